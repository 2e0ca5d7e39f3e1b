"""Exact bounds for the rate behind a count: which rates `hits` in `trials` allow, and with which certainty.

Pure arithmetic on the binomial distribution, through the regularised incomplete beta function. It uses no approximation
that fails for rare events such as errors. Nothing here knows requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable

# The accuracy of the continued fraction; far finer than any significance that is asked for.
PRECISION = 1e-12
MOST_TERMS = 100_000
# A bound is found to this relative accuracy.
BOUND_PRECISION = 1e-7
# Newton's step after one so small, by the same measure, would be below the arithmetic's own error.
STEP_PRECISION = 1e-8
_TINY = 1e-300


def at_least(hits: int, trials: int, rate: float) -> float:
    """How likely `hits` or more are in `trials` where each is one with probability `rate`."""
    if hits <= 0:
        return 1.0
    if hits > trials or rate <= 0.0:
        return 0.0
    if rate >= 1.0:
        return 1.0
    return _incomplete_beta(hits, trials - hits + 1, rate)


def at_most(hits: int, trials: int, rate: float) -> float:
    """How likely `hits` or fewer are in `trials` where each is one with probability `rate`."""
    if hits >= trials or rate <= 0.0:
        return 1.0
    if rate >= 1.0:
        return 0.0
    return _incomplete_beta(trials - hits, hits + 1, 1.0 - rate)


def lowest_rate(hits: int, trials: int, doubt: float) -> float:
    """The least rate that `hits` in `trials` still allow: below it so many are seen with probability `doubt` or less.

    The one-sided bound of Clopper and Pearson.
    """
    if hits <= 0 or trials <= 0:
        return 0.0
    if hits >= trials:
        return math.exp(math.log(doubt) / trials)
    return _solve(lambda rate: at_least(hits, trials, rate), hits, trials - hits + 1, doubt, 0.0, hits / trials)


def highest_rate(hits: int, trials: int, doubt: float) -> float:
    """The largest rate that `hits` in `trials` still allow: above it so few are seen with probability `doubt` or less.

    The one-sided bound of Clopper and Pearson.
    """
    if trials <= 0 or hits >= trials:
        return 1.0
    if hits <= 0:
        return -math.expm1(math.log(doubt) / trials)
    return 1.0 - _solve(
        lambda other: at_most(hits, trials, 1.0 - other), trials - hits, hits + 1, doubt, 0.0, 1.0 - hits / trials
    )


def _solve(tail: Callable[[float], float], a: float, b: float, doubt: float, low: float, high: float) -> float:
    """Where `tail`, the regularised incomplete beta function of `a` and `b`, is `doubt`: between these two.

    By Newton's steps on both logarithms: the curve is concave, and nearly straight far from the rate that was seen, so
    a few steps suffice where halving the span took 25. A step that leaves the span is replaced by its middle.
    """
    log_doubt, log_beta = math.log(doubt), math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    x = high
    while high - low > BOUND_PRECISION * min(high, 1.0 - low):
        value = tail(x)
        if value >= doubt:
            high = x
        else:
            low = x
        stepped = low
        if value > 0.0 and x < 1.0:
            slope = math.exp(a * math.log(x) + (b - 1) * math.log1p(-x) - log_beta) / value
            if slope > 0.0:
                stepped = x * math.exp(min((log_doubt - math.log(value)) / slope, 1.0))
                if abs(stepped - x) <= STEP_PRECISION * min(x, 1.0 - x):
                    return stepped
        x = stepped if low < stepped < high else (low + high) / 2
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, for 0 < x < 1, by Lentz's continued fraction."""
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x) - math.log(a)
    )
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1)
    d = 1.0 / (d if abs(d) > _TINY else _TINY)
    total = d
    for term in range(1, MOST_TERMS):
        twice = 2 * term
        for factor in (
            term * (b - term) * x / ((a + twice - 1) * (a + twice)),
            -(a + term) * (a + b + term) * x / ((a + twice) * (a + twice + 1)),
        ):
            d = 1.0 + factor * d
            d = 1.0 / (d if abs(d) > _TINY else _TINY)
            c = 1.0 + factor / c
            c = c if abs(c) > _TINY else _TINY
            step = c * d
            total *= step
        if abs(step - 1.0) < PRECISION:
            break
    return min(1.0, front * total)
