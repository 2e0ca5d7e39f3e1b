"""What `marserve run` adds to a server: it says when the model is ready, and puts a changed source in its place.

`LocalRun` is the server's companion. It waits for the first load, and ends the server if that fails. With a `Reload` it
then follows the source's files: each change is staged by the given function and swapped in, after it has loaded. What
cannot be staged or loaded is shown, and the version before goes on answering.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from watchfiles import awatch

from marserve.app.building.parts import Parts
from marserve.app.draining import Stop
from marserve.app.listeners import Listener
from marserve.errors import CannotImport, Draining, LoadFailed, MarserveError
from marserve.registry.changes.swap import SwapParameters
from marserve.registry.intake.registration import RegisterParameters
from marserve.registry.models import Registry
from marserve.settings import Address

# Changes that come within so long of each other are one; a file that is written all the time is read after the latter.
_SETTLE_MS, _MOST_SETTLE_MS = 50, 800
# Causes of a failed load that lie in what the source imports.
_BAD_SOURCE = ("import_error", "missing_module")
# Causes of one that may.
_MAY_BE_OF_SOURCE = (*_BAD_SOURCE, "load_failed", "missing_file", "exit", "signal")
# After so long the terminal says what it waits for.
SLOW_S = 1.0
# Some file systems give no notices.
_LOOK_EVERY_MS = 1_000


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded: where it answers, how long that took since the command began, in seconds, and what it
    declares, None for nothing.
    """

    address: Address
    seconds: float
    declaration: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Failure:
    """A first load, or a change, failed. `reason` has the author's exception, empty without one.

    `is_of_source`: the source cannot be imported, as the sentence says; `traceback` is the author's part of that, where
    no log has it. `next_step` may help.
    """

    sentence: str
    reason: str = ""
    next_step: str = ""
    traceback: str = ""
    is_of_source: bool = False


@dataclass(frozen=True, slots=True)
class Reload:
    """How to follow a source. `folders` are those in which its files lie now.

    `stage` blocks: it stages what is there and returns the name of the store's entry, None if nothing has changed since
    its last call, whether that succeeded or not. Raises CannotArchive. `forget_old` deletes entries that are replaced.
    `end` ends a call of `stage` that is under way.
    """

    folders: Callable[[], Collection[Path]]
    stage: Callable[[], str | None]
    forget_old: Callable[[], None]
    end: Callable[[], None]


class LocalRun:
    """The companion of one `marserve run`. The callbacks print."""

    shows_tracebacks = True

    def __init__(
        self,
        model: str,
        *,
        began: float,
        on_ready: Callable[[Ready], None],
        on_failure: Callable[[Failure], None],
        on_swapped: Callable[[float], None],
        shorten: Callable[[str], str] = str,
        with_own_paths: Callable[[str], str] = str,
        explain: Callable[[], Failure | None] = lambda: None,
        on_slow: Callable[[], None] = lambda: None,
        on_finishing: Callable[[int, float], None] = lambda requests, limit_s: None,
        reload: Reload | None = None,
        binds_grpc: bool = False,
    ) -> None:
        """`began` is the command's begin, by `time.monotonic`. `on_swapped` gets a change's seconds.

        `shorten` gives what of a log line the terminal is shown, `with_own_paths` a text with the author's files in the
        place of their copies; both are called on any thread. `explain` blocks: it finds out whether a load failed
        because the source cannot be imported. `on_slow` is called when the first load takes longer than a second.
        `on_finishing` is called as `Companion.finishing` is.
        """
        self.binds_grpc = binds_grpc
        self.shorten = shorten
        self.with_own_paths = with_own_paths
        self.was_interrupted = False
        """Whether Ctrl-C ended the server."""
        self.has_bad_source = False
        """Whether the source cannot be imported."""
        self._model, self._began, self._reload = model, began, reload
        self._explain, self._on_slow = explain, on_slow
        self.finishing = on_finishing
        self._on_ready, self._on_failure, self._on_swapped = on_ready, on_failure, on_swapped

    async def live(self, parts: Parts, listeners: Sequence[Listener], reading: asyncio.Task[Any], stop: Stop) -> None:
        """Say when the model is ready, and follow its source, until cancelled."""
        loading = asyncio.ensure_future(self._failures(parts.registry, reading))
        try:
            done, _ = await asyncio.wait([loading], timeout=SLOW_S)
            if not done:
                self._on_slow()
            failures = await loading
            if not failures:
                address = next(each.address for each in listeners if "Inference" in each.names)
                declaration = parts.registry.describe(self._model).get("declaration")
                self._on_ready(Ready(address, time.monotonic() - self._began, declaration))
                if self._reload is not None:
                    await self._follow(parts.registry, self._reload, stop.asked)
            elif not stop.asked.is_set():
                for failure in failures:
                    self._on_failure(failure)
                stop.has_failed = True
                stop.asked.set()
            await asyncio.Event().wait()
        finally:
            loading.cancel()
            if self._reload is not None:
                self._reload.end()
            self.was_interrupted = stop.first_signal == signal.SIGINT

    async def _failures(self, registry: Registry, reading: asyncio.Task[Any]) -> list[Failure]:
        """Wait for the first load; why it failed, empty if it did not."""
        await asyncio.wait([reading])
        failures = [Failure(sentence) for sentence in registry.startup_failures]
        for error in await registry.failed_loads():
            failure = await self._failure_of(error)
            self.has_bad_source |= failure.is_of_source
            failures.append(failure)
        return failures

    async def _failure_of(self, error: LoadFailed) -> Failure:
        explained = await asyncio.to_thread(self._explain) if error.cause in _MAY_BE_OF_SOURCE else None
        return explained or Failure(str(error), error.reason, is_of_source=error.cause in _BAD_SOURCE)

    async def _follow(self, registry: Registry, reload: Reload, stop: asyncio.Event) -> None:
        """Take each change, until a stop is asked for. The folders are watched; each second they are looked at, too."""
        while not stop.is_set():
            folders = reload.folders()
            try:
                async for _ in awatch(
                    *folders,
                    watch_filter=None,
                    step=_SETTLE_MS,
                    debounce=_MOST_SETTLE_MS,
                    stop_event=stop,
                    rust_timeout=_LOOK_EVERY_MS,
                    yield_on_timeout=True,
                    recursive=False,
                    ignore_permission_denied=True,
                ):
                    await self._take_change(registry, reload)
                    if reload.folders() != folders:
                        break
            except (OSError, RuntimeError):  # a folder is gone, or there are too many watches
                await asyncio.sleep(_LOOK_EVERY_MS / 1000)
                await self._take_change(registry, reload)

    async def _take_change(self, registry: Registry, reload: Reload) -> None:
        began = time.monotonic()
        try:
            entry = await asyncio.to_thread(reload.stage)
            if entry is None:
                return
            registration = RegisterParameters(url=entry, model_name=self._model)
            await registry.swap(SwapParameters(self._model, registration, checks=False))
        except Draining:
            return
        except LoadFailed as error:
            self._on_failure(await self._failure_of(error))
        except CannotImport as error:
            self._on_failure(Failure(error.message, traceback=error.traceback, is_of_source=True))
        except MarserveError as error:
            self._on_failure(Failure(error.message))
        else:
            self._on_swapped(time.monotonic() - began)
            await asyncio.to_thread(reload.forget_old)
