"""Tries builds of an archive's model, judges each, and writes the best one into a new archive.

Each candidate is made, loaded and run in a process of its own, with limits of time and memory. What fails there is a
row of the report. The parent is the reference: it is recorded once, and measured beside each candidate in turns.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from marserve.archive.writing.writer import refuse_existing
from marserve.errors import without_stop
from marserve.files.digests import digest_of
from marserve.machine.describe import count_cores
from marserve.optimise.candidates import (
    CANDIDATES,
    DEFAULT_BOUNDS,
    NATIVE,
    PACKAGES,
    TOOLS,
    Candidate,
    Goal,
    Measured,
    beaten_by,
    best,
    bounds_of,
    choose,
    in_order,
    refuse_unknown,
    rows_of,
    split,
)
from marserve.optimise.compare import (
    Errors,
    agreement_of,
    check_scores,
    compare_answers,
    describe_agreement,
    describe_outputs,
    describe_ratios,
    measure_both,
)
from marserve.optimise.comparison import Agreement, Bounds, OutputErrors, Verdict, worst
from marserve.optimise.inputs import BadInputs, Input, OwnInputs, own_inputs
from marserve.optimise.optimised_archive import (
    digests_of_build,
    place_of,
    refuse_changed,
    states_of,
    write_optimised,
)
from marserve.optimise.proof import FOLDER as BUILD_FOLDER
from marserve.optimise.proof import PROOF_PATH, Proof, write_proof
from marserve.optimise.ratio import PAIRS, Ratio
from marserve.optimise.recording import Recording
from marserve.optimise.subject import GRACE_S, LOAD_S, Facts, Subject, SubjectFailed
from marserve.optimise.taken import Taken
from marserve.pool.pool import threads_for

GIB: Final = 1 << 30
MOST_SAMPLES: Final = 64
# The span of so many pairs holds the median with a certainty of 94 % (1 - 2 / 2**5), of the speed alone.
LOOK_PAIRS: Final = 5


@dataclass(frozen=True, slots=True)
class Wish:
    """What is looked for. `candidates` are names, none for all; `batch_size` 0: that of the archive.

    `within_s` bounds the whole search: what is unfinished then is a row that says so. `memory_bytes` bounds each
    candidate's process. `threads` are a worker's share, 0 for that of a server without `worker_threads`; each build is
    measured with one thread too. `scores` names outputs with class scores. Each pair is measured inside of a `turn`.
    """

    goal: Goal = "latency"
    bounds: Bounds = DEFAULT_BOUNDS
    candidates: tuple[str, ...] = ()
    batch_size: int = 0
    threads: int = 0
    within_s: float = 1800.0
    memory_bytes: int = 8 * GIB
    scores: tuple[str, ...] = ()
    pairs: int = PAIRS
    is_trusted: bool = False
    turn: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(slots=True)
class Row:
    """One candidate: why it was not tried or refused, or what it showed.

    `ratios` are by batch size, with a worker's share of threads; `ratios_of_one` with one, where the share is larger.
    `samples` calls lie beside its files, with what it gave.
    `may_change`: another try may end otherwise, for its process failed, or the time or the disk was not enough.
    """

    name: str
    is_exact: bool = True
    why_not: str = ""
    verdict: Verdict | None = None
    worst: dict[str, OutputErrors] = field(default_factory=dict)
    outputs: list[dict[str, object]] = field(default_factory=list)
    agreement: Agreement | None = None
    ratios: dict[int, Ratio] = field(default_factory=dict)
    ratios_of_one: dict[int, Ratio] = field(default_factory=dict)
    seconds: float = 0.0
    size: int = 0
    samples: int = 0
    may_change: bool = False

    @property
    def has_passed(self) -> bool:
        """Whether it may take the parent's place; a build that was judged may have failed after that."""
        return not self.why_not and self.verdict is not None and self.verdict.has_passed


@dataclass(slots=True)
class Report:
    """All rows, and the winner's name, empty where the parent stays; `archive` is what was written.

    `trust` is its digest where a server is to be told that it may load what is in it, else empty.
    `threads` are a worker's share, with which the ratios were measured that decide.
    """

    model: str
    version: str
    goal: Goal
    batch_size: int
    compared: int
    calibrated: int
    rows: list[Row]
    parent_bytes: int
    notes: list[str]
    threads: int = 1
    winner: str = ""
    archive: Path | None = None
    trust: str = ""
    seconds: float = 0.0


