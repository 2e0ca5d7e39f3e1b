"""Pools whose workers are on a Ray cluster, and a gate on the way that closes without a word."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from marserve.agent_link import ArchiveRef
from marserve.pool.launchers.remote.cluster import Cluster, ClusterOptions
from marserve.pool.options import RayOptions
from support.model_folders import OBEDIENT
from support.processes import descendants
from support.ray_cluster import PROGRAM
from support.running_pool import RunningPool


def pack(folder: Path, archive: Path) -> ArchiveRef:
    """Make an archive of a model's folder."""
    with zipfile.ZipFile(archive, "w") as packed:
        for file in sorted(folder.rglob("*")):
            packed.write(file, file.relative_to(folder))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return ArchiveRef(digest, archive.name, path=str(archive))


class RemotePool(RunningPool):
    """A pool on the cluster at `address`; nodes keep their archives in `folder`. `ray` are fields of `RayOptions`."""

    def __init__(
        self,
        folder: Path,
        address: str,
        source: str | Path = OBEDIENT,
        *,
        cluster: dict[str, Any] | None = None,
        ray: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        options = ClusterOptions(**{"address": address, "cache": str(folder / "nodes"), **(cluster or {})})
        self.cluster = Cluster(options, os.environ)
        super().__init__(folder, source, cluster=self.cluster, **more)
        self.archive = folder / "m.mar"
        wish = RayOptions(archive=pack(self.folder, self.archive), **(ray or {}))
        self.options = dataclasses.replace(self.options, ray=wish)

    def children(self) -> set[int]:
        """Those below us but for the cluster's own, which come and go as Ray likes."""
        return super().children() - set().union(*map(descendants, of_clusters()))

    @property
    def nodes(self) -> list[str]:
        """The node of each worker that has one, by the beginning of its id."""
        return [view.node.partition("(")[2].rstrip(")") for view in self.pool.workers() if view.node]

    @property
    def deaths(self) -> dict[str, int]:
        """Causes of deaths so far, and how often."""
        return {cause: count for cause, count in self.metrics.worker_deaths.items() if count}


def of_clusters() -> list[int]:
    """The processes below us that have the nodes of a cluster below them."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # a child that has just ended has no command line
            if any(PROGRAM.name in word for word in child.cmdline()):
                found.append(child.pid)
    return found


class Gate:
    """A TCP proxy; `freeze` has what is connected say and hear nothing more, without closing it, as a cut cable."""

    def __init__(self, target: Callable[[], tuple[str, int]]) -> None:
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self.passed = 0
        self.port = 0

    async def open(self) -> Gate:
        """Listen on loopback, on a port of the system's."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.passed += 1
        far_reader, far_writer = await asyncio.open_connection(*self._target())
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()

    def freeze(self) -> None:
        """From now on nothing passes of what is connected; what connects anew does."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """End it."""
        self.freeze()
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
