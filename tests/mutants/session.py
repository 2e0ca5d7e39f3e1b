"""A pytest plugin that runs each mutant of one file in a fork of a session that has collected the tests.

The session collects once and runs nothing itself. Its first fork runs all tests and finds which lines each of them
reaches and how long it takes; then each mutant has a fork of its own, in which the changed function gets its new code
(`function.__code__`, so that names imported from the module stay what they are), and the tests that reach the changed
lines run until one fails. What runs at import cannot be changed so: those mutants are files in the copy, and have a new
interpreter. So have the processes that tests start: the mutant lies in the copy as long as tests run that start some.

Nothing that a mutant's tests left survives them: processes, files, time.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import ctypes
import gc
import inspect
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType

import hypothesis
import pytest

from mutants import tracing
from mutants.draw import Mutant, all_mutants

KILLED, SURVIVED, TIMED_OUT, UNREACHED, BROKEN = "killed", "survived", "timed out", "not reached", "not viable"
STARTUP_S = 10.0
# Of pytest's flags. Its own time-outs take the signal that a mutant's tests are bounded by.
PLAIN = ("-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0", "-p", "mutants.session")
# The status of a process whose test took too long; pytest has 0 to 5.
LATE = 9
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Order:
    """What one session does: which mutants of `target` (their numbers), with which bounds, and where results go."""

    target: str
    numbers: list[int]
    results: str
    scratch: str
    cpu_s: float


@dataclass
class Reach:
    """What one test reaches, and what it takes."""

    node: str
    lines: list[int]
    seconds: float
    cpu_s: float
    has_passed: bool


@dataclass(frozen=True)
class Verdict:
    """How one mutant ended."""

    number: int
    line: int
    key: str
    change: str
    outcome: str
    seconds: float
    tests: int


def pytest_configure(config: pytest.Config) -> None:
    """Tests that draw examples draw the same ones for every mutant, and remember none.

    The process ends with the one that started it, however that ends.
    """
    parent = os.environ.get("MARSERVE_MUTANTS_PARENT")
    if parent is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):
            os._exit(1)
    hypothesis.settings.register_profile(
        "mutants", database=None, derandomize=True, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    hypothesis.settings.load_profile("mutants")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In an interpreter of one mutant: the tests that are wanted, in their order.

    Names that are new stay: parameters may be made of the very constant that was changed.
    """
    path = os.environ.get("MARSERVE_MUTANTS_WANTED")
    if path is None:
        return
    order = json.loads(Path(path).read_text())
    turns = {node: turn for turn, node in enumerate(order["wanted"])}
    tests = {node.partition("[")[0] for node in order["wanted"]}
    known = set(order["known"])
    items[:] = [
        item
        for item in items
        if item.nodeid in turns or (item.nodeid not in known and item.nodeid.partition("[")[0] in tests)
    ]
    items.sort(key=lambda item: turns.get(item.nodeid, len(turns)))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In place of pytest's loop over the tests."""
    path = os.environ.get("MARSERVE_MUTANTS_ORDER")
    if path is None:
        return None
    order = Order(**json.loads(Path(path).read_text()))
    Room(session, order).run()
    return True


