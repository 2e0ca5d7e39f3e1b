"""Compiles `load.c` and runs it: load on a server of this machine, and what came of it. Knows no servers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("load.c")
COMPILERS = ("cc", "gcc", "clang")


class CannotMeasure(Exception):
    """A figure cannot be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of the load generator saw; `load.c` says what the fields mean."""

    answered: int
    answered_in_all: int
    per_second: float
    failed: int
    last_failure: int
    lost: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float

    def must_be_clean(self, who: str) -> Load:
        """Itself. Raises CannotMeasure when a request failed or was lost: such a rate would compare nothing."""
        if self.failed or self.lost or not self.answered:
            raise CannotMeasure(
                f"{who} answered {self.answered} requests, failed {self.failed} (the last with status "
                f"{self.last_failure}) and lost {self.lost}; its rate means nothing"
            )
        return self


class LoadGenerator:
    """The compiled load generator."""

    def __init__(self, program: Path) -> None:
        self._program = program

    @classmethod
    def compile(cls, folder: Path) -> LoadGenerator:
        """Build it in `folder`. Raises CannotMeasure where there is no Linux or no C compiler."""
        if sys.platform != "linux":
            raise CannotMeasure("The load generator uses epoll: run the benchmarks on Linux.")
        compiler = next((path for path in map(shutil.which, COMPILERS) if path is not None), None)
        if compiler is None:
            raise CannotMeasure(
                "There is no C compiler for the load generator; install one (Debian: apt-get install gcc libc6-dev)."
            )
        program = folder / "load"
        done = subprocess.run(
            [compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-o", str(program), str(SOURCE)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CannotMeasure(f"{compiler} cannot compile {SOURCE.name}:\n{done.stderr.strip()}")
        return cls(program)

    def start(
        self,
        port: int,
        path: str,
        *,
        body_bytes: int = 0,
        body_file: Path | None = None,
        content_type: str = "application/octet-stream",
        connections: int,
        seconds: float,
        warm_up_s: float,
    ) -> subprocess.Popen[str]:
        """Begin a load whose body is `body_bytes` letters, or what `body_file` holds; `result` waits for its end."""
        body = f"@{body_file}" if body_file is not None else str(body_bytes)
        words = [port, path, body, connections, seconds, warm_up_s, content_type]
        return subprocess.Popen(
            [str(self._program), *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def result(self, load: subprocess.Popen[str]) -> Load:
        """Wait for a load's end. Raises CannotMeasure when it could not reach the server."""
        try:
            out, err = load.communicate(timeout=300)
        finally:
            if load.poll() is None:
                load.kill()
                load.wait()
        if load.returncode:
            raise CannotMeasure(f"the load generator ended with status {load.returncode}: {err.strip()}")
        return Load(**json.loads(out))

    def run(
        self,
        port: int,
        path: str,
        *,
        body_bytes: int = 0,
        body_file: Path | None = None,
        content_type: str = "application/octet-stream",
        connections: int,
        seconds: float,
        warm_up_s: float = 0.3,
    ) -> Load:
        """Put load on `http://127.0.0.1:{port}{path}` for `warm_up_s` uncounted and `seconds` counted seconds."""
        return self.result(
            self.start(
                port,
                path,
                body_bytes=body_bytes,
                body_file=body_file,
                content_type=content_type,
                connections=connections,
                seconds=seconds,
                warm_up_s=warm_up_s,
            )
        )
