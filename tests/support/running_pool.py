"""A real pool of real workers for a test, and the proof that nothing of it is left afterwards."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import msgspec
import pytest

import marserve
import marserve_handlers
from marserve.errors import MarserveError
from marserve.messages import Answer, Load, Part, Request
from marserve.pool.dispatch.jobs import Job
from marserve.pool.launchers import process
from marserve.pool.launchers.forked import SINGLE_THREADED
from marserve.pool.launchers.launcher import Launchers
from marserve.pool.launchers.remote.cluster import Cluster
from marserve.pool.options import PoolOptions
from marserve.pool.pool import Pool
from marserve.pool.reservation import Reservations
from marserve.pool.worker_end.output import WorkerOutput
from support.model_folders import OBEDIENT, write_model
from support.patience import PATIENCE_S
from support.prepared import Kind, Prepared, prepare
from support.processes import descendants, living, open_descriptors, until
from support.receivers import Waiting
from support.worker_logs import KeptLines


class Sent(Waiting):
    """A request that was sent, and what came of it."""

    job: Job


def worker_environment(**more: str) -> Mapping[str, str]:
    """What workers inherit in tests: ours, and the way to this checkout's packages."""
    packages = [str(Path(package.__path__[0]).parent) for package in (marserve, marserve_handlers)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(packages), **more}


_IMPORTS = ("marserve.worker.loop", "marserve.worker.template", "marserve.worker.checks")
WORKERS = Kind("marserve.worker", _IMPORTS, worker_environment())
TORCH_WORKERS = Kind(
    "marserve.worker",
    (*_IMPORTS, "torch", "torch.distributed"),
    {**WORKERS.environment, **SINGLE_THREADED},
    (*WORKERS.read_early, "OMP_", "MKL_", "OPENBLAS_"),
)


@contextmanager
def prepared_workers(kind: Kind) -> Iterator[None]:
    """Workers and templates that pools of this process start meanwhile are forked (`support/prepared.py`).

    Each is a process as ever, which has not imported what it would have imported.
    """
    prepare(kind)
    forked = type("Workers", (Prepared,), {"kind": kind})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", SimpleNamespace(Popen=forked, DEVNULL=subprocess.DEVNULL))
        yield


class RunningPool:
    """A pool in a folder of its own. Use it as an async context manager; its end stops it and looks at what is left.

    `source` is the handler (the obedient one unless given), `load` holds fields of `Load`, the rest is `PoolOptions`.
    There are `workers` at least and `most`, or as many, at most.
    """

    def __init__(
        self,
        folder: Path,
        source: str | Path = OBEDIENT,
        *,
        start: str = "auto",
        workers: int = 1,
        most: int | None = None,
        load: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        reservations: Reservations | None = None,
        cluster: Cluster | None = None,
        on_failed: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        self.folder = folder / "model"
        self.log = KeptLines()
        most = workers if most is None else most
        self.options = PoolOptions("m", "1.0", workers, most, worker_start=start, **options)  # type: ignore[arg-type]
        order = msgspec.structs.replace(
            write_model(self.folder, source), batch_size=self.options.batch_size, **(load or {})
        )
        self.load: Load = order
        self._reservations = reservations
        self._cluster = cluster
        self._on_failed = on_failed
        self._environment = environment or worker_environment()
        self._ids = itertools.count()
        self._seen: set[int] = set()

    async def __aenter__(self) -> RunningPool:
        self._children_before = self.children()
        await self._make_a_pipe()
        self._descriptors_before = open_descriptors()
        self.launchers = Launchers(self._environment, self.log, cluster=self._cluster)
        self.pool = Pool(
            self.options,
            self.load,
            self.launchers,
            self.log,
            on_failed=self._on_failed,
            reservations=self._reservations,
        )
        self.metrics = self.pool.metrics
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.look()
        await self.pool.stop()
        await self.launchers.close()
        if error is not None:
            return
        assert self.pool.dispatcher.is_empty
        await until(lambda: self.children() <= self._children_before, f"no processes left, but {self.children()}")
        await until(lambda: not living(self._seen), f"no workers left, but {living(self._seen)}")
        await until(lambda: not self.left_open(), f"no descriptors left, but {self.left_open()}")

    async def _make_a_pipe(self) -> None:
        """And close it: from its first stream on libuv holds a spare descriptor, which is nobody's leak."""
        output = WorkerOutput("m", "1.0", "none", self.log)
        for descriptor in await output.open():
            os.close(descriptor)
        await output.drained(5.0)

    def children(self) -> set[int]:
        """The processes below us, of which none may be left that was not there before."""
        return descendants()

    def left_open(self) -> dict[int, str]:
        """Descriptors that are open and were not before."""
        before = self._descriptors_before
        return {number: what for number, what in open_descriptors().items() if before.get(number) != what}

    def look(self) -> set[int]:
        """Take down who is there below us; they must all be gone at the end."""
        self._seen |= {*self.pids, *self.children()} - self._children_before
        return set(self._seen)

    async def start(self) -> RunningPool:
        """Start the workers and wait for them."""
        self.pool.start()
        await self.pool.wait_until_ready()
        return self

    def send(
        self,
        body: bytes,
        *,
        deadline: float | None = None,
        parts: list[Part] | None = None,
        server_headers: Sequence[tuple[str, str]] = (),
    ) -> Sent:
        """Send a request."""
        sent = Sent()
        parts = parts or [Part("body", body)]
        request = Request(f"r{next(self._ids)}", parts, [], list(server_headers), deadline=deadline)
        sent.job = self.pool.submit(request, sent)
        return sent

    async def ask(self, body: bytes, *, timeout_s: float = PATIENCE_S) -> Answer | MarserveError:
        """Send a request and wait for its end."""
        return await self.send(body).told(timeout_s)

    async def ask_body(self, body: bytes) -> bytes:
        """Send a request and wait for its answer's body."""
        told = await self.ask(body)
        assert isinstance(told, Answer), told
        return told.body

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [view.pid for view in self.pool.workers() if view.pid > 0]

    def calls(self) -> list[str]:
        """What reached the obedient handler: one line a batch."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def file(self, name: str) -> Path:
        """A file in the model's folder."""
        return self.folder / name
