"""The load generator, before servers that stall, refuse, break and die."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve.tuning.http_line import HttpTarget
from marserve.tuning.load import (
    MOST_UNANSWERED,
    Limit,
    Reason,
    Shape,
    Tally,
    due_times,
    run,
)
from marserve.tuning.payloads import NoPayloads, Payload, read_payloads
from support.fake_apis import Asked, FakeApis, fake_apis
from support.scripted_server import Act, answer, chunk, head, scripted

PATH = "/predictions/m"
BODIES = [Payload(b"one", "text/plain"), Payload(b"two"), Payload(b"three", "application/json")]


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server whose model answers everything."""
    with fake_apis() as running:
        running.answer(f"POST {PATH}", {"7": 0.98})
        yield running


def _target(port: int) -> HttpTarget:
    return HttpTarget(PATH, "127.0.0.1", port, headers=(("authorization", "Bearer k"),))


def _port(apis: FakeApis) -> int:
    return int(apis.url.rsplit(":", 1)[1])


def _load(port: int, shape: Shape, limit: Limit, timeout_s: float = 10.0) -> Tally:
    tally = Tally()

    async def work() -> None:
        async with _target(port).line(BODIES, timeout_s) as line:
            await line.load(shape, limit, tally)

    run(work)
    return tally


def test_exactly_as_many_requests_are_sent_as_were_asked_for(apis: FakeApis) -> None:
    """Each payload in turn with its type and the key; more clients than requests are not started."""
    closed = _load(_port(apis), Shape(4), Limit(10))
    opened = _load(_port(apis), Shape(rate=500.0), Limit(7))
    few = _load(_port(apis), Shape(100), Limit(3))

    assert (closed.sent, closed.answered, closed.failures) == (10, 10, 0)
    assert (opened.sent, opened.answered, len(opened.late)) == (7, 7, 7)
    assert (few.sent, few.answered) == (3, 3)
    assert len(apis.asked) == 20
    assert sorted(asked.body for asked in apis.asked[:10]) == sorted([b"one"] * 4 + [b"two"] * 3 + [b"three"] * 3)
    types = {asked.body: asked.headers.get("content-type") for asked in apis.asked}
    assert types == {b"one": "text/plain", b"two": None, b"three": "application/json"}
    assert all(asked.headers["authorization"] == "Bearer k" for asked in apis.asked)


def test_a_span_ends_the_load(apis: FakeApis) -> None:
    """What is under way at its end is awaited."""
    closed = _load(_port(apis), Shape(2), Limit(seconds=0.1))
    opened = _load(_port(apis), Shape(rate=100.0), Limit(seconds=0.1))

    assert closed.sent == closed.answered > 0
    assert opened.sent == opened.answered == len(list(due_times(Shape(rate=100.0), Limit(seconds=0.1))))


def test_what_waits_behind_a_stall_is_timed_from_when_it_was_due(apis: FakeApis) -> None:
    """A loop that counted from the send would call each of these quick, or send fewer (coordinated omission)."""
    gate, begun, stall_s = threading.Event(), time.monotonic(), 0.3
    take = apis.take

    def stalled(asked: Asked) -> tuple[int, bytes, str]:
        if not gate.is_set():
            gate.wait(max(0.0, begun + stall_s - time.monotonic()))
            gate.set()
        return take(asked)

    apis.take = stalled  # type: ignore[method-assign]
    dues = list(due_times(Shape(rate=100.0), Limit(40)))

    tally = _load(_port(apis), Shape(rate=100.0), Limit(40))

    # The fewest that can have been due in the stall, which began a little before the load.
    waited = [due for due in dues if due < stall_s - 0.15]
    assert len(waited) > 5
    assert len(tally.seconds) == 40
    assert sum(seconds > 0.05 for seconds in tally.seconds) >= len(waited)


