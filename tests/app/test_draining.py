"""Who ends the server, how patiently, and in which order it is done."""

from __future__ import annotations

import asyncio
import logging
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.app.draining import Stop, drain, finish_accepted

pytestmark = pytest.mark.anyio

DRAIN_S = 30.0


class Recorder:
    """A part whose calls are written down: `registry.refuse_new`. Those in `waiting` return what they are given."""

    def __init__(self, name: str, calls: list[str], **waiting: Any) -> None:
        self._name, self._calls, self._waiting = name, calls, waiting

    def __getattr__(self, call: str) -> Any:
        def note(*_: Any) -> None:
            self._calls.append(f"{self._name}.{call}")

        async def wait(*arguments: Any) -> Any:
            note()
            answer = self._waiting[call]
            return await answer(*arguments) if callable(answer) else answer

        return wait if call in self._waiting else note


def a_server(calls: list[str], drained: Any = 0) -> tuple[Any, list[Any], list[Any]]:
    """Parts, listeners and gRPC listeners that write down what is done with them. `drained`: what `drain` gives."""
    parts = SimpleNamespace(
        settings=SimpleNamespace(drain_delay=0.0, drain_timeout=DRAIN_S),
        registry=Recorder("registry", calls, drain=drained),
        rollouts=Recorder("rollouts", calls, stop=None),
        workflows=Recorder("workflows", calls, drain=0),
        connections=[],
    )
    listener: Any = Recorder("listener", calls, turn_away=None)
    listener.state = SimpleNamespace(connections={Recorder("connection", calls)})
    return parts, [listener], [Recorder("grpc", calls, stop=None)]


async def test_the_end_has_an_order() -> None:
    """Readiness first, connections last: no request is cut off that the server has accepted."""
    calls: list[str] = []

    await drain(*_arguments(a_server(calls), Stop()))

    assert calls == [
        "registry.begin_drain",
        "rollouts.stop",
        "registry.refuse_new",
        "workflows.refuse_new",
        "workflows.drain",
        "registry.drain",
        "listener.turn_away",
        "listener.close",
        "connection.shutdown",
        "grpc.stop",
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

    after = calls[calls.index("registry.drain") + 1 :]
    assert after[:3] == ["listener.turn_away", "listener.close", "connection.shutdown"]
    assert [record.message for record in caplog.records] == ["SIGINT again: stopping now"]


async def test_requests_that_were_given_up_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The operator reads how many clients got no answer."""
    await drain(*_arguments(a_server([], 3), Stop()))

    assert "3 requests were given up" in caplog.text


async def test_models_get_what_workflows_left_of_the_time() -> None:
    """Together they take no longer than the setting says; what is left of both is added."""
    given: list[float] = []

    async def drain_models(timeout_s: float) -> int:
        given.append(timeout_s)
        return 2

    workflows: Any = Recorder("workflows", [], drain=1)
    registry: Any = Recorder("registry", [], drain=drain_models)

    assert await finish_accepted(registry, workflows, DRAIN_S) == 3
    assert 0 < given[0] <= DRAIN_S


async def test_no_time_left_is_none_and_never_less() -> None:
    """Workflows that took all of it leave models a look, not an error."""
    given: list[float] = []

    async def drain_models(timeout_s: float) -> int:
        given.append(timeout_s)
        return 0

    async def drain_workflows(timeout_s: float) -> int:
        await asyncio.sleep(2 * timeout_s)
        return 0

    workflows: Any = Recorder("workflows", [], drain=drain_workflows)
    registry: Any = Recorder("registry", [], drain=drain_models)
    await finish_accepted(registry, workflows, 0.01)

    assert given == [0.0]


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
