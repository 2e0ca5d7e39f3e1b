"""What `marserve tune --goal` loads: a copy of a version under a name of its own, which gets no client's requests.

One copy is there at a time: another version, or other threads, take its place. It is unregistered however the search
ends. With `on_live` it is the version itself, which gets its own options back.
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
from marserve.tuning.settings import FOUND, KEPT, Goal, Layout, Setting

# Batches are timed in so many slices, whose median counts.
SLICES: Final = 3
WARM_UP_BATCHES: Final = 2
# Where a policy finds the size of batches: so many requests at a time for each worker, so many times.
WIDTHS: Final = (1, 4, 16, 64)
ROUNDS: Final = 12
LOAD_S: Final = 600.0
REMOVE_S: Final = 60.0
# A registration that a signal or a broken connection left goes on in the server: its copy is waited for so long, to be
# removed.
LATE_S: Final = 10.0
LOOK_EVERY_S: Final = 0.2
# What a server answers that does not know copies.
NO_COPIES: Final = "Parameter url is required."
# With so many requests waiting for each place in a batch, batches are full.
FULL: Final = 2


def setting_of(described: dict[str, Any], *, with_threads: bool = False, with_padding: bool = False) -> Setting:
    """How a version is served now."""
    goal = described.get("goal")
    padding = (goal or {}).get("paddingBudget", KEPT) if with_padding else KEPT
    threads = described.get("threadsPerWorker", 0) if with_threads else 0
    return Setting(
        Layout(max(1, described["maxWorkers"]), described["modelVersion"], threads, padding),
        described["batchSize"],
        described["maxBatchDelay"] / 1000 if goal is None else FOUND,
    )


@dataclass(slots=True)
class TunedCopy:
    """A copy of a version, and the measurements that the search asks for. Use it as a context manager.

    `described` is the version that is tuned, and `first` how it is served now. `target` is that of a model's name and
    version. `asked` counts requests. `left` says what is left in the server that should not be.
    """

    server: Management
    described: dict[str, Any]
    first: Layout
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
    _copied: tuple[str, int, float] | None = None
    _may_come: bool = False
    _now: Setting | None = None
    _refused: set[object] = field(default_factory=set)
    _ends: float = 0.0

    @property
    def name(self) -> str:
        """The name that requests go to."""
        model = str(self.described["modelName"])
        return model if self.is_live else f"{model}-tuning-{os.getpid()}"

    def __enter__(self) -> Self:
        try:
            if self.is_live:
                self._now = setting_of(self.described)
            else:
                self._load(self.first)
        except BaseException:
            self._remove()
            raise
        self._ends = time.monotonic() + self.seconds
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._remove()
        except BaseException:  # a signal came at this very moment: only a further one leaves the copy
            self._remove()
            raise

    def _load(self, layout: Layout) -> None:
        """Have the copy be one of this build; the time of loading is not that of the search."""
        begun = time.monotonic()
        self._remove()
        if self.left:
            raise CommandFailed(self.left)
        self.on_step(f"Loading a copy: {replace(layout, workers=1)}")
        parameters: dict[str, str | int | float] = {
            "copy_of": self.described["modelName"],
            "model_version": layout.version,
            "model_name": self.name,
            "initial_workers": 1,
            "synchronous": "true",
        }
        if layout.threads:
            parameters["threads"] = layout.threads
        if layout.padding != KEPT:
            parameters["padding_budget"] = layout.padding
        # Before the call: one that is interrupted, or gets no answer, goes on in the server.
        self._copied, self._may_come = layout.build, True
        try:
            self.server.order("POST", "/models", parameters, timeout_s=LOAD_S)
            self._may_come = False
        except CommandFailed as failure:
            if "type" in failure.detail:  # the server's own answer, and no proxy's: nothing is loaded
                self._copied, self._may_come = None, False
            if failure.detail.get("code") in (400, 404, 405, 500, 507):
                failure.next_step = "--on-live loads the version that serves, and no copy of it."
            if failure.message == NO_COPIES:
                failure.message = "The server makes no copies of models: it is of an earlier version than this command."
            raise
        self._ends += time.monotonic() - begun

    def _remove(self) -> None:
        """Unregister the copy, or set back what was changed; `left` names what cannot be.

        A copy that may come yet is looked for again for `LATE_S`.
        """
        if self.is_live:
            self._set_back()
            return
        until = time.monotonic() + LATE_S
        while self._copied is not None:
            self.on_step("Removing the copy")
            version = self._copied[0]
            what = "may be there or still come" if self._may_come else "is still there"
            self.left = f"{self.name} {version} {what}; `marserve unregister {self.name}` removes it."
            try:
                self.server.order("DELETE", model_path(self.name, version), {"force": "true"}, timeout_s=REMOVE_S)
                self.left = ""
            except CommandFailed as failure:
                if failure.detail.get("code") == 404 and self._may_come and time.monotonic() < until:
                    time.sleep(LOOK_EVERY_S)
                    continue
                if failure.detail.get("code") == 404 and not self._may_come:
                    self.left = ""
            self._copied = self._now = None
            self._may_come = False

    def _set_back(self) -> None:
        before = setting_of(self.described)
        if self._now is None or self._now == before:
            return
        kept = f"{self.name} {before.layout.version} keeps other options"
        self.left = f"{kept}; `marserve tune` sets them."
        try:
            self._set(before, least=self.described["minWorkers"])
            self.left = ""
        except CommandFailed as failure:
            self.left = f"{kept}: {failure.message}"

    # ------------------------------------------------------------------------------------------- of the search

    def has_time(self) -> bool:
        """Whether another measurement may begin."""
        return time.monotonic() < self._ends

    def batch_s(self, layout: Layout, size: int, batches: int) -> Sequence[float]:
        """How long a batch takes, from the rate of full batches on all workers."""
        self.on_step(f"Probing batches of {size}, {layout}")
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
                self.notes.append(f"{layout}, batches of {size}: {reason.status or ''} {reason.text}")
                break
        return taken

    def seen_costs(self, layout: Layout) -> Sequence[tuple[int, int, float]]:
        """What the version itself has learned, under loads of several widths."""
        for width in WIDTHS:
            self.on_step(f"Probing {width} requests at a time for each worker, {layout}")
            if not self._try(Setting(layout, max(WIDTHS), FOUND)):
                return []
            clients = min(MOST_CLIENTS, layout.workers * width)
            tally = self._load_with(layout, Shape(clients), Limit(clients * ROUNDS, self._left_s()))
            if not tally.answered and tally.failed:
                (reason, _), *_ = tally.failed.items()
                self.notes.append(f"{layout}: {reason.status or ''} {reason.text}")
                return []
        costs = self.server.describe(self.name, layout.version)[0].get("goal", {}).get("costs", [])
        return [
            (each.get("lengthUpTo", 1), int(size), milliseconds / 1000)
            for each in costs
            for size, milliseconds in each["bySize"].items()
        ]

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
        """As many clients as fill batches on all workers, of which the queue takes all while the first ones leave."""
        places = setting.layout.workers * setting.batch_size
        queue = self.described.get("jobQueueSize", 100)
        return Shape(max(1, min(MOST_CLIENTS, FULL * places, max(places, queue))))

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
        """Whether the server took a setting; a layout that it refused, such as for memory, is asked for once.

        A server that is gone fails the search.
        """
        layout = setting.layout
        if layout in self._refused or layout.build in self._refused:
            return False
        try:
            if not self.is_live and self._copied != layout.build:
                self._refused.add(layout.build)
                self._load(layout)
                self._refused.discard(layout.build)
            self._set(setting)
        except CommandFailed as failure:
            if self.left or "code" not in failure.detail:
                raise
            self._refused.add(layout)
            self.notes.append(f"{layout}: {failure.message}")
            return False
        return True

    def _set(self, setting: Setting, least: int | None = None) -> None:
        """Have the server serve a version so, with `least` workers, all of them if not given."""
        before = self._now
        if before == setting:
            return
        parameters: dict[str, str | int] = {"batch_size": setting.batch_size}
        if setting.delay_s != FOUND:
            parameters["max_batch_delay"] = round(1000 * setting.delay_s)
        if before is None or before.layout != setting.layout or least is not None:
            workers = setting.layout.workers
            fewest = workers if least is None else least
            parameters |= {"min_worker": fewest, "max_worker": workers, "synchronous": "true"}
        self._now = replace(setting, batch_size=0)  # unknown until it is done
        self.server.order("PUT", model_path(self.name, setting.layout.version), parameters, timeout_s=LOAD_S)
        self._now = setting