class _OutOfTime(SubjectFailed):
    """The time of the search is over; the message says it as the end of a sentence."""


class NothingToOptimise(SubjectFailed):
    """No build can take the place of the archive's model; the message says why."""


def optimise(
    archive: Path,
    inputs: Sequence[Input] | None,
    wish: Wish,
    folder: Path,
    *,
    force: bool = False,
    on_step: Callable[[str], None] = lambda step: None,
) -> Report:
    """Try the candidates, and write the best one's archive into `folder`. Blocks, for minutes.

    Without `inputs` those are taken that the archive brings itself, and a note says which; without candidates those
    that its `optimise` key names.

    Raises BadInputs where it has no inputs, NothingToOptimise, SubjectFailed for an archive that cannot be loaded,
    BadArchive, CannotArchive, UnknownCandidate, UnknownScores.
    """
    trusted = [archive.name] if wish.is_trusted else []

    def check(parent: Subject) -> None:
        refuse_existing(place_of(parent.load.model, folder), force=force)  # before minutes are spent

    before = states_of(archive)
    with _searched(partial(Subject, archive, trusted=trusted), inputs, wish, on_step, check) as search:
        report = search.report
        refuse_changed(archive, before)  # each candidate took it in anew
        if report.winner:
            on_step(f"writing the archive with {report.winner}")
            report.archive = search.write(archive, folder, force=force)
            # What was compiled here may run here.
            may_run = [report.archive.name] if wish.is_trusted or report.winner in NATIVE else []
            try:
                refuse_changed(archive, before)
                search.look_again(partial(Subject, report.archive, trusted=may_run), on_step)
            except BaseException:
                report.archive.unlink(missing_ok=True)
                raise
            report.trust = digest_of(report.archive) if report.winner in NATIVE else ""
    return report


def optimise_here(
    taken: Taken, wish: Wish, folder: Path, *, patience: float = 1.0, on_step: Callable[[str], None] = lambda step: None
) -> Report:
    """Try the candidates for a version that is taken in already, and put the best one into `folder`.

    The folder has the proof and the build where an archive would have them, and is not made without a winner. Limits of
    time are `patience` times as long. Raises as `optimise`.
    """
    start = partial(Subject, Path(taken.load.model_dir), taken=taken, patience=patience)
    with _searched(start, None, wish, on_step) as search:
        if search.report.winner:
            search.put(folder)
            search.look_again(partial(start, build=str(folder)), on_step)
    return search.report


def describe_report(report: Report) -> dict[str, Any]:
    """As `marserve optimise --json`, the page and the server show it."""
    return {
        "modelName": report.model,
        "modelVersion": report.version,
        "goal": report.goal,
        "batchSize": report.batch_size,
        "threads": report.threads,
        "calibrated": report.calibrated,
        "compared": report.compared,
        "seconds": report.seconds,
        "winner": report.winner or None,
        "archive": None if report.archive is None else str(report.archive),
        "trustedModels": report.trust or None,
        "notes": report.notes,
        "builds": [
            {
                "name": row.name,
                "passed": row.has_passed,
                "whyNot": row.why_not or None,
                "faults": [] if row.verdict is None else list(row.verdict.faults),
                "notes": [] if row.verdict is None else list(row.verdict.notes),
                "outputs": row.outputs,
                "agreement": describe_agreement(row.agreement),
                "ratios": [*describe_ratios(row.ratios, report.threads), *describe_ratios(row.ratios_of_one, 1)],
                "seconds": row.seconds,
                "bytes": row.size,
            }
            for row in report.rows
        ],
    }


