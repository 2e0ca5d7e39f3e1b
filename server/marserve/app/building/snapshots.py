"""Reads the snapshot to restore, and builds the writer of further ones."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from marserve import __version__
from marserve.app.building.cannot_start import CannotStart
from marserve.app.building.tasks import has_succeeded
from marserve.app.building.watching import watched_folders
from marserve.errors import ArchiveNotFound, InvalidSnapshot
from marserve.plugins import find_snapshot_store
from marserve.registry.catalogue.snapshot import SnapshotVersion, check_archives, read_models
from marserve.registry.catalogue.snapshot_writer import SnapshotWriter
from marserve.registry.models import Registry
from marserve.settings import Settings
from marserve.settings.snapshot_files import FolderSnapshots, effective_properties, snapshot_folder
from marserve.store.addresses.fetch_guard import is_address
from marserve.store.sources.local import LocalStore

log = logging.getLogger("marserve.app")


def read_snapshot(settings: Settings) -> list[SnapshotVersion] | None:
    """The versions to restore; None if the settings name no snapshot. Blocks.

    Raises CannotStart for a snapshot that is wrong or names an archive that the store does not have.
    """
    if settings.model_snapshot is None:
        return None
    store = LocalStore(settings.model_store, roots=[*settings.model_roots, *watched_folders(settings)])

    def has_archive(name: str) -> bool:
        if is_address(name):
            return True  # it will be fetched, or is kept
        try:
            store.find(name)
        except ArchiveNotFound:
            return False
        return True

    where = settings.restored_from or settings.origins["model_snapshot"][-1].where
    try:
        versions = read_models(settings.model_snapshot)
        check_archives(versions, has_archive)
    except InvalidSnapshot as error:
        way_out = (
            "mend that, or start with --ncs (config_snapshots=false) to start without the snapshot"
            if settings.restored_from is not None
            else "mend that, or remove model_snapshot and name the models in load_models"
        )
        raise CannotStart(f"{error.message} (InvalidSnapshotException, {where}); {way_out}") from error
    log.info("Restoring %d model versions, as %s has them", len(versions), where)
    return versions


def build_snapshots(settings: Settings, devices: int) -> SnapshotWriter | None:
    """The writer of snapshots: into a package's store if one is installed, else beside the logs; None if it is off.

    Raises BadSettings.
    """
    if not settings.config_snapshots:
        return None
    store = find_snapshot_store() or FolderSnapshots(
        snapshot_folder(settings.log_location, settings.working_directory), settings.config_snapshots_kept
    )
    facts = {
        "model_store": str(settings.model_store or ""),
        "workflow_store": str(settings.workflow_store or ""),
        "number_of_gpu": str(devices),
        "python": sys.executable,
    }
    log.info("Snapshots are written to %s; --ncs (config_snapshots=false) switches that off", store.where)
    return SnapshotWriter(store, effective_properties(settings, facts, __version__))


async def write_snapshots(writer: SnapshotWriter, registry: Registry, reading: asyncio.Task[Any]) -> None:
    """Write snapshots once all models of the start are read; an earlier one would lose the rest."""
    await asyncio.wait([reading])
    if has_succeeded(reading):
        await writer.run(registry.snapshot)
