"""A candidate whose process crashes, hangs or takes too much is a row of the report, and leaves nothing running.

Its process is a stand-in that answers as one that has loaded a model, without torch. Real ones are in the long suite.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from marserve.optimise import optimise, subject
from marserve.optimise.candidates import Candidate
from marserve.optimise.inputs import Input
from marserve.optimise.optimise import Wish
from marserve.optimise.recording import RecordedRun, Recording, read_recording
from marserve.optimise.subject import Facts, Subject
from support.server import make_archive

HANDLER = "def handle(data, context):\n    return [0] * len(data)\n"
# Loaded at once; what it does with its first order, which is to build, is filled in.
PROCESS = """
import json, os, resource, signal, sys, time

def read():
    return json.loads(sys.stdin.readline())

def answer(order, **said):
    print(json.dumps({{**said, "number": order["number"]}}), flush=True)

answer({{"number": 0}}, load_s=0.0)
order = read()
{does}
"""
GREEDY = """
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    bytearray(8 << 30)
except MemoryError:
    answer(order, refused="MemoryError: there is no more")
time.sleep(60)
"""


@pytest.fixture
def search(tmp_path: Path) -> Any:
    """A search of an archive whose parent has been recorded; 60 s are left."""
    archive = make_archive(tmp_path / "m.mar", HANDLER)

    def start(**given: Any) -> Subject:
        return Subject(archive, **given)

    made = optimise._Search(
        start=start,
        parent=None,  # type: ignore[arg-type]  # looked at once a candidate was built
        recorded=Recording([], "torch", "", []),
        facts=Facts("torch", "", "", 100, [], {}),
        wish=Wish(within_s=300.0),
        scratch=tmp_path / "scratch",
        calibrating=[],
        compared=[],
        size=4,
        share=1,
        report=None,  # type: ignore[arg-type]  # as the parent
        is_by_name=True,
    )
    made.scratch.mkdir()
    made.until = time.monotonic() + 60
    return made


def stand_in(does: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Have such a process in the place of each candidate's; those that were started."""
    program = folder / "process.py"
    program.write_text(PROCESS.format(does=does))
    begin, started = subprocess.Popen, []

    def popen(_: Any, **given: Any) -> subprocess.Popen[bytes]:
        started.append(begin([sys.executable, "-I", "-S", str(program)], **given))
        return started[-1]

    monkeypatch.setattr(subject.subprocess, "Popen", popen)
    return started


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("os._exit(7)", "m 1.0: its process ended with status 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "m 1.0: its process ended with signal 9"),
        ("print('no kernel', file=sys.stderr, flush=True); os._exit(1)", "m 1.0: its process ended with status 1"),
        ("time.sleep(60)", "m 1.0 did not answer within "),
        (GREEDY, "MemoryError: there is no more"),
    ],
    ids=["crash", "killed", "words", "hang", "greedy"],
)
def test_a_candidate_that_fails_is_a_row_with_its_reason(
    does: str, why: str, search: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its process is gone; the parent's search goes on."""
    started = stand_in(does, tmp_path, monkeypatch)
    monkeypatch.setattr(subject, "GRACE_S", 0.2)
    steps: list[str] = []
    if "did not answer" in why:
        search.until = time.monotonic() + 1

    row = search.try_one(Candidate("bf16", is_exact=False), steps.append)

    assert row.why_not.startswith(why), row
    assert not row.has_passed
    assert steps == ["bf16: building"]
    (process,) = started
    assert process.poll() is not None


def test_candidates_that_come_after_the_time_are_rows_that_say_so(
    search: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started for them; a later search may find more."""
    started = stand_in("", tmp_path, monkeypatch)
    search.until = time.monotonic()

    row = search.try_one(Candidate("bf16", is_exact=False), lambda step: None)

    assert (row.why_not, row.may_change, row.has_passed) == ("not finished: 300 s were over", True, False)
    assert started == []


ANSWER = {"status": 200, "message": "", "headers": [], "file": "answer-0", "call": 0}
ALONE = {"name": "alone", "file": "run-0.npz"}
IN_TWOS = {"name": "in twos", "file": "run-1.npz"}
# What a process records that had the time for two inputs and all runs.
WHOLE: dict[str, Any] = {
    "answers": [ANSWER, {**ANSWER, "call": 1}],
    "kind": "torch",
    "why_not": "",
    "runs": [ALONE, IN_TWOS],
}
# Builds at once, records as it is told here, and answers whatever else comes; what it was told is in a file.
RECORDS = """
import pathlib, shutil
here = pathlib.Path({here!r})
answer(order, seconds=1.0, bytes=10)
while line := sys.stdin.readline():
    order = json.loads(line)
    with open(here / "told", "a") as told:
        told.write(line)
    if order["do"] == "record":
        for run in ("run-0.npz", "run-1.npz"):
            shutil.copy(here / run, order["folder"])
        answer(order, **json.loads({recorded!r}))
    else:
        answer(order, samples=2, seconds=0.1, calls=1)
"""


class Parent:
    """The parent's process, as far as it is measured."""

    def use_threads(self, threads: int, within_s: float) -> None:
        """At once."""

    def time(self, rows: int, seconds: float) -> float:
        """As the stand-in."""
        return 0.2


@pytest.fixture
def recording(search: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Has the candidates of the search record this, and the parent what it is told; the orders that were given."""
    (search.scratch / "parent").mkdir()
    for at, folder in enumerate((tmp_path, search.scratch / "parent")):
        for run in (ALONE, IN_TWOS):
            with zipfile.ZipFile(folder / run["file"], "w") as file:
                for call in range(2):
                    with file.open(f"{call}/output", "w") as member:
                        np.lib.format.write_array(member, np.array([1.0 + call, 2.0 + at * 1e-7]))
    search.recorded, search.parent = read_recording(WHOLE), Parent()
    search.compared = [Input(tmp_path / "a", ""), Input(tmp_path / "b", "")]

    def record(**changed: Any) -> list[dict[str, Any]]:
        does = RECORDS.format(here=str(tmp_path), recorded=json.dumps({**WHOLE, **changed}))
        stand_in(does, tmp_path, monkeypatch)
        return Told(tmp_path / "told")

    return record


class Told(list[dict[str, Any]]):
    """The orders after the build, read when they are looked at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return iter([json.loads(line) for line in lines])


EXACT = Candidate("channels-last", is_exact=True)


def test_a_candidate_that_recorded_all_passes_and_is_measured(search: Any, recording: Any) -> None:
    """With what is left of the time, and no more."""
    told = recording()

    row = search.try_one(EXACT, lambda step: None)

    assert row.has_passed, row
    assert list(row.ratios) == [1, 4]
    (order,) = [order for order in told if order["do"] == "record"]
    assert 0 < order["within_s"] < 60


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"answers": [ANSWER]}, "not finished: 300 s were over after 1 of 2 inputs"),
        (
            {"runs": [ALONE, {**IN_TWOS, "is_cut_short": True}]},
            "not finished: 300 s were over before all batches had been run",
        ),
    ],
    ids=["inputs", "batches"],
)
def test_a_candidate_whose_recording_was_cut_short_has_not_passed(
    changed: dict[str, Any], why: str, search: Any, recording: Any
) -> None:
    """A run without a batch has no fault. A later search may have the time."""
    recording(**changed)

    row = search.try_one(EXACT, lambda step: None)

    assert (row.why_not, row.may_change, row.has_passed) == (why, True, False)


