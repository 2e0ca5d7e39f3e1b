"""Which worker has the fewest requests: beside a plain look at all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from marserve.pool.dispatch.jobs import WorkerLane
from marserve.pool.dispatch.least_loaded import Fewest

STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "add", "add", "forget"]), st.integers(0, 5), st.integers(-4, 4)), max_size=80
)


@given(STEPS)
def test_it_names_what_a_look_at_every_worker_names(steps: list[tuple[str, int, int]]) -> None:
    """Who has the fewest, and of those who has had so many for longest; asked after each step."""
    lanes = [WorkerLane(str(number)) for number in range(6)]
    fewest = Fewest()
    plain: dict[WorkerLane, tuple[int, int]] = {}  # how many, and since which step

    for turn, (what, number, amount) in enumerate(steps):
        lane = lanes[number]
        if what == "put":
            fewest.put(lane, abs(amount))
            count: int | None = abs(amount)
        elif what == "add":
            amount = max(amount, -plain.get(lane, (0, 0))[0])
            fewest.add(lane, amount)
            count = plain[lane][0] + amount if lane in plain else None
        else:
            fewest.forget(lane)
            plain.pop(lane, None)
            count = None
        if count is not None and (lane not in plain or plain[lane][0] != count):
            plain[lane] = count, turn

        least = min(plain, key=lambda each: plain[each], default=None)
        assert fewest.first() == (None if least is None else (least, plain[least][0]))


def test_nothing_of_workers_that_are_gone_is_kept() -> None:
    """Thousands come, get more and more, and go."""
    fewest = Fewest()
    for number in range(2000):
        lane = WorkerLane(str(number))
        fewest.put(lane, 0)
        fewest.add(lane, number)
        fewest.forget(lane)

    assert fewest.first() is None
    assert not fewest._rows
    assert not fewest._counts
