"""What `marserve tune --goal` loads: a copy of a version under a name of its own, which gets no client's requests.

The copy is registered from the same archive, and unregistered however the search ends. With `on_live` it is the version
itself, which gets its own options back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self

from marserve.cli.output import CommandFailed
from marserve.cli.remote import Management, model_path
from marserve.tuning.load import MOST_CLIENTS, Limit, Shape, Tally, Target, run
from marserve.tuning.payloads import Payload
from marserve.tuning.percentiles import percentile_of
from marserve.tuning.search import Sample
from marserve.tuning.settings import Goal, Layout, Setting

# Batches are timed in so many slices, whose median counts.
SLICES: Final = 3
WARM_UP_BATCHES: Final = 2
LOAD_S: Final = 600.0
# A registration that Ctrl-C left goes on in the server: its copy is waited for so long, to be removed.
LATE_S: Final = 10.0
LOOK_EVERY_S: Final = 0.2
# With so many requests waiting for each place in a batch, batches are full.
FULL: Final = 2
GOVERNED: Final = (
    "Tune on a server without a document, such as that of `marserve run ARCHIVE`, and put the patch's values into the "
    "document."
)


def setting_of(described: dict[str, Any]) -> Setting:
    """How a version is served now."""
    return Setting(
        Layout(max(1, described["maxWorkers"]), described["modelVersion"]),
        described["batchSize"],
        described["maxBatchDelay"] / 1000,
    )


@dataclass(slots=True)
class TunedCopy:
    """Copies of versions, and the measurements that the search asks for. Use it as a context manager.

    `described` are the versions, the first one that which is tuned. `target` is that of a model's name and version.
    `asked` counts requests. `left` says what is left in the server that should not be.
    """

    server: Management
    described: Sequence[dict[str, Any]]
    target: Callable[[str, str], Target]
    payloads: Sequence[Payload]
    goal: Goal
    seconds: float
    on_step: Callable[[str], None]
    is_live: bool = False
    timeout_s: float = 120.0
    asked: int = 0
    notes: list[str] = field(default_factory=list)
    left: str = ""
    _copied: list[str] = field(default_factory=list)
    _now: dict[str, Setting] = field(default_factory=dict)
    _refused: set[Layout] = field(default_factory=set)
    _ends: float = 0.0

    @property
    def name(self) -> str:
        """The name that requests go to."""
        model = str(self.described[0]["modelName"])
        return model if self.is_live else f"{model}-tuning-{os.getpid()}"

    def __enter__(self) -> Self:
        try:
            for described in self.described:
                self._load(described)
        except CommandFailed:
            self._remove()
            raise
        except BaseException:
            self._remove(LATE_S)
            raise
        self._ends = time.monotonic() + self.seconds
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    def _load(self, described: dict[str, Any]) -> None:
        version = described["modelVersion"]
        if self.is_live:
            self._now[version] = setting_of(described)
            return
        self.on_step(f"Loading a copy of version {version}")
        parameters = {
            "url": described["modelUrl"],
            "model_name": self.name,
            "initial_workers": 1,
            "synchronous": "true",
        }
        self._copied.append(version)  # before: an interrupted call goes on in the server
        try:
            self.server.order("POST", "/models", parameters, timeout_s=LOAD_S)
        except CommandFailed as failure:
            if failure.detail.get("code") == 409:
                failure.next_step = GOVERNED
            elif failure.detail.get("code") in (400, 404, 507):
                failure.next_step = "--on-live loads the version that serves, and no copy of it."
            raise

    def _remove(self, late_s: float = 0.0) -> None:
        """Unregister the copies, the default version last; or set back what was changed.

        A copy that is not there is looked for again for `late_s`.
        """
        self.on_step("Removing the copy")
        if self.is_live:
            before = setting_of(self.described[0])
            if self._now.get(before.layout.version) != before:
                try:
                    self._set(before, least=self.described[0]["minWorkers"])
                except CommandFailed as failure:
                    self.left = f"{self.name} {before.layout.version} keeps other options: {failure.message}"
            return
        until = time.monotonic() + late_s
        while self._copied:
            version = self._copied.pop()
            try:
                self.server.order("DELETE", model_path(self.name, version), {"force": "true"}, timeout_s=LOAD_S)
            except CommandFailed as failure:
                if failure.detail.get("code") != 404 or (late_s and time.monotonic() >= until):
                    self.left = f"{self.name} {version} is still there; `marserve unregister {self.name}` removes it."
                elif late_s:
                    self._copied.append(version)
                    time.sleep(LOOK_EVERY_S)

    # ------------------------------------------------------------------------------------------- of the search

    def has_time(self) -> bool:
        """Whether another measurement may begin."""
        return time.monotonic() < self._ends

    def batch_s(self, layout: Layout, size: int, batches: int) -> Sequence[float]:
        """How long a batch takes, from the rate of full batches on all workers."""
        self.on_step(f"Probing batches of {size}, {layout.workers} workers")
        if not self._try(Setting(layout, size, 0.0)):
            return []
        a_round = layout.workers * size
        shape = self._filling(Setting(layout, size, 0.0))
        self._load_with(layout, shape, Limit(WARM_UP_BATCHES * a_round, self._left_s()))
        taken = []
        for _ in range(SLICES):
            tally = self._load_with(layout, shape, Limit(max(1, batches // SLICES) * a_round, self._left_s()))
            if tally.answered and not tally.failures:
                taken.append(layout.workers * size * tally.lasted_s / tally.answered)
            elif tally.failed:
                (reason, _), *_ = tally.failed.items()
                self.notes.append(f"{layout.workers} workers, batches of {size}: {reason.status or ''} {reason.text}")
                break
        return taken

    def measure(self, setting: Setting, rate: float | None, requests: int) -> Sample:
        """One measurement."""
        self.on_step(f"Measuring {setting}" + ("" if rate is None else f" at {rate:.0f} a second"))
        if not self._try(setting):
            return Sample(0.0)
        shape = Shape(rate=rate, seed=requests + self.asked)
        if rate is None:
            shape = self._filling(setting)
        tally = self._load_with(setting.layout, shape, Limit(requests, self._left_s()))
        found = percentile_of(sorted(tally.seconds), self.goal.share)
        return Sample(tally.answered / tally.lasted_s if tally.lasted_s else 0.0, found.seconds, tally.failures)

    def _filling(self, setting: Setting) -> Shape:
        """As many clients as fill batches on all workers, and no more than the queue takes."""
        places = setting.layout.workers * setting.batch_size
        return Shape(max(1, min(MOST_CLIENTS, FULL * places, places + self.described[0].get("jobQueueSize", 100))))

    def _left_s(self) -> float:
        return max(0.05, self._ends - time.monotonic())

    def _load_with(self, layout: Layout, shape: Shape, limit: Limit) -> Tally:
        tally = Tally()

        async def work() -> None:
            async with self.target(self.name, layout.version).line(self.payloads, self.timeout_s) as line:
                await line.load(shape, limit, tally)

        try:
            run(work)
        finally:
            self.asked += tally.sent
        return tally

    def _try(self, setting: Setting) -> bool:
        """Whether the server took a setting; a layout that it refused, such as for memory, is asked for once."""
        if setting.layout in self._refused:
            return False
        try:
            self._set(setting)
        except CommandFailed as failure:
            self._refused.add(setting.layout)
            self.notes.append(f"{setting.layout.workers} workers: {failure.message}")
            return False
        return True

    def _set(self, setting: Setting, least: int | None = None) -> None:
        """Have the server serve a version so, with `least` workers, all of them if not given."""
        before = self._now.get(setting.layout.version)
        if before == setting:
            return
        parameters: dict[str, str | int] = {
            "batch_size": setting.batch_size,
            "max_batch_delay": round(1000 * setting.delay_s),
        }
        if before is None or before.layout != setting.layout or least is not None:
            workers = setting.layout.workers
            fewest = workers if least is None else least
            parameters |= {"min_worker": fewest, "max_worker": workers, "synchronous": "true"}
        self._now[setting.layout.version] = replace(setting, batch_size=0)  # unknown until it is done
        self.server.order("PUT", model_path(self.name, setting.layout.version), parameters, timeout_s=LOAD_S)
        self._now[setting.layout.version] = setting