def test_a_step_takes_half_of_what_is_left_at_most_unless_its_candidate_is_the_last(
    search: Any, recording: Any
) -> None:
    """Else one that hangs would leave nothing to the others."""
    told = recording(answers=[ANSWER])
    search.to_come = 1

    row = search.try_one(EXACT, lambda step: None)

    (order,) = [order for order in told if order["do"] == "record"]
    assert 20 < order["within_s"] <= 30
    assert row.why_not == "not finished: its part of the 300 s was over after 1 of 2 inputs"


def test_a_parent_that_answered_fewer_inputs_is_compared_by_those_and_without_its_batches_nothing_passes(
    search: Any, recording: Any
) -> None:
    """Both happen where the time is over while it is recorded."""
    recording(answers=[ANSWER])
    fewer = read_recording({**WHOLE, "answers": [ANSWER]})
    search.recorded, search.compared = fewer, search.compared[:1]
    assert search.try_one(EXACT, lambda step: None).has_passed

    cut = RecordedRun("in twos", "run-1.npz", is_cut_short=True)
    search.recorded = msgspec.structs.replace(fewer, runs=[fewer.runs[0], cut])
    row = search.try_one(Candidate("onnx", is_exact=True), lambda step: None)

    why = "not finished: 300 s were over before the parent had run all its batches"
    assert (row.why_not, row.may_change, row.has_passed) == (why, True, False)


