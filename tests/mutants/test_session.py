"""Running mutants: each ends as its tests say, and nothing of one is left for the next."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mutants.__main__ import (
    choose,
    copy_of_the_repository,
    join,
    killed_share,
    mutants_of,
    read_results,
    run_room,
    still_to_kill,
    summary,
)
from mutants.draw import all_mutants

SOURCE = '''
"""A file."""
import pathlib, subprocess
LIMIT = 10
def is_over(number):
    return number > LIMIT
def twice(number):
    return number * 2
def unheard(number):
    return number
def far(number):
    return number or 40
def down(number):
    while number > 0:
        number -= 3
def start(wanted):
    if wanted == "none":
        return
    subprocess.Popen(["sleep", "1234.75"], start_new_session=True)
    raise ValueError
'''
TESTS = """
import subprocess, sys
import pytest
from marserve import tiny
from marserve.tiny import twice
def test_over():
    assert tiny.is_over(11) and not tiny.is_over(10)
def test_twice():
    assert twice(0) == 0
def test_far():
    line = [sys.executable, "-c", "import marserve.tiny; print(marserve.tiny.far(0))"]
    assert subprocess.run(line, capture_output=True, check=True).stdout == b"40\\n"
def test_down():
    tiny.down(2)
def test_start():
    tiny.start("none")
def test_broken():
    assert False
"""
ENDS = {
    "number > LIMIT → number >= LIMIT": "killed",
    "10 → 11": "killed",
    "2 → 3": "survived",
    "return number → return None": "not reached",
    "40 → 41": "killed",
    "number -= 3 → number += 3": "timed out",
    "wanted == 'none' → wanted != 'none'": "killed",
}


def processes(word: str) -> list[Path]:
    """The processes that have the word in their command line."""
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if word.encode() in path.read_bytes()]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A small repository."""
    here = tmp_path / "copy"
    shutil.copytree(Path(__file__).parent, here / "tests/mutants", ignore=shutil.ignore_patterns("test_*", "__pyc*"))
    files = {
        "server/marserve/__init__.py": "",
        "server/marserve/tiny.py": SOURCE,
        "tests/test_tiny.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["long", "torch", "contract"]\n'
        'addopts = "--import-mode=importlib"',
    }
    for name, text in files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    shutil.copy2(here / "tests/mutants/tracing.py", here / "server/sitecustomize.py")
    return here


@pytest.mark.system
def test_a_mutant_ends_as_its_tests_say_and_leaves_nothing(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, in one that a test starts, at import, in a loop without end; the file is as it was."""
    numbers = [number for number, mutant in enumerate(all_mutants(SOURCE)) if mutant.change in ENDS]
    assert len(numbers) == len(ENDS)

    verdicts = run_room("tiny", numbers, copy, tmp_path, cpu_s=0.5)

    assert {verdict["change"]: verdict["outcome"] for verdict in verdicts} == ENDS
    assert "without any change: tests/test_tiny.py::test_broken" in capsys.readouterr().out
    assert (copy / "server/marserve/tiny.py").read_text() == SOURCE
    assert not processes("1234.75")
    assert not (tmp_path / "t").exists()


def test_the_same_seed_chooses_the_same_mutants_in_proportion_to_the_rooms() -> None:
    """Another seed chooses others; 0 is all there are."""
    rooms = ["wire", "pool/dispatch/batcher"]
    chosen, every = choose(rooms, 100, "a"), choose(rooms, 0, "a")

    assert choose(rooms, 100, "a") == chosen != choose(rooms, 100, "b")
    assert sum(map(len, chosen.values())) == 100
    assert all(set(chosen[room]) < set(every[room]) for room in rooms)


def test_what_survived_is_found_again_where_it_stands() -> None:
    """What the source has no longer is passed over, and what was killed is not asked for."""
    mutants = mutants_of("wire")
    verdicts = [
        {"key": mutant.key, "outcome": "survived" if number % 3 else "killed"} for number, mutant in enumerate(mutants)
    ]

    numbers = still_to_kill("wire", [*verdicts, {"key": "f | 1: 1 → 2 (1)", "outcome": "survived"}])

    assert numbers == [number for number in range(len(mutants)) if number % 3]


def test_what_was_found_stays_with_its_mutant_when_the_source_changes_elsewhere() -> None:
    """At import, too. What the source has no longer does not count, and what was run again is what it is now."""
    before = all_mutants("import os\nA = 1\nB = 2\ndef f():\n    return os.a < A\n")
    after = all_mutants("C = 9\nB = 2\ndef f():\n    C\n    return os.a < A\n")
    assert len({mutant.key for mutant in before}) == len(before)
    found = [{"key": mutant.key, "change": mutant.change, "line": 0, "outcome": "survived"} for mutant in before]
    again = {**found[-1], "outcome": "killed"}

    joined = join(after, found, [again])

    assert [(one["line"], one["change"], one["outcome"]) for one in joined] == [
        (2, "2 → 3", "survived"),
        (2, "2 → 1", "survived"),
        *((5, one["change"], "survived") for one in found[-3:-1]),
        (5, again["change"], "killed"),
    ]


def test_what_was_found_before_a_room_was_cut_off_is_kept(tmp_path: Path) -> None:
    """A line that was being written then is left out."""
    assert read_results(tmp_path) == []
    (tmp_path / "results.jsonl").write_text('{"tests": 3, "failing": []}\n{"key": "a"}\n{"key": "b"}\n{"ke')

    assert read_results(tmp_path) == [{"key": "a"}, {"key": "b"}]


def test_a_copy_has_what_git_has_and_a_tracer_for_every_interpreter(tmp_path: Path) -> None:
    """Nothing is written to the repository itself."""
    copy = copy_of_the_repository(tmp_path)

    assert (copy / "server/marserve/wire.py").is_file()
    assert (copy / "server/sitecustomize.py").is_file()
    assert ".git" not in os.listdir(copy)


def test_the_share_is_of_the_viable() -> None:
    """What ends by time counts as killed; what no test reaches has survived."""
    from collections import Counter

    counts = Counter({"killed": 8, "timed out": 1, "survived": 2, "not reached": 1, "not viable": 5})

    assert killed_share(counts) == 0.75
    line = " ".join(summary("pool/queue", counts).split())
    assert line == "pool/queue drawn 17 viable 12 killed 9 (75 %, 1 of them by time) survived 2 not reached 1"