def test_due_times_are_those_of_strangers_and_the_same_for_a_seed() -> None:
    """Their distances have the mean of the rate and as much spread."""
    dues = list(due_times(Shape(rate=50.0), Limit(5000)))
    gaps = [after - before for before, after in zip([0.0, *dues], dues, strict=False)]
    mean = sum(gaps) / len(gaps)

    assert mean == pytest.approx(0.02, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)
    assert dues == list(due_times(Shape(rate=50.0), Limit(5000)))
    assert dues != list(due_times(Shape(rate=50.0, seed=2), Limit(5000)))


def test_a_rate_of_nothing_is_refused_before_anything_waits_for_it() -> None:
    """Else a load would wait for ever for a request that is never due."""
    with pytest.raises(ValueError, match="a rate of 0 requests a second"):
        due_times(Shape(rate=0.0), Limit(5))


def test_a_redirect_is_no_answer_of_a_model(apis: FakeApis) -> None:
    """As of a proxy that wants a login, which is faster than any model."""
    apis.answer(f"POST {PATH}", {"7": 0.98}, 302)

    tally = _load(_port(apis), Shape(1), Limit(requests=3))

    assert (tally.answered, tally.failures) == (1, 2)
    assert [(reason.status, reason.text) for reason in tally.failed] == [(302, "a redirect")]


def test_a_failure_that_is_deep_json_has_no_reason(apis: FakeApis) -> None:
    """It is counted as any other."""
    apis.answer(f"POST {PATH}", b"[" * 1500, 500)

    tally = _load(_port(apis), Shape(1), Limit(requests=3))

    assert [(reason.status, reason.text) for reason in tally.failed] == [(500, "no reason given")]


def test_failures_are_counted_by_status_and_reason_with_one_example(apis: FakeApis) -> None:
    """The cause of the header, else the type of the error object."""
    apis.answer(f"POST {PATH}", {"type": "BadRequestException", "message": "wants numbers"}, 400)
    apis.answer(f"POST {PATH}", {"type": "BadRequestException", "message": "wants more numbers"}, 400)
    apis.answer(f"POST {PATH}", b"oh", 500, "text/plain")

    tally = _load(_port(apis), Shape(), Limit(6))

    assert tally.answered == 1
    assert {reason: count for reason, (count, _) in tally.failed.items()} == {
        Reason(400, "BadRequestException"): 2,
        Reason(500, "no reason given"): 3,
    }
    assert '"wants numbers"' in tally.failed[Reason(400, "BadRequestException")][1]
    assert not tally.gave_up


def test_a_cause_in_the_header_is_the_reason(apis: FakeApis) -> None:
    """It says more than the type."""
    apis.headers["x-marserve-cause"] = "queue_full"
    apis.answer(f"POST {PATH}", {"type": "ServiceUnavailableException"}, 503)

    tally = _load(_port(apis), Shape(), Limit(2))

    assert Reason(503, "queue_full") in tally.failed


