"""What each test file costs in seconds of a processor: its own, and those of the processes that it started.

A sum of processor time stays nearly the same while others use the machine; wall time does not. `pytest --cost FILE`
appends a line of JSON for each test and each collected file; `python tests/support/cost.py FILE 20` prints the twenty
most expensive files. `make test-cost` does both.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Reading:
    """What this process and the ones that it reaped have used so far, in seconds."""

    own: float
    children: float
    wall: float


def read() -> Reading:
    """The figures of now."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Reading(own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime, time.monotonic())


class CostReport:
    """Hooks of pytest that append a line for each test, and for each file that is collected."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._collecting_since = read()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """A test with all of its fixtures; a module's end belongs to its last test."""
        before = read()
        result = yield
        if isinstance(item, pytest.Function):
            self._write("test", item.nodeid, before)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, object, object]:
        """What importing a test file takes, by the first file that imports a package."""
        before = read()
        result = yield
        if isinstance(collector, pytest.Module):
            self._write("collect", collector.nodeid, before)
        return result

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All of the collecting in one process."""
        self._write("collected", f"{len(session.items)} tests", self._collecting_since)

    def _write(self, kind: str, name: str, before: Reading) -> None:
        after = read()
        line = {
            "kind": kind,
            "name": name,
            "pid": os.getpid(),
            "own": round(after.own - before.own, 4),
            "children": round(after.children - before.children, 4),
            "wall": round(after.wall - before.wall, 4),
        }
        with self._path.open("a") as file:  # one short write: runners append to one file
            file.write(json.dumps(line) + "\n")


@dataclass
class Sum:
    """A file's figures, in seconds."""

    tests: int = 0
    own: float = 0.0
    children: float = 0.0
    wall: float = 0.0
    collect: float = field(default=0.0)


def add_up(lines: list[dict[str, object]]) -> dict[str, Sum]:
    """The figures of each test file."""
    sums: dict[str, Sum] = defaultdict(Sum)
    for line in lines:
        if line["kind"] == "collected":
            continue
        found = sums[str(line["name"]).split("::")[0]]
        own, children, wall = (float(str(line[key])) for key in ("own", "children", "wall"))
        if line["kind"] == "collect":
            found.collect += own + children
            continue
        found.tests += 1
        found.own += own
        found.children += children
        found.wall += wall
    return dict(sums)


def show(lines: list[dict[str, object]], most: int) -> str:
    """A table of the most expensive files, and the sum of all."""
    sums = add_up(lines)
    rows = [f"{'seconds':>8} {'own':>8} {'started':>8} {'collect':>8} {'wall':>8} {'tests':>6}  file"]
    by_cost = sorted(sums.items(), key=lambda pair: -(pair[1].own + pair[1].children))
    total = Sum()
    for _, one in by_cost:
        total.tests += one.tests
        total.own += one.own
        total.children += one.children
        total.wall += one.wall
        total.collect += one.collect
    for name, one in [*by_cost[:most], (f"{len(sums)} files", total)]:
        rows.append(
            f"{one.own + one.children:8.1f} {one.own:8.1f} {one.children:8.1f} {one.collect:8.2f} {one.wall:8.1f} "
            f"{one.tests:6}  {name}"
        )
    return "\n".join(rows)


def main() -> None:
    """Print what a run wrote: `cost.py FILE [HOW_MANY]`."""
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    rows = [show(lines, int(sys.argv[2]) if len(sys.argv) > 2 else 20)]
    collected = (line for line in lines if line["kind"] == "collected")
    rows += [
        f"{one['own'] + one['children']:8.1f} to collect {one['name']} in process {one['pid']}" for one in collected
    ]
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
