"""Two archives beside each other: both answer the same inputs, and what they gave is compared and judged."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from marserve.errors import MarserveError
from marserve.files.nearest import did_you_mean
from marserve.optimise.comparison import ALONE, NOTHING, Agreement, Bounds, RunErrors, Verdict, judge
from marserve.optimise.inputs import Input
from marserve.optimise.measures import Array, may_be_scores, measure
from marserve.optimise.ratio import PAIRS, Ratio, ratio_of
from marserve.optimise.recording import Recording, RunArrays
from marserve.optimise.subject import Subject, SubjectFailed

# Of one measurement of a pair.
TURN_S: Final = 0.1
RELATIVE, ABSOLUTE = 1e-3, 1e-5
ANY_OUTPUT: Final = "*"
MOST_FAULTS: Final = 10


Difference = tuple[int, str, str, str]
BY_COMPARE: Final = "the handler's compare"


@dataclass(frozen=True, slots=True)
class Wish:
    """What is compared, and how. `batch_size` 0: that of the reference. `scores` names outputs with class scores.

    With `same_answers` each answer that differs is a fault, whatever the models gave.
    """

    bounds: Bounds = field(default_factory=Bounds)
    batch_size: int = 0
    scores: tuple[str, ...] = ()
    within_s: float = 600.0
    pairs: int = PAIRS
    same_answers: bool = False


@dataclass(frozen=True, slots=True)
class Answers:
    """How the handlers' answers compare: `differing` of `compared`, `by` the handler's `compare` or a tolerance.

    `differing` are input, place, what was seen and what was wanted; `beyond_numbers` those that differ in more than
    numbers, none where the handler's `compare` decided (`by_handler`).
    """

    by: str
    compared: int
    differing: tuple[Difference, ...]
    by_handler: bool = False
    beyond_numbers: tuple[Difference, ...] = ()


@dataclass(slots=True)
class Report:
    """What two archives showed. `runs` are beside the reference alone, `mates` beside the build itself alone."""

    inputs: int
    batch_size: int
    runs: dict[str, RunErrors]
    mates: dict[str, RunErrors]
    agreement: Agreement | None
    answers: Answers
    ratios: dict[int, Ratio]
    verdict: Verdict
    load_s: tuple[float, float]


class UnknownScores(MarserveError):
    """A name is that of no output that holds class scores; the message says which outputs there are."""


def compare(
    reference: Subject,
    other: Subject,
    inputs: Sequence[Input],
    wish: Wish,
    on_step: Callable[[str], None] = lambda step: None,
) -> Report:
    """Compare `other` with `reference`, both as they are. Blocks. Raises SubjectFailed, UnknownScores.

    `on_step` gets what happens next, in few words.
    """
    on_step("loading both")
    load_s = reference.loaded(), other.loaded()
    size = wish.batch_size or reference.batch_size
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="marserve-run-"))) for _ in range(2)]
        recordings = []
        for subject, folder in zip((reference, other), folders, strict=True):
            on_step(f"{len(inputs)} inputs through {subject.name}")
            recordings.append(subject.record(inputs, folder, size, wish.within_s))
            check_scores(wish.scores, recordings[0], folders[0])
        on_step("comparing what they gave")
        errors = Errors(recordings, folders, wish.scores)
        answers, failed = compare_answers(reference, recordings, folders)
    on_step("measuring both in turns")
    ratios, untimed = measure_both(reference, other, sorted({1, size}), wish.pairs)
    agreement = agreement_of(errors, answers, has_compare=recordings[0].has_compare)
    failed += faults_of_answers(answers, errors, agreement, wish)
    verdict = errors.judge(agreement, wish.bounds)
    if not errors.runs and answers.compared:
        verdict = Verdict(tuple(fault for fault in verdict.faults if fault != NOTHING), verdict.notes)
    notes = [*verdict.notes, *errors.notes, *untimed]
    for subject, recording in zip((reference, other), recordings, strict=True):
        notes += [f"{subject.name}: {note}" for note in recording.notes]
        if recording.why_not:
            notes.append(f"{subject.name}: only answers are compared: {recording.why_not}")
    verdict = Verdict((*failed, *verdict.faults), tuple(dict.fromkeys(notes)))
    return Report(len(inputs), size, errors.runs, errors.mates, agreement, answers, ratios, verdict, load_s)


def agreement_of(errors: Errors, answers: Answers, *, has_compare: bool) -> Agreement | None:
    """How many inputs agree: by their best class, else by the handler's compare, else None."""
    if errors.agreement is not None or not has_compare or not answers.compared:
        return errors.agreement
    return Agreement(BY_COMPARE, answers.compared - len(answers.differing), answers.compared)


