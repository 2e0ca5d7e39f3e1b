"""`make test-again`: what a history of runs says, and what a run leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.again import ALONE, BUSY, Run, beside, busy_loops, main, read_history, run_once, show
from support.by_file import shuffled

# Stands for pytest: it notes its arguments, and its parent's children of that moment.
SUITE = """
import json, os, sys
asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))
children = open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()
print("seed", asked["--order-seed"], "children", len(children))
failed = ["a.py::test_x"] if int(asked["--order-seed"]) == 6 else []
json.dump({"passed": 3, "failed": failed}, open(asked["--outcome"], "w"))
sys.exit(bool(failed))
"""
COMMAND = [sys.executable, "-S", "-c", SUITE]


def run(seed: int, *failed: str, status: int | None = None) -> Run:
    """A run as the history has it."""
    ended = int(bool(failed)) if status is None else status
    return Run(seed, beside(seed), 12.5, ended, 7, list(failed), "abc", "2026-01-01T00:00:00+0000")


def test_a_third_of_the_seeds_have_busy_loops_beside() -> None:
    """Whatever the first seed is, and though each call makes one run."""
    assert [sum(beside(seed) == BUSY for seed in range(first, first + 9)) for first in (1, 2, 3)] == [3, 3, 3]
    assert beside(7) == ALONE


def test_a_seed_decides_the_order_of_files() -> None:
    """All files once, in the same order for every runner, in another one for another seed."""
    paths = [Path(f"tests/test_{number}.py") for number in range(30)]

    first = shuffled(paths, 1)

    assert sorted(first) == sorted(paths)
    assert first == shuffled(reversed(paths), 1)
    assert first not in (paths, shuffled(paths, 2))


def test_the_table_counts_over_all_runs() -> None:
    """What failed most often stands first, with where it failed and the seeds that show it again."""
    runs = [run(1), run(3, "a", "b"), run(4, "a"), run(5, "a"), run(6, "a"), run(8, status=3)]

    table = show(runs)

    assert table.splitlines() == [
        "6 runs, 1 green: 1 of 4 alone, 0 of 2 beside two busy loops",
        "failed  alone beside  seeds                    test",
        "     4      2      2  4 5 6 …                  a",
        "     1      1      0  8                        (no test: pytest ended with status 3)",
        "     1      0      1  3                        b",
    ]


def test_a_table_of_green_runs_is_one_line() -> None:
    """Nothing failed, and nothing is listed."""
    assert show([run(1), run(3)]) == "2 runs, 2 green: 1 of 1 alone, 1 of 1 beside two busy loops"


def test_a_line_that_was_cut_is_left_out() -> None:
    """The lines before and after it count."""
    line = json.dumps(vars(run(1)))

    assert read_history(f"{line}\n{line[:40]}\n[]\n{{}}\n{line}\n") == [run(1), run(1)]


def test_busy_loops_are_gone_with_the_run() -> None:
    """Ended and reaped, whatever ends the block; by themselves when their time is over."""
    ids: list[int] = []

    def fail_beside() -> None:
        with busy_loops(2, 60) as running:
            ids.extend(running)
            for process in running:
                os.kill(process, 0)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fail_beside()

    assert len(ids) == 2
    for process in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    with busy_loops(1, 0) as (bounded,):
        os.waitid(os.P_PID, bounded, os.WEXITED | os.WNOWAIT)  # returns though nothing ended it


def test_a_run_that_does_not_end_has_failed(tmp_path: Path) -> None:
    """It is interrupted, what it started is gone, and its line says that pytest was not done."""
    started = tmp_path / "started"
    hangs = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(started)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )

    ended = run_once([sys.executable, "-S", "-c", hangs], 7, tmp_path / "log", limit_s=3)

    assert not ended.is_green
    assert "KeyboardInterrupt" in (tmp_path / "log").read_text()
    child = int(started.read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or " Z " in state.read_text()


def test_runs_of_several_days_are_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each finished run adds its line; a failed one leaves what it printed, and fails the command."""
    history = tmp_path / "again" / "runs.jsonl"
    own = len(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())

    def again(seed: int, runs: int) -> int:
        monkeypatch.setattr("sys.argv", ["again", "--seed", str(seed), "--runs", str(runs)])
        sys.argv += ["--history", str(history), "--", *COMMAND]
        return main()

    assert again(5, 2) == 1
    assert "SEED=6, beside two busy loops" in capsys.readouterr().out
    history.write_text(history.read_text() + '{"seed"')  # the machine went down
    assert again(7, 1) == 0

    assert "3 runs, 2 green" in capsys.readouterr().out
    assert [(one.seed, one.passed, one.failed) for one in read_history(history.read_text())] == [
        (5, 3, []),
        (6, 3, ["a.py::test_x"]),
        (7, 3, []),
    ]
    assert [log.name for log in history.parent.glob("*.log")] == ["6.log"]
    assert (history.parent / "6.log").read_text() == f"seed 6 children {own + 3}\n"


@pytest.mark.system
def test_what_failed_is_what_pytest_reports(tmp_path: Path) -> None:
    """A failed test, a failed end and a file that cannot be imported, by their names, each once."""
    conftest = """
from pathlib import Path
import pytest
from support.again import Outcome
from support.by_file import ByFile
def pytest_configure(config):
    config.pluginmanager.register(ByFile(5), "by_file")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcome(Path("outcome.json")), "outcome")
@pytest.fixture
def ends_badly():
    yield
    assert 0
"""
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_a.py").write_text("def test_good(): pass\ndef test_bad(ends_badly): assert 0\n")
    (tmp_path / "test_b.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "-q"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        timeout=60,
        check=False,
    )

    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["passed"] == 1
    assert sorted(outcome["failed"]) == ["test_a.py::test_bad", "test_b.py"]
