"""Judges a new version by what it and the one that serves did in the same time: go on, hold, promote, or roll back.

Four measures, each a share of requests: errors (5xx and no answer), rejections (4xx), requests slower than the
baseline's p99 allows, and answers that differ from the baseline's. For each the judge asks one question: do the counts
*show* that the candidate is worse by more than the limit? They do when the least rate that the candidate's count still
allows lies above the largest that the baseline's allows, plus the limit; both are exact binomial bounds (Clopper and
Pearson), so small numbers need no rule of thumb.

A request is slow above `T = p99 x (1 + max_p99_increase)`. The baseline's p99 is not known exactly either: the judge
takes the least latency of which the baseline's counts show that at most 1 % lie above it. The candidate is slower when
its counts show that more than 1 % of its requests lie above T.

Frequent looks raise the chance of a false alarm. `significance` is the chance that a roll-out of an equal version is
rolled back at all. It is divided among measures and steps, and within a step among looks: look k gets the share
1 / (k (k + 1)), and these shares add up to one however many looks there are. A look is made when the candidate's
requests have grown by a quarter, so there are few; the last look of a step is always made.

Pure: counts and seconds in, verdicts out. No clock, no I/O.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Literal

from marserve.registry.observing.arms import LATENCY_BOUNDS, Seen
from marserve.registry.observing.proportions import at_least, at_most, highest_rate, lowest_rate

Decision = Literal["continue", "promote", "hold", "roll back"]
Measure = Literal["errors", "rejections", "p99", "answers"]
Standing = Literal["worse", "not worse", "unknown"]

# The share of requests that may lie above a p99.
ABOVE_P99 = 0.01
# A difference below this is not called slower, however quick the baseline is; seconds.
LEAST_SLOWDOWN_S = 0.002
FIRST_LOOK = 10
LOOK_GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class Limits:
    """How much worse a candidate may be, and how sure the judge must be.

    `max_error_increase` is a difference of shares (0.01: one request in a hundred more), for errors and rejections
    each. `max_p99_increase` is relative (0.25: a quarter slower), None leaves the p99 out. `max_difference` is the
    share of compared answers that may differ. `min_requests` of each version, and compared answers, are needed to
    promote. `significance` is the chance that an equal version is rolled back.
    """

    max_error_increase: float = 0.01
    max_p99_increase: float | None = 0.25
    max_difference: float = 0.001
    min_requests: int = 200
    significance: float = 0.01


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of the candidate that were compared with the baseline's; a missing one counts as different."""

    compared: int = 0
    differing: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """One measure at one look. Values are shares of requests, except the p99's `limit_s`: T in seconds.

    `candidate_at_least` and `baseline_at_most` are the bounds that were compared, `doubt` the chance of each to be
    wrong. `reason` is the finding in a sentence.
    """

    measure: Measure
    standing: Standing
    reason: str
    candidate: float = 0.0
    baseline: float = 0.0
    candidate_at_least: float = 0.0
    baseline_at_most: float = 0.0
    limit: float = 0.0
    limit_s: float | None = None
    doubt: float = 0.0

    def document(self) -> dict[str, Any]:
        """The finding as the evidence records it."""
        members: dict[str, Any] = {
            "measure": self.measure,
            "standing": self.standing,
            "reason": self.reason,
            "candidate": _rounded(self.candidate),
            "baseline": _rounded(self.baseline),
            "candidateAtLeast": _rounded(self.candidate_at_least),
            "baselineAtMost": _rounded(self.baseline_at_most),
            "limit": _rounded(self.limit),
            "doubt": _rounded(self.doubt),
        }
        if self.limit_s is not None:
            members["limitSeconds"] = _rounded(self.limit_s)
        return members


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a look. `look` counts the step's looks from 1; 0 if there was nothing new to look at."""

    decision: Decision
    reason: str
    look: int = 0
    findings: tuple[Finding, ...] = ()

    def document(self) -> dict[str, Any]:
        """The verdict as the evidence records it."""
        findings = [finding.document() for finding in self.findings]
        return {"decision": self.decision, "reason": self.reason, "look": self.look, "findings": findings}


