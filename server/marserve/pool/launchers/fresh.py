"""A worker in a new interpreter: slow to start, safe for everything."""

from __future__ import annotations

import os
from collections.abc import Mapping

from marserve.pool.launchers.endpoints import WorkerEnds
from marserve.pool.launchers.process import WorkerProcess, limit_threads, spawn


def launch_fresh(ends: WorkerEnds, environment: Mapping[str, str], threads: int) -> WorkerProcess:
    """Start a worker on these ends; it says hello on the wire and waits to be told what to load."""
    return spawn(
        ["worker", str(os.getpid()), str(ends.wire), str(ends.page)],
        {**environment, **limit_threads(threads)},
        pass_fds=(ends.wire, ends.page),
        out=ends.out,
        err=ends.err,
    )
