"""Checks, before anything is begun, that the server can write its folders and read its store.

It makes and writes nothing. Folders of logs, keys and sockets are checked when these are opened.
"""

from __future__ import annotations

import os
from pathlib import Path

from marserve.errors import BadSettings
from marserve.machine.limits import too_low
from marserve.settings import Settings

WRITTEN = ("temporary_folder", "state_folder", "download_cache", "environment_folder")


def refuse_unusable(settings: Settings) -> None:
    """Raise BadSettings for the first folder of the settings that the server cannot write or read, and for limits of
    this process that are too low for a server.
    """
    if limit := too_low():
        raise BadSettings(limit)
    for name in WRITTEN:
        folder: Path | None = getattr(settings, name)
        if folder is not None and (why := why_unwritable(folder)) is not None:
            raise _wrong(settings, name, f"where the server cannot write ({why}); name a folder that it may write to")
    store = settings.model_store
    is_listed = settings.load_models == "all" or settings.watch_model_store
    if store is not None and store.is_dir() and not os.access(store, os.X_OK | (os.R_OK if is_listed else 0)):
        raise _wrong(
            settings,
            "model_store",
            f"which may not be read by user {os.geteuid()}; let that user read it, or run the server as one who may",
        )
    shared = settings.system_shared_memory_folder
    if shared is not None and not (shared.is_dir() and os.access(shared, os.X_OK)):
        raise _wrong(
            settings,
            "system_shared_memory_folder",
            "which is no folder that the server can look into; name one that is there, as /dev/shm",
        )
    group = settings.worker_cgroup
    if group is not None and not (group / "cgroup.subtree_control").is_file():
        raise _wrong(
            settings, "worker_cgroup", "which is no cgroup v2 folder; name one that the server may write, or none"
        )


def why_unwritable(folder: Path) -> str | None:
    """Why this folder, which may not exist yet, cannot be written; None if it can."""
    for place in (folder, *folder.parents):
        try:
            if not place.exists():
                continue
        except OSError as error:
            return str(error.strerror)
        if not place.is_dir():
            return f"{place} is a file" if place != folder else "it is a file"
        if os.access(place, os.W_OK | os.X_OK):
            return None
        is_there = "it" if place == folder else str(place)
        return f"{is_there} may not be written by user {os.geteuid()}, or lies in a file system that is read-only"
    return "there is no such path"


def _wrong(settings: Settings, name: str, what: str) -> BadSettings:
    origins = settings.origins.get(name)
    shown = origins[-1].text.strip() if origins else str(getattr(settings, name))
    # A flag has the name of its key, so the key alone is enough.
    where = origins[-1].where if origins and not origins[-1].where.startswith("--") else None
    return BadSettings(f"{name} is {shown!r}, {what}", key=name, source=where)
