"""The judge: equal versions pass, worse ones are found, and too little traffic is said to be too little."""

from __future__ import annotations

import json
from bisect import bisect_left

import numpy
import pytest

from marserve.registry.observing.arms import LATENCY_BOUNDS, Seen
from marserve.registry.observing.proportions import highest_rate, lowest_rate
from marserve.rollout.judge import (
    ABOVE_P99,
    Answers,
    Judge,
    Limits,
    Verdict,
    allowed_above,
    budget_of,
    known_p99,
    needed_for_p99,
    smallest_found,
)
from support.judged_versions import Behaviour, counts_of, play_step

RUNS = 100
NOTHING = Answers()


def steady(requests: int, *, errors: int = 0, rejections: int = 0, latency_s: float = 0.01) -> Seen:
    """A version that always took the same time."""
    one = counts_of([latency_s])
    return Seen(requests, errors, rejections, tuple(requests * count for count in one))


# --------------------------------------------------------------------------------------------- in many worlds


def alarms(runs: int, share: float) -> int:
    """How many roll-outs of an equal version, three steps each, are rolled back.

    It errs in 5 % of requests, is given no margin at all, which is the hardest case, and is looked at often.
    """
    limits = Limits(max_error_increase=0.0, max_p99_increase=0.0, max_difference=0.02, min_requests=100)
    equal = Behaviour(errors=0.05, rejections=0.03, median_s=0.2, differing=0.02)
    found = 0
    for seed in range(runs):
        judge, draw = Judge(limits, 3, compares=True), numpy.random.default_rng(seed)
        for _ in range(3):
            judge.begin_step()
            verdict, _, _ = play_step(judge, draw, equal, equal, share=share, hold_s=20, most_s=20, mirrored=0.2)
            if verdict.decision == "roll back":
                found += 1
                break
    return found


def test_an_equal_version_is_not_rolled_back() -> None:
    """In none of a dozen roll-outs."""
    assert alarms(12, 0.25) == 0


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("share", [0.05, 0.25, 0.5])
def test_equal_versions_are_rolled_back_in_fewer_than_one_run_of_a_hundred(share: float) -> None:
    """Whatever their share: in a thousand runs."""
    assert alarms(1000, share) < 10


def test_a_version_wrong_on_two_percent_is_found_within_2000_mirrored_requests() -> None:
    """In 99 of 100 runs, with the limit of every roll-out that names none."""
    late = 0

    for seed in range(RUNS):
        judge, draw = Judge(Limits(), 4, compares=True), numpy.random.default_rng(1000 + seed)
        verdict, _, answers = play_step(
            judge, draw, Behaviour(differing=0.02), mirrored=1.0, only_mirrored=True, hold_s=60
        )
        late += verdict.decision != "roll back" or answers.compared >= 2000

    assert late <= RUNS / 100


@pytest.mark.parametrize("runs", [20, pytest.param(RUNS, marks=pytest.mark.long)])
def test_a_doubled_p99_is_found(runs: int) -> None:
    """Within 2,000 requests to the candidate in 95 of 100 runs; the sentence says where the line was."""
    late = 0

    for seed in range(runs):
        judge, draw = Judge(Limits(), 4), numpy.random.default_rng(2000 + seed)
        verdict, seen, _ = play_step(judge, draw, Behaviour(slowness=2.0), hold_s=60)
        late += verdict.decision != "roll back" or seen.requests > 2000
        if verdict.decision == "roll back":
            assert "to the candidate took more than" in verdict.reason

    assert late <= 0.05 * runs


