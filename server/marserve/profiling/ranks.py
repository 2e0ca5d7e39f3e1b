"""What each rank of a group did: communicate, compute, both at once, or neither. Pure.

Communication is what torch's process groups mark (`gloo:all_reduce`); computing is every other operator, on any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from marserve.answers.profiles import ProfileRank
from marserve.profiling.trace import Trace, common, joined, length

# These operators only hand a collective over, or wait for it.
_HANDS_OVER: Final = ("c10d::", "_c10d_functional::")


def describe_ranks(traces: Mapping[int, Sequence[Trace]]) -> list[ProfileRank]:
    """The ranks by number, each with its traces."""
    return [_describe(rank, traces[rank]) for rank in sorted(traces)]


def _describe(rank: int, traces: Sequence[Trace]) -> ProfileRank:
    window = talking = computing = both = busy = 0.0
    collectives: Counter[str] = Counter()
    for trace in traces:
        spoke = joined((each.begin, each.end) for each in trace.collectives)
        computed = joined(
            (each.begin, each.end)
            for spans in trace.operators.values()
            for each in spans
            if not each.name.startswith(_HANDS_OVER)
        )
        ends = [moment for interval in (*spoke, *computed) for moment in interval]
        ends += [moment for batch in trace.batches for moment in (batch.begin, batch.end)]
        if not ends:
            continue
        window += max(ends) - min(ends)
        talking += length(spoke)
        computing += length(computed)
        both += common(spoke, computed)
        busy += length(joined((*spoke, *computed)))
        collectives.update(each.name for each in trace.collectives)
    return ProfileRank(
        rank,
        round(window / 1000, 3),
        round(talking / 1000, 3),
        round(computing / 1000, 3),
        round(both / 1000, 3),
        round(max(0.0, window - busy) / 1000, 3),
        dict(collectives.most_common(20)),
    )
