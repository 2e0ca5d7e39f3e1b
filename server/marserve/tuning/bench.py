"""A whole measurement: warm-up, then a load, or turns of a build and its baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from marserve.tuning.baseline import LEAST_PAIRS, Times, compare, fails_more, turn_s
from marserve.tuning.load import Limit, Line, Shape, Tally, Target, run
from marserve.tuning.payloads import Payload

MOST_PAIRS: Final = 40
# A turn has so many requests and lasts so long, where there are enough of them.
TURN_REQUESTS: Final = 20
LEAST_TURN_REQUESTS: Final = 5
TURN_S: Final = 0.5
LEAST_TURN_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent: how requests come, for how long, how many before they count, and how long each may take."""

    shape: Shape
    limit: Limit
    warm_up: int = 20
    timeout_s: float = 120.0
    allowed: float = 0.05


@dataclass(slots=True)
class Measured:
    """What was seen of a build, and of its baseline if there is one, with how many times as long the build takes.

    `fails_more`: the build fails more often than its baseline. `was_cut_off`: Ctrl-C ended the measurement.
    """

    warm_up: Tally = field(default_factory=Tally)
    tally: Tally = field(default_factory=Tally)
    warm_up_of_baseline: Tally = field(default_factory=Tally)
    baseline: Tally | None = None
    pairs: list[tuple[float, float]] = field(default_factory=list)
    was_cut_off: bool = False

    @property
    def times(self) -> Times | None:
        """How many times as long the build takes; None with fewer than nine pairs."""
        return compare(self.pairs) if len(self.pairs) >= LEAST_PAIRS else None

    @property
    def fails_more(self) -> bool:
        """Whether the build fails more often than its baseline, beyond chance."""
        before = self.baseline
        if before is None or not self.tally.sent or not before.sent:
            return False
        return fails_more(self.tally.failures, self.tally.sent, before.failures, before.sent)


@dataclass(frozen=True, slots=True)
class Turns:
    """How a measurement with a baseline is cut: so many pairs, and the limit of each turn."""

    pairs: int
    limit: Limit


def cut(plan: Plan) -> Turns:
    """Turns for a plan. Each build gets the plan's requests; its seconds are for both.

    Raises ValueError where they do not suffice for nine pairs.
    """
    requests, seconds = plan.limit.requests, plan.limit.seconds
    least = max(LEAST_TURN_REQUESTS, plan.shape.clients if plan.shape.rate is None else 0)
    pairs = MOST_PAIRS
    if requests is not None:
        if requests < LEAST_PAIRS * least:
            raise ValueError(f"{requests} requests are too few for {LEAST_PAIRS} pairs: {LEAST_PAIRS * least} suffice")
        pairs = min(pairs, max(LEAST_PAIRS, requests // max(TURN_REQUESTS, 4 * least)))
    if seconds is not None:
        if seconds < 2 * LEAST_PAIRS * LEAST_TURN_S:
            enough = 2 * LEAST_PAIRS * LEAST_TURN_S
            raise ValueError(f"{seconds:g} s are too few for {LEAST_PAIRS} pairs: {enough:g} s suffice")
        pairs = min(pairs, max(LEAST_PAIRS, int(seconds / 2 / TURN_S)))
    limit = Limit(
        None if requests is None else requests // pairs,
        None if seconds is None else seconds / 2 / pairs,
    )
    return Turns(pairs, limit)


def measure(
    target: Target,
    payloads: Sequence[Payload],
    plan: Plan,
    baseline: Target | None = None,
    on_step: Callable[[str, int, int], None] = lambda text, done, whole: None,
) -> Measured:
    """Measure a target, in turns with its baseline if there is one. Ctrl-C ends it early; what was seen is returned.

    A warm-up without a good answer is the end. Raises ValueError as `cut`.
    """
    measured = Measured()
    turns = None if baseline is None else cut(plan)
    if baseline is not None:
        measured.baseline = Tally()

    async def work() -> None:
        async with target.line(payloads, plan.timeout_s) as line:
            on_step("Warming up", 0, 0)
            if not await _warm_up(line, plan, measured.warm_up):
                return
            if baseline is None or turns is None:
                on_step("Measuring", 0, 0)
                await line.load(plan.shape, plan.limit, measured.tally)
                return
            async with baseline.line(payloads, plan.timeout_s) as other:
                if await _warm_up(other, plan, measured.warm_up_of_baseline):
                    await _take_turns(line, other, plan, turns, measured, on_step)

    try:
        run(work)
    except KeyboardInterrupt:
        measured.was_cut_off = True
    return measured


async def _warm_up(line: Line, plan: Plan, tally: Tally) -> bool:
    """Send the requests that do not count. Returns whether any was answered well, or none was to be sent."""
    if not plan.warm_up:
        return True
    clients = plan.shape.clients if plan.shape.rate is None else 1
    await line.load(Shape(clients), Limit(plan.warm_up, plan.limit.seconds), tally)
    return tally.answered > 0


async def _take_turns(
    line: Line,
    baseline: Line,
    plan: Plan,
    turns: Turns,
    measured: Measured,
    on_step: Callable[[str, int, int], None],
) -> None:
    """Turns of both, each of which begins every second pair, with the same requests at the same times.

    A pair goes on where the one of the last pair ended that sent fewer, so that neither leaves an input out.
    """
    assert measured.baseline is not None
    first = 0
    for number in range(turns.pairs):
        on_step("Taking turns", number, turns.pairs)
        shape = replace(plan.shape, seed=plan.shape.seed + number)
        seen = {"build": Tally(), "baseline": Tally()}
        order = [("baseline", baseline, measured.baseline), ("build", line, measured.tally)]
        for name, one, whole in order if number % 2 == 0 else order[::-1]:
            try:
                await one.load(shape, turns.limit, seen[name], first=first)
            finally:
                whole.add(seen[name])
        first += min(each.sent for each in seen.values())
        if seen["build"].seconds and seen["baseline"].seconds:
            measured.pairs.append((turn_s(seen["baseline"].seconds), turn_s(seen["build"].seconds)))
        if measured.tally.gave_up or measured.baseline.gave_up:
            return