def faults_of_answers(answers: Answers, errors: Errors, agreement: Agreement | None, wish: Wish) -> list[str]:
    """Which answers that differ are at fault, in a sentence each; numbers alone are for the models' errors to judge."""
    is_bounded = agreement is not None and agreement.by == BY_COMPARE and wish.bounds.min_agreement is not None
    if not answers.differing or (is_bounded and not wish.same_answers):  # how many may differ was asked for
        return []
    if wish.same_answers:
        return [_differ(answers, answers.differing, f"({answers.by})")]
    if answers.by_handler or not any(run.outputs for run in errors.runs.values()):
        return [f"{len(answers.differing)} of {answers.compared} answers differ ({answers.by})"]
    same = [each for each in answers.differing if each[0] in errors.same]
    # Another best class is another text: how many there may be is for the agreement to say.
    more = [each for each in answers.beyond_numbers if each[0] not in errors.same | errors.disagreeing]
    return [
        _differ(answers, found, how)
        for found, how in ((same, "where the models give the same"), (more, "in more than numbers"))
        if found
    ]


def _differ(answers: Answers, found: Sequence[Difference], how: str) -> str:
    """That these differ in that way, with the first of them."""
    at, path, seen, wanted = found[0]
    first = f"input {at}{f' at {path}' if path else ''} is {seen}, wanted {wanted}"
    hint = "" if answers.by_handler else "; if they may, let the handler say so in compare(primary, shadow)"
    return f"{len(found)} of {answers.compared} answers differ {how}: {first}{hint}"


def check_scores(scores: Sequence[str], reference: Recording, folder: Path) -> None:
    """Raise UnknownScores for a name of which the reference has no output that may hold class scores.

    Nothing is said of a reference whose model was not looked into, or gave no output.
    """
    alone = reference.run(ALONE)
    if not scores or alone is None:
        return
    with RunArrays(folder, alone) as arrays:
        names = list(dict.fromkeys(name for call in arrays for name in arrays.names(call)))
        there = f"there are {', '.join(names)}"
        for name in scores if names else ():
            if name == ANY_OUTPUT and len(names) > 1:
                raise UnknownScores(f"{ANY_OUTPUT} is the only output, and {there}")
            found = names[0] if name == ANY_OUTPUT else name
            if found not in names:
                raise UnknownScores(f"there is no output {name}; {there}{did_you_mean(name, names)}")
            given = [outputs[found] for outputs in map(arrays.outputs, arrays) if found in outputs]
            if not any(map(may_be_scores, given)):
                raise UnknownScores(
                    f"the output {found} holds no class scores, which are floating numbers of two classes or "
                    f"more along the last axis: it is {given[0].dtype} {list(given[0].shape)}; {there}"
                )


def describe_agreement(agreement: Agreement | None) -> dict[str, Any] | None:
    """An agreement, as reports and archives have it."""
    if agreement is None:
        return None
    return {
        "by": agreement.by,
        "agreeing": agreement.agreeing,
        "inputs": agreement.inputs,
        "shown": agreement.shown,
    }


def describe_ratios(ratios: Mapping[int, Ratio], threads: int | None = None) -> list[dict[str, Any]]:
    """The ratios by batch size, as reports have them; with so many threads, where those are said."""
    said = {} if threads is None else {"threads": threads}
    return [
        {"rows": rows, **said, "middle": ratio.middle, "low": ratio.low, "high": ratio.high, "isNoisy": ratio.is_noisy}
        for rows, ratio in ratios.items()
    ]


def describe_outputs(runs: Mapping[str, RunErrors], mates: Mapping[str, RunErrors]) -> list[dict[str, Any]]:
    """The figures of each output in each run, as reports and archives have them."""
    return [
        {
            "run": run,
            "output": name,
            "rows": each.rows,
            "meanError": each.mean_error,
            "largestError": each.largest,
            "cosine": each.cosine,
            "top1": each.top1 / each.ranked if each.ranked else None,
            "top5": each.top5 / each.ranked if each.ranked else None,
            "byMates": mates[run].outputs[name].largest if run in mates and name in mates[run].outputs else None,
        }
        for run, errors in runs.items()
        for name, each in errors.outputs.items()
    ]


