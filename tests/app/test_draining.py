"""Who ends the server, how patiently, and in which order it is done."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.app.draining import MOST_NAMED, Stop, drain, finish_accepted, under_way
from marserve.pool.dispatch.queue import GivenUp

pytestmark = pytest.mark.anyio

DRAIN_S = 30.0


class Recorder:
    """A part whose calls are written down: `registry.refuse_new`.

    Those in `waiting` are coroutines that return what they are given; those in `left` are not, and return it as well.
    """

    def __init__(self, name: str, calls: list[str], left: dict[str, Any] | None = None, **waiting: Any) -> None:
        self._name, self._calls, self._left, self._waiting = name, calls, left or {}, waiting

    def __getattr__(self, call: str) -> Any:
        def note(*_: Any) -> Any:
            self._calls.append(f"{self._name}.{call}")
            return self._left.get(call)

        async def wait(*arguments: Any) -> Any:
            note()
            answer = self._waiting[call]
            return await answer(*arguments) if callable(answer) else answer

        return wait if call in self._waiting else note


class Connections(list[Any]):
    """A table of connections; `answering` as it would count."""

    answering = 0


class Looked(Connections):
    """One connection whose client takes its answer when the table is looked at for the `takes_at`th time, or never."""

    answering = 1

    def __init__(self, takes_at: int | None) -> None:
        super().__init__(["one that takes its answer"])
        self._takes_at = takes_at
        self.looks = 0

    def __len__(self) -> int:
        self.looks += 1
        if self.looks == self._takes_at:
            self.clear()
            self.answering = 0
        return super().__len__()


def a_server(
    calls: list[str], drained: Any = 0, left: Sequence[Any] = (), workflows_left: Sequence[Any] = ()
) -> tuple[Any, list[Any], list[Any]]:
    """Parts, listeners and gRPC listeners that write down what is done with them.

    `drained`: what `drain` gives; `left`: what is then refused.
    """
    parts = SimpleNamespace(
        settings=SimpleNamespace(drain_delay=0.0, drain_timeout=DRAIN_S),
        registry=Recorder("registry", calls),
        rollouts=Recorder("rollouts", calls, stop=None),
        workflows=Recorder("workflows", calls, {"refuse_accepted": workflows_left}, drain=0),
        connections=Connections(),
        uploads=None,
        logs=SimpleNamespace(book=Recorder("book", calls)),
    )
    parts.registry.data_plane = Recorder("data_plane", calls, {"refuse_accepted": left}, drain=drained)
    listener: Any = Recorder("listener", calls, turn_away=None)
    listener.state = SimpleNamespace(connections={Recorder("connection", calls)})
    return parts, [listener], [Recorder("grpc", calls, stop=None)]


async def test_the_end_has_an_order() -> None:
    """Readiness first, connections last: no request is cut off that the server has accepted."""
    calls: list[str] = []

    await drain(*_arguments(a_server(calls), Stop()))

    assert calls.index("registry.refuse_new") < calls.index("grpc.stop") < calls.index("listener.turn_away")
    calls.remove("grpc.stop")  # beside what follows the refusal
    assert calls == [
        "registry.begin_drain",
        "listener.send_clients_away",
        "rollouts.stop",
        "registry.refuse_new",
        "workflows.refuse_new",
        "workflows.drain",
        "data_plane.drain",
        "book.end_following",
        "listener.turn_away",
        "listener.close",
        "connection.shutdown",
    ]


async def test_a_second_signal_ends_the_wait_and_not_the_order(caplog: pytest.LogCaptureFixture) -> None:
    """What hangs is waited for no longer; listeners are closed all the same."""
    calls: list[str] = []
    stop = Stop()
    stop.on_signal(signal.SIGTERM)

    async def hang(_: float) -> int:
        stop.on_signal(signal.SIGINT)
        await asyncio.Event().wait()
        return 0

    with caplog.at_level(logging.INFO):
        await drain(*_arguments(a_server(calls, hang), stop))

    assert "grpc.stop" in calls
    calls.remove("grpc.stop")
    after = calls[calls.index("data_plane.drain") + 1 :]
    assert after[:2] == ["workflows.refuse_accepted", "data_plane.refuse_accepted"]
    assert after[2:6] == ["book.end_following", "listener.turn_away", "listener.close", "connection.shutdown"]
    assert [record.message for record in caplog.records] == ["SIGINT again: stopping now"]


async def test_what_is_refused_at_the_end_stands_in_the_log_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """The operator reads which clients got no answer, of which version, and why."""
    requests = [GivenUp("r1", "stream", 9.0), GivenUp("r2", "running", 3.0), GivenUp("r3", "waiting", 2.0)]

    await drain(*_arguments(a_server([], 4, [("digits", "1.0", requests)], [("chain", ["w1"])]), Stop()))

    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "Workflow chain: 1 request refused, drain_timeout is over (30 s): w1",
        "Model digits version 1.0: 2 requests refused (1 waited, 1 ran) and 1 stream cut, "
        "drain_timeout is over (30 s): r1, r2, r3",
    ]


async def test_the_log_names_only_so_many(caplog: pytest.LogCaptureFixture) -> None:
    """A full queue makes one line, and not a long one."""
    requests = [GivenUp(f"r{number}", "waiting", 0.0) for number in range(MOST_NAMED + 80)]

    await drain(*_arguments(a_server([], 100, [("digits", "1.0", requests)]), Stop()))

    assert f"{MOST_NAMED + 80} requests refused" in caplog.text
    assert f"r{MOST_NAMED - 1} and 80 more" in caplog.text
    assert f"r{MOST_NAMED}," not in caplog.text


@pytest.mark.parametrize("takes_it", [True, False])
async def test_a_client_may_take_its_answer_until_the_time_is_over(
    takes_it: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a slow client was promised is not cut off by the few seconds that idle connections get."""
    monkeypatch.setattr("marserve.app.draining.CLOSE_CONNECTIONS_S", 0.001)
    server = a_server([])
    parts = server[0]
    parts.settings.drain_timeout = DRAIN_S if takes_it else 0.05
    parts.connections = Looked(takes_at=20 if takes_it else None)

    await asyncio.wait_for(drain(*_arguments(server, Stop())), 10)

    assert ("1 connection cut off: the client had not taken its answer" in caplog.text) is not takes_it
    assert parts.connections.looks >= 20 or not takes_it


