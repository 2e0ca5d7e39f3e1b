"""A Ray cluster for tests: real nodes on this machine, in a process of its own, so that no test imports ray."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

import marserve
import marserve_handlers

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "beside" / "ray_nodes.py"

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra `ray`): no cluster to place workers on"
)


class LocalCluster:
    """A head without resources, and the nodes that tests add. Use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        """`folder` gets what Ray writes: a short path, for Ray makes sockets in it."""
        packages = [str(Path(package.__path__[0]).parent) for package in (marserve, marserve_handlers)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(packages),
            "RAY_TMPDIR": str(folder),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        environment.pop("RAY_ADDRESS", None)
        self._errors = folder / "errors"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self.address: str = self._read()["address"]

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def add(self, cpus: int = 2, variables: Mapping[str, str] | None = None, **resources: float) -> str:
        """Add a node, with these environment variables; returns Ray's id of it."""
        words = [f"{name}={much}" for name, much in resources.items()]
        words += [f"${name}={value}" for name, value in (variables or {}).items()]
        return str(self._ask(f"add {cpus} {' '.join(words)}")["node"])

    def kill(self, node: str) -> None:
        """End a node at once, as one that loses its power."""
        self._ask(f"kill {node}")

    def close(self) -> None:
        """End all of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                document: dict[str, Any] = json.loads(line)
                return document
        self.close()
        printed = self._errors.read_text(errors="replace")
        raise AssertionError(f"the cluster has ended: {self._process.returncode}\n{printed[-5000:]}")
