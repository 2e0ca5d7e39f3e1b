"""Carries out roll-outs, one a model: a task reads the counts, judges, sets the traffic and keeps the evidence.

Nothing is awaited between a verdict and the traffic that it asks for. From the moment a version is found to be worse
no request is chosen for it, and those that wait for it go to the version that serves. A change that an operator makes
by hand wins, and ends the roll-out. A stop of the server leaves its record as it is; the next start goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, get_args

from marserve.errors import (
    BadInput,
    DefaultVersionInUse,
    Draining,
    MarserveError,
    ModelNotFound,
    RolloutNotFound,
    RolloutsUnread,
    RolloutUnderWay,
    VersionNotFound,
)
from marserve.pool.pool import Pool
from marserve.registry.catalogue.traffic import Traffic, read_traffic
from marserve.registry.changes.dry_run import Rehearsed
from marserve.registry.intake.registration import Registered, RegisterParameters
from marserve.registry.models import Registry
from marserve.registry.observing.arms import Arm, Seen
from marserve.registry.observing.shadow import Shadow
from marserve.rollout.course import Course, RolloutSpec, State, forecast, read_rollout
from marserve.rollout.judge import Answers, Measure
from marserve.rollout.records import KEPT_ENDED, Records

log = logging.getLogger("marserve.rollout")

# How often the counts are looked at, in seconds.
TICK_S = 0.05
# How often a version is checked for being ready.
READY_LOOK_S = 0.05
# How long versions may take to be ready: to begin with, and after a restart of the server.
READY_LIMIT_S = 900.0
# A version without a worker for so long counts as dead. A worker that crashed is usually replaced sooner.
DEAD_AFTER_S = 5.0
MOST_EVENTS = 200

Order = Literal["pause", "resume", "abort", "promote"]
ORDERS: tuple[Order, ...] = ("pause", "resume", "abort", "promote")
_ENDS: Final[tuple[tuple[str, str], ...]] = (
    *[("promoted", reason) for reason in ("judge", "call")],
    *[("rolled back", measure) for measure in get_args(Measure)],
    *[("rolled back", reason) for reason in ("too_few", "workers", "batching", "not_ready", "error", "judge")],
    *[("aborted", reason) for reason in ("call", "changed")],
)
"""How roll-outs end, and by what."""
_AFTER: dict[Order, State] = {"pause": "paused", "resume": "running", "abort": "aborted", "promote": "promoted"}


class Rollouts:
    """The roll-outs of one server. All methods belong to the event loop's thread."""

    def __init__(self, registry: Registry, records: Records | None, now: Callable[[], float] = time.monotonic) -> None:
        """Without `records` nothing is kept on disk, and a restart forgets the roll-outs."""
        self.registry = registry
        self.now = now
        self._records = records
        self._kept: dict[str, list[dict[str, Any]]] = {}
        self._running: dict[str, _Rollout] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing: dict[str, asyncio.Task[None]] = {}
        self._unwritten: set[str] = set()
        self._ends: dict[tuple[str, str], int] = dict.fromkeys(_ENDS, 0)
        self._is_stopped = False
        self._is_read = records is None

    # ------------------------------------------------------------------------------------------- calls

    def begin(self, model: str, spec: RolloutSpec, *, dry_run: bool = False) -> dict[str, Any]:
        """Begin a roll-out, or with `dry_run` say what it would do. Returns its description.

        Raises ModelNotFound, VersionNotFound, RolloutUnderWay, RolloutsUnread; BadInput for what cannot be rolled out.
        """
        if self._is_stopped:
            raise Draining
        self._check_read()
        if model in self._running:
            raise RolloutUnderWay(
                f"Model {model} has a roll-out already, of version {self._running[model].spec.version}: wait until it "
                "has ended, or abort it."
            )
        baseline, before = self._check(model, spec)
        if dry_run:
            return {
                "modelName": model,
                "modelVersion": spec.version,
                "baseline": baseline,
                "dryRun": True,
                "spec": spec.document(),
                "steps": forecast(spec, self._rate_of(model, baseline)),
            }
        rollout = _Rollout(self, model, spec, baseline, before)
        rollout.note("asked for")
        self._run(rollout)
        return rollout.describe()

    def describe(self, model: str) -> dict[str, Any]:
        """The model's present roll-out, or its last one, with those before as `earlier`.

        Raises RolloutNotFound, RolloutsUnread, and ModelNotFound for an unknown model of which no record is
        kept.
        """
        self._check_read()
        kept = self._kept.get(model, [])
        running = self._running.get(model)
        if running is not None:
            return {**running.describe(), "earlier": [_in_short(each) for each in kept if each["id"] != running.id]}
        if not kept:
            self.registry.data_plane.check_exists(model)
            raise RolloutNotFound(model)
        return {**kept[-1], "earlier": [_in_short(each) for each in kept[:-1]]}

    def list(self) -> list[dict[str, Any]]:
        """Each model's present or last roll-out, in short."""
        self._check_read()
        models = sorted(self._kept.keys() | self._running.keys())
        return [_in_short(self.describe(model)) for model in models]

    def under_way(self, model: str) -> tuple[str, str] | None:
        """The version that is being rolled out and the one that it is compared with; None without a roll-out."""
        rollout = self._running.get(model)
        return None if rollout is None else (rollout.spec.version, rollout.baseline)

    def order(self, model: str, order: Order) -> dict[str, Any]:
        """Pause, resume, abort or promote a roll-out, at once. Returns its description.

        Raises RolloutNotFound, ModelNotFound, and RolloutUnderWay if the roll-out's state does not allow it.
        """
        self._find(model).order(order)
        return self.describe(model)

    def rehearse(self, model: str, order: Order) -> Rehearsed:
        """Say what an order would do. Raises as `order`."""
        return self._find(model).rehearse(order)

    def _check_read(self) -> None:
        """Raise RolloutsUnread before `start` has read the records: until then RolloutNotFound may be wrong."""
        if not self._is_read:
            raise RolloutsUnread

    def _find(self, model: str) -> _Rollout:
        self._check_read()
        rollout = self._running.get(model)
        if rollout is None:
            if model not in self._kept:
                self.registry.data_plane.check_exists(model)
                raise RolloutNotFound(model)
            state = self._kept[model][-1]["state"]
            raise RolloutUnderWay(f"The roll-out of model {model} has ended: it was {state}.")
        return rollout

    def _check(self, model: str, spec: RolloutSpec) -> tuple[str, Traffic | None]:
        """The version that serves now and the traffic in force, if the roll-out may begin."""
        registry = self.registry
        registry.data_plane.check_exists(model)
        rule = registry.traffic.rule_of(model)
        baseline = registry.mirrors.default_of(model)
        if rule is not None:
            weighted = [name for name, weight in rule.weights.items() if weight]
            if len(weighted) != 1:
                raise BadInput(
                    f"The requests of model {model} are shared out by weights among {', '.join(weighted)}; a roll-out "
                    "needs one version that serves. Reset the traffic first."
                )
            baseline = weighted[0]
        if baseline == spec.version:
            raise BadInput(f"Version {spec.version} of model {model} serves already.")
        is_there = registry.mirrors.pool_of(model, spec.version) is not None
        if spec.url is None and not is_there:
            raise VersionNotFound(model, spec.version)
        if spec.url is not None and is_there:
            raise BadInput(f"Version {spec.version} of model {model} is registered already; leave the url out.")
        shadow = registry.mirrors.shadow_of(model)
        if shadow is not None and spec.compare is not None:
            raise BadInput(f"Model {model} has a shadow, which a roll-out with compare would replace; remove it first.")
        for name in (baseline, spec.version) if is_there else (baseline,):
            pool = registry.mirrors.pool_of(model, name)
            if pool is not None and pool.options.sequences is not None and spec.compare is not None:
                raise BadInput(f"Version {name} has sequences, whose answers cannot be compared; leave compare out.")
        return baseline, rule

    def _rate_of(self, model: str, baseline: str) -> float:
        """Accepted requests per second of the baseline since it was registered: the rate that a dry run assumes."""
        pool = self.registry.mirrors.pool_of(model, baseline)
        if pool is None:
            return 0.0
        starts = [worker.started_at for worker in pool.workers()]
        served_s = time.time() - min(starts) if starts else 0.0
        return pool.metrics.client_requests / served_s if served_s > 0 else 0.0

    # ------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Read the records, and go on with the roll-outs that had not ended."""
        if self._records is None:
            return
        self._kept = await asyncio.to_thread(self._records.read)
        for model, kept in self._kept.items():
            if kept and kept[-1].get("state") in ("preparing", "running", "paused"):
                try:
                    rollout = _Rollout.read(self, model, kept[-1])
                except (MarserveError, KeyError, TypeError, ValueError) as error:
                    log.error("The roll-out of model %s cannot be taken up again: %r", model, error)
                    kept[-1] |= {"state": "aborted", "reason": "its record cannot be read", "ended": time.time()}
                    continue
                rollout.note("the server was started again")
                self._run(rollout)
        self._is_read = True

    def _run(self, rollout: _Rollout) -> None:
        self._running[rollout.model] = rollout
        task = asyncio.create_task(rollout.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Leave every roll-out where it is, and its record so. May be called twice."""
        self._is_stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._writing:
            await asyncio.wait(self._writing.values())

    def undo_registration(self, model: str, registering: asyncio.Future[Registered]) -> None:
        """Unregister the version once the registration under way has ended. A server that stops leaves it as it is."""
        if self._is_stopped:
            return

        async def undo() -> None:
            try:
                registered = await asyncio.shield(registering)
                await self.registry.unregister(model, registered.version)
                log.info("Model %s version %s is unregistered: its roll-out had ended", model, registered.version)
            except MarserveError as error:
                log.info("The registration for an ended roll-out of model %s left nothing: %s", model, error)

        task = asyncio.create_task(undo())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def rows(self) -> Iterator[tuple[tuple[str, str], float]]:
        """How many roll-outs ended, by outcome and reason; with those of 0, so that a first one is a growth."""
        for (state, reason), count in self._ends.items():
            yield (state.replace(" ", "_"), reason), count

    def count_end(self, state: State, reason: str) -> None:
        """Count a roll-out that has ended."""
        self._ends[state, reason] += 1

    def ended(self, rollout: _Rollout) -> None:
        """Note that a roll-out has ended; its leftovers may still be cleared away."""
        if self._running.get(rollout.model) is rollout:
            del self._running[rollout.model]

    def save(self, rollout: _Rollout) -> None:
        """Keep a roll-out's present state: in memory at once, on disk soon."""
        kept = self._kept.setdefault(rollout.model, [])
        document = rollout.describe()
        for place, each in enumerate(kept):
            if each["id"] == rollout.id:
                kept[place] = document
                break
        else:
            kept.append(document)
        del kept[: -KEPT_ENDED - 1]
        self._unwritten.add(rollout.model)
        if self._records is not None and rollout.model not in self._writing:
            self._writing[rollout.model] = asyncio.create_task(self._write(self._records, rollout.model))

    async def _write(self, records: Records, model: str) -> None:
        try:
            while model in self._unwritten:
                self._unwritten.discard(model)
                try:
                    await asyncio.to_thread(records.write, model, list(self._kept[model]))
                except OSError as error:
                    log.error("The record of model %s's roll-out cannot be written: %s", model, error)
        finally:
            del self._writing[model]


class _Rollout:
    """One roll-out: its course, what it set, and what happened."""

    def __init__(
        self, rollouts: Rollouts, model: str, spec: RolloutSpec, baseline: str, before: Traffic | None
    ) -> None:
        """`before` is the traffic to go back to, None for the default version."""
        self.model = model
        self.spec = spec
        self.baseline = baseline
        self.id = uuid.uuid4().hex
        self.course = Course(spec)
        self._rollouts = rollouts
        self._before = before
        self._began = time.time()
        self._ended: float | None = None
        self._events: list[dict[str, Any]] = []
        self._first_step = 0
        self._is_paused_at_start = False
        self._is_restarted = False
        self._is_registering = False
        self._has_registered = False
        self._rule: Traffic | None = before
        self._pools: dict[str, Pool] = {}
        self._arms: dict[str, Arm] = {}
        self._seen = (Seen(), Seen())
        self._answers = Answers()
        self._answers_before = Answers()
        self._shadow: Shadow | None = None
        self._deaths_before: dict[str, int] = {}
        self._dead_since: dict[str, float] = {}
        self._is_ordered = asyncio.Event()

    @classmethod
    def read(cls, rollouts: Rollouts, model: str, document: Mapping[str, Any]) -> _Rollout:
        """A roll-out that was under way when the server ended. Raises any error for a malformed document."""
        before = document.get("before")
        rollout = cls(
            rollouts,
            model,
            read_rollout(document["spec"]),
            str(document["baseline"]),
            None if before is None else read_traffic(before),
        )
        rollout.id = str(document["id"])
        rollout._began = float(document["began"])
        rollout._events = list(document["events"])
        rollout._first_step = int(document["step"])
        rollout._is_paused_at_start = document["state"] == "paused"
        rollout._is_restarted = True
        rollout._is_registering = bool(document.get("registering"))
        rollout._has_registered = bool(document["registered"])
        return rollout

    def describe(self) -> dict[str, Any]:
        """Its whole state; this is also the record."""
        course, now = self.course, self._rollouts.now()
        described: dict[str, Any] = {
            "id": self.id,
            "modelName": self.model,
            "modelVersion": self.spec.version,
            "baseline": self.baseline,
            "state": course.state,
            "reason": course.reason,
            "step": max(course.step, self._first_step) if course.state == "preparing" else course.step,
            "share": course.share,
            "began": self._began,
            "spec": self.spec.document(),
            "registered": self._has_registered,
            **({"registering": True} if self._is_registering else {}),
            "events": list(self._events),
        }
        if self._ended is not None:
            described["ended"] = self._ended
        if self._before is not None:
            described["before"] = self._before.document()
        if course.state in ("running", "paused"):
            described["elapsedSeconds"] = round(course.elapsed_s(now), 3)
            described["holdSeconds"] = self.spec.hold_s
        if self._arms or course.has_ended:
            described["counts"] = {
                name: {"requests": seen.requests, "errors": seen.errors, "rejections": seen.rejections}
                for name, seen in zip(("baseline", "candidate"), self._seen, strict=True)
            }
            if self.spec.compare is not None:
                described["answers"] = {"compared": self._answers.compared, "differing": self._answers.differing}
        if course.verdict is not None:
            described["verdict"] = course.verdict.document()
        return described

    def note(self, event: str, **more: Any) -> None:
        """Add an event to the evidence, and save it."""
        self._events.append({"at": time.time(), "event": event, "share": self.course.share, **more})
        del self._events[:-MOST_EVENTS]
        log.info(
            "Roll-out of %s %s: %s%s",
            self.model,
            self.spec.version,
            event,
            f" ({more['reason']})" if more.get("reason") else "",
        )
        self._rollouts.save(self)

    # ------------------------------------------------------------------------------------------- orders

    def order(self, order: Order) -> None:
        """Carry out an order. Raises RolloutUnderWay if the state does not allow it."""
        course, now = self.course, self._rollouts.now()
        self._check_order(order)
        if order == "abort":
            self._end("aborted", "aborted by a call", "call")
        elif order == "promote":
            if self._notice_hands():
                return
            self._end("promoted", "promoted by a call", "call")
        elif order == "pause":
            course.pause(now)
            self.note("paused")
        else:
            course.resume(now)
            self.note("resumed")
        self._is_ordered.set()

    def rehearse(self, order: Order) -> Rehearsed:
        """Say what an order would do. Raises RolloutUnderWay if the state does not allow it."""
        self._check_order(order)
        course, candidate, baseline = self.course, self.spec.version, self.baseline
        by_hand = self._find_hands() if order == "promote" else ""
        state, share, notes = "aborted" if by_hand else _AFTER[order], course.share, []
        if state == "promoted":
            share = 100.0
            notes = [f"version {candidate} would be the default version and answer all requests that name none"]
        elif state == "aborted":
            as_before = f"version {baseline} would answer as before; what waits for {candidate} would be handed to it"
            share, notes = 0.0, [by_hand or as_before]
            if self._has_registered and self._is_its_own_there():
                notes.append(f"version {candidate} would be unregistered, for the roll-out registered it")
        return Rehearsed(
            f"The roll-out of model {self.model} to version {candidate} would be {state}",
            self.model,
            candidate,
            {"state": course.state, "share": course.share},
            {"state": state, "share": share},
            notes=tuple(notes),
        )

    def _check_order(self, order: Order) -> None:
        state = self.course.state
        if order != "abort" and state == "preparing":
            raise RolloutUnderWay(f"The roll-out of model {self.model} is preparing; it can only be aborted.")
        if order == "pause" and state == "paused":
            raise RolloutUnderWay(f"The roll-out of model {self.model} is paused already.")
        if order == "resume" and state != "paused":
            raise RolloutUnderWay(f"The roll-out of model {self.model} is not paused.")

    # ------------------------------------------------------------------------------------------- its life

    async def run(self) -> None:
        """Run from the preparation to the end."""
        try:
            if await self._prepare() and not self.course.has_ended:
                self._begin()
                while not self.course.has_ended:
                    await asyncio.sleep(TICK_S)
                    self._tick()
        except asyncio.CancelledError:
            raise
        except MarserveError as error:
            self._end("rolled back", f"{type(error).__name__}: {error}", "error")
        except Exception:
            # Catches everything: after any error here, the version that served before must serve again.
            log.exception("The roll-out of model %s failed", self.model)
            self._end("rolled back", "an unexpected error; the server's log says more", "error")
        finally:
            if self.course.has_ended:
                await self._clear_away()

    async def _prepare(self) -> bool:
        """Have the versions loaded, warmed and certified. False if the roll-out ended meanwhile."""
        registry, spec = self._rollouts.registry, self.spec
        limit = asyncio.timeout(READY_LIMIT_S)
        try:
            async with limit:
                if self._is_restarted:
                    await self._wait_until(lambda: registry.has_tried_startup)
                await self._wait_until(lambda: self._is_ready(self.baseline))
                if spec.url is not None and registry.mirrors.pool_of(self.model, spec.version) is None:
                    await self._register(spec)
                elif self._is_registering:
                    self._note_registered()  # the registration ended while the server before this one stopped
                await self._wait_until(lambda: self._is_ready(spec.version))
                await self._wait_until(self._is_certified)
        except TimeoutError:
            if not limit.expired():
                raise
            self._end("rolled back", f"its versions were not ready within {READY_LIMIT_S:g} s", "not_ready")
            return False
        if self.course.has_ended:
            return False
        pool = registry.mirrors.pool_of(self.model, spec.version)
        certificate = {} if pool is None else dict(pool.described.get("batching", {}))
        state = str(certificate.get("certificate", "not checked"))
        self.note("ready", certificate=state)
        if state == "failed":
            why = f"it does not answer batches as single requests: {certificate.get('reason', '')}"
            self._end("rolled back", why, "batching")
        return not self.course.has_ended

    async def _register(self, spec: RolloutSpec) -> None:
        assert spec.url is not None
        registry = self._rollouts.registry
        # An archive that a stopped server had fetched lies in the store: that is no reason to refuse it.
        wanted = RegisterParameters(
            spec.url,
            model_name=self.model,
            initial_workers=spec.workers or 1,
            freshness="now" if self._is_registering else "stored",
        )
        self._is_registering = True
        self._rollouts.save(self)
        registering = asyncio.ensure_future(registry.register(wanted))
        registering.add_done_callback(_note_end)
        try:
            registered = await asyncio.shield(registering)
        except asyncio.CancelledError:
            # The registration goes on; its result is no longer wanted.
            self._rollouts.undo_registration(self.model, registering)
            raise
        if registered.version != spec.version:
            await registry.unregister(self.model, registered.version)
            raise BadInput(f"The archive holds version {registered.version}, not {spec.version}.")
        self._note_registered()

    def _note_registered(self) -> None:
        self._is_registering, self._has_registered = False, True
        self.note("registered")

    async def _wait_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so() and not self.course.has_ended:
            self._is_ordered.clear()
            waiting = asyncio.ensure_future(self._is_ordered.wait())
            try:
                await asyncio.wait([waiting], timeout=READY_LOOK_S)
            finally:
                waiting.cancel()

    def _is_ready(self, version: str) -> bool:
        try:
            return self._rollouts.registry.data_plane.is_model_ready(self.model, version)
        except (ModelNotFound, VersionNotFound):
            if not self._is_restarted or self._rollouts.registry.has_tried_startup:
                raise
            return False  # it may still be read

    def _is_certified(self) -> bool:
        """Whether the check of the candidate's batches has ended, with or without a certificate."""
        pool = self._rollouts.registry.mirrors.pool_of(self.model, self.spec.version)
        return pool is None or not dict(pool.described.get("batching", {})).get("isChecking", False)

    def _begin(self) -> None:
        registry = self._rollouts.registry
        for name in (self.baseline, self.spec.version):
            pool = registry.mirrors.pool_of(self.model, name)
            if pool is None:
                raise VersionNotFound(self.model, name)
            self._pools[name] = pool
        self._arms = registry.mirrors.watch(self.model, self.baseline, self.spec.version)
        spec = self.spec.shadow()
        if spec is not None:
            registry.mirrors.put(self.model, spec)
            self._shadow = registry.mirrors.shadow_of(self.model)
        self.course.begin(self._rollouts.now(), step=self._first_step)
        self._enter_step()
        if self._is_paused_at_start:
            self.course.pause(self._rollouts.now())
            self.note("paused")

    def _enter_step(self) -> None:
        """Set the step's traffic and begin its window."""
        share = self.course.share
        sticky = None if self._before is None else self._before.sticky
        weights = {self.baseline: 100 - share, self.spec.version: share}
        self._rule = Traffic(weights, sticky)
        self._rollouts.registry.traffic.put(self.model, self._rule)
        self._rule = self._rollouts.registry.traffic.rule_of(self.model)
        for arm in self._arms.values():
            arm.restart()
        self._answers_before = self._answers_so_far()
        self._deaths_before = {name: _deaths(pool) for name, pool in self._pools.items()}
        self.note(f"{share:g}% of the requests")

    def _tick(self) -> None:
        """Read the counts, and carry out the verdict at once."""
        if self.course.has_ended or self._notice_hands():
            return
        now = self._rollouts.now()
        dead = self._find_dead(now)
        self._read_counts()
        if dead is not None:
            self._end("rolled back", dead, "workers")
            return
        step, was_paused = self.course.step, self.course.state == "paused"
        verdict = self.course.look(now, *self._seen, self._answers)
        if self.course.has_ended:
            self._conclude()
        elif self.course.step != step:
            self.note("step passed", verdict=verdict.document(), reason=verdict.reason)
            self._enter_step()
        elif verdict.decision == "hold" and not was_paused and self._events[-1]["event"] != "holds":
            self.note("holds", reason=verdict.reason)

    def _read_counts(self) -> None:
        seen = []
        for name in (self.baseline, self.spec.version):
            counted = self._arms[name].seen()
            deaths = _deaths(self._pools[name]) - self._deaths_before[name]
            # A worker's death counts as an error, though another worker answered its requests.
            errors = min(counted.requests, counted.errors + deaths)
            seen.append(Seen(counted.requests, errors, counted.rejections, counted.latency))
        self._seen = (seen[0], seen[1])
        so_far, before = self._answers_so_far(), self._answers_before
        self._answers = Answers(so_far.compared - before.compared, so_far.differing - before.differing)

    def _answers_so_far(self) -> Answers:
        """The comparisons of the roll-out's own shadow; a copy without an answer differs."""
        if self._shadow is None:
            return Answers()
        counts = self._shadow.counts
        failed = sum(counts.errors.values())
        return Answers(counts.compared + failed, counts.differing + failed)

    def _find_dead(self, now: float) -> str | None:
        """A sentence naming the version that has had no worker for a while; None if both have one."""
        for name, pool in self._pools.items():
            if pool.ready_workers or pool.options.idle_timeout_s is not None:  # one that may sleep wakes at a request
                self._dead_since.pop(name, None)
                continue
            since = self._dead_since.setdefault(name, now)
            if name == self.spec.version and (not pool.is_healthy or now - since >= DEAD_AFTER_S):
                death = pool.last_death
                why = "" if death is None else f", the last one by {death.cause}: {death.detail}"
                return f"version {name} has no worker any more{why}"
        return None

    def _notice_hands(self) -> bool:
        """Whether an operator changed what the roll-out relies on. It has ended then, and the change stays."""
        if self.course.has_ended:
            return True
        why = self._find_hands()
        if not why:
            return False
        self._end("aborted", why, "changed")
        return True

    def _find_hands(self) -> str:
        """What an operator changed of what the roll-out relies on, in a sentence; empty if nothing."""
        registry = self._rollouts.registry
        why = ""
        for name, pool in self._pools.items():
            if registry.mirrors.pool_of(self.model, name) is not pool:
                why = f"version {name} was unregistered or replaced meanwhile"
        if not why and self._pools:
            try:
                if registry.traffic.rule_of(self.model) != self._rule:
                    why = "the traffic was changed by hand meanwhile"
                elif self._shadow is not registry.mirrors.shadow_of(self.model) and self._shadow is not None:
                    why = "the shadow that answers were compared by was removed or replaced meanwhile"
            except ModelNotFound:
                why = "the model was unregistered meanwhile"
        return why

    # ------------------------------------------------------------------------------------------- its end

    def _end(self, state: State, reason: str, word: str) -> None:
        if not self.course.has_ended:
            self.course.end(state, reason)
            self._conclude(word)

    def _conclude(self, word: str = "") -> None:
        """Set the traffic for after the course, and count it. Awaits nothing. Without a `word` the judge ended it."""
        registry, version = self._rollouts.registry, self.spec.version
        state = self.course.state
        has_traffic = self._has_traffic()
        if has_traffic:
            self._set_final_traffic(state)
        shadow = registry.mirrors.shadow_of(self.model)
        if (
            shadow is not None
            and shadow.spec.version == version
            and (self.spec.compare is not None or state != "promoted")
        ):
            registry.mirrors.remove(self.model)
        moved = 0
        if has_traffic and state != "promoted" and self._is_there(self.baseline) and self._is_there(version):
            moved = registry.mirrors.hand_over(self.model, version, self.baseline)
        registry.mirrors.unwatch(self.model)
        self._rollouts.count_end(state, word or self._judged_by())
        self._ended = time.time()
        more: dict[str, Any] = {} if self.course.verdict is None else {"verdict": self.course.verdict.document()}
        if moved:
            more["handedOver"] = moved
        self.note(state, reason=self.course.reason, **more)
        self._rollouts.ended(self)
        self._is_ordered.set()

    def _judged_by(self) -> str:
        """What the judge's verdict stands on: a measure that was worse, or too few requests."""
        verdict = self.course.verdict
        if verdict is None or self.course.state == "promoted":
            return "judge"
        if verdict.decision == "hold":
            return "too_few"
        return next((finding.measure for finding in verdict.findings if finding.standing == "worse"), "judge")

    def _has_traffic(self) -> bool:
        """Whether the traffic in force was set by this roll-out, also if before a restart of the server."""
        try:
            rule = self._rollouts.registry.traffic.rule_of(self.model)
        except ModelNotFound:
            return False
        if self._pools:
            return rule == self._rule
        return self._is_restarted and rule is not None and {*rule.weights} <= {self.baseline, self.spec.version}

    def _set_final_traffic(self, state: State) -> None:
        registry, version = self._rollouts.registry, self.spec.version
        try:
            if state == "promoted":
                registry.set_default(self.model, version)
                if self._before is not None and self._before.sticky is not None:
                    registry.traffic.put(self.model, Traffic({version: 100}, self._before.sticky))
                else:
                    registry.traffic.reset(self.model)
            elif self._before is None or not self._is_there(self.baseline):
                registry.traffic.reset(self.model)
            else:
                registry.traffic.put(self.model, self._before)
        except MarserveError as error:
            log.error("Roll-out of %s %s: the traffic cannot be set: %s", self.model, version, error)

    def _is_there(self, version: str) -> bool:
        return self._rollouts.registry.mirrors.pool_of(self.model, version) is not None

    def _is_its_own_there(self) -> bool:
        """Whether the version is there, and is still the one that this roll-out registered."""
        pool = self._rollouts.registry.mirrors.pool_of(self.model, self.spec.version)
        return pool is not None and (not self._pools or self._pools.get(self.spec.version) is pool)

    async def _clear_away(self) -> None:
        """Unregister a version that the roll-out itself registered and that is not to stay."""
        if self.course.state == "promoted" or not self._has_registered or not self._is_its_own_there():
            return
        try:
            await self._rollouts.registry.unregister(self.model, self.spec.version)
            self._has_registered = False
            self.note("unregistered")
        except DefaultVersionInUse:
            log.info("Roll-out of %s: version %s stays, it is the default", self.model, self.spec.version)
        except MarserveError as error:
            log.error("Roll-out of %s: version %s cannot be unregistered: %s", self.model, self.spec.version, error)


def _note_end(registering: asyncio.Future[Registered]) -> None:
    """Retrieve the task's error, so that asyncio does not log it as never retrieved."""
    if not registering.cancelled():
        registering.exception()


def _deaths(pool: Pool) -> int:
    return sum(pool.metrics.worker_deaths.values())


def _in_short(document: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("id", "modelName", "modelVersion", "baseline", "state", "reason", "share", "began", "ended")
    return {key: document[key] for key in keys if key in document}
