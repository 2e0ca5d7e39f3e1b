"""What `marserve run` adds to a server, with a registry that answers as it is asked to."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.app import local_run
from marserve.app.draining import Stop
from marserve.app.local_run import Failure, LocalRun
from marserve.errors import LoadFailed
from marserve.settings import Address


class Registry:
    """One model, whose load ends when `loaded` is set, with these errors."""

    def __init__(self, *errors: LoadFailed) -> None:
        self.startup_failures: list[str] = []
        self.loaded = asyncio.Event()
        self._errors = list(errors)

    async def failed_loads(self) -> list[LoadFailed]:
        """As the registry's."""
        await self.loaded.wait()
        return self._errors

    def describe(self, model: str) -> dict[str, Any]:
        """Nothing is declared."""
        return {}


class Run:
    """A companion, and what its callbacks got, in order. What is slow is then loaded."""

    def __init__(self, registry: Registry, explained: Failure | None = None) -> None:
        self.events: list[Any] = []
        self.stop = Stop()
        self._registry = registry
        self._has_settled = asyncio.Event()
        self.companion = LocalRun(
            "m",
            began=0.0,
            on_ready=lambda ready: self._settle("ready"),
            on_failure=self._settle,
            on_swapped=self._settle,
            explain=lambda: explained,
            on_slow=self._is_slow,
        )

    def _settle(self, event: object) -> None:
        self.events.append(event)
        self._has_settled.set()

    def _is_slow(self) -> None:
        self.events.append("slow")
        self._registry.loaded.set()

    async def live(self) -> None:
        """Live until the model is ready or has failed."""
        parts: Any = SimpleNamespace(registry=self._registry)
        listeners: Any = [SimpleNamespace(names=["Inference"], address=Address("http", "127.0.0.1", 8080))]
        reading = asyncio.create_task(asyncio.sleep(0))
        living = asyncio.create_task(self.companion.live(parts, listeners, reading, self.stop))
        async with asyncio.timeout(30):
            await self._has_settled.wait()
        living.cancel()
        await asyncio.wait([living])


@pytest.mark.parametrize(("slow_s", "events"), [(0.0, ["slow", "ready"]), (30.0, ["ready"])])
def test_a_first_load_that_takes_long_is_named_once(
    monkeypatch: pytest.MonkeyPatch, slow_s: float, events: list[str]
) -> None:
    """Before the model is ready; a short one is not named."""
    monkeypatch.setattr(local_run, "SLOW_S", slow_s)

    async def scenario() -> Run:
        registry = Registry()
        if slow_s:
            registry.loaded.set()
        run = Run(registry)
        await run.live()
        return run

    assert asyncio.run(scenario()).events == events


@pytest.mark.parametrize(
    ("cause", "is_explained", "is_bad"),
    [
        ("load_failed", True, True),
        ("load_failed", False, False),
        ("exit", True, True),
        ("import_error", False, True),
        ("killed", True, False),
    ],
)
def test_a_source_that_cannot_be_imported_differs_from_a_model_that_does_not_load(
    cause: str, is_explained: bool, is_bad: bool
) -> None:
    """By an import that is tried where the cause leaves it open; the server ends in both cases."""
    explained = Failure("m.py, line 1: no.", is_of_source=True)

    async def scenario() -> Run:
        registry = Registry(LoadFailed("m", "1.0", reason="why", cause=cause))
        registry.loaded.set()
        run = Run(registry, explained if is_explained else None)
        await run.live()
        return run

    run = asyncio.run(scenario())
    [failure] = run.events
    assert (failure is explained) is (is_explained and cause != "killed")
    assert run.companion.has_bad_source is is_bad
    assert run.stop.asked.is_set()
    assert run.stop.has_failed