@pytest.mark.parametrize(("errors", "most"), [(1.0, 60), (0.3, 250), (0.05, 3000)])
@pytest.mark.parametrize("runs", [30, pytest.param(RUNS, marks=pytest.mark.long)])
def test_more_errors_are_found_the_sooner_the_more_there_are(errors: float, most: int, runs: int) -> None:
    """Requests to the candidate until it is found; the baseline fails once in a thousand."""
    late = 0

    for seed in range(runs):
        judge, draw = Judge(Limits(), 4), numpy.random.default_rng(3000 + seed)
        verdict, seen, _ = play_step(judge, draw, Behaviour(errors=errors), hold_s=90)
        late += verdict.decision != "roll back" or seen.requests > most

    assert late <= 0.02 * runs


def test_a_version_that_rejects_what_the_other_takes_is_found() -> None:
    """4xx count by themselves."""
    judge, draw = Judge(Limits(), 4), numpy.random.default_rng(1)

    verdict, _, _ = play_step(judge, draw, Behaviour(rejections=0.1))

    assert verdict.decision == "roll back"
    assert verdict.reason.startswith("rejections of the candidate: ")


@pytest.mark.parametrize("runs", [10, pytest.param(RUNS, marks=pytest.mark.long)])
def test_what_is_worse_by_less_than_the_limit_is_promoted(runs: int) -> None:
    """Half a percent more errors where one percent is allowed, ten percent slower where a quarter is."""
    for seed in range(runs):
        judge, draw = Judge(Limits(), 4), numpy.random.default_rng(4000 + seed)
        verdict, _, _ = play_step(judge, draw, Behaviour(errors=0.006, slowness=1.1), hold_s=60)

        assert verdict.decision == "promote"


def test_a_quicker_and_better_version_is_promoted() -> None:
    """Worse is asked in one direction only."""
    judge, draw = Judge(Limits(), 4), numpy.random.default_rng(5)

    verdict, _, _ = play_step(judge, draw, Behaviour(errors=0.0, slowness=0.3), Behaviour(errors=0.2), hold_s=60)

    assert verdict.decision == "promote"


# ------------------------------------------------------------------------------------------------ step by step


def test_it_says_continue_until_the_step_is_over() -> None:
    """However many requests there were."""
    judge = Judge(Limits(), 4)

    verdict = judge.look(9.9, 10, steady(100_000), steady(100_000), NOTHING, only_mirrored=False)

    assert (verdict.decision, verdict.look) == ("continue", 1)


def test_too_little_traffic_holds_and_says_how_much_is_missing() -> None:
    """Of the candidate, of the baseline, and of compared answers."""
    judge = Judge(Limits(min_requests=200), 4, compares=True)

    verdict = judge.look(10, 10, steady(150), steady(30), Answers(12, 0), only_mirrored=False)

    assert verdict.decision == "hold"
    assert verdict.reason == (
        "too few: 30 of 200 requests to the candidate, 150 requests to the baseline, 12 answers compared"
    )


def test_a_p99_that_is_not_known_holds_too() -> None:
    """Unless it is not to be judged."""
    seen = steady(300)

    held = Judge(Limits(), 4).look(10, 10, seen, seen, NOTHING, only_mirrored=False)
    promoted = Judge(Limits(max_p99_increase=None), 4).look(10, 10, seen, seen, NOTHING, only_mirrored=False)

    assert held.decision == "hold"
    assert "the baseline's p99 is not known from 300 requests" in held.reason
    assert promoted.decision == "promote"


def test_once_there_is_enough_it_is_promoted() -> None:
    """The hold ends at the next look."""
    judge = Judge(Limits(), 1)
    judge.look(10, 10, steady(300), steady(300), NOTHING, only_mirrored=False)

    verdict = judge.look(20, 10, steady(5000), steady(5000), NOTHING, only_mirrored=False)

    assert verdict.decision == "promote"


def test_looks_are_few() -> None:
    """Counts that grow by one request a tick are not tested ten thousand times; nor is a hold without end."""
    judge = Judge(Limits(), 4)
    looks = 0

    for requests in range(1, 4_000):
        seen = steady(requests)
        looks += bool(judge.look(requests / 100, 20, seen, seen, NOTHING, only_mirrored=False).look)
        if requests > 200:
            judge.look(requests / 100, 20, steady(10), steady(10), NOTHING, only_mirrored=False)

    assert looks < 40


