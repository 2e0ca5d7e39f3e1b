"""Which batches captured calls are run in."""

from __future__ import annotations

from typing import Any

import numpy as np

from marserve_handlers.optimising.batches import ALONE, LOUD, LOUDNESS, Batch, parts_of, plan_runs
from marserve_handlers.optimising.call_arrays import Call


def call_of(value: float, width: int = 2, kind: str = "f4") -> Call:
    """A call with one row."""
    return Call((np.full((1, width), value, kind),), {})


def planned(calls: list[Call], size: int) -> dict[str, list[Batch]]:
    """All batches by run."""
    return {name: list(batches) for name, batches in plan_runs(calls, size)}


def values(batch: Batch) -> list[Any]:
    """The first number of each row."""
    numbers: list[Any] = batch.call.args[0][:, 0].tolist()
    return numbers


def test_every_call_is_in_every_run_once_and_the_last_batch_is_filled() -> None:
    """Five calls in batches of four: what fills the second is not looked at again."""
    runs = planned([call_of(at) for at in range(5)], 4)

    assert list(runs) == [ALONE, "in twos", "in batches of 4", LOUD]
    for name, batches in runs.items():
        kept = [at for batch in batches for at in batch.members[: batch.kept]]
        assert sorted(kept) == [0, 1, 2, 3, 4], name
    assert values(runs["in batches of 4"][1]) == [4.0, 0.0, 1.0, 2.0]
    assert runs["in batches of 4"][1].kept == 1


def test_each_has_a_loud_mate_beside_it() -> None:
    """Another call's numbers, many times as large: one row of a batch, so that few calls are made."""
    runs = planned([call_of(1.0), call_of(2.0), call_of(3.0), call_of(4.0)], 3)

    assert [values(batch) for batch in runs[LOUD]] == [[1.0, 2.0, 3.0 * LOUDNESS], [3.0, 4.0, 1.0 * LOUDNESS]]
    assert [batch.kept for batch in runs[LOUD]] == [2, 2]
    assert [values(batch) for batch in planned([call_of(1.0), call_of(2.0)], 2)[LOUD]] == [
        [1.0, 2.0 * LOUDNESS],
        [2.0, 1.0 * LOUDNESS],
    ]


def test_one_call_makes_batches_with_itself() -> None:
    """A single input is run in batches, too."""
    runs = planned([call_of(3.0)], 3)

    assert values(runs["in batches of 3"][0]) == [3.0, 3.0, 3.0]
    assert values(runs[LOUD][0]) == [3.0, 3.0, 3.0 * LOUDNESS]


def test_other_shapes_do_not_share_a_batch() -> None:
    """Sentences of other lengths."""
    runs = planned([call_of(1.0, width=2), call_of(2.0, width=3), call_of(3.0, width=2)], 2)

    assert [batch.members for batch in runs["in twos"]] == [(0, 2), (1, 1)]


def test_without_a_batch_axis_each_is_run_alone_and_so_is_it_at_batch_size_one() -> None:
    """There is nothing to compare in batches."""
    scalar = Call((np.array(1.0),), {})

    assert list(planned([scalar, scalar], 8)) == [ALONE]
    assert list(planned([call_of(1.0)], 1)) == [ALONE]


def test_whole_numbers_have_no_loud_mate() -> None:
    """Ids of words are not louder when they are larger."""
    assert list(planned([call_of(1, kind="i8")], 2)) == [ALONE, "in twos"]


def test_an_output_is_cut_by_the_rows_of_each_call() -> None:
    """One that is not as long as they are together has no batch axis."""
    calls = [call_of(1.0), Call((np.zeros((2, 2), "f4"),), {})]

    parts = parts_of({"a": np.arange(3.0), "b": np.zeros((3, 5))}, calls)

    assert parts is not None
    assert [part["a"].tolist() for part in parts] == [[0.0], [1.0, 2.0]]
    assert parts_of(np.zeros((2, 5)), calls) is None
    assert parts_of(np.array(1.0), calls) is None
    assert parts_of(np.array(1.0), calls[:1]) is not None


def test_one_scale_for_a_whole_batch_shows_beside_a_loud_mate_and_nowhere_with_batches_of_one() -> None:
    """As of INT8 that is quantised dynamically, by tensor: a row is not what it is alone."""

    def rounded(rows: Any) -> Any:
        scale = np.abs(rows).max() / 127
        return np.round(rows / scale) * scale

    calls = [call_of(1.0), call_of(2.0)]
    alone = [rounded(call.args[0])[0, 0] for call in calls]

    runs = planned(calls, 4)
    seen = [row[0] for batch in runs[LOUD] for row in rounded(batch.call.args[0])[: batch.kept]]

    assert max(abs(ours - theirs) for ours, theirs in zip(seen, alone, strict=True)) > 0.05
    assert list(planned(calls, 1)) == [ALONE]
