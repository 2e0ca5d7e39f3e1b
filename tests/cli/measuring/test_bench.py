"""`marserve bench`."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_line import marserve
from support.fake_apis import Asked, FakeApis, description, fake_apis

PREDICT = "POST /predictions/digits"


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server with two versions of a model."""
    with fake_apis() as running:
        for path in (PREDICT, f"{PREDICT}/1.0", f"{PREDICT}/2.0"):
            running.answer(path, {"7": 0.98})
        yield running


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Two request bodies."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    (folder / "a.json").write_text("[1]")
    (folder / "b.txt").write_text("two")
    return folder


def test_users_own_requests_are_measured(apis: FakeApis, inputs: Path) -> None:
    """Twenty before that do not count, then as many as were asked for; the p99 of fifty cannot be known."""
    ran = marserve("bench", "digits", "--inputs", inputs, "--requests", 50, "--inference", apis.url)

    assert ran.status == 0, ran.err
    assert len(apis.asked) == 70
    assert {(asked.body, asked.headers["content-type"]) for asked in apis.asked} == {
        (b"[1]", "application/json"),
        (b"two", "text/plain"),
    }
    assert ran.out.startswith(f"digits at {apis.url}: one at a time.\n50 answered, 0 failed in ")
    assert re.search(r"^p99 +- +cannot be known: it takes 300 answers$", ran.out, re.MULTILINE)


def test_a_script_gets_one_document(apis: FakeApis, inputs: Path) -> None:
    """Percentiles that cannot be known are null."""
    ran = marserve(
        *("bench", "digits", "--inputs", inputs / "a.json", "--rate", 500, "--requests", 60, "--warm-up", 0),
        *("--json", "--inference", apis.url),
    )

    document = ran.document
    assert (document["loop"], document["rate"], document["sent"], document["answered"]) == ("open", 500.0, 60, 60)
    assert document["percentiles"]["p50"]["lowMs"] <= document["percentiles"]["p50"]["ms"]
    assert document["percentiles"]["p99"] is None
    assert document["failures"] == []
    assert len(apis.asked) == 60