@contextmanager
def _searched(
    start: Callable[..., Subject],
    inputs: Sequence[Input] | None,
    wish: Wish,
    on_step: Callable[[str], None],
    check: Callable[[Subject], None] = lambda parent: None,
) -> Iterator[_Search]:
    """The search with its report, while its files and the parent's process are there.

    `check` raises where what is found could not be used.
    """
    began = time.monotonic()
    refuse_unknown(wish.candidates)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="marserve-optimise-")))
        parent = stack.enter_context(start())
        share = wish.threads or share_of(parent)
        given = OwnInputs(list(inputs), "") if inputs is not None else _brought(parent, scratch)
        calibrating, compared = ([given.inputs[at] for at in indices] for indices in split(len(given.inputs)))
        on_step(f"loading {parent.name}")
        parent.loaded()
        facts = parent.facts()
        _refuse_what_cannot_be(facts, parent)
        check(parent)
        size = wish.batch_size or parent.batch_size
        parent.use_threads(share, GRACE_S)  # one alone would take longer to compare
        (scratch / "parent").mkdir()
        on_step(f"{len(compared)} inputs through {parent.name}")
        left = max(0.0, began + wish.within_s - time.monotonic())
        recorded = parent.record(compared, scratch / "parent", size, left)
        compared = compared[: len(recorded.answers)]  # a note says that the time was over
        if not recorded.runs:
            failed = next((answer.message for answer in recorded.answers if answer.message), "")
            none = f"no input was answered{f', the first fails with {without_stop(failed)}' if failed else ''}"
            raise NothingToOptimise(f"{parent.name} cannot be built anew: {recorded.why_not or none}.")
        check_scores(wish.scores, recorded, scratch / "parent")
        report = Report(
            parent.load.model,
            parent.load.version,
            wish.goal,
            size,
            len(compared),
            len(calibrating),
            [],
            facts.weight_bytes,
            [
                *([given.note] if given.note else []),
                *recorded.notes,
            ],
            share,
        )
        named = wish.candidates or parent.taken.optimise.candidates
        search = _Search(
            start, parent, recorded, facts, wish, scratch, calibrating, compared, size, share, report, bool(named)
        )
        search.until = began + wish.within_s
        agreement_is_known = bool(wish.scores or recorded.scores or recorded.has_compare)
        installed = [name for name in PACKAGES if find_spec(name) is not None]
        installed += [name for name in TOOLS if shutil.which(name)]
        choices = choose(
            facts.kind,
            facts.cpu,
            installed,
            named,
            len(compared),
            wish.bounds.min_agreement,
            has_agreement=agreement_is_known,
            is_drawn=given.is_drawn,
            calibrating=len(calibrating),
        )
        report.rows = [Row(each.candidate.name, each.candidate.is_exact, each.why_not) for each in choices]
        tried = in_order([choice.candidate for choice in choices if not choice.why_not])
        for number, candidate in enumerate(tried, 1):
            place = f"{number} of {len(tried)}"
            search.to_come = len(tried) - number
            row = search.try_one(candidate, partial(_tell_place, on_step, place))
            report.rows = [row if each.name == row.name else each for each in report.rows]
        report.winner = best(wish.goal, size, _measured(report.rows), facts.weight_bytes)
        yield search
        report.seconds = time.monotonic() - began


def _tell_place(on_step: Callable[[str], None], place: str, step: str) -> None:
    on_step(f"{place}, {step}")


def share_of(parent: Subject) -> int:
    """The threads that each worker of the archive would have on this machine."""
    return threads_for(parent.taken.max_workers, count_cores(), os.environ.get("OMP_NUM_THREADS"))


def _brought(parent: Subject, scratch: Path) -> OwnInputs:
    taken = parent.taken
    folder = scratch / "inputs"
    folder.mkdir()
    unpacked = Path(parent.load.model_dir)
    try:
        return own_inputs(unpacked, taken.optimise.inputs, taken.samples, taken.drawn, folder)
    except BadInputs as error:
        raise BadInputs(f"{parent.name}: {error.message}") from error


def _refuse_what_cannot_be(facts: Facts, parent: Subject) -> None:
    if facts.build:
        raise NothingToOptimise(f"{parent.name} serves the build {facts.build} already: optimise its parent.")
    if facts.why_not:
        raise NothingToOptimise(f"{parent.name} cannot be built anew: {facts.why_not}.")


def _measured(rows: Sequence[Row]) -> dict[str, Measured]:
    return {row.name: Measured(row.ratios, row.size) for row in rows if row.has_passed}


