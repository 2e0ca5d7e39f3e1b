"""The batches in which captured calls are run again: each alone, in twos, in full batches, and beside a loud mate.

A model answers a row the same whoever shares its batch. Where one scale is taken from a whole batch, as in some kinds
of quantisation, a mate with large numbers shows that it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from marserve_handlers.optimising.call_arrays import Call, as_numpy, join, leaves_of, louder

ALONE = "alone"
LOUD = "beside a loud mate"
# How many times as large the loud mate's numbers are.
LOUDNESS = 30.0


@dataclass(frozen=True, slots=True)
class Batch:
    """A call with the rows of several. `members` are the indices of the calls that it joins, `kept` how many of them,
    from the first, are looked at: the others fill the batch, or are loud."""

    call: Call
    members: tuple[int, ...]
    kept: int


def in_full(size: int) -> str:
    """The name of the run in batches of that size."""
    return "in twos" if size == 2 else f"in batches of {size}"


def plan_runs(calls: Sequence[Call], batch_size: int) -> Iterator[tuple[str, Iterator[Batch]]]:
    """The runs, each with its batches: `ALONE` first; no batch is larger than `batch_size`.

    Calls without a batch axis are only run alone. Those of other shapes are in batches of their own.
    """
    yield ALONE, (Batch(call, (at,), 1) for at, call in enumerate(calls))
    groups = _groups(calls)
    if batch_size > 1 and groups:
        for size in sorted({2, batch_size}):
            yield in_full(size), _in_batches(calls, groups, size)
        if any(louder(calls[group[0]], LOUDNESS) for group in groups):
            yield LOUD, _beside_loud(calls, groups, batch_size)


def parts_of(output: Any, calls: Sequence[Call]) -> list[dict[str, Any]] | None:
    """What each of the joined calls got of an output, as arrays by name; None where it has no batch axis."""
    arrays = {name: as_numpy(leaf) for name, leaf in leaves_of(output).items()}
    if len(calls) == 1:
        return [arrays]
    total = sum(call.rows for call in calls)
    if any(array.ndim == 0 or array.shape[0] != total for array in arrays.values()):
        return None
    parts, at = [], 0
    for call in calls:
        parts.append({name: array[at : at + call.rows] for name, array in arrays.items()})
        at += call.rows
    return parts


def _groups(calls: Sequence[Call]) -> list[list[int]]:
    """The indices of calls that may share a batch; groups of one are there too, since doubles make a batch."""
    groups: dict[Any, list[int]] = {}
    for at, call in enumerate(calls):
        if call.rows:
            groups.setdefault(call.shapes, []).append(at)
    return list(groups.values())


def _in_batches(calls: Sequence[Call], groups: Sequence[Sequence[int]], size: int) -> Iterator[Batch]:
    """Each call once; the last batch of a group is filled with its first ones again."""
    for group in groups:
        for begin in range(0, len(group), size):
            members = [group[at % len(group)] for at in range(begin, begin + size)]
            kept = min(size, len(group) - begin)
            yield Batch(join([calls[at] for at in members]), tuple(members), kept)


def _beside_loud(calls: Sequence[Call], groups: Sequence[Sequence[int]], size: int) -> Iterator[Batch]:
    """Each call once, in batches whose last row is the loud one; filled as those without are.

    One loud row for each call would make every call cost two.
    """
    for group in groups:
        for begin in range(0, len(group), size - 1):
            members = [group[at % len(group)] for at in range(begin, begin + size)]
            kept = min(size - 1, len(group) - begin)
            loud = louder(calls[members[-1]], LOUDNESS)
            if loud is not None:
                yield Batch(join([*(calls[at] for at in members[:-1]), loud]), tuple(members), kept)
