"""The parts of a worker's time: from its clocks, batch by batch, and from the operators in its traces. Pure.

Of the time in the author's code the thread ran, waited for a processor, or was blocked (asleep, on a lock, reading).
What it ran for is shared out between operators and Python. A trace has only wall times: where the thread had to wait
for a processor, operators and Python waited in proportion. What operators took beyond the time that the thread ran or
waited was spent on their own threads, and is theirs. Batches whose operators were not recorded are taken to be as those
whose operators were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from marserve.answers.profiles import PartName, ProfileOperator, ProfilePart, ProfileShapes
from marserve.messages import Profiled, ProfiledBatch
from marserve.profiling.trace import BATCH_MARK, Span, Trace

MOST_OPERATORS: Final = 30
MOST_SHAPES: Final = 5


def whole_s(profiled: Profiled) -> float:
    """The time that was profiled, in seconds, without what the profiler itself took between batches."""
    return max(0.0, profiled.ended - profiled.began - profiled.own_s)


def parts_of(profiled: Profiled, traces: Sequence[Trace]) -> list[ProfilePart]:
    """The parts of the whole, in a fixed order; `traces` are those of the process that the clocks are of."""
    batches = profiled.batches
    ran = sum(each.cpu_s for each in batches)
    waited = sum(each.waited_s for each in batches)
    handler = sum(each.handler_s for each in batches)
    blocked = max(0.0, handler - ran - waited)
    of_run, of_blocked = _shares_of_operators(batches, traces)
    collected = min(sum(each.collected_s for each in batches), ran * (1 - of_run))
    decode, encode = sum(each.decode_s for each in batches), sum(each.encode_s for each in batches)
    whole = max(whole_s(profiled), handler + decode + encode)
    seconds: list[tuple[PartName, float]] = [
        ("operators", ran * of_run + blocked * of_blocked),
        ("python", max(0.0, ran * (1 - of_run) - collected)),
        ("waiting", waited),
        ("blocked", blocked * (1 - of_blocked)),
        ("collections", collected),
        ("decode", decode),
        ("encode", encode),
        ("between", max(0.0, whole - handler - decode - encode)),
    ]
    return [
        ProfilePart(name, round(part * 1000, 3), round(part / whole if whole else 0.0, 5)) for name, part in seconds
    ]


def _shares_of_operators(batches: Sequence[ProfiledBatch], traces: Sequence[Trace]) -> tuple[float, float]:
    """Of the time that the thread ran, and of that in which it was blocked, the shares that are operators'."""
    known = {each.number: each for each in batches}
    took = ran = waited = blocked = 0.0
    for trace in traces:
        for marked in trace.batches:
            batch = known.get(number_of(marked))
            if batch is None:
                continue
            took += sum(each.us for each in trace.within([marked])) / 1e6
            ran += batch.cpu_s
            waited += batch.waited_s
            blocked += max(0.0, batch.handler_s - batch.cpu_s - batch.waited_s)
    awake = ran + waited
    if not awake:
        return 0.0, 0.0
    if took <= awake:
        return took / awake, 0.0
    return 1.0, min(1.0, (took - awake) / blocked) if blocked else 0.0


def number_of(marked: Span) -> int:
    """The number of the batch that a span marks; 0 if it has none."""
    word = marked.name[len(BATCH_MARK) :].partition(":")[0].strip()
    return int(word) if word.isdecimal() and len(word) < 19 else 0


def top_operators(traces: Iterable[Trace]) -> list[ProfileOperator]:
    """The operators that took longest by themselves, on all threads."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    shaped: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0.0]))
    for trace in traces:
        for outermost in trace.operators.values():
            waiting = list(outermost)
            while waiting:
                span = waiting.pop()
                waiting += span.calls
                sums = found[span.name]
                sums[0] += 1
                sums[1] += span.own_us
                sums[2] += span.us
                if span.shapes:
                    with_shapes = shaped[span.name][span.shapes]
                    with_shapes[0] += 1
                    with_shapes[1] += span.us
    longest = sorted(found.items(), key=lambda each: -each[1][1])[:MOST_OPERATORS]
    return [
        ProfileOperator(
            name,
            int(calls),
            round(own_us / 1000, 3),
            round(us / 1000, 3),
            [
                ProfileShapes(shapes, int(count), round(took / 1000, 3))
                for shapes, (count, took) in sorted(shaped[name].items(), key=lambda each: -each[1][1])[:MOST_SHAPES]
            ],
        )
        for name, (calls, own_us, us) in longest
    ]