def test_a_step_is_looked_at_as_it_grows_and_once_more_at_its_end() -> None:
    """By a quarter each time; the end's look is one, and only once there is enough to promote."""
    judge = Judge(Limits(max_p99_increase=None, min_requests=105), 1)

    def look(elapsed_s: float, requests: int) -> tuple[str, int]:
        seen = steady(requests)
        verdict = judge.look(elapsed_s, 10, seen, seen, NOTHING, only_mirrored=False)
        return verdict.decision, verdict.look

    looks = [look(elapsed_s, requests) for elapsed_s, requests in [(1, 9), (2, 10), (3, 12), (4, 13), (9, 100)]]
    assert looks == [("continue", number) for number in (0, 1, 0, 2, 3)]
    assert look(10, 104) == ("hold", 0)
    assert look(11, 105) == ("promote", 4)
    assert look(12, 131) == ("promote", 0)
    assert look(13, 132) == ("promote", 5)
    judge.begin_step()
    assert look(1, 9) == ("continue", 0)
    assert look(2, 10) == ("continue", 1)


def test_a_step_without_any_request_is_looked_at_once() -> None:
    """Where none is asked for: there is nothing new to look at afterwards."""
    judge = Judge(Limits(max_p99_increase=None, min_requests=0), 1)
    empty = Seen(latency=counts_of([]))

    verdicts = [judge.look(10, 10, empty, empty, NOTHING, only_mirrored=False) for _ in range(3)]

    assert [verdict.look for verdict in verdicts] == [1, 0, 0]
    assert verdicts[0].reason == "nothing shows that it is worse than it may be"
    assert [(found.candidate, found.baseline) for found in verdicts[0].findings] == [(0.0, 0.0)] * 2


def test_what_is_not_known_is_nought_in_the_evidence_and_why_is_said() -> None:
    """A p99 without enough requests; a step that goes on says so."""
    verdict = Judge(Limits(), 4).look(1, 10, steady(20), steady(20), NOTHING, only_mirrored=False)

    document = verdict.document()
    p99 = document["findings"][2]
    assert (document["decision"], document["reason"], document["look"]) == ("continue", "the step is not over", 1)
    assert (p99["measure"], p99["standing"]) == ("p99", "unknown")
    figures = ("candidate", "baseline", "candidateAtLeast", "baselineAtMost", "limit")
    assert [p99[name] for name in figures] == [0.0] * 5
    assert p99["doubt"] > 0
    assert "limitSeconds" not in p99
    assert p99["reason"].startswith("the baseline's p99 is not known from 20 requests (some ")


def test_a_verdict_without_a_look_says_so() -> None:
    """Looks are counted from 1."""
    assert Verdict("hold", "why").document() == {"decision": "hold", "reason": "why", "look": 0, "findings": []}


def test_a_step_whose_answers_are_not_compared_asks_for_none() -> None:
    """Though others' are: neither to promote, nor to be judged by."""
    judge = Judge(Limits(max_p99_increase=None, min_requests=100), 4, compares=True)
    seen = steady(200)

    held = judge.look(10, 10, seen, seen, NOTHING, only_mirrored=False)
    judge.begin_step()
    promoted = judge.look(11, 10, seen, seen, NOTHING, only_mirrored=False, compares=False)

    assert (held.decision, held.reason) == ("hold", "too few: 0 of 100 answers compared")
    assert promoted.decision == "promote"
    assert "answers" not in [finding.measure for finding in promoted.findings]


