"""Runs whole files side by side: each runner imports and collects the files that it runs, and no others.

pytest-xdist has every runner collect all tests, which took four runners 25 seconds each. With `--by-file` a file is
collected as one item that imports nothing; the runner that is given this item collects the file's tests and runs them.
Files in the folders whose tests take longest go first, or with `--order-seed` all in a random order. With
`--dist loadgroup` one runner runs all files that import torch, one all whose workers are forked from a process that
has, and one those with the stand-ins for S3 and for containers: each takes a second or two of a processor to start.
`make test` uses it; to choose tests by name or mark, use pytest without it (`-m "not long"` works).
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

SLOWEST_FIRST = ("contract", "end_to_end", "pool", "cli", "deploy", "examples")
# Files of a group share what their runner has imported or started. A file is in the first whose words its source has.
GROUPS = (
    ("torch_workers", ("RunningPool", "mark.torch")),
    ("torch", ('importorskip("torch"',)),
    ("stand_ins", ("S3Server",)),
    ("stand_ins", ("support.container",)),
)


class WholeFile(pytest.Item):
    """A file whose tests are not collected yet."""

    def runtest(self) -> None:
        """`ByFile` runs the file's tests in its place."""
        raise AssertionError("a file is not a test")

    def reportinfo(self) -> tuple[Path, int, str]:
        """What a runner that dies with it is said to have run."""
        return self.path, 0, str(self.path.name)

    def collect_tests(self) -> list[pytest.Item]:
        """The tests of the file that `-m` and `-k` leave; an error of its import is reported as ever."""
        holder = self.parent
        assert isinstance(holder, Holder)
        assert holder.parent is not None
        module: pytest.Module = pytest.Module.from_parent(holder.parent, path=self.path)
        items = list(self.session.genitems(module))
        self.ihook.pytest_collection_modifyitems(session=self.session, config=self.config, items=items)
        return items


class Holder(pytest.File):
    """Stands for a test file."""

    def collect(self) -> Iterator[WholeFile]:
        """One item."""
        group = find_group(self.path.read_text("utf-8"))
        # What follows an @ is the group for pytest-xdist; its mark does not get as far with every version of pytest.
        item: WholeFile = WholeFile.from_parent(self, name=f"file@{group}" if group else "file")
        item.add_marker(pytest.mark.timeout(0))  # each test has its own limit
        yield item


class ByFile:
    """The hooks of pytest."""

    def __init__(self, order_seed: int | None = None) -> None:
        self._order_seed = order_seed

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Collector:
        """The file, without importing it."""
        holder: Holder = Holder.from_parent(parent, path=module_path)
        return holder

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Long ones first, so that the runners end together; by a seed, the same order in every runner."""
        if not all(isinstance(item, WholeFile) for item in items):
            return
        if self._order_seed is None:
            items.sort(key=_turn)
        else:
            turn = {path: place for place, path in enumerate(shuffled([item.path for item in items], self._order_seed))}
            items.sort(key=lambda item: turn[item.path])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run the tests of a file; of a test in it, one that passed, tell no more than that."""
        if not isinstance(item, WholeFile):
            # Five messages a test cost the process that collects them as much as a small test itself.
            for report in runtestprotocol(item, log=False, nextitem=nextitem):
                if report.when == "call" or not report.passed:
                    item.ihook.pytest_runtest_logreport(report=report)
            return True
        tests = item.collect_tests()
        # What was imported stays: a full collection, of which there are many, took a quarter of a second to walk it.
        gc.collect()
        gc.freeze()
        running = item.session.items
        place = running.index(item)
        for test, after in zip(tests, [*tests[1:], nextitem], strict=False):
            if item.session.shouldfail or item.session.shouldstop:
                break
            running[place] = test  # pytest-xdist takes reports of the item alone that it knows to be running
            test.ihook.pytest_runtest_protocol(item=test, nextitem=after)
        running[place] = item
        if not tests:  # the test before it has left what this file and its own share
            item.session._setupstate.teardown_exact(nextitem)
        return True


def find_group(source: str) -> str | None:
    """The group of a test file with this source, `None` for one that any runner may run."""
    return next((name for name, words in GROUPS if all(word in source for word in words)), None)


def shuffled(paths: Iterable[Path], seed: int) -> list[Path]:
    """The files in an order that the seed alone decides, whatever order they came in."""
    turns = sorted(paths)
    random.Random(seed).shuffle(turns)
    return turns


def _turn(item: pytest.Item) -> tuple[int, int, str]:
    folder = next((part for part in item.path.parts if part in SLOWEST_FIRST), None)
    turn = SLOWEST_FIRST.index(folder) if folder else len(SLOWEST_FIRST)
    return turn, -item.path.stat().st_size, str(item.path)