@pytest.mark.parametrize(
    ("step", "orders"),
    [("building", []), ("comparing", []), ("measuring", ["record"])],
)
def test_no_step_begins_once_the_time_is_over(step: str, orders: list[str], search: Any, recording: Any) -> None:
    """What the steps before took is gone for those after."""
    told = recording()

    def over(said: str) -> None:
        if step in said:
            search.until = time.monotonic()

    row = search.try_one(EXACT, over)

    assert (row.why_not, row.may_change, row.has_passed) == ("not finished: 300 s were over", True, False)
    assert [order["do"] for order in told] == orders


@pytest.mark.parametrize(("turns", "passes"), [(2, False), (12, False), (18, True)])
def test_a_measurement_ends_with_the_time_and_one_thread_alone_may_be_left_out(
    turns: int, passes: bool, search: Any, recording: Any
) -> None:
    """Nine pairs of each batch size with a worker's share, which decides; then the same with one thread."""
    recording()
    seen = 0

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        nonlocal seen
        seen += 1
        yield
        if seen == turns:
            search.until = time.monotonic()

    search.wish = Wish(within_s=300.0, turn=turn)
    search.share = 2
    row = search.try_one(EXACT, lambda step: None)

    assert seen == turns
    assert (row.has_passed, row.why_not) == (passes, "" if passes else "not finished: 300 s were over")
    if passes:
        assert list(row.ratios) == [1, 4]
        assert "it was not timed with 1 thread: 300 s were over" in row.verdict.notes


FACTS = """
facts = {{"kind": "torch", "why_not": "", "build": "", "weight_bytes": 1, "cpu": [], "versions": {{}}}}
answer(order, **facts, why_parent={why!r})
"""


@pytest.mark.parametrize(
    ("why", "said"),
    [
        (
            "the build bf16 of the archive is not used, the parent serves: output of sample 0 is off by 0.2.",
            "m 1.0: the build bf16 of the archive is not used, the parent serves: output of sample 0 is off by 0.2.",
        ),
        (
            "",
            "m 1.0 does not load the build bf16 of its archive: its handler loads its model neither by BaseHandler's "
            "initialize nor by context.load_model() on the CPU.",
        ),
    ],
)
def test_a_build_that_is_not_used_once_it_is_written_says_why(
    why: str, said: str, search: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of the load, if it tried the build at all."""
    stand_in(FACTS.format(why=why), tmp_path, monkeypatch)
    search.report = SimpleNamespace(winner="bf16")

    with pytest.raises(optimise.NothingToOptimise) as raised:
        search.look_again(search.start, lambda step: None)

    assert str(raised.value) == said


def test_a_proof_says_how_many_samples_were_written_and_the_goal(search: Any) -> None:
    """Large ones are fewer than inputs were compared."""
    row = optimise.Row("bf16", is_exact=False, samples=7)
    search.report = SimpleNamespace(winner="bf16", version="1.0", goal="memory", rows=[row])
    search.parent = SimpleNamespace(flops=lambda: None)
    search.compared = [None] * 64
    search.folder_of("bf16").mkdir(parents=True)

    proof = search._proof("")

    assert (proof.samples, proof.goal) == (7, "memory")