class Errors:
    """The errors of all runs of two recordings, and which inputs agree by their best class."""

    def __init__(self, recordings: Sequence[Recording], folders: Sequence[Path], scores: Sequence[str]) -> None:
        """Compare them. Raises OSError."""
        self.runs: dict[str, RunErrors] = {}
        self.mates: dict[str, RunErrors] = {}
        self.reference_mates: dict[str, RunErrors] = {}
        self.notes: list[str] = []
        self._bare = next((each.bare for each in recordings if each.bare), "")
        self._scores = scores or tuple(recordings[0].scores)
        self._ranked: set[int] = set()
        # The inputs for which another class is the best in a run, and those for which the models give the same alone.
        self.disagreeing: set[int] = set()
        self.same: set[int] = set()
        self._scored: set[str] = set()
        reference, other = recordings
        alone = reference.run(ALONE), other.run(ALONE)
        if alone[0] is None or alone[1] is None:
            return
        with RunArrays(folders[0], alone[0]) as wanted, RunArrays(folders[1], alone[1]) as own:
            names = self._renamed(wanted, own)
            calls = self._calls(reference, other)
            for recorded in other.runs:
                with RunArrays(folders[1], recorded) as seen:
                    errors = RunErrors({}, list(recorded.faults))
                    same = self._compare(errors, seen, wanted, calls, names)
                    if recorded.name == ALONE:
                        self.same = same
                    if recorded.name == ALONE and not recorded.faults:
                        self._look_for_lacking(errors, seen, wanted, calls)
                    self.runs[recorded.name] = errors
                    if recorded.name != ALONE:
                        self.mates[recorded.name] = self._beside_itself(seen, own, names)
            for recorded in reference.runs:
                if recorded.name != ALONE:
                    with RunArrays(folders[0], recorded) as seen:
                        self.reference_mates[recorded.name] = self._beside_itself(seen, wanted, {})

    @property
    def agreement(self) -> Agreement | None:
        """How many inputs have the same best class in every run; None where no output holds class scores."""
        if not self._ranked:
            return None
        by = f"top-1 of {', '.join(sorted(self._scored))}"
        return Agreement(by, len(self._ranked - self.disagreeing), len(self._ranked))

    def judge(self, agreement: Agreement | None, bounds: Bounds) -> Verdict:
        """The verdict on the errors, with how many inputs agree."""
        nothing = NOTHING
        if self._bare:
            nothing += (
                f": the model gives a value of the type {self._bare}, in which no tensor and no array was found; let "
                "it return tensors, or lists, tuples, dicts or dataclasses of them"
            )
        return judge(self.runs, self.mates, agreement, bounds, self.reference_mates, nothing)

    @staticmethod
    def _calls(reference: Recording, other: Recording) -> dict[int, tuple[int, int]]:
        """The other's call to the reference's call and the input, where both have one."""
        wanted = {at: call for call, at in reference.inputs_of_calls().items()}
        return {call: (wanted[at], at) for call, at in other.inputs_of_calls().items() if at in wanted}

    def _renamed(self, wanted: RunArrays, own: RunArrays) -> dict[str, str]:
        """The other's outputs to the reference's: runtimes name them in their own ways, and keep their order."""
        ours = list(own.outputs(next(iter(own), -1)))
        theirs = list(wanted.outputs(next(iter(wanted), -1)))
        if set(ours) == set(theirs) or len(ours) != len(theirs):
            return {}
        return dict(zip(ours, theirs, strict=True))

    def _compare(
        self,
        errors: RunErrors,
        seen: RunArrays,
        wanted: RunArrays,
        calls: dict[int, tuple[int, int]],
        names: dict[str, str],
    ) -> set[int]:
        """Compare a run with what is wanted; the inputs of which each output is as good as equal."""
        same = set()
        for call in seen:
            if call not in calls:
                continue
            reference_call, at = calls[call]
            outputs = {names.get(name, name): array for name, array in seen.outputs(call).items()}
            expected = wanted.outputs(reference_call)
            if set(outputs) != set(expected):
                wanted_names = ", ".join(expected) or "none"
                _note_fault(errors, f"input {at}: the outputs are {', '.join(outputs)}, wanted {wanted_names}")
                continue
            rows = []
            for name, array in outputs.items():
                is_scores = self._holds_scores(name, expected)
                try:
                    row = measure(array, expected[name], is_scores=is_scores)
                except ValueError as error:
                    _note_fault(errors, f"input {at}: {name}: {error}")
                    continue
                errors.add(name, at, row)
                rows.append(row)
                if row.is_top1 is not None:
                    self._scored.add(name)
                    self._ranked.add(at)
                    if not row.is_top1:
                        self.disagreeing.add(at)
            if len(rows) == len(outputs) and all(row.sums.is_same for row in rows):
                same.add(at)
        return same

    @staticmethod
    def _look_for_lacking(
        errors: RunErrors, seen: RunArrays, wanted: RunArrays, calls: dict[int, tuple[int, int]]
    ) -> None:
        """Note inputs for which the reference gave outputs and the other none: its file has nothing of them."""
        there = set(seen)
        lacking = {reference_call: at for call, (reference_call, at) in calls.items() if call not in there}
        for call in wanted:
            if call in lacking:
                names = ", ".join(wanted.outputs(call))
                _note_fault(errors, f"input {lacking[call]}: there are no outputs, wanted {names}")

    def _holds_scores(self, name: str, outputs: dict[str, Array]) -> bool:
        is_named = name in self._scores or (ANY_OUTPUT in self._scores and len(outputs) == 1)
        return is_named and may_be_scores(outputs[name])

    @staticmethod
    def _beside_itself(seen: RunArrays, alone: RunArrays, names: dict[str, str]) -> RunErrors:
        errors = RunErrors()
        for call in seen:
            expected = alone.outputs(call)
            for name, array in seen.outputs(call).items():
                if name in expected:
                    with contextlib.suppress(ValueError):  # beside the reference it is a fault already
                        errors.add(names.get(name, name), call, measure(array, expected[name]))
        return errors


