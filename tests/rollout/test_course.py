"""The course of a roll-out: its steps, holds, pauses and ends, with the time as a number."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.errors import BadInput
from marserve.option_values import Tolerance
from marserve.registry.observing.arms import Seen
from marserve.rollout.course import Course, RolloutSpec, forecast, read_rollout
from marserve.rollout.judge import Answers, Limits
from support.judged_versions import counts_of

NOTHING = Answers()


def seen(requests: int, errors: int = 0) -> Seen:
    """Counts of quick answers."""
    return Seen(requests, errors, 0, tuple(requests * count for count in counts_of([0.01])))


def course(**more: Any) -> Course:
    """One that has begun at 0."""
    spec = RolloutSpec("2.0", **{"steps": (10.0, 50.0, 100.0), "hold_s": 10.0, "max_hold_s": 100.0, **more})
    made = Course(spec)
    made.begin(0.0)
    return made


def test_an_equal_version_goes_from_step_to_step_to_all_requests() -> None:
    """Each step lasts its hold; the last one is judged against what the baseline did when it still had requests."""
    made = course()
    shares = []

    for second in range(40):
        shares.append(made.share)
        baseline = Seen(latency=counts_of([])) if made.share == 100 else seen(3000)
        made.look(float(second), baseline, seen(3000), NOTHING)

    assert made.state == "promoted"
    assert [shares.count(share) for share in (10.0, 50.0, 100.0)] == [11, 10, 19]
    assert made.share == 100


def test_a_worse_version_ends_at_once_wherever_it_is() -> None:
    """Its last verdict is kept as the evidence."""
    made = course()
    made.look(10.0, seen(3000), seen(3000), NOTHING)
    assert made.step == 1

    made.look(10.1, seen(3000), seen(100, errors=60), NOTHING)

    assert (made.state, made.share) == ("rolled back", 0)
    assert made.verdict is not None
    assert made.reason.startswith("errors of the candidate: 60 of 100")


def test_at_the_last_step_it_is_still_taken_back() -> None:
    """The baseline has no requests any more, and what it did before counts."""
    made = course()
    for at in (10.0, 20.0):
        made.look(at, seen(3000), seen(3000), NOTHING)
    assert made.share == 100

    made.look(20.1, Seen(latency=counts_of([])), seen(100, errors=60), NOTHING)

    assert made.state == "rolled back"


def test_a_pause_holds_the_clock_and_not_the_judge() -> None:
    """It goes on where it was; what is worse meanwhile goes."""
    made = course()
    made.pause(4.0)

    for at in (10.0, 50.0, 500.0):
        made.look(at, seen(3000), seen(3000), NOTHING)
    assert (made.state, made.step, made.elapsed_s(500.0)) == ("paused", 0, 4.0)
    made.resume(500.0)
    made.look(505.9, seen(3000), seen(3000), NOTHING)
    assert made.step == 0
    made.look(506.0, seen(3000), seen(3000), NOTHING)
    assert made.step == 1

    made.pause(507.0)
    made.look(508.0, seen(3000), seen(200, errors=150), NOTHING)
    assert made.state == "rolled back"


def test_too_few_requests_hold_for_as_long_as_they_may() -> None:
    """And then the version before serves again: nothing showed that the new one is as good."""
    made = course()

    held = made.look(50.0, seen(3000), seen(20), NOTHING)
    assert (held.decision, made.state) == ("hold", "running")
    made.look(100.0, seen(3000), seen(20), NOTHING)

    assert made.state == "rolled back"
    assert made.reason == "too few: 20 of 200 requests to the candidate, after 100 s (max_hold)"


def test_a_pause_has_no_bound_on_its_hold() -> None:
    """Who pauses says when."""
    made = course()
    made.pause(50.0)

    made.look(1e6, seen(3000), seen(20), NOTHING)

    assert made.state == "paused"


def test_an_end_is_for_good() -> None:
    """Nothing that comes later changes it."""
    made = course()
    made.end("aborted", "because")
    made.end("promoted", "no")
    made.pause(1.0)
    made.resume(2.0)

    assert (made.state, made.reason, made.has_ended) == ("aborted", "because", True)


def test_a_restart_begins_at_its_step_with_its_hold_anew() -> None:
    """What was counted before is gone with the process."""
    made = Course(RolloutSpec("2.0", steps=(10.0, 50.0, 100.0), hold_s=10.0))
    made.begin(1000.0, step=1)

    made.look(1009.0, seen(3000), seen(3000), NOTHING)
    assert (made.step, made.share) == (1, 50)
    made.look(1010.0, seen(3000), seen(3000), NOTHING)
    assert made.step == 2


def test_answers_are_not_asked_for_at_the_last_step() -> None:
    """Nobody has requests to mirror from any more."""
    made = course(compare="exact", steps=(0.0, 50.0, 100.0))
    made.look(10.0, seen(3000), Seen(latency=counts_of([])), Answers(300, 0))
    assert made.step == 1
    made.look(20.0, seen(3000), seen(3000), Answers(300, 0))
    assert made.step == 2

    made.look(30.0, Seen(latency=counts_of([])), seen(3000), NOTHING)

    assert made.state == "promoted"


# --------------------------------------------------------------------------------------------------- reading


def test_the_least_and_the_whole_of_what_may_be_asked_for() -> None:
    """What comes out may be put in again."""
    assert read_rollout({"version": "2.0"}) == RolloutSpec("2.0")
    whole = {
        "version": "2.0",
        "url": "m.mar",
        "workers": 2,
        "steps": [0, 5, 100],
        "hold": 30.0,
        "max_hold": 90.0,
        "max_error_increase": 0.02,
        "max_p99_increase": None,
        "max_difference": 0.0,
        "min_requests": 10,
        "significance": 0.05,
        "compare": {"relative": 0.1, "absolute": 0.2},
        "share": 0.5,
    }
    spec = read_rollout(whole)

    assert spec.document() == whole
    assert read_rollout(spec.document()) == spec
    assert spec.compare == Tolerance(0.1, 0.2)
    assert spec.limits == Limits(0.02, None, 0.0, 10, 0.05)


def test_a_long_hold_has_a_longer_bound() -> None:
    """Ten times it, and ten minutes at the least."""
    assert read_rollout({"version": "2.0", "hold": 600}).max_hold_s == 6000
    assert read_rollout({"version": "2.0", "hold": 1}).max_hold_s == 600


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "is an object"),
        ({}, "version of a roll-out"),
        ({"version": "2.0", "url": ""}, "url of a roll-out"),
        ({"version": "2.0", "steps": []}, "a list of 1 to 50"),
        ({"version": "2.0", "steps": [5, 50]}, "the last one must be 100"),
        ({"version": "2.0", "steps": [5, 5, 100]}, "must rise"),
        ({"version": "2.0", "steps": [5, 101]}, "from 0 to 100"),
        ({"version": "2.0", "steps": [100]}, "needs a step below 100"),
        ({"version": "2.0", "min_requests": 1.5}, "a whole number"),
        ({"version": "2.0", "max_hold": 1, "hold": 2}, "max_hold of a roll-out is '1'"),
        ({"version": "2.0", "significance": 0}, "significance"),
        ({"version": "2.0", "share": 0, "compare": "exact"}, "share of a roll-out is 0"),
    ],
)
def test_what_cannot_be_meant(document: Any, words: str) -> None:
    """The sentence names the member, the value and what it may be."""
    with pytest.raises(BadInput) as caught:
        read_rollout(document)

    assert words in str(caught.value)


def test_the_forecast_says_what_each_step_would_see_and_find() -> None:
    """More requests find smaller faults; none find nothing."""
    spec = RolloutSpec("2.0", compare="exact")

    busy, quiet = forecast(spec, 1000.0), forecast(spec, 0.0)

    assert [step["requests"] for step in busy] == [3000, 15000, 30000, 60000]
    found = [step["findsErrors"] for step in busy]
    assert found == sorted(found, reverse=True)
    assert 0.01 < found[0] < 0.05
    assert [step["findsErrors"] for step in quiet] == [None] * 4
