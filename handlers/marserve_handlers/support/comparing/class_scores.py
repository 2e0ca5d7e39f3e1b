"""Class scores in two answers to one request: whether their best class is the same, and how far the scores are apart.

Counted as `marserve compare` counts: an answer agrees if its best class is the wanted one, and the error is the sum of
all differences beside the sum of what is wanted, both by magnitude.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from marserve_handlers.support.shown import shown


@dataclass(frozen=True, slots=True)
class ScoreErrors:
    """The best class of both answers, and sums over the classes that are in both."""

    seen: str
    wanted: str
    error: float
    magnitude: float


def compare_scores(seen: bytes, wanted: bytes) -> ScoreErrors:
    """Compare the scores that two bodies hold as JSON: `{"cat": 0.9, …}`, or a list with one number a class.

    A label that only one of the two has, as one beyond the best five, is not in the sums. Raises ValueError.
    """
    ours, theirs = _scores_of(seen), _scores_of(wanted)
    both = ours.keys() & theirs.keys()
    error = sum(abs(ours[name] - theirs[name]) for name in both)
    magnitude = sum(abs(theirs[name]) for name in both)
    return ScoreErrors(max(ours, key=ours.__getitem__), max(theirs, key=theirs.__getitem__), error, magnitude)


def _scores_of(body: bytes) -> dict[str, float]:
    try:
        value: Any = json.loads(body)
    except ValueError:
        raise ValueError(f"an answer holds no class scores: {shown(bytes(body[:80]))} is not JSON") from None
    named = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(named, dict) or not named or not all(_is_score(score) for score in named.values()):
        raise ValueError(
            f"an answer holds no class scores: {shown(value)} is neither an object nor a list of finite numbers"
        )
    return {str(name): float(score) for name, score in named.items()}


def _is_score(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
