"""How a measurement is cut into turns, and carried out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from marserve.tuning.bench import Plan, cut, measure
from marserve.tuning.http_line import HttpTarget
from marserve.tuning.load import Limit, Line, Shape, Tally
from marserve.tuning.payloads import Payload
from support.fake_apis import FakeApis, fake_apis


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server with two versions."""
    with fake_apis() as running:
        running.answer("POST /predictions/m/1.0", [1])
        running.answer("POST /predictions/m/2.0", [2])
        yield running


def _target(apis: FakeApis, version: str) -> HttpTarget:
    return HttpTarget(f"/predictions/m/{version}", "127.0.0.1", int(apis.url.rsplit(":", 1)[1]))


def test_turns_are_nine_pairs_at_least_and_forty_at_most() -> None:
    """No turn is too short to say anything; requests and seconds are not exceeded."""
    for requests in (45, 90, 400, 1000, 100_000):
        turns = cut(Plan(Shape(), Limit(requests)))
        assert turns.limit.requests is not None
        assert 9 <= turns.pairs <= 40
        assert turns.pairs * turns.limit.requests <= requests
    for seconds in (3.6, 10.0, 100.0):
        turns = cut(Plan(Shape(), Limit(seconds=seconds)))
        assert turns.limit.seconds is not None
        assert 9 <= turns.pairs <= 40
        assert turns.limit.seconds >= 0.2
        assert 2 * turns.pairs * turns.limit.seconds == pytest.approx(seconds)


def test_too_few_requests_for_nine_pairs_are_refused_with_the_number_that_suffices() -> None:
    """More clients need more, for a turn has one request of each at least."""
    with pytest.raises(ValueError, match="44 requests are too few for 9 pairs: 45 suffice"):
        cut(Plan(Shape(), Limit(44)))
    with pytest.raises(ValueError, match="100 requests are too few for 9 pairs: 288 suffice"):
        cut(Plan(Shape(32), Limit(100)))
    with pytest.raises(ValueError, match=r"1 s are too few for 9 pairs: 3\.6 s suffice"):
        cut(Plan(Shape(), Limit(seconds=1.0)))


def test_both_get_the_same_requests_and_each_begins_every_second_pair(apis: FakeApis) -> None:
    """The payloads go on from turn to turn."""
    payloads = [Payload(b"%d" % number) for number in range(7)]

    measured = measure(_target(apis, "2.0"), payloads, Plan(Shape(), Limit(90), warm_up=2), _target(apis, "1.0"))

    assert measured.baseline is not None
    assert (measured.tally.answered, measured.baseline.answered, len(measured.pairs)) == (90, 90, 9)
    assert (measured.warm_up.sent, measured.warm_up_of_baseline.sent) == (2, 2)
    counted = apis.asked[4:]
    versions = [asked.path[-3:] for asked in counted]
    assert versions[:40] == ["1.0"] * 10 + ["2.0"] * 20 + ["1.0"] * 10
    sent = {version: [a.body for a in counted if a.path.endswith(version)] for version in ("1.0", "2.0")}
    assert sent["1.0"] == sent["2.0"] == [b"%d" % (number % 7) for number in range(90)]


@dataclass
class _Counted(Line):
    """Stands for connections over which so many requests are answered within a turn."""

    answers: int
    begins: list[int] = field(default_factory=list)

    def line(self, payloads: Sequence[Payload], timeout_s: float) -> Line:
        """Itself, as a target."""
        return self

    async def load(self, shape: Shape, limit: Limit, tally: Tally, *, first: int = 0) -> None:
        """A turn that takes no time."""
        assert limit.requests is None
        self.begins.append(first)
        tally.sent += self.answers
        tally.seconds += [0.01] * self.answers

    async def ask(self, number: int, due: float | None, tally: Tally) -> None:
        """Not of a turn."""
        raise AssertionError(number)

    async def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize(("answers", "of_baseline"), [(10, 25), (25, 10), (7, 7), (0, 3)])
def test_turns_by_seconds_go_on_through_the_inputs(answers: int, of_baseline: int) -> None:
    """From where the slower one ended: both get the same inputs in a pair, and neither leaves one out."""
    build, baseline = _Counted(answers), _Counted(of_baseline)

    measure(build, [Payload(b"x")] * 500, Plan(Shape(), Limit(seconds=10.0), warm_up=0), baseline)

    assert build.begins == baseline.begins
    assert len(build.begins) == 10
    assert [after - before for before, after in pairwise(build.begins)] == [min(answers, of_baseline)] * 9


def test_a_model_that_answers_nothing_in_the_warm_up_is_not_measured(apis: FakeApis) -> None:
    """Nor is one whose baseline does not."""
    payloads = [Payload(b"x")]
    plan = Plan(Shape(), Limit(90), warm_up=3)

    gone = measure(_target(apis, "3.0"), payloads, plan)
    beside_gone = measure(_target(apis, "2.0"), payloads, plan, _target(apis, "3.0"))

    assert (gone.warm_up.failures, gone.tally.sent) == (3, 0)
    assert (beside_gone.warm_up_of_baseline.failures, beside_gone.tally.sent) == (3, 0)


def test_a_build_that_fails_where_its_baseline_does_not_is_said_to(apis: FakeApis) -> None:
    """Though the requests that it answers are as quick."""
    for _ in range(12):
        apis.answer("POST /predictions/m/4.0", [4])
    apis.answer("POST /predictions/m/4.0", {"type": "InternalServerException"}, 500)

    measured = measure(_target(apis, "4.0"), [Payload(b"x")], Plan(Shape(), Limit(90), warm_up=2), _target(apis, "1.0"))

    assert measured.fails_more
    assert measured.times is None  # only one turn had answers