def test_a_measure_may_spend_its_share_of_the_doubt() -> None:
    """Of all measures and steps; a look's is 1 / (k (k + 1)): half of it a bound, all of it where there is one."""
    limits = Limits(significance=0.12)
    assert budget_of(limits, 2, compares=True) == pytest.approx(0.12 / 8)
    assert budget_of(limits, 0, compares=False) == pytest.approx(0.12 / 3)
    assert budget_of(Limits(significance=0.12, max_p99_increase=None), 1, compares=False) == pytest.approx(0.06)
    judge = Judge(limits, 2, compares=True)

    doubts = []
    for requests in (2000, 4000):
        seen = steady(requests)
        verdict = judge.look(1, 10, seen, seen, Answers(requests, 0), only_mirrored=False)
        doubts.append({finding.measure: finding.doubt for finding in verdict.findings})
        assert {finding.standing for finding in verdict.findings} == {"not worse"}

    first, second = 0.015 / 2, 0.015 / 6
    assert doubts[0] == pytest.approx(
        {"errors": first / 2, "rejections": first / 2, "p99": first / 2, "answers": first}
    )
    assert doubts[1] == pytest.approx(
        {"errors": second / 2, "rejections": second / 2, "p99": second / 2, "answers": second}
    )


def test_the_evidence_of_a_slow_candidate_says_where_the_line_was() -> None:
    """In seconds, with the shares of both above it."""
    judge = Judge(Limits(max_p99_increase=0.5), 1)
    quick, slow = steady(5000, latency_s=0.01), steady(5000, latency_s=0.1)

    verdict = judge.look(1, 10, quick, slow, NOTHING, only_mirrored=False)

    p99 = next(finding for finding in verdict.findings if finding.measure == "p99")
    assert (p99.standing, p99.candidate, p99.baseline, p99.limit, p99.baseline_at_most) == (
        "worse",
        1.0,
        0.0,
        0.01,
        0.01,
    )
    assert p99.limit_s is not None
    assert 0.015 <= p99.limit_s < 0.03
    assert p99.document()["limitSeconds"] == pytest.approx(p99.limit_s, rel=1e-5)
    assert verdict.reason.startswith("5000 of 5000 requests (100%) to the candidate took more than ")


def test_the_baseline_s_own_requests_above_its_p99_are_in_the_evidence() -> None:
    """From the first latency above it on; a line beyond a second is told in seconds."""
    judge = Judge(Limits(max_p99_increase=0.0), 1)
    counts = [0] * (len(LATENCY_BOUNDS) + 1)
    of_most = bisect_left(LATENCY_BOUNDS, 1.5)
    counts[of_most], counts[of_most + 1] = 4995, 5
    usual = Seen(5000, latency=tuple(counts))

    verdict = judge.look(1, 10, usual, usual, NOTHING, only_mirrored=False)

    p99 = next(finding for finding in verdict.findings if finding.measure == "p99")
    assert p99.baseline == 0.001
    assert p99.reason.endswith(f"the baseline's p99 is at most {LATENCY_BOUNDS[of_most]:.3g} s")


def test_answers_that_differ_are_found_and_counted() -> None:
    """With the least share of them that the counts still allow."""
    judge = Judge(Limits(max_p99_increase=None), 1, compares=True)
    empty = Seen(latency=counts_of([]))

    verdict = judge.look(1, 10, steady(200), empty, Answers(200, 50), only_mirrored=True)

    (answers,) = verdict.findings
    assert verdict.decision == "roll back"
    assert (answers.candidate, answers.baseline, answers.limit, answers.baseline_at_most) == (0.25, 0.0, 0.001, 0.0)
    assert answers.candidate_at_least == lowest_rate(50, 200, answers.doubt)
    assert verdict.reason == "50 of 200 compared answers (25%) differ from the baseline's; 0.1% may"


def test_a_mirrored_step_is_judged_by_answers_alone() -> None:
    """Nobody asked the candidate itself."""
    judge = Judge(Limits(), 4, compares=True)
    empty = Seen(latency=counts_of([]))

    verdict = judge.look(10, 10, steady(1000), empty, Answers(200, 0), only_mirrored=True)

    assert verdict.decision == "promote"
    assert [finding.measure for finding in verdict.findings] == ["answers"]


