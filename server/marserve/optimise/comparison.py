"""Whether what one build of a model gives is as good as what another one gives: errors, agreement, a verdict.

Each row was run alone, in batches, and beside a loud mate; what is wanted is always what the reference gave for the row
alone. Numbers come in as sums (`Sums`), so that nothing here knows arrays. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from marserve.registry.observing.proportions import lowest_rate

ALONE = "alone"
# The doubt that is left about a claimed agreement.
DOUBT = 0.05
MAX_ERROR = 0.03
# Builds that compute in float32 as the reference does are as good as equal.
MAX_ERROR_FLOAT32 = 1e-4
# How far a row may be from itself alone for the sake of its mates, as a share of the largest number. Kernels for other
# batch sizes add up in another order (1e-6 in float32); one scale for a whole batch was seen to do 1.6e-3 and more.
MAX_MATES = 1e-3
# Outputs whose largest error is not more than this share of the largest number give the same answers.
SAME = 1e-5
NOTHING = "nothing could be compared"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What must hold. `max_error` is of the mean error as a share of the mean output.

    `min_agreement` is the share of inputs that must agree, shown with 95 % certainty; None where none is asked for.
    """

    max_error: float = MAX_ERROR
    min_agreement: float | None = None
    max_mates: float = MAX_MATES


@dataclass(frozen=True, slots=True)
class Sums:
    """Numbers beside what is wanted, as sums over elements; they add up.

    `new_nans` counts elements that are no finite number where a finite one is wanted.
    """

    elements: int = 0
    error: float = 0.0
    wanted: float = 0.0
    largest_error: float = 0.0
    largest_wanted: float = 0.0
    product: float = 0.0
    seen_squares: float = 0.0
    wanted_squares: float = 0.0
    new_nans: int = 0

    @property
    def is_same(self) -> bool:
        """Whether they are as good as equal, each of them."""
        return not self.new_nans and self.largest_error <= SAME * self.largest_wanted

    def __add__(self, other: Sums) -> Sums:
        """Those of both."""
        return Sums(
            self.elements + other.elements,
            self.error + other.error,
            self.wanted + other.wanted,
            max(self.largest_error, other.largest_error),
            max(self.largest_wanted, other.largest_wanted),
            self.product + other.product,
            self.seen_squares + other.seen_squares,
            self.wanted_squares + other.wanted_squares,
            self.new_nans + other.new_nans,
        )


@dataclass(frozen=True, slots=True)
class RowErrors:
    """One row of one output beside what is wanted.

    `is_top1` and `top5` say whether the largest element is the wanted one, and which share of the five largest; None
    for what are no class scores.
    """

    sums: Sums = Sums()
    is_top1: bool | None = None
    top5: float | None = None


@dataclass(slots=True)
class OutputErrors:
    """The errors of one output over all rows of a run."""

    sums: Sums = Sums()
    rows: int = 0
    first_nan: int = -1
    ranked: int = 0
    top1: int = 0
    top5: float = 0.0

    def add(self, index: int, row: RowErrors) -> None:
        """Add the row of the input with this index."""
        self.rows += 1
        self.sums += row.sums
        if row.sums.new_nans and self.first_nan < 0:
            self.first_nan = index
        if row.is_top1 is not None:
            self.ranked += 1
            self.top1 += row.is_top1
            self.top5 += row.top5 or 0.0

    @property
    def mean_error(self) -> float:
        """The mean error as a share of the mean output; both by magnitude."""
        return _share(self.sums.error, self.sums.wanted)

    @property
    def largest(self) -> float:
        """The largest error as a share of the largest output."""
        return _share(self.sums.largest_error, self.sums.largest_wanted)

    @property
    def cosine(self) -> float:
        """The cosine between all that was seen and all that is wanted; 1 for nothing but zeros on both sides."""
        if not self.sums.seen_squares and not self.sums.wanted_squares:
            return 1.0
        if not self.sums.seen_squares or not self.sums.wanted_squares:
            return 0.0
        return self.sums.product / math.sqrt(self.sums.seen_squares) / math.sqrt(self.sums.wanted_squares)


@dataclass(slots=True)
class RunErrors:
    """One run: its outputs, and sentences about rows that could not be compared (another shape, a call that failed)."""

    outputs: dict[str, OutputErrors] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, output: str, index: int, row: RowErrors) -> None:
        """Add a row of that output."""
        self.outputs.setdefault(output, OutputErrors()).add(index, row)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many of the compared inputs agree, by what (`top-1 of scores`, `the handler's compare`)."""

    by: str
    agreeing: int
    inputs: int

    @property
    def shown(self) -> float:
        """The share of all such inputs that is shown to agree, with 95 % certainty."""
        return lowest_rate(self.agreeing, self.inputs, DOUBT)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether all bounds hold; `faults` are sentences about those that do not, `notes` about what was not shown."""

    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def has_passed(self) -> bool:
        """Whether nothing is at fault."""
        return not self.faults


