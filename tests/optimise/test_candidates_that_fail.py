"""A candidate whose process crashes, hangs or takes too much is a row of the report, and leaves nothing running.

Its process is a stand-in that answers as one that has loaded a model, without torch. Real ones are in the long suite.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.optimise import optimise, subject
from marserve.optimise.candidates import Candidate
from marserve.optimise.optimise import Wish
from marserve.optimise.recording import Recording
from marserve.optimise.subject import Facts, Subject
from support.server import make_archive

HANDLER = "def handle(data, context):\n    return [0] * len(data)\n"
# Loaded at once; what it does with the order to build is filled in.
PROCESS = """
import json, os, resource, signal, sys, time
print(json.dumps({{"load_s": 0.0}}), flush=True)
sys.stdin.readline()
{does}
"""
GREEDY = """
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    bytearray(8 << 30)
except MemoryError:
    print(json.dumps({"refused": "MemoryError: there is no more"}), flush=True)
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


FACTS = """
facts = {{"kind": "torch", "why_not": "", "build": "", "weight_bytes": 1, "cpu": [], "versions": {{}}}}
print(json.dumps({{**facts, "why_parent": {why!r}}}), flush=True)
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