def test_a_server_that_is_gone_ends_the_load_soon() -> None:
    """It is not hammered: some requests in a row without an answer are enough."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]

        tally = _load(port, Shape(2), Limit(100_000))
        opened = _load(port, Shape(rate=2000.0), Limit(100_000))

    assert tally.answered == opened.answered == 0
    assert MOST_UNANSWERED <= tally.sent <= MOST_UNANSWERED + 2
    assert opened.sent < 1000
    assert tally.gave_up == f"{MOST_UNANSWERED} requests in a row got no answer (connection refused)"


def test_a_server_that_dies_midway_leaves_what_was_measured() -> None:
    """Its answers count, then it is given up."""
    with scripted(answer(200, b"a"), answer(200, b"b"), Act((head(200, content_length="9") + b"c",), True)) as server:
        tally = _load(int(server.address.rsplit(":", 1)[1]), Shape(), Limit(1000))

    assert tally.answered == 2
    assert tally.gave_up
    assert Reason(None, "the connection broke") in tally.failed


def test_an_answer_in_chunks_and_one_that_closes_its_connection_are_whole() -> None:
    """The next request takes another connection."""
    acts = [
        Act((head(200, transfer_encoding="chunked"), chunk(b"ab"), chunk(b""))),
        Act((head(200, connection="close", content_length="1") + b"a",), True),
        answer(200, b"c"),
    ]
    with scripted(*acts) as server:
        tally = _load(int(server.address.rsplit(":", 1)[1]), Shape(), Limit(3))

    assert (tally.answered, tally.failures) == (3, 0)


def test_a_silent_server_is_waited_for_as_long_as_was_asked() -> None:
    """The request counts as one without an answer."""
    with scripted(Act((), holds=True), answer(200, b"c")) as server:
        tally = _load(int(server.address.rsplit(":", 1)[1]), Shape(), Limit(2), timeout_s=0.1)

    assert tally.answered == 1
    assert [reason.text for reason in tally.failed] == ["no answer within 0.1 s"]


def test_what_is_no_http_is_said_so() -> None:
    """As of a port of something else."""
    with scripted(Act((b"220 mail.example ESMTP\r\n",), True)) as server:
        tally = _load(int(server.address.rsplit(":", 1)[1]), Shape(), Limit(1))

    assert [reason.text for reason in tally.failed] == ["no HTTP"]


def test_ctrl_c_leaves_what_was_seen(apis: FakeApis) -> None:
    """The load ends at once; requests under way count neither as answered nor as failed."""
    tally = Tally()
    take = apis.take

    def interrupting(asked: Asked) -> tuple[int, bytes, str]:
        if len(apis.asked) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return take(asked)

    apis.take = interrupting  # type: ignore[method-assign]

    async def work() -> None:
        async with _target(_port(apis)).line(BODIES, 10.0) as line:
            await line.load(Shape(), Limit(100_000), tally)

    with pytest.raises(KeyboardInterrupt):
        run(work)

    assert 4 <= tally.answered <= tally.sent < 100
    assert tally.failures == 0
    assert tally.lasted_s > 0


def test_inputs_that_cannot_be_held_or_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number that is allowed, or the system's reason."""
    file = tmp_path / "a.txt"
    file.write_bytes(b"abc")

    assert read_payloads([(file, "text/plain")]) == [Payload(b"abc", "text/plain", "a.txt")]
    with pytest.raises(NoPayloads, match=r"nothing\.txt cannot be read: No such file"):
        read_payloads([(tmp_path / "nothing.txt", "")])
    with pytest.raises(NoPayloads, match="no input"):
        read_payloads([])
    monkeypatch.setattr("marserve.tuning.payloads.MOST_BYTES", 2)
    with pytest.raises(NoPayloads, match="hold 3 bytes; at most 2"):
        read_payloads([(file, "")])


def test_an_interrupt_that_leaves_the_loop_half_closed_is_still_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop was seen to raise RuntimeError then, and a copy would stay."""

    class Runner:
        def __init__(self, **options: object) -> None:
            pass

        def __enter__(self) -> Runner:
            return self

        def run(self, work: Any) -> None:
            work.close()
            raise KeyboardInterrupt

        def __exit__(self, *error: object) -> None:
            raise RuntimeError("Cannot close a running event loop")

    async def work() -> None:
        """Nothing."""

    monkeypatch.setattr(asyncio, "Runner", Runner)
    with pytest.raises(KeyboardInterrupt):
        run(work)


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_with_a_handler_cancels_the_load_before_the_handler_is_called(number: signal.Signals) -> None:
    """Raised within a callback its exception would be lost, and the load go on."""
    seen: list[str] = []

    def leave(number: int, frame: object) -> None:
        seen.append("left")
        sys.exit(128 + number)

    async def work() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, number)
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("cancelled")

    before = signal.signal(number, leave)
    try:
        with pytest.raises(SystemExit) as raised:
            run(work)
        assert signal.getsignal(number) is leave
    finally:
        signal.signal(number, before)

    assert raised.value.code == 128 + number
    assert seen == ["cancelled", "left"]
