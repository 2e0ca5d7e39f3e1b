"""`marserve swap` and `marserve rollout` with an archive that lies on the machine of the command."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import OtherArchiveThere
from support.command_line import marserve
from support.fake_apis import FakeApis, description, fake_apis

DATA = b"an archive"
SENT = {"archive": "second.mar", "sha256": hashlib.sha256(DATA).hexdigest(), "bytes": len(DATA)}
SWAP = ["swap", "digits"]
ROLLOUT = ["rollout", "digits", "2.0", "--url"]
NOT_THERE = {"code": 404, "type": "ModelNotFoundException", "message": "Model not found at: second.mar"}
RUNNING = {
    "modelName": "digits",
    "modelVersion": "2.0",
    "baseline": "1.0",
    "state": "running",
    "share": 5,
    "reason": None,
    "events": [],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an archive."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "second.mar").write_bytes(DATA)
    return tmp_path


@pytest.fixture
def bare(here: Path) -> Iterator[FakeApis]:
    """A server with one model; what it answers to changes is the test's."""
    with fake_apis() as running:
        running.answer("GET /models/digits/all", [description()])
        yield running


@pytest.fixture
def apis(bare: FakeApis) -> FakeApis:
    """The same, which takes what it is sent."""
    bare.answer("PUT /archives/second.mar", SENT, 201)
    bare.answer("POST /models/digits/swap", {"status": "2.0 has taken the place of 1.0"})
    bare.answer("POST /models/digits/rollout", RUNNING)
    return bare


def asked_for(apis: FakeApis) -> Any:
    """The archive that the server was asked to take."""
    [post] = apis.orders("POST")
    return post.parameters.get("url") or json.loads(post.body)["url"]


@pytest.mark.parametrize("command", [SWAP, ROLLOUT])
@pytest.mark.parametrize("words", [["./second.mar"], ["second.mar", "--upload"]])
def test_the_file_is_sent_and_asked_for_by_its_name(apis: FakeApis, command: list[str], words: list[str]) -> None:
    """A script learns what was sent."""
    ran = marserve(*command, *words, "--json", "--management", apis.url)

    assert (ran.status, ran.document["upload"]) == (0, SENT)
    assert [put.body for put in apis.orders("PUT")] == [DATA]
    assert asked_for(apis) == "second.mar"


@pytest.mark.parametrize("command", [SWAP, ROLLOUT])
@pytest.mark.parametrize("words", [["second.mar"], ["./second.mar", "--no-upload"], ["https://origin/a/second.mar"]])
def test_other_words_are_the_servers(apis: FakeApis, command: list[str], words: list[str]) -> None:
    """As ever."""
    ran = marserve(*command, *words, "--json", "--management", apis.url)

    assert (ran.status, apis.orders("PUT")) == (0, [])
    assert asked_for(apis) == words[0]


@pytest.mark.parametrize("command", [SWAP, ROLLOUT])
def test_a_refused_file_changes_nothing(bare: FakeApis, command: list[str]) -> None:
    """The server's words, and what may help."""
    bare.answer("PUT /archives/second.mar", {"code": 409, "message": "The model store has second.mar"}, 409)

    ran = marserve(*command, "./second.mar", "--management", bare.url)

    assert (ran.status, bare.orders("POST")) == (1, [])
    assert "--replace" in ran.err


@pytest.mark.parametrize("command", [["swap", "nobody"], ["rollout", "nobody", "2.0", "--url"]])
def test_nothing_is_sent_for_a_model_that_is_not_there(apis: FakeApis, command: list[str]) -> None:
    """A typing error costs no upload."""
    ran = marserve(*command, "./second.mar", "--management", apis.url)

    assert (ran.status, apis.orders("PUT")) == (1, [])


@pytest.mark.parametrize("command", [SWAP, ROLLOUT])
def test_what_can_only_be_a_file_here_and_is_not_is_a_wrong_argument(apis: FakeApis, command: list[str]) -> None:
    """Status 2, and nothing was tried."""
    ran = marserve(*command, "./gone.mar", "--management", apis.url)

    assert (ran.status, apis.asked) == (2, [])
    assert "There is no file ./gone.mar here." in ran.err


@pytest.mark.parametrize("flag", ["--upload", "--no-upload", "--replace", "--as=third.mar"])
def test_a_roll_out_without_an_archive_has_nothing_to_send(apis: FakeApis, flag: str) -> None:
    """Status 2."""
    ran = marserve("rollout", "digits", "2.0", flag, "--management", apis.url)

    assert (ran.status, apis.asked) == (2, [])
    assert "name it by --url" in ran.err


