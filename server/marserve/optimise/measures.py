"""The errors of one row: what a build gave beside what is wanted, both as numpy's arrays."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from marserve.optimise.comparison import RowErrors, Sums

_BEST: Final = 5

Array = np.ndarray[Any, Any]


def measure(seen: Array, wanted: Array, *, is_scores: bool = False) -> RowErrors:
    """The errors of `seen`. Whole numbers and truth values count by value as others do, complex ones as two real ones.

    Texts are equal or not: each one that differs is an error of 1 where 1 is wanted.

    With `is_scores` the last axis holds one score a class: the best class must be the same in every place. Elements
    that are infinite or no number on both sides alike are left out. Raises ValueError for unequal shapes, and for what
    is neither numbers nor texts.
    """
    if seen.shape != wanted.shape:
        raise ValueError(f"it is {list(seen.shape)}, wanted {list(wanted.shape)}")
    ours, theirs = _as_reals(seen, wanted)
    fine, wanted_fine = np.isfinite(ours), np.isfinite(theirs)
    # An infinity in the place of a finite number, or another infinity, is as bad as what is no number.
    strange = ~wanted_fine & ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
    new_nans = int(np.count_nonzero(wanted_fine & ~fine)) + int(np.count_nonzero(strange))
    both = fine & wanted_fine
    ours, theirs = ours[both], theirs[both]
    off = np.abs(ours - theirs)
    top1, top5 = _ranks(seen, wanted) if is_scores else (None, None)
    sums = Sums(
        elements=int(theirs.size),
        error=float(off.sum()),
        wanted=float(np.abs(theirs).sum()),
        largest_error=float(off.max(initial=0.0)),
        largest_wanted=float(np.abs(theirs).max(initial=0.0)),
        product=float(ours @ theirs),
        seen_squares=float(ours @ ours),
        wanted_squares=float(theirs @ theirs),
        new_nans=new_nans,
    )
    return RowErrors(sums, top1, top5)


def may_be_scores(array: Array) -> bool:
    """Whether an array could hold class scores: floating numbers, two classes or more along the last axis."""
    return array.dtype.kind == "f" and array.ndim >= 1 and array.shape[-1] > 1


def _ranks(seen: Array, wanted: Array) -> tuple[bool | None, float | None]:
    if not may_be_scores(wanted) or not wanted.size:
        return None, None
    ours, theirs = seen.reshape(-1, seen.shape[-1]), wanted.reshape(-1, wanted.shape[-1])
    count = min(_BEST, theirs.shape[1])
    best_ours, best_theirs = (np.argsort(-each, axis=1, kind="stable")[:, :count] for each in (ours, theirs))
    is_top1 = bool(np.all(best_ours[:, 0] == best_theirs[:, 0]))
    shared = [len(set(one) & set(other)) / count for one, other in zip(best_ours, best_theirs, strict=True)]
    return is_top1, float(np.mean(shared))


def _as_reals(seen: Array, wanted: Array) -> tuple[Array, Array]:
    """Both as rows of real numbers, as long as each other."""
    kinds = {seen.dtype.kind, wanted.dtype.kind}
    if kinds == {"U"}:
        return (seen == wanted).astype(np.float64).ravel(), np.ones(wanted.size)
    if not kinds <= set("fiubc"):
        what = f"it is of type {seen.dtype}, wanted {wanted.dtype}"
        if "U" in kinds:
            raise ValueError(f"{what}, and texts are compared with texts alone")
        raise ValueError(f"{what}, which are neither numbers nor texts")
    if "c" in kinds:
        ours, theirs = (each.astype(np.complex128).ravel().view(np.float64) for each in (seen, wanted))
    else:
        ours, theirs = (each.astype(np.float64).ravel() for each in (seen, wanted))
    return ours, theirs