def inputs_needed(agreement: float) -> int:
    """How many inputs must agree, without one that does not, to show this agreement. 0.98 takes 149."""
    if agreement <= 0:
        return 1
    return math.ceil(math.log(DOUBT) / math.log(agreement)) if agreement < 1 else 0


def judge(
    runs: Mapping[str, RunErrors],
    mates: Mapping[str, RunErrors],
    agreement: Agreement | None,
    bounds: Bounds,
    reference_mates: Mapping[str, RunErrors] | None = None,
    nothing: str = NOTHING,
) -> Verdict:
    """The verdict on a build; `nothing` is the fault where nothing at all was compared.

    `runs` compare it with the reference alone; `mates` compare its own batches with itself alone, and
    `reference_mates` the reference's with itself: a build may depend on mates as far as its reference does.
    """
    faults: list[str] = []
    notes: list[str] = []
    for run, errors in runs.items():
        faults += [f"{run}: {fault}" for fault in errors.faults]
        for name, output in errors.outputs.items():
            fault = _fault_of(name, output, bounds)
            if fault:
                faults.append(f"{run}: {fault}")
    for run, errors in mates.items():
        for name, output in errors.outputs.items():
            before = (reference_mates or {}).get(run, RunErrors()).outputs.get(name, OutputErrors()).largest
            if output.largest > max(bounds.max_mates, 2 * before):
                faults.append(
                    f"{run}: {name} of a row depends on its mates: off by {shown(output.largest)} of the largest "
                    f"output from the row alone; {shown(bounds.max_mates)} is allowed"
                )
    agreement_faults, agreement_notes = _judge_agreement(agreement, bounds)
    # Runs without an output: what the model gave holds no numbers, or none of its calls is one of the reference's.
    if not faults and not any(errors.outputs for errors in runs.values()) and (runs or agreement is None):
        faults.append(nothing)
    return Verdict((*faults, *agreement_faults), (*notes, *agreement_notes))


def _fault_of(name: str, output: OutputErrors, bounds: Bounds) -> str:
    if output.sums.new_nans:
        return (
            f"{name} has {output.sums.new_nans} elements that are no finite number, first for input {output.first_nan}"
        )
    if not output.mean_error <= bounds.max_error:
        return (
            f"{name} has a mean error of {shown(output.mean_error)} of the mean output; {shown(bounds.max_error)} is "
            "allowed"
        )
    return ""


def _judge_agreement(agreement: Agreement | None, bounds: Bounds) -> tuple[list[str], list[str]]:
    if agreement is None:
        note = "agreement was not looked at: no output is known to hold class scores, and the handler has no compare"
        if bounds.min_agreement is None:
            return [], [note]
        return [], [f"{note}; the errors alone decide"]
    seen = f"{agreement.agreeing} of {agreement.inputs} inputs agree by {agreement.by}"
    shows = f"which shows {percent(agreement.shown)} with 95 % certainty"
    if bounds.min_agreement is None or agreement.shown >= bounds.min_agreement:
        return [], []
    wanted = percent(bounds.min_agreement)
    if agreement.agreeing < agreement.inputs:
        return [f"{seen}, {shows}; {wanted} is asked for"], []
    missing = inputs_needed(bounds.min_agreement) - agreement.inputs
    return [f"{seen}, {shows}; {wanted} takes {missing} more inputs that agree"], []


def worst(runs: Sequence[RunErrors]) -> RunErrors:
    """One run for all: of each output the figures of the run with the largest mean error."""
    found = RunErrors()
    for errors in runs:
        found.faults += errors.faults
        for name, output in errors.outputs.items():
            if name not in found.outputs or output.mean_error > found.outputs[name].mean_error:
                found.outputs[name] = output
    return found


def shown(share: float) -> str:
    """A share in two digits: `0.012`, `3.1e-06`."""
    return f"{share:.2g}"


def percent(share: float) -> str:
    """A share in percent, rounded down to one digit: what is shown must not be less than what is said."""
    return f"{math.floor(share * 1000 + 1e-9) / 10:g} %"


def _share(part: float, whole: float) -> float:
    if not part:
        return 0.0
    return part / whole if whole else math.inf