def test_what_the_model_declares_is_sent_where_nothing_is_named(apis: FakeApis) -> None:
    """Drawn as for a check of batches."""
    declaration = {"kind": "tensors", "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 2]}]}
    apis.answer("GET /models/digits", [description(declaration=declaration)])

    ran = marserve("bench", "digits", "--requests", 4, "--inference", apis.url, "--management", apis.url)

    assert ran.status == 0, ran.err
    assert apis.orders("POST")[0].body == b'{"x": [0.0, 0.5]}'


def test_nothing_to_send_is_said_before_anything_is_sent(apis: FakeApis, tmp_path: Path) -> None:
    """Of a model that declares nothing, of an empty folder, and of a file that is not there."""
    apis.answer("GET /models/digits", [description()])

    declared = marserve("bench", "digits", "--inference", apis.url, "--management", apis.url)
    empty = marserve("bench", "digits", "--inputs", tmp_path, "--inference", apis.url)
    missing = marserve("bench", "digits", "--inputs", tmp_path / "no.json", "--inference", apis.url)

    assert (declared.status, empty.status, missing.status) == (2, 2, 2)
    assert "the model declares no tensors" in declared.err
    assert "holds no files" in empty.err
    assert "no.json cannot be read: No such file" in missing.err
    assert all("--inputs" in ran.err for ran in (declared, empty, missing))
    assert apis.orders("POST") == []


def test_an_unknown_model_or_version_is_said_after_one_request(apis: FakeApis, inputs: Path) -> None:
    """In the server's words, whichever of the two it is."""
    model = marserve("bench", "digit", "--inputs", inputs, "--inference", apis.url)
    baseline = marserve(
        *("bench", "digits", "--inputs", inputs, "--baseline", "9.9", "--requests", 90, "--inference", apis.url)
    )

    assert (model.status, baseline.status) == (1, 1)
    assert "Model not found: /predictions/digit\n" in model.err
    assert "/predictions/digits/9.9" in baseline.err
    assert f"{apis.url} was asked: --inference names another server; `marserve models` lists" in model.err
    assert len(apis.asked) == 3


def test_a_wrong_address_is_said_so(inputs: Path) -> None:
    """One that is no address, and one at which nothing listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"

        nothing = marserve("bench", "digits", "--inputs", inputs, "--inference", url)
    odd = marserve("bench", "digits", "--inputs", inputs, "--inference", "localhost")
    baseline = marserve("bench", "digits", "--inputs", inputs, "--baseline", "ftp://x", "--inference", url)

    assert (nothing.status, odd.status, baseline.status) == (1, 2, 2)
    assert f"No server answers at {url}" in nothing.err
    assert "'localhost' is no address" in odd.err
    assert "'ftp://x' is no address" in baseline.err


def test_where_every_answer_is_a_refusal_the_first_one_is_shown(apis: FakeApis, inputs: Path) -> None:
    """The warm-up alone shows it; the load is not sent."""
    apis.answer("POST /predictions/picky", {"type": "BadRequestException", "message": "wants numbers"}, 400)

    ran = marserve("bench", "picky", "--inputs", inputs, "--requests", 1000, "--inference", apis.url)

    assert ran.status == 1
    assert "none of 19 requests was answered; the first got 400 (BadRequestException): wants numbers" in ran.err
    assert len(apis.asked) == 20


def test_failures_are_shown_by_reason_with_an_example(apis: FakeApis, inputs: Path) -> None:
    """Beside the answers, whose times alone count."""
    for _ in range(30):
        apis.answer("POST /predictions/full", [1])
    apis.answer("POST /predictions/full", {"type": "ServiceUnavailableException", "message": "Full. Wait."}, 503)

    ran = marserve("bench", "full", "--inputs", inputs, "--requests", 20, "--inference", apis.url)

    assert ran.status == 0, ran.err
    assert "10 answered, 10 failed" in ran.out
    assert re.search("10 +503 +ServiceUnavailableException +Full. Wait", ran.out)


def test_a_server_that_dies_midway_fails_with_what_was_measured(apis: FakeApis, inputs: Path) -> None:
    """The status is 1, and the sentence says that it was given up."""
    take = apis.take

    def dying(asked: Asked) -> tuple[int, bytes, str]:
        if len(apis.asked) > 30:
            raise ConnectionError("dead")
        return take(asked)

    apis.take = dying  # type: ignore[method-assign]

    ran = marserve("bench", "digits", "--inputs", inputs, "--requests", 1000, "--inference", apis.url)

    assert ran.status == 1
    assert "Given up early: 20 requests in a row got no answer (the connection broke)." in ran.out


def test_ctrl_c_prints_what_was_measured(apis: FakeApis, inputs: Path) -> None:
    """With the status of every command that Ctrl-C ends."""
    take = apis.take

    def interrupting(asked: Asked) -> tuple[int, bytes, str]:
        if len(apis.asked) == 40:
            os.kill(os.getpid(), signal.SIGINT)
        return take(asked)

    apis.take = interrupting  # type: ignore[method-assign]

    ran = marserve("bench", "digits", "--inputs", inputs, "--requests", 100_000, "--inference", apis.url)

    assert ran.status == 130
    assert "Cut off by Ctrl-C" in ran.out
    assert " answered, 0 failed" in ran.out


def test_turns_with_a_baseline_end_in_a_verdict(apis: FakeApis, inputs: Path) -> None:
    """Here each version's first answer is slow, or the build's every one is: only the second is a fault."""
    take = apis.take

    def slowed(asked: Asked) -> tuple[int, bytes, str]:
        if asked.path.endswith("2.0"):
            signal.sigtimedwait([], 0.02)
        return take(asked)

    apis.take = slowed  # type: ignore[method-assign]
    words = ("bench", "digits", "--inputs", inputs, "--requests", 45, "--inference", apis.url, "--warm-up", 2)

    slower = marserve(*words, "--version", "2.0", "--baseline", "1.0")
    faster = marserve(*words, "--version", "1.0", "--baseline", "2.0", "--json")

    assert slower.status == 1, slower.err
    assert "Slower: " in slower.out
    assert "baseline 1.0: 45 answered" in slower.out
    assert faster.status == 0
    assert faster.document["isSlower"] is False
    assert faster.document["timesAsLong"]["high"] < 1
    assert faster.document["baseline"]["answered"] == 45


def test_the_baseline_may_be_another_server(apis: FakeApis, inputs: Path) -> None:
    """The same version there."""
    with fake_apis() as other:
        other.answer(PREDICT, [1])
        marserve(
            *("bench", "digits", "--inputs", inputs, "--requests", 45, "--warm-up", 1),
            *("--baseline", other.url, "--inference", apis.url, "--allow", 10),
        )

        assert len(other.asked) == len(apis.asked) == 46


def test_words_that_exclude_each_other_or_do_not_suffice_are_refused(apis: FakeApis, inputs: Path) -> None:
    """Before anything is sent."""
    both = marserve("bench", "digits", "--inputs", inputs, "--rate", 5, "--concurrency", 2, "--inference", apis.url)
    few = marserve("bench", "digits", "--inputs", inputs, "--baseline", "1.0", "--requests", 8, "--inference", apis.url)

    assert (both.status, few.status) == (2, 2)
    assert "--rate and --concurrency exclude each other" in both.err
    assert "8 requests are too few for 9 pairs: 45 suffice" in few.err
    assert apis.asked == []