class Judge:
    """Judges one step after the other. `steps` is their number; with `compares` answers are compared too."""

    def __init__(self, limits: Limits, steps: int, *, compares: bool = False) -> None:
        self._limits = limits
        self._compares = self._compares_now = compares
        self._budget = budget_of(limits, steps, compares=compares)
        self.begin_step()

    def begin_step(self) -> None:
        """A new window begins, and with it the count of looks."""
        self._looks = 0
        self._next_look = FIRST_LOOK
        self._has_looked_at_the_end = False
        self._findings: tuple[Finding, ...] = ()

    def look(
        self,
        elapsed_s: float,
        hold_s: float,
        baseline: Seen,
        candidate: Seen,
        answers: Answers,
        *,
        only_mirrored: bool,
        compares: bool = True,
    ) -> Verdict:
        """Judge a step that has lasted `elapsed_s` of the `hold_s` that it should.

        `only_mirrored`: the candidate gets copies of requests and no others, so only its answers count. Without
        `compares` this step's answers are not compared, though those of other steps are.
        """
        self._compares_now = self._compares and compares
        is_over = elapsed_s >= hold_s
        grown = answers.compared if only_mirrored else max(candidate.requests, answers.compared)
        looked = 0
        closes = (
            is_over
            and not self._has_looked_at_the_end
            and not self._too_few(baseline, candidate, answers, only_mirrored)
        )
        if closes or grown >= self._next_look:
            self._has_looked_at_the_end = is_over
            self._looks += 1
            looked = self._looks
            self._next_look = max(grown + 1, math.ceil(grown * LOOK_GROWTH))
            self._findings = tuple(self._find(baseline, candidate, answers, only_mirrored))
            worse = [finding for finding in self._findings if finding.standing == "worse"]
            if worse:
                reason = "; ".join(finding.reason for finding in worse)
                return Verdict("roll back", reason, looked, self._findings)
        if not is_over:
            return Verdict("continue", "the step is not over", looked, self._findings)
        missing = self._too_few(baseline, candidate, answers, only_mirrored)
        if missing:
            return Verdict("hold", f"too few: {', '.join(missing)}", looked, self._findings)
        unknown = [finding.reason for finding in self._findings if finding.standing == "unknown"]
        if unknown:
            return Verdict("hold", f"too little to judge by: {', '.join(unknown)}", looked, self._findings)
        return Verdict("promote", "nothing shows that it is worse than it may be", looked, self._findings)

    def _too_few(self, baseline: Seen, candidate: Seen, answers: Answers, only_mirrored: bool) -> list[str]:
        """What is still missing for a promotion, in words."""
        least = self._limits.min_requests
        missing: list[str] = []
        if not only_mirrored:
            for name, seen in (("candidate", candidate), ("baseline", baseline)):
                if seen.requests < least:
                    missing.append(f"{seen.requests} requests to the {name}")
        if self._compares_now and answers.compared < least:
            missing.append(f"{answers.compared} answers compared")
        if missing:  # one line on a terminal, however many of them there are
            missing[0] = missing[0].replace(" ", f" of {least} ", 1)
        return missing

    # ------------------------------------------------------------------------------------------- measures

    def _find(self, baseline: Seen, candidate: Seen, answers: Answers, only_mirrored: bool) -> list[Finding]:
        # Half of what this look may spend for each of the two bounds.
        doubt = self._budget / (self._looks * (self._looks + 1)) / 2
        found: list[Finding] = []
        if not only_mirrored:
            requests = candidate.requests, baseline.requests
            found.append(self._compare_rates("errors", requests, (candidate.errors, baseline.errors), doubt))
            found.append(
                self._compare_rates("rejections", requests, (candidate.rejections, baseline.rejections), doubt)
            )
            if self._limits.max_p99_increase is not None:
                found.append(self._compare_p99(candidate, baseline, self._limits.max_p99_increase, doubt))
        if self._compares_now:
            found.append(self._judge_answers(answers, 2 * doubt))
        return found

    def _compare_rates(self, measure: Measure, of: tuple[int, int], hits: tuple[int, int], doubt: float) -> Finding:
        """`of` and `hits` are the candidate's and the baseline's."""
        (requests, base_requests), (bad, base_bad) = of, hits
        least = lowest_rate(bad, requests, doubt)
        most = highest_rate(base_bad, base_requests, doubt)
        limit = most + self._limits.max_error_increase
        words = (
            f"{measure} of the candidate: {bad} of {requests} requests ({_percent(bad, requests)}), of the baseline: "
            f"{base_bad} of {base_requests} ({_percent(base_bad, base_requests)})"
        )
        return Finding(
            measure,
            "worse" if least > limit else "not worse",
            f"{words}; {_share(self._limits.max_error_increase)} more is allowed",
            _ratio(bad, requests),
            _ratio(base_bad, base_requests),
            least,
            most,
            limit,
            doubt=doubt,
        )

    def _compare_p99(self, candidate: Seen, baseline: Seen, increase: float, doubt: float) -> Finding:
        known = known_p99(baseline, doubt)
        if known is None:
            needed = needed_for_p99(doubt)
            return Finding(
                "p99",
                "unknown",
                f"the baseline's p99 is not known from {baseline.requests} requests (some {needed} are needed)",
                doubt=doubt,
            )
        limit_s = max(LATENCY_BOUNDS[known] * (1 + increase), LATENCY_BOUNDS[known] + LEAST_SLOWDOWN_S)
        at = bisect_left(LATENCY_BOUNDS, limit_s)
        slow = sum(candidate.latency[at + 1 :])
        base_slow = sum(baseline.latency[known + 1 :])
        least = lowest_rate(slow, candidate.requests, doubt)
        bound_s = LATENCY_BOUNDS[min(at, len(LATENCY_BOUNDS) - 1)]
        return Finding(
            "p99",
            "worse" if least > ABOVE_P99 else "not worse",
            f"{slow} of {candidate.requests} requests ({_percent(slow, candidate.requests)}) to the candidate took "
            f"more than {_seconds(bound_s)}; 1% may: the baseline's p99 is at most {_seconds(LATENCY_BOUNDS[known])}",
            _ratio(slow, candidate.requests),
            _ratio(base_slow, baseline.requests),
            least,
            ABOVE_P99,
            ABOVE_P99,
            limit_s=bound_s,
            doubt=doubt,
        )

    def _judge_answers(self, answers: Answers, doubt: float) -> Finding:
        least = lowest_rate(answers.differing, answers.compared, doubt)
        limit = self._limits.max_difference
        return Finding(
            "answers",
            "worse" if least > limit else "not worse",
            f"{answers.differing} of {answers.compared} compared answers "
            f"({_percent(answers.differing, answers.compared)}) differ from the baseline's; {_share(limit)} may",
            _ratio(answers.differing, answers.compared),
            0.0,
            least,
            0.0,
            limit,
            doubt=doubt,
        )


