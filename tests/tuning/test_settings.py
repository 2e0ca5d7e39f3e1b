"""What may be tuned, and for what."""

from __future__ import annotations

import pytest

from marserve.tuning.settings import Goal, Layout, Setting, layouts, read_goal, space


@pytest.mark.parametrize(
    ("word", "goal"),
    [("rate", Goal()), ("p99=50ms", Goal(0.99, 0.05)), ("p95=1.5s", Goal(0.95, 1.5)), ("p50=2ms", Goal(0.5, 0.002))],
)
def test_a_goal_is_a_rate_or_a_percentile_with_its_time(word: str, goal: Goal) -> None:
    """The words of the command."""
    assert read_goal(word) == goal


@pytest.mark.parametrize("word", ["", "p99", "p99=", "p99=50", "p98=50ms", "p99=0ms", "p99=-1ms", "latency", "p99=1h"])
def test_another_goal_is_refused_with_what_may_stand_there(word: str) -> None:
    """And the value seen."""
    with pytest.raises(ValueError, match=r"--goal is .*; it is rate, or a percentile with its time, such as p99=50ms"):
        read_goal(word)


def test_batches_of_one_have_one_delay() -> None:
    """They never wait."""
    found = space([Layout(1), Layout(2, "2.0")], batch_sizes=(1, 4), delays_s=(0.0, 0.01))

    assert [str(setting) for setting in found] == [
        "1 worker, batches of 1, 0 ms",
        "1 worker, batches of 4, 0 ms",
        "1 worker, batches of 4, 10 ms",
        "2.0, 2 workers, batches of 1, 0 ms",
        "2.0, 2 workers, batches of 4, 0 ms",
        "2.0, 2 workers, batches of 4, 10 ms",
    ]
    assert found[0] == Setting(Layout(1), 1, 0.0)
    assert (str(read_goal("p99=50ms")), str(read_goal("rate"))) == ("p99=50ms", "rate")


def test_threads_of_all_workers_are_no_more_than_the_processors_but_for_what_was_named() -> None:
    """A number that is too large beside any other stays with the smallest; what serves now is always among them."""
    fitting = layouts("1", [1, 2, 4], [1, 2, 4], cores=4)
    named = layouts("1", [1, 8], [2], cores=4)
    now = layouts("1", [1, 3], [1, 5], cores=4, always=[Layout(3, "1", 5)])

    assert [(each.workers, each.threads) for each in fitting] == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    assert [(each.workers, each.threads) for each in named] == [(1, 2), (8, 2)]
    assert Layout(3, "1", 5) in now


def test_a_setting_reads_as_people_say_it() -> None:
    """Threads where they are tuned, in the right number."""
    assert str(Setting(Layout(1, "1.0"), 8, 0.0)) == "1.0, 1 worker, batches of 8, 0 ms"
    assert str(Setting(Layout(2, "", 1), 8, 0.002)) == "2 workers of 1 thread, batches of 8, 2 ms"
    assert str(Layout(1, "2", 4)) == "2, 1 worker of 4 threads"
