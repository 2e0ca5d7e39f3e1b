"""When snapshots are written: at the start, after changes, at the end; and what a store that fails does to it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path

import pytest

from marserve.model_options import say
from marserve.registry.catalogue.snapshot import SnapshotVersion
from marserve.registry.catalogue.snapshot_writer import SnapshotWriter
from marserve.settings.load import read_properties
from marserve.settings.snapshot_files import FolderSnapshots

pytestmark = pytest.mark.anyio

NOOP = SnapshotVersion("noop", "1.0", "noop.mar", True, say(min_workers=1))


class Store(FolderSnapshots):
    """A folder that tells when something was saved, and lets nothing through while it is shut."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.saved: list[str] = []
        self.is_open = threading.Event()
        self.is_open.set()
        self.has_begun = threading.Event()
        self.trouble: Exception | None = None

    def save(self, name: str, text: bytes) -> None:
        """Save, once it is open."""
        self.has_begun.set()
        assert self.is_open.wait(30)
        if self.trouble is not None:
            raise self.trouble
        super().save(name, text)
        self.saved.append(name)

    def kinds(self) -> list[str]:
        """What was saved, in order."""
        return [name.split("-")[1] for name in self.saved]

    async def wait_for(self, count: int) -> None:
        """Return once so many were saved."""
        async with asyncio.timeout(30):
            while len(self.saved) < count:
                await asyncio.sleep(0.005)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path)


async def end(task: asyncio.Task[None]) -> None:
    """Cancel it and wait for its end."""
    task.cancel()
    await asyncio.wait([task])


async def test_one_is_written_at_the_start_and_one_after_each_change(store: Store) -> None:
    """With the models as they are then."""
    models = [NOOP]
    writer = SnapshotWriter(store, {"job_queue_size": "7"})
    task = asyncio.create_task(writer.run(lambda: models))

    await store.wait_for(1)
    models.clear()
    writer.note_change()
    await store.wait_for(2)
    await end(task)
    await writer.write("shutdown", models)

    assert store.kinds() == ["startup.cfg", "snapshot.cfg", "shutdown.cfg"]
    assert store.saved == sorted(store.saved)
    newest = store.newest()
    assert newest is not None
    lines = {name: text for name, text, _ in read_properties(newest[1], "x")}
    assert lines["job_queue_size"] == "7"
    document = json.loads(lines["model_snapshot"])
    assert (document["name"], document["modelCount"], document["models"]) == (newest[0], 0, {})


async def test_changes_that_come_while_one_is_written_are_written_together(store: Store) -> None:
    """A thousand changes are not a thousand files."""
    writer = SnapshotWriter(store, {})
    store.is_open.clear()
    task = asyncio.create_task(writer.run(lambda: [NOOP]))
    assert await asyncio.to_thread(store.has_begun.wait, 30)

    for _ in range(1000):
        writer.note_change()
    store.is_open.set()
    await store.wait_for(2)
    await end(task)

    assert store.kinds() == ["startup.cfg", "snapshot.cfg"]


async def test_the_last_one_comes_after_one_whose_task_was_cancelled(store: Store) -> None:
    """A thread cannot be cancelled; what it writes must not be the newest."""
    writer = SnapshotWriter(store, {})
    store.is_open.clear()
    task = asyncio.create_task(writer.run(lambda: [NOOP]))
    assert await asyncio.to_thread(store.has_begun.wait, 30)
    task.cancel()

    last = asyncio.create_task(writer.write("shutdown", []))
    store.is_open.set()
    await last
    await asyncio.wait([task])

    assert store.kinds() == ["startup.cfg", "shutdown.cfg"]
    assert store.saved == sorted(store.saved)


@pytest.mark.parametrize("trouble", [OSError(28, "No space left on device"), RuntimeError("a plug-in's")], ids=repr)
async def test_a_store_that_fails_is_told_once_and_tried_again(
    store: Store, caplog: pytest.LogCaptureFixture, trouble: Exception
) -> None:
    """The server goes on."""
    writer = SnapshotWriter(store, {})
    store.trouble = trouble

    with caplog.at_level(logging.ERROR):
        await writer.write("startup", [])
        await writer.write("snapshot", [])
    store.trouble = None
    await writer.write("snapshot", [])

    assert store.kinds() == ["snapshot.cfg"]
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 1
    assert str(store.folder) in told[0].getMessage()


async def test_one_that_could_not_be_written_follows_when_it_can_be(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when nothing changes any more: else a kill would bring back the models of long ago."""
    writer = SnapshotWriter(store, {}, try_again_s=0.001)
    store.trouble = OSError(28, "No space left on device")
    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(writer.run(lambda: [NOOP]))
        async with asyncio.timeout(30):
            while not caplog.records:
                await asyncio.sleep(0.005)
        store.trouble = None
        await store.wait_for(1)
        await end(task)
        await writer.write("shutdown", [NOOP])  # waits for the thread that wrote

    assert store.kinds() == ["startup.cfg", "shutdown.cfg"]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert caplog.records[1].message == f"Snapshots are written to {store.folder} again"


async def test_two_servers_with_one_folder_take_no_name_twice(tmp_path: Path) -> None:
    """Each goes on from the other's newest."""
    stores = [Store(tmp_path), Store(tmp_path)]
    writers = [SnapshotWriter(store, {}) for store in stores]

    await asyncio.gather(*(writer.write("snapshot", []) for _ in range(10) for writer in writers))

    names = [name for store in stores for name in store.saved]
    assert len(set(names)) == len(names) == 20