# ------------------------------------------------------------------------------------------------ what it can see


def known_p99(seen: Seen, doubt: float) -> int | None:
    """The least of `LATENCY_BOUNDS`, by its index, of which the counts show that at most 1 % of requests are above it.

    None where there are too few requests to show that of any.
    """
    above = allowed_above(seen.requests, doubt)
    if above is None:
        return None
    index = len(seen.latency) - 1
    slower = 0
    while index > 0 and slower + seen.latency[index] <= above:
        slower += seen.latency[index]
        index -= 1
    # `index` is the last bucket with too many: its upper bound is the answer, if it has one.
    return index if index < len(LATENCY_BOUNDS) else None


def allowed_above(requests: int, doubt: float) -> int | None:
    """The most requests above a latency that still show that at most 1 % are; None if even zero would show nothing."""
    if at_most(0, requests, ABOVE_P99) > doubt:
        return None
    low, high = 0, int(requests * ABOVE_P99) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if at_most(middle, requests, ABOVE_P99) <= doubt:
            low = middle
        else:
            high = middle
    return low


def needed_for_p99(doubt: float) -> int:
    """The least number of requests from which the baseline's p99 is known."""
    return math.ceil(math.log(doubt) / math.log1p(-ABOVE_P99))


def smallest_found(
    requests: int, allowed: float, budget: float, *, looks: int = 15, power: float = 0.9
) -> float | None:
    """The smallest rate above `allowed` that is found with probability `power` in so many requests.

    `budget` is what a measure may spend in a step. The baseline counts as known exactly. None: not even a rate of 1.
    """
    doubt = budget / (looks * (looks + 1)) / 2
    if requests <= 0 or lowest_rate(requests, requests, doubt) <= allowed:
        return None
    low, high = 0, requests
    while high - low > 1:
        middle = (low + high) // 2
        if lowest_rate(middle, requests, doubt) > allowed:
            high = middle
        else:
            low = middle
    least, most = allowed, 1.0
    while most - least > 1e-5:
        middle_rate = (least + most) / 2
        if at_least(high, requests, middle_rate) >= power:
            most = middle_rate
        else:
            least = middle_rate
    return most


def budget_of(limits: Limits, steps: int, *, compares: bool) -> float:
    """What one measure may spend in one step of a roll-out."""
    measures = 2 + (limits.max_p99_increase is not None) + compares
    return limits.significance / (measures * max(1, steps))


# ------------------------------------------------------------------------------------------------ words


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _percent(part: int, whole: int) -> str:
    return _share(_ratio(part, whole))


def _share(rate: float) -> str:
    return f"{100 * rate:.3g}%"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
