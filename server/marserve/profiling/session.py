"""Has one worker of a version profiled while it serves, has its traces read, and keeps the last profiles.

Traces are read by a process of its own (`analysis`). It is ended with the client, as the profile is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from marserve.answers.profiles import ModelProfile, ProfileState, ProfileWorker
from marserve.errors import CannotProfile, ProfileUnknown, without_stop
from marserve.pool.checks.profiles import ProfileWish, TakenProfile
from marserve.profiling.analysis import NICENESS, Analysed, Measured
from marserve.profiling.py_spy import PySpy
from marserve.registry.models import Registry

__all__ = ["ProfileWish", "Profiles"]

# So many profiles are kept, the last ones, each with its trace.
MOST_KEPT: Final = 4
ANALYSED_WITHIN_S: Final = 60.0

log = logging.getLogger("marserve.profiling")


class _Kept(NamedTuple):
    profile: ModelProfile
    trace: bytes


class _Reading(NamedTuple):
    since: float
    seconds: float
    requests: int


class Profiles:
    """The profiles of a server's versions. All calls belong to the event loop's thread."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._reading: dict[tuple[str, str], _Reading] = {}

    async def make(self, model: str, version: str | None, wish: ProfileWish) -> ModelProfile:
        """Profile one worker of a version (or label, or the default version), and keep the profile.

        A caller that is cancelled ends it. Raises ModelNotFound, VersionNotFound, and CannotProfile.
        """
        began = datetime.now(UTC)
        spy = PySpy()
        beginning: list[asyncio.Task[None]] = []

        def begun(pids: list[int]) -> None:
            if pids:
                beginning.append(asyncio.create_task(spy.begin(pids[0], wish.seconds)))

        try:
            name, taken = await self._registry.profile(model, version, wish, begun)
            with self._noting_reading((model, name), taken):
                if beginning:
                    await beginning[0]
                stacks, why_none = await spy.end() if beginning else ("", "the worker is on another machine")
                analysed = await _analyse(Measured(taken.profiled, list(taken.traces), wish.max_bytes, stacks))
        finally:
            if beginning:
                await asyncio.wait(beginning)
            await spy.close()
        profile = _named(analysed.profile, model, name, taken, began, wish)
        if why_none and not profile.pythonStacks:
            profile.noPython = why_none
        self._keep(model, name, _Kept(profile, analysed.trace))
        return profile

    def state(self, model: str, version: str | None) -> ProfileState:
        """Whether one is being made, and the last. Raises ModelNotFound, VersionNotFound."""
        name, progress = self._registry.profile_progress(model, version)
        kept = self._kept.get((model, name))
        last = None if kept is None else kept.profile
        if progress is not None:
            return ProfileState(True, round(progress[0], 1), progress[1], last=last)
        reading = self._reading.get((model, name))
        if reading is None:
            return ProfileState(False, last=last)
        read_s = round(time.monotonic() - reading.since, 1)
        return ProfileState(True, round(reading.seconds, 1), reading.requests, read_s, last)

    @contextlib.contextmanager
    def _noting_reading(self, key: tuple[str, str], taken: TakenProfile) -> Iterator[None]:
        profiled = taken.profiled
        requests = sum(each.requests for each in profiled.batches)
        reading = _Reading(time.monotonic(), max(0.0, profiled.ended - profiled.began), requests)
        self._reading[key] = reading
        try:
            yield
        finally:
            if self._reading.get(key) is reading:  # a second profile may have been made meanwhile
                del self._reading[key]

    def trace(self, model: str, version: str | None) -> bytes:
        """The last profile's trace, packed by gzip. Raises ProfileUnknown without one, and as `state`."""
        name, _ = self._registry.profile_progress(model, version)
        kept = self._kept.get((model, name))
        if kept is None:
            raise ProfileUnknown(
                f"Version {name} of {model} has no profile that is kept (the last {MOST_KEPT} of all are): make one "
                f"with `marserve profile {model}`."
            )
        if not kept.trace:
            reason = kept.profile.noOperators or "none was recorded"
            raise ProfileUnknown(f"The last profile of {model} {name} has no trace: {without_stop(reason)}.")
        return kept.trace

    def _keep(self, model: str, version: str, kept: _Kept) -> None:
        self._kept.pop((model, version), None)
        self._kept[model, version] = kept
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)


def _named(
    profile: ModelProfile, model: str, version: str, taken: TakenProfile, began: datetime, wish: ProfileWish
) -> ModelProfile:
    profile.modelName, profile.modelVersion, profile.worker = model, version, taken.worker
    profile.began = began.strftime("%Y-%m-%dT%H:%M:%SZ")
    profile.askedRequests = wish.requests or None
    profile.workers = [
        ProfileWorker(name, requests, round(mean_s * 1000, 3)) for name, requests, mean_s in taken.others
    ]
    return profile


async def _analyse(measured: Measured) -> Analysed:
    """Have a process read the traces. Raises CannotProfile if it fails: the worker wrote what nothing can read."""
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "marserve.profiling.analysis",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    with contextlib.suppress(OSError):  # while it imports; it does so by itself then
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    try:
        async with asyncio.timeout(ANALYSED_WITHIN_S):
            written, said = await process.communicate(msgspec.msgpack.encode(measured))
    except TimeoutError:
        raise CannotProfile(
            f"The traces were not read within {ANALYSED_WITHIN_S:g} s: record fewer operators, by a smaller max_bytes."
        ) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-1:] or [f"status {process.returncode}"]
        raise CannotProfile(
            f"What the worker recorded cannot be read: {last[0][:300]}. Record less, by a smaller max_bytes."
        )
    log.info("The traces of a profile were read in %.1f s", time.monotonic() - began)
    return msgspec.msgpack.decode(written, type=Analysed)
