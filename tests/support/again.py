"""Runs the test suite again and again, and counts which tests failed how often.

    make test-again RUNS=10 SEED=1

Each run has a seed: run 1 has the given one, or one that is drawn, and each further run has the next number. The seed
alone says in which order the files run (`by_file.py`) and whether two busy loops run beside the suite: they do where
it is divisible by three. One line of JSON for each finished run is appended to the history; the table is over all its
lines, so runs may be spread over days. What a failed run printed is kept beside the history, under its seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ALONE = "nothing"
BUSY = "two busy loops"
BUSY_LOOPS = 2
# A loop ends by itself when its time is over, or when the process that started it is gone.
_LOOP = """
import os, sys, time
parent, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while os.getppid() == parent and time.monotonic() < end:
    for _ in range(200_000): pass
"""
_ENDING_S = 30.0


@dataclass(frozen=True)
class Run:
    """One run of the suite, as a line of the history has it. `status` is pytest's exit status."""

    seed: int
    beside: str
    seconds: float
    status: int
    passed: int
    failed: list[str]
    commit: str
    began: str

    @property
    def is_green(self) -> bool:
        """Whether every test passed, and pytest itself has nothing to complain of."""
        return self.status == 0 and not self.failed


def beside(seed: int) -> str:
    """What runs beside the suite: a third of all seeds have two busy loops."""
    return ALONE if seed % 3 else BUSY


def read_history(text: str) -> list[Run]:
    """The runs of a history; a line that was cut short, as by a full disk, is left out."""
    runs = []
    for line in text.splitlines():
        try:
            runs.append(Run(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return runs


def show(runs: Sequence[Run]) -> str:
    """How many runs were green, and a row for each test that failed, the most frequent first."""
    busy = [run for run in runs if run.beside != ALONE]
    alone = [run for run in runs if run.beside == ALONE]
    rows = [
        f"{len(runs)} runs, {_green(runs)} green: {_green(alone)} of {len(alone)} alone, "
        f"{_green(busy)} of {len(busy)} beside {BUSY}"
    ]
    failures: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        for name in run.failed or ([] if run.is_green else [f"(no test: pytest ended with status {run.status})"]):
            failures[name].append(run)
    if failures:
        rows.append(f"{'failed':>6} {'alone':>6} {'beside':>6}  {'seeds':<24} test")
    for name, failed in sorted(failures.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        beside_loops = sum(run.beside != ALONE for run in failed)
        seeds = " ".join(str(run.seed) for run in failed[-3:]) + (" …" if len(failed) > 3 else "")
        rows.append(f"{len(failed):6} {len(failed) - beside_loops:6} {beside_loops:6}  {seeds:<24} {name}")
    return "\n".join(rows)


def _green(runs: Iterable[Run]) -> int:
    return sum(run.is_green for run in runs)


class Outcome:
    """Hooks of pytest that write what passed and what failed into a file when the session ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed = 0
        self._failed: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test fails once, also where its end fails after it."""
        if report.failed:
            self._failed[report.nodeid] = None
        elif report.passed and report.when == "call":
            self._passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported has failed."""
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_sessionfinish(self) -> None:
        """All of it at once."""
        self._path.write_text(json.dumps({"passed": self._passed, "failed": list(self._failed)}))


@contextmanager
def busy_loops(count: int, limit_s: float) -> Iterator[list[int]]:
    """Processes that only compute, while the block runs and for `limit_s` at most; their ids."""
    loops = [
        subprocess.Popen([sys.executable, "-S", "-c", _LOOP, str(os.getpid()), str(limit_s)]) for _ in range(count)
    ]
    try:
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_once(command: Sequence[str], seed: int, output: Path, limit_s: float) -> Run:
    """Run pytest's `command` in the order of the seed; what it prints goes to `output`.

    A run that does not end within `limit_s` is interrupted, then killed, and has failed.
    """
    began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    since = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, output.open("wb") as printed:
        outcome = Path(folder) / "outcome.json"
        asked = [*command, "--order-seed", str(seed), "--outcome", str(outcome)]
        with (
            busy_loops(0 if beside(seed) == ALONE else BUSY_LOOPS, limit_s),
            # A session of its own: what is ended is the whole of this run, and nothing else.
            subprocess.Popen(asked, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True) as suite,
        ):
            status = _wait(suite, limit_s)
        found = json.loads(outcome.read_text()) if outcome.exists() else {"passed": 0, "failed": []}
    seconds = round(time.monotonic() - since, 1)
    return Run(seed, beside(seed), seconds, status, found["passed"], found["failed"], _commit(), began)


def _wait(suite: subprocess.Popen[bytes], limit_s: float) -> int:
    try:
        return suite.wait(limit_s)
    except subprocess.TimeoutExpired:
        return _end(suite) or 1
    except KeyboardInterrupt:
        _end(suite)
        raise


def _end(suite: subprocess.Popen[bytes]) -> int:
    """Let the tests tidy up, then kill what is left of the run's session."""
    suite.send_signal(signal.SIGINT)
    try:
        status = suite.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        status = -signal.SIGKILL
    with suppress(ProcessLookupError):
        os.killpg(suite.pid, signal.SIGKILL)
    return status


def _commit() -> str:
    described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return described.stdout.strip()


def main() -> int:
    """Run what the flags ask for. The exit status is 1 when one of these runs was not green."""
    parser = argparse.ArgumentParser(prog="again", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, help="of the first run; drawn unless given")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which a run has failed")
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("command", nargs="+", help="pytest with its arguments, after --")
    asked = parser.parse_args()
    first = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1, 1_000_000)
    asked.history.parent.mkdir(parents=True, exist_ok=True)
    is_green = True
    try:
        for seed in range(first, first + asked.runs):
            _say(f"run {seed - first + 1} of {asked.runs}: SEED={seed}, beside {beside(seed)} …")
            output = asked.history.with_name(f"{seed}.log")
            run = run_once(asked.command, seed, output, asked.limit)
            _append(asked.history, run)
            _say(f"    {run.passed} passed, {len(run.failed)} failed, status {run.status}, {run.seconds} s")
            if run.is_green:
                output.unlink()
            else:
                _say(f"    its output: {output}")
            is_green = is_green and run.is_green
    except KeyboardInterrupt:
        _say("    interrupted: this run is not in the history")
        is_green = False
    _say(show(read_history(asked.history.read_text() if asked.history.exists() else "")))
    return 0 if is_green else 1


def _append(history: Path, run: Run) -> None:
    """One write, so that lines of runs side by side never mix; after a cut line it begins a new one."""
    with history.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
        begins_anew = file.read(1) not in (b"\n", b"")
        file.write((b"\n" if begins_anew else b"") + json.dumps(asdict(run)).encode() + b"\n")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