class Room:
    """One file, its mutants, and the tests beside it."""

    def __init__(self, session: pytest.Session, order: Order) -> None:
        self._items = session.items
        self._config = session.config
        self._order = order
        self._target = Path(order.target)
        self._source = self._target.read_text("utf-8")
        self._code = compile(self._source, str(self._target), "exec")
        self._mutants = all_mutants(self._source)
        self._writes = 0
        self._is_written = False
        # Whatever a test leaves behind becomes this process's child, and is ended after it.
        self._prctl = ctypes.CDLL(None).prctl
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(self) -> None:
        """Find what tests reach, then run each mutant; results are appended as they come."""
        reaches = self._look()
        functions = self._functions()
        gc.freeze()  # what is loaded stays where it is: a collection in a fork copies none of it
        with open(self._order.results, "w", encoding="utf-8") as results:
            results.write(json.dumps({"tests": len(reaches), "failing": self._failing(reaches)}) + "\n")
            for number in self._order.numbers:
                verdict = self._judge(number, self._mutants[number], reaches, functions)
                results.write(json.dumps(asdict(verdict)) + "\n")
                results.flush()

    @staticmethod
    def _failing(reaches: Iterable[Reach]) -> list[str]:
        return [reach.node for reach in reaches if not reach.has_passed]

    # ------------------------------------------------------------------------------------------------- what tests reach

    def _look(self) -> list[Reach]:
        notes = os.environ["MARSERVE_MUTANTS_NOTES"]
        found = Path(self._order.scratch, "reach.json")
        pid = os.fork()
        if not pid:
            try:
                self._be_quiet()
                signal.signal(signal.SIGVTALRM, _give_up)
                tracing.begin()
                reaches = [self._watch(item, following, notes) for item, following in self._pairs(self._items)]
                found.write_text(json.dumps([asdict(reach) for reach in reaches]))
            except BaseException:
                Path(self._order.scratch, "why").write_text(traceback.format_exc())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        self._sweep()
        if not found.exists():
            why = Path(self._order.scratch, "why")
            raise RuntimeError(why.read_text() if why.exists() else "the tests ended the process that watches them")
        return [Reach(**reach) for reach in json.loads(found.read_text())]

    def _watch(self, item: pytest.Item, following: pytest.Item | None, notes: str) -> Reach:
        Path(notes).write_bytes(b"")
        tracing.begin_again()
        # One that takes so long while it is watched is of no use within the bound of a mutant.
        signal.setitimer(signal.ITIMER_VIRTUAL, 3 * self._order.cpu_s)
        began_s, cpu_began_s = own_time_s(os.getpid()), _processor_time_s()
        failures = self._play(item, following)
        seconds, cpu_s = own_time_s(os.getpid()) - began_s, _processor_time_s() - cpu_began_s
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        lines = sorted({int(line) for line in Path(notes).read_bytes().split()})
        return Reach(item.nodeid, lines, seconds, cpu_s, not failures)

    # ------------------------------------------------------------------------------------------------------ one mutant

    def _judge(
        self, number: int, mutant: Mutant, reaches: list[Reach], functions: dict[tuple[str, int], list[FunctionType]]
    ) -> Verdict:
        chosen = self._choose(mutant, reaches)
        began = time.monotonic()

        def verdict(outcome: str) -> Verdict:
            return Verdict(
                number,
                mutant.lines[0],
                mutant.key,
                mutant.change,
                outcome,
                round(time.monotonic() - began, 2),
                len(chosen),
            )

        if not chosen:
            return verdict(UNREACHED)
        tree = mutant.apply(self._source)
        try:
            code = compile(tree, str(self._target), "exec")
        except (SyntaxError, ValueError):
            return verdict(BROKEN)
        swaps = self._swaps(mutant, code, functions) if mutant.is_in_function else []
        try:
            if not swaps or any(tracing.STARTED in reach.lines for reach in chosen):
                self._write(ast.unparse(tree))
            if swaps:
                return verdict(self._run_forked(swaps, chosen))
            return verdict(self._run_anew(chosen))
        finally:
            if self._is_written:
                self._write(self._source)
            self._sweep()

    def _choose(self, mutant: Mutant, reaches: list[Reach]) -> list[Reach]:
        """The quickest tests that reach the mutant, as many as fit into its time: while watched all took longer.

        One case of each test first, then the others: a hundred cases of one claim must not displace another claim.
        """
        first, last = mutant.lines
        good = [reach for reach in reaches if reach.has_passed]
        if mutant.is_in_function:
            good = [reach for reach in good if any(first <= line <= last for line in reach.lines)]
        good.sort(key=lambda reach: reach.seconds)
        cases: collections.Counter[str] = collections.Counter()
        turns: list[tuple[int, int, Reach]] = []
        for reach in good:
            test = reach.node.partition("[")[0]
            turns.append((cases[test], len(turns), reach))
            cases[test] += 1
        chosen: list[Reach] = []
        left_s, left_cpu_s = 4 * self._order.cpu_s, 2 * self._order.cpu_s
        for _, _, reach in sorted(turns, key=lambda turn: turn[:2]):
            if not chosen or (reach.seconds <= left_s and reach.cpu_s <= left_cpu_s):
                chosen.append(reach)
                left_s -= reach.seconds
                left_cpu_s -= reach.cpu_s
        return chosen

    def _swaps(
        self, mutant: Mutant, code: CodeType, functions: dict[tuple[str, int], list[FunctionType]]
    ) -> list[tuple[FunctionType, CodeType]]:
        """Which live functions get which code; empty where only a new interpreter will do."""
        old = _outermost(self._code, mutant.lines[0])
        if old is None:
            return []
        new = next((one for one in _all_codes(code) if _place(one) == _place(old)), None)
        if new is None or old.co_freevars != new.co_freevars:
            return []
        return [(function, new) for function in functions.get(_place(old), ())]

    def _functions(self) -> dict[tuple[str, int], list[FunctionType]]:
        found: dict[tuple[str, int], list[FunctionType]] = {}
        for thing in gc.get_objects():
            if type(thing) is FunctionType and thing.__code__.co_filename == str(self._target):
                found.setdefault(_place(thing.__code__), []).append(thing)
        return found

    def _run_forked(self, swaps: list[tuple[FunctionType, CodeType]], chosen: list[Reach]) -> str:
        expected_s = sum(reach.seconds for reach in chosen)
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            status = 3
            try:
                os.setpgid(0, 0)
                cpu_s = int(self._order.cpu_s + 2 * expected_s) + 1
                resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                self._be_quiet()
                for function, code in swaps:
                    function.__code__ = code
                wanted = {reach.node: index for index, reach in enumerate(chosen)}
                items = [item for item in self._items if item.nodeid in wanted]
                items.sort(key=lambda item: wanted[item.nodeid])
                status = 0
                for item, following in self._pairs(items):
                    bound_s = self._order.cpu_s + 4 * chosen[wanted[item.nodeid]].seconds
                    with _bounded(bound_s):
                        has_failed = self._play(item, following)
                    if has_failed:
                        os._exit(1)
            except BaseException:
                status = 1
            finally:
                os._exit(status)
        return self._wait(pid, expected_s)

    def _run_anew(self, chosen: list[Reach]) -> str:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        for name in ("MARSERVE_MUTANTS_ORDER", "MARSERVE_MUTANTS_TRACED", "MARSERVE_MUTANTS_NOTES"):
            environment.pop(name, None)
        wanted = Path(self._order.scratch, "wanted.json")
        wanted.write_text(
            json.dumps({"known": [item.nodeid for item in self._items], "wanted": [reach.node for reach in chosen]})
        )
        environment["MARSERVE_MUTANTS_WANTED"] = str(wanted)
        environment["MARSERVE_MUTANTS_PARENT"] = str(os.getpid())
        files = list(dict.fromkeys(reach.node.partition("::")[0] for reach in chosen))
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", "-q", *PLAIN, f"--basetemp={self._order.scratch}/t", *files],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        process.returncode = 0  # it is waited for below
        return self._wait(process.pid, sum(reach.seconds for reach in chosen) + STARTUP_S)

    def _wait(self, pid: int, expected_s: float) -> str:
        """How the process ended. Its time stands still while others have the processor."""
        until_s = 4 * self._order.cpu_s + 4 * expected_s
        pause_s = 0.001
        began_s = own_time_s(pid)
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                if os.WIFSIGNALED(status):
                    return TIMED_OUT if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else KILLED
                return {0: SURVIVED, 1: KILLED, LATE: TIMED_OUT}.get(os.WEXITSTATUS(status), BROKEN)
            if own_time_s(pid) - began_s >= until_s:
                break
            time.sleep(pause_s)
            pause_s = min(0.05, pause_s * 1.5)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return TIMED_OUT

    # -------------------------------------------------------------------------------------------------------- the tests

    @staticmethod
    def _pairs(items: list[pytest.Item]) -> Iterable[tuple[pytest.Item, pytest.Item | None]]:
        return zip(items, [*items[1:], None], strict=True)

    def _play(self, item: pytest.Item, following: pytest.Item | None) -> bool:
        """Run one test; whether it failed."""
        self._failed = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return self._failed

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure, at whichever of a test's stages."""
        self._failed = self._failed or report.failed

    def _be_quiet(self) -> None:
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        self._config.pluginmanager.register(self, "mutants")
        devnull = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(devnull, descriptor)

    # -------------------------------------------------------------------------------------------------------- the place

    def _write(self, text: str) -> None:
        """Put a text in the target's place, with a time that no other had: compiled files go by it."""
        self._writes += 1
        self._is_written = text is not self._source
        self._target.write_text(text, "utf-8")
        os.utime(self._target, (1_000_000_000 + self._writes,) * 2)

    def _sweep(self) -> None:
        """End what tests left running and delete what they wrote."""
        for _ in range(200):
            children = _children_of(os.getpid())
            for child in children:
                for kill in (os.killpg, os.kill):
                    try:
                        kill(child, signal.SIGKILL)
                    except (ProcessLookupError, PermissionError):
                        continue
            if not children:
                break
            for child in children:
                try:
                    os.waitpid(child, 0)
                except ChildProcessError:
                    continue
        shutil.rmtree(Path(self._order.scratch, "t"), ignore_errors=True)