async def test_a_notice_asks_for_the_end_and_the_signal_after_it_is_the_first(caplog: pytest.LogCaptureFixture) -> None:
    """Who takes a machine away announces it, and later sends SIGTERM: that must not cut anybody off."""
    stop = Stop()

    stop.on_notice("This machine is to go")
    assert stop.asked.is_set()
    stop.on_signal(signal.SIGTERM)

    assert await stop.unless_hurried(asyncio.sleep(0, "waited")) == "waited"
    assert "This machine is to go: draining" in caplog.text
    assert not stop.has_failed


@pytest.mark.parametrize(("workflows_took_s", "models_get_s"), [(10.0, 20.0), (45.0, 0.0)])
async def test_models_get_what_workflows_left_of_the_time(workflows_took_s: float, models_get_s: float) -> None:
    """Together they take no longer than the setting says, and none left is 0; what is left of both is added."""
    given: list[float] = []
    clock = [100.0]

    async def drain_workflows(timeout_s: float) -> int:
        given.append(timeout_s)
        clock[0] += workflows_took_s
        return 1

    async def drain_models(timeout_s: float) -> int:
        given.append(timeout_s)
        return 2

    workflows: Any = Recorder("workflows", [], drain=drain_workflows)
    data_plane: Any = Recorder("data_plane", [], drain=drain_models)

    assert await finish_accepted(data_plane, workflows, DRAIN_S, lambda: clock[0]) == 3
    assert given == [DRAIN_S, models_get_s]


async def test_the_first_signal_asks_and_the_second_hurries() -> None:
    """Whichever signals they are."""
    stop = Stop()
    assert not stop.asked.is_set()

    stop.on_signal(signal.SIGINT)
    assert stop.asked.is_set()
    assert await stop.unless_hurried(asyncio.sleep(0, "done")) == "done"

    stop.on_signal(signal.SIGTERM)
    assert await stop.unless_hurried(asyncio.Event().wait()) is None
    assert not stop.has_failed


async def test_a_wait_ends_with_its_limit_and_what_was_waited_for_with_it() -> None:
    """Nothing runs on behind the server's back."""
    ends: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("ended")

    assert await Stop().unless_hurried(work(), 0.01) is None
    assert ends == ["ended"]


async def test_what_fails_while_it_is_waited_for_is_raised() -> None:
    """It is no lack of time."""

    async def fail() -> None:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        await Stop().unless_hurried(fail())


async def test_a_crash_that_counts_asks_for_the_end_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Further workers die on the way out; the exit status says that it was no orderly stop."""
    stop = Stop()

    stop.on_crash("a worker of m crashed")
    stop.on_crash("a worker of m crashed")

    assert stop.asked.is_set()
    assert stop.has_failed
    assert [record.message for record in caplog.records] == [
        "a worker of m crashed; the model's onCrash is fail: the server ends"
    ]


def _arguments(server: tuple[Any, list[Any], list[Any]], stop: Stop) -> tuple[Any, Stop, list[Any], list[Any]]:
    parts, listeners, grpc_listeners = server
    return parts, stop, listeners, grpc_listeners


@pytest.mark.parametrize(("pools", "workflows", "requests"), [(0, 0, 0), (3, 0, 3), (2, 1, 2), (0, 1, 1)])
async def test_a_workflows_request_counts_once(pools: int, workflows: int, requests: int) -> None:
    """It is at a node, or between two of them."""
    parts: Any = SimpleNamespace(
        registry=SimpleNamespace(data_plane=SimpleNamespace(under_way=pools)),
        workflows=SimpleNamespace(under_way=workflows),
    )

    assert under_way(parts) == requests