@pytest.mark.parametrize("command", [SWAP, ROLLOUT])
def test_a_dry_run_sends_the_file_to_be_checked_alone(bare: FakeApis, command: list[str]) -> None:
    """What would become of it cannot be said before it is there; with --replace nothing is asked."""
    bare.answer("PUT /archives/second.mar", {**SENT, "isDryRun": True})
    for call in ("swap", "rollout"):
        bare.answer(f"POST /models/digits/{call}", NOT_THERE, 404)

    ran = marserve(*command, "./second.mar", "--dry-run", "--json", "--management", bare.url)
    replaced = marserve(*command, "./second.mar", "--replace", "--dry-run", "--json", "--management", bare.url)

    assert ran.status == replaced.status == 0, ran.err
    assert ran.document == replaced.document == {"upload": {**SENT, "isDryRun": True}, "isDryRun": True}
    assert [put.parameters for put in bare.orders("PUT")] == [
        {"dry_run": "true"},
        {"dry_run": "true", "replace": "true"},
    ]
    assert len(bare.orders("POST")) == 1


def test_a_dry_run_that_fails_otherwise_fails(bare: FakeApis) -> None:
    """An unknown version is no missing archive."""
    error = {"code": 404, "type": "ModelVersionNotFoundException", "message": "Model version: 9 does not exist"}
    bare.answer("PUT /archives/second.mar", {**SENT, "isDryRun": True})
    bare.answer("POST /models/digits/swap", error, 404)

    ran = marserve(*SWAP, "./second.mar", "--version", "9", "--dry-run", "--management", bare.url)

    assert ran.status == 1
    assert "Model version: 9" in ran.err


@pytest.mark.parametrize("command", [["register"], SWAP, ROLLOUT])
def test_a_file_here_that_the_store_lacks_is_pointed_at(bare: FakeApis, command: list[str]) -> None:
    """The words that send it; of another name only what the server says."""
    bare.answer("GET /models", {"models": []})
    for call in ("", "/digits/swap", "/digits/rollout"):
        bare.answer(f"POST /models{call}", NOT_THERE, 404)

    ran = marserve(*command, "second.mar", "--management", bare.url)
    other = marserve(*command, "third.mar", "--management", bare.url)

    sends = f"`marserve {' '.join(command)} ./second.mar` sends it."
    assert (ran.status, ran.err.splitlines()[-1]) == (1, f"  second.mar is in this folder: {sends}")
    assert "is in this folder" not in other.err


@pytest.mark.parametrize("command", [["register"], SWAP, ROLLOUT])
def test_a_source_is_no_archive(bare: FakeApis, here: Path, command: list[str]) -> None:
    """The command that makes one of it and sends that."""
    (here / "greet.py").touch()
    bare.answer("GET /models", {"models": []})
    for call in ("", "/digits/swap", "/digits/rollout"):
        bare.answer(f"POST /models{call}", {**NOT_THERE, "message": "Model not found at: greet.py"}, 404)

    ran = marserve(*command, "greet.py", "--management", bare.url)

    makes = "`marserve archive greet.py --register` makes one and sends it."
    assert ran.err.endswith(f"  greet.py is no archive: {makes}\n")


@pytest.mark.parametrize("command", [SWAP, ROLLOUT])
def test_a_file_is_sent_under_another_name(apis: FakeApis, command: list[str]) -> None:
    """The store gets it as that, and is asked for it by that."""
    apis.answer("PUT /archives/third.mar", {**SENT, "archive": "third.mar"}, 201)

    ran = marserve(*command, "./second.mar", "--as", "third.mar", "--management", apis.url)

    assert ran.status == 0, ran.err
    assert [put.body for put in apis.orders("PUT")] == [DATA]
    assert asked_for(apis) == "third.mar"


def test_another_name_is_for_a_file_that_is_sent(apis: FakeApis) -> None:
    """Status 2: a name in the store stays what it is."""
    ran = marserve(*SWAP, "second.mar", "--as", "third.mar", "--management", apis.url)

    assert (ran.status, apis.orders("POST")) == (2, [])
    assert "--as names a file that is sent" in ran.err


@pytest.mark.parametrize("command", [["register"], SWAP, ROLLOUT])
def test_other_content_in_the_store_is_said_once(bare: FakeApis, command: list[str]) -> None:
    """In the words of the command."""
    sentence = str(OtherArchiveThere("second.mar"))
    bare.answer("PUT /archives/second.mar", {"code": 409, "message": sentence}, 409)

    ran = marserve(*command, "./second.mar", "--management", bare.url)

    assert ran.err.splitlines() == [
        "marserve: The model store has second.mar with other content, which stays.",
        "  --as NAME gives it another name; --replace replaces that one, if no version uses it.",
    ]
