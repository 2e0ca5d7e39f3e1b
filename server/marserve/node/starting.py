"""Prepares what a worker needs on this machine before it can start: its archive, its metrics file, and its launcher.

The unpacked archive and the template of one worker are kept for the next worker of the same version and options.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from marserve import agent_link
from marserve.files.leased_folders import Lease
from marserve.messages import Load
from marserve.node.archives import USUAL_CACHE_BYTES, NodeArchives, usual_folder
from marserve.node.origins import origins
from marserve.node.receiving import Receiver
from marserve.pool.launchers.launcher import Launcher, Launchers
from marserve.pool.options import PoolOptions
from marserve.pool.worker_end.output import WorkerLog


class Starter:
    """One agent's. `ask` has the server send the archive with this digest; its parts go to `receiver`."""

    def __init__(self, order: agent_link.AgentOrder, log: WorkerLog, ask: Callable[[str], None]) -> None:
        """`log` takes what templates print."""
        self._order, self._log = order, log
        self.receiver = Receiver(ask)
        self._launchers: Launchers | None = None
        self._launcher: tuple[agent_link.Start, Launcher] | None = None
        self._prepared: Lease | None = None
        self._prepared_key: tuple[str, bool] | None = None
        self._stop = threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="marserve-agent-"))

    async def prepare(self, order: agent_link.Start) -> tuple[Load, Launcher]:
        """The order to load with this machine's paths, and the launcher that starts the worker.

        Raises OSError and MarserveError, among them NodeUnfit if another node may succeed.
        """
        folder = await self._archive(order.archive)
        load = translate(order.load, folder, self._write_metrics(order.metrics))
        return load, await self._launcher_for(order, load)

    async def _launcher_for(self, order: agent_link.Start, load: Load) -> Launcher:
        """The last worker's launcher, with its template, if the orders are alike; else a new one."""
        key = msgspec.structs.replace(order, worker_id="")
        if self._launcher is not None:
            if self._launcher[0] == key:
                return self._launcher[1]
            await self._launcher[1].close()
            self._launcher = None
        if self._launchers is None:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
            environment |= order.environment
            self._launchers = Launchers(environment, self._log)
            self._launchers.watch_kills()
        devices = tuple(range(order.devices))
        start = cast("Any", order.worker_start)
        options = PoolOptions(load.model, load.version, 1, 1, worker_start=start, gpu_ids=devices)
        launcher = Launcher(self._launchers, load, options)
        self._launcher = (key, launcher)
        return launcher

    def _write_metrics(self, content: str | None) -> str | None:
        if content is None:
            return None
        path = self._folder / "metrics.yaml"
        path.write_text(content, "utf-8")
        return str(path)

    async def _archive(self, ref: agent_link.ArchiveRef) -> Path:
        key = (ref.sha256, ref.is_trusted)
        if self._prepared is not None and self._prepared_key == key:
            return self._prepared.folder
        loop = asyncio.get_running_loop()

        def receive(path: Path) -> None:
            asyncio.run_coroutine_threadsafe(self.receiver.receive(ref, path), loop).result()

        def prepare() -> Lease:
            folder = Path(self._order.cache) if self._order.cache else usual_folder()
            openers = origins(self._order.stores, os.environ)
            archives = NodeArchives(folder, self._order.cache_bytes or USUAL_CACHE_BYTES, openers)
            return archives.prepare(ref, receive, self._stop)

        prepared = await asyncio.to_thread(prepare)
        if self._prepared is not None:
            self._prepared.release()
        self._prepared, self._prepared_key = prepared, key
        return prepared.folder

    def was_killed_for_memory(self) -> bool:
        """Whether the kernel of this machine has killed for memory just now."""
        if self._launchers is None or not self._launchers.oom_kills.can_be_seen:
            return False
        self._launchers.oom_kills.look(time.monotonic())
        return self._launchers.oom_kills.claim(time.monotonic())

    def give_up(self) -> None:
        """Stop waiting for an archive: the server has gone."""
        self._stop.set()
        self.receiver.close("the server has gone")

    async def close(self) -> None:
        """End the templates, and release what was kept. Call it after `give_up` and the last worker's end."""
        if self._launcher is not None:
            await self._launcher[1].close()
        if self._launchers is not None:
            await self._launchers.close()
        if self._prepared is not None:
            self._prepared.release()
        shutil.rmtree(self._folder, ignore_errors=True)


def translate(load: Load, folder: Path, metrics_file: str | None) -> Load:
    """An order to load that names this machine's paths: those inside the archive move with it."""
    theirs = Path(load.model_dir)
    moved = [
        str(folder / Path(path).relative_to(theirs)) if Path(path).is_relative_to(theirs) else path
        for path in load.import_paths
    ]
    return msgspec.structs.replace(load, model_dir=str(folder), import_paths=moved, metrics_file=metrics_file)
