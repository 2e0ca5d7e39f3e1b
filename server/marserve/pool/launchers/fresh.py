"""A worker in a new interpreter: slow to start, safe for everything."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from marserve.pool.interpreter import Interpreter, environment_of, program_of
from marserve.pool.launchers.endpoints import WorkerEnds
from marserve.pool.launchers.process import WorkerProcess, limit_threads, spawn


def launch_fresh(
    ends: WorkerEnds,
    environment: Mapping[str, str],
    threads: int,
    more: Sequence[int] = (),
    *,
    lineage: str = "",
    python: str = "",
    interpreter: Interpreter | None = None,
    program: Sequence[str] = (),
) -> WorkerProcess:
    """Start a worker on these ends; it says hello on the wire and waits for its order to load.

    `more` are the further descriptors of a rank of a group. `lineage` marks the worker's processes (`lineage.py`).
    It is `program`, in another language; else it runs under another `interpreter`, or under `python`, or if that is
    empty under the server's own.
    """
    return spawn(
        ["worker", str(os.getpid()), str(ends.wire), str(ends.page), *map(str, more)],
        {**environment_of(interpreter, environment), **limit_threads(threads)},
        pass_fds=(ends.wire, ends.page, *more),
        out=ends.out,
        err=ends.err,
        lineage=lineage,
        program=program or program_of(interpreter, python),
    )