def _note_fault(errors: RunErrors, fault: str) -> None:
    if len(errors.faults) < MOST_FAULTS:
        errors.faults.append(fault)


def compare_answers(
    reference: Subject, recordings: Sequence[Recording], folders: Sequence[Path]
) -> tuple[Answers, list[str]]:
    """How the answers compare, and sentences about inputs that one answers and the other does not."""
    alike: dict[str, list[int]] = {}
    pairs: list[tuple[int, list[dict[str, Any]]]] = []
    for at, (ours, theirs) in enumerate(zip(recordings[0].answers, recordings[1].answers, strict=False)):
        if bool(ours.message) != bool(theirs.message):
            how = f"fails with {theirs.message}" if theirs.message else f"is answered; wanted a failure, {ours.message}"
            alike.setdefault(how, []).append(at)
        elif not ours.message:
            pairs.append(
                (
                    at,
                    [
                        {"status": each.status, "message": "", "headers": each.headers, "file": each.file}
                        for each in (ours, theirs)
                    ],
                )
            )
    faults = [
        f"input {inputs[0]} {how}{f' (and {len(inputs) - 1} more)' if len(inputs) > 1 else ''}"
        for how, inputs in alike.items()
    ]
    if not pairs:
        return Answers("nothing was answered", 0, ()), faults[:MOST_FAULTS]
    said = reference.ask(
        {
            "do": "judge",
            "pairs": [pair for _, pair in pairs],
            "ours": str(folders[0]),
            "theirs": str(folders[1]),
            "tolerance": {"relative": RELATIVE, "absolute": ABSOLUTE},
        },
        600.0,
    )
    by = f"by {BY_COMPARE}" if said["by_handler"] else f"by more than {RELATIVE:g}"
    differing, beyond = (
        tuple((pairs[at][0], where, seen, wanted) for at, where, seen, wanted in said[key])
        for key in ("differences", "beyond_numbers")
    )
    return Answers(by, len(pairs), differing, said["by_handler"], beyond), faults[:MOST_FAULTS]


def measure_both(
    reference: Subject,
    other: Subject,
    sizes: Sequence[int],
    pairs: int,
    turn: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[dict[int, Ratio], list[str]]:
    """The ratio at each batch size, and why one was not measured. Each pair is measured inside of a `turn`."""
    ratios: dict[int, Ratio] = {}
    notes: list[str] = []
    for rows in sizes if pairs else ():
        try:
            measured = []
            for number in range(pairs):
                turns = [reference, other] if number % 2 == 0 else [other, reference]
                with turn():
                    seconds = {subject: subject.time(rows, TURN_S) for subject in turns}
                measured.append((seconds[reference], seconds[other]))
            ratios[rows] = ratio_of(measured)
        except SubjectFailed as error:
            notes.append(f"batches of {rows} were not timed: {error}")
    return ratios, notes