def own_time_s(pid: int) -> float:
    """The clock, less what a process has waited for a processor: what others do on the machine does not move it."""
    try:
        waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    except (OSError, IndexError):  # it has ended, or the system does not say
        waited_ns = 0
    return time.monotonic() - waited_ns / 1e9


@contextlib.contextmanager
def _bounded(bound_s: float) -> Iterator[None]:
    """End the process with `LATE` where the block takes longer, by its own time."""
    end_s = own_time_s(os.getpid()) + bound_s

    def look(*_: object) -> None:
        left_s = end_s - own_time_s(os.getpid())
        if left_s <= 0:
            os._exit(LATE)
        signal.setitimer(signal.ITIMER_REAL, max(0.01, left_s))

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, bound_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _processor_time_s() -> float:
    """What this process has used, and those of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _give_up(*_: object) -> None:
    pytest.fail("it takes too long to be run for each mutant")


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def _outermost(code: CodeType, line: int) -> CodeType | None:
    """The function below a module or class that holds the line; classes are looked into."""
    for one in _inner(code):
        lines = [number for part in _all_codes(one) for _, _, number in part.co_lines() if number is not None]
        if min(one.co_firstlineno, *lines) <= line <= max(lines):
            return one if one.co_flags & inspect.CO_NEWLOCALS else _outermost(one, line)
    return None


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in _inner(code):
        yield from _all_codes(one)


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (one for one in code.co_consts if isinstance(one, CodeType))