@dataclass(slots=True)
class _Search:
    """What all candidates of one search share."""

    start: Callable[..., Subject]
    parent: Subject
    recorded: Recording
    facts: Facts
    wish: Wish
    scratch: Path
    calibrating: Sequence[Input]
    compared: Sequence[Input]
    size: int
    share: int
    report: Report
    is_by_name: bool = False
    to_come: int = 0
    until: float = 0.0

    def folder_of(self, name: str) -> Path:
        """Where a candidate's files are."""
        return self.scratch / "builds" / name

    def try_one(self, candidate: Candidate, on_step: Callable[[str], None]) -> Row:
        """Make a candidate, compare it with the parent, and measure it. What fails is why the row is refused."""
        row = Row(candidate.name, candidate.is_exact)
        try:
            if any(run.is_cut_short for run in self.recorded.runs):
                raise self._out_of_time(" before the parent had run all its batches")
            self._left()
            self._try(candidate, row, on_step)
        except _OutOfTime as error:
            row.why_not, row.may_change = f"not finished: {error}", True
        except SubjectFailed as error:
            row.why_not, row.may_change = _first_line(str(error)), True
        return row

    def _left(self) -> float:
        """The seconds that are left. Raises _OutOfTime where there are none."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise self._out_of_time()
        return left

    def _allowed(self) -> float:
        """The seconds that one step may take: half of what is left, so that some is left if it hangs."""
        return self._left() / 2 if self.to_come else self._left()

    def _out_of_time(self, when: str = "", *, is_part: bool = False) -> _OutOfTime:
        within = f"{self.wish.within_s:g} s"
        return _OutOfTime(f"its part of the {within} was over{when}" if is_part else f"{within} were over{when}")

    def _try(self, candidate: Candidate, row: Row, on_step: Callable[[str], None]) -> None:
        build, run = self.folder_of(candidate.name), self.scratch / f"run-{candidate.name}"
        build.mkdir(parents=True)
        run.mkdir()
        wish = self.wish
        with self.start(memory_bytes=wish.memory_bytes, threads=self.share) as subject:
            on_step(f"{candidate.name}: building")
            subject.loaded(min(LOAD_S, self._left() + GRACE_S))
            # A single input calibrates nothing, and is an example all the same.
            examples = self.calibrating or self.compared
            built = subject.build(candidate.name, build, examples, self.size, self._allowed())
            if built.refused:
                row.why_not = "; ".join([built.refused, *built.notes])
                row.may_change = os.strerror(errno.ENOSPC) in built.refused
                return
            row.seconds, row.size = built.seconds, built.bytes
            if beaten := self._beaten(candidate, subject, row, on_step):
                row.why_not = beaten
                return
            on_step(f"{candidate.name}: comparing")
            recorded = subject.record(self.compared, run, self.size, self._allowed())
            if recorded.is_cut_short(len(self.compared)):  # what was not run has no faults
                tried, of = len(recorded.answers), len(self.compared)
                what = f" after {tried} of {of} inputs" if tried < of else " before all batches had been run"
                raise self._out_of_time(what, is_part=self.to_come > 0)
            errors = Errors([self.recorded, recorded], [self.scratch / "parent", run], wish.scores)
            failing = [
                f"input {at} fails with {theirs.message}"
                for at, (ours, theirs) in enumerate(zip(self.recorded.answers, recorded.answers, strict=False))
                if theirs.message and not ours.message
            ]
            agreement = errors.agreement
            if agreement is None and self.recorded.has_compare:
                both, folders = [self.recorded, recorded], [self.scratch / "parent", run]
                answers, _ = compare_answers(self.parent, both, folders)
                agreement = agreement_of(errors, answers, has_compare=True)
            verdict = errors.judge(agreement, bounds_of(candidate, wish.bounds))
            if recorded.why_not:
                failing.append(recorded.why_not)
            faults = [*failing[:3], *verdict.faults]
            if faults and built.notes:  # what was baked is the likely reason
                faults[0] = "; ".join([faults[0], *built.notes])
            row.verdict = Verdict(tuple(faults), (*built.notes, *verdict.notes))
            row.worst = worst(list(errors.runs.values())).outputs
            row.outputs = describe_outputs(errors.runs, errors.mates)
            row.agreement = agreement
            if row.has_passed:
                on_step(f"{candidate.name}: measuring beside the parent")
                self._left()
                row.samples = subject.write_samples(build, MOST_SAMPLES)
                self._measure(subject, row)
        shutil.rmtree(run, ignore_errors=True)

    def _beaten(self, candidate: Candidate, subject: Subject, row: Row, on_step: Callable[[str], None]) -> str:
        """Why a build need not be compared, after a look at its speed: one that passed is faster with certainty.

        Comparing takes most of a search. Those that were asked for by name are compared all the same.
        """
        if self.is_by_name:
            return ""
        goal, size, passed = self.wish.goal, self.size, _measured(self.report.rows)
        if not beaten_by(goal, size, 1.0, passed):
            return ""
        on_step(f"{candidate.name}: a look at its speed")
        rows = rows_of(goal, size)
        folder = self.scratch / f"look-{candidate.name}"
        folder.mkdir()
        subject.record(self.compared[: max(rows, 2)], folder, rows, self._allowed())
        shutil.rmtree(folder)
        for each in (self.parent, subject):
            each.use_threads(self.share, GRACE_S)
        looked, _ = measure_both(self.parent, subject, [rows], LOOK_PAIRS, self.wish.turn)
        if rows not in looked or not (faster := beaten_by(goal, size, looked[rows].high, passed)):
            return ""
        row.ratios = looked
        return f"not compared: {faster} is faster with certainty"

    def _measure(self, subject: Subject, row: Row) -> None:
        """Measure a build that passed, with one thread and with the worker's share of them.

        Raises _OutOfTime where the time is over before the share was measured, which decides.
        """
        assert row.verdict is not None
        sizes = sorted({1, self.size})
        # The share first, with which it was compared: loaded anew for other threads, a build may be compiled anew.
        for threads in sorted({1, self.share}, reverse=True):
            try:
                self._left()
                for each in (self.parent, subject):
                    each.use_threads(threads, GRACE_S)
            except SubjectFailed as error:
                measured: dict[int, Ratio] = {}
                with_threads = f"{threads} thread{'s' if threads > 1 else ''}"
                untimed = [f"it was not timed with {with_threads}: {_first_line(str(error))}"]
            else:
                measured, untimed = measure_both(self.parent, subject, sizes, self.wish.pairs, self._turn)
            if threads == self.share:
                row.ratios = measured
                if len(measured) < len(sizes):
                    self._left()
            else:
                row.ratios_of_one = measured
            row.verdict = Verdict(row.verdict.faults, (*row.verdict.notes, *untimed))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Where a pair is measured. Raises _OutOfTime."""
        self._left()
        with self.wish.turn():
            yield

    def write(self, archive: Path, folder: Path, *, force: bool) -> Path:
        """Write the winner's archive, the one that was searched with the build in it; its path."""
        output = place_of(self.report.model, folder)
        proof = self._proof("" if archive.is_dir() else digest_of(archive))
        write_optimised(archive, self.folder_of(self.report.winner), proof, output, force=force)
        return output

    def put(self, folder: Path) -> None:
        """Put the winner's files and the proof into a new folder."""
        (folder / PROOF_PATH).parent.mkdir(parents=True)
        (folder / PROOF_PATH).write_bytes(write_proof(self._proof("")))
        shutil.copytree(self.folder_of(self.report.winner), folder / BUILD_FOLDER)

    def _proof(self, parent: str) -> Proof:
        row = next(row for row in self.report.rows if row.name == self.report.winner)
        build = self.folder_of(row.name)
        return Proof(
            build=row.name,
            parent=parent,
            parent_version=self.report.version,
            files=digests_of_build(build),
            bounds={
                "maxError": bounds_of(_candidate(row.name), self.wish.bounds).max_error,
                "minAgreement": bounds_of(_candidate(row.name), self.wish.bounds).min_agreement,
            },
            errors=row.outputs,
            ratios={str(rows): [ratio.middle, ratio.low, ratio.high] for rows, ratio in row.ratios.items()},
            cpu=self.facts.cpu,
            versions=self.facts.versions,
            threads=self.share,
            samples=row.samples,
            goal=self.report.goal,
            flops=self._flops(),
            agreement=describe_agreement(row.agreement),
        )

    def _flops(self) -> dict[str, object] | None:
        """What the parent takes. Asked last: its process runs the author's code without numbers, which may end it."""
        try:
            return self.parent.flops()
        except SubjectFailed:
            return None

    def look_again(self, start: Callable[..., Subject], on_step: Callable[[str], None]) -> None:
        """Load what was written as a worker would. Raises NothingToOptimise if it is not used."""
        on_step("loading what was written")
        with start(threads=self.share) as made:
            made.loaded()
            facts = made.facts()
            if facts.build == self.report.winner:
                return
            if facts.why_parent:
                raise NothingToOptimise(f"{made.name}: {without_stop(facts.why_parent)}.")
            raise NothingToOptimise(
                f"{made.name} does not load the build {self.report.winner} of its archive: its handler loads its model "
                "neither by BaseHandler's initialize nor by context.load_model() on the CPU."
            )


def _candidate(name: str) -> Candidate:
    return next(each for each in CANDIDATES if each.name == name)


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]