def test_a_worse_candidate_goes_before_the_step_is_over_and_the_evidence_can_be_written_down() -> None:
    """Counts, bounds, limit and doubt of each measure, as JSON."""
    judge = Judge(Limits(), 4)

    verdict = judge.look(1, 60, steady(1000, errors=1), steady(50, errors=30), NOTHING, only_mirrored=False)

    assert verdict.decision == "roll back"
    assert verdict.reason == (
        "errors of the candidate: 30 of 50 requests (60%), of the baseline: 1 of 1000 (0.1%); 1% more is allowed"
    )
    evidence = json.loads(json.dumps(verdict.document()))
    first = evidence["findings"][0]
    assert (first["measure"], first["standing"], first["candidate"]) == ("errors", "worse", 0.6)
    assert first["candidateAtLeast"] > first["limit"] == pytest.approx(first["baselineAtMost"] + 0.01)
    assert 0 < first["doubt"] < 0.01


def test_what_is_slower_by_less_than_two_milliseconds_is_not_called_slower() -> None:
    """A quarter of nearly nothing is nearly nothing."""
    judge = Judge(Limits(), 1)
    quick, slower = steady(5000, latency_s=0.0005), steady(5000, latency_s=0.0023)

    verdict = judge.look(10, 10, quick, slower, NOTHING, only_mirrored=False)

    assert verdict.decision == "promote"


# ------------------------------------------------------------------------------------------------ its parts


def test_the_p99_that_is_known_lies_above_the_true_one_as_often_as_the_doubt_allows() -> None:
    """Of 300 samples of 3,000 requests with a doubt of 5 %, no more than 9 % have it below."""
    draw = numpy.random.default_rng(9)
    true_p99 = float(numpy.exp(0.5 * 2.3263)) * 0.02
    below = 0

    for _ in range(300):
        latencies = 0.02 * numpy.exp(0.5 * draw.normal(size=3000))
        counts = numpy.bincount(numpy.searchsorted(LATENCY_BOUNDS, latencies), minlength=len(LATENCY_BOUNDS) + 1)
        known = known_p99(Seen(3000, latency=tuple(map(int, counts))), 0.05)
        assert known is not None
        below += LATENCY_BOUNDS[known] < true_p99

    assert below <= 27


def test_the_p99_of_requests_beyond_every_bound_is_not_known() -> None:
    """More than one percent took longer than anything that is told apart."""
    assert known_p99(Seen(5000, latency=counts_of([1e6] * 5000)), 0.01) is None


def test_how_many_requests_may_lie_above_a_p99() -> None:
    """So few that the bound still says one percent; none, where there are too few requests."""
    needed = needed_for_p99(0.001)

    assert allowed_above(needed - 1, 0.001) is None
    assert allowed_above(needed, 0.001) == 0
    allowed = allowed_above(10_000, 0.001)
    assert allowed is not None
    assert highest_rate(allowed, 10_000, 0.001) <= ABOVE_P99 < highest_rate(allowed + 1, 10_000, 0.001)


def test_the_smallest_rate_that_is_found_is_found_as_often_as_said() -> None:
    """The power that the dry run and the docs tell."""
    limits = Limits()
    budget = budget_of(limits, 4, compares=True)
    smallest = smallest_found(2000, limits.max_difference, budget)
    assert smallest is not None
    draw = numpy.random.default_rng(3)

    found = sum(
        lowest_rate(int(draw.binomial(2000, smallest)), 2000, budget / (15 * 16) / 2) > limits.max_difference
        for _ in range(400)
    )

    assert 0.85 <= found / 400 <= 0.95
    assert smallest < 0.02
    assert smallest_found(1, 0.01, budget) is None
    assert smallest_found(0, 0.01, budget) is None
    assert smallest_found(1, 0.0, 0.5, looks=1, power=0.9) == pytest.approx(0.9, abs=1e-4)
