"""The weights that a model's configuration names by `checkpoint`, apart from its model file: found, and judged.

A word names a folder of the archive, else one of the model store, as the archives of that store are found. An address
that ends in a slash is fetched. What lies there is judged by its headers. Everything blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from marserve.archive.checkpoints.checked_files import check_members
from marserve.archive.checkpoints.checkpoint import read_checkpoint
from marserve.archive.checkpoints.contents import Checkpoint, folder_inside
from marserve.archive.checkpoints.dcp_metadata import METADATA
from marserve.archive.checkpoints.safetensors_index import ENDING, INDEX_ENDING
from marserve.archive.contents.built_in_handlers import BUILT_IN_HANDLERS
from marserve.archive.contents.manifest import Manifest
from marserve.archive.pickles.check_budget import CheckBudget, CheckStopped
from marserve.errors import ArchiveNotFound, BadArchive, Draining
from marserve.files.leased_folders import Lease
from marserve.registry.catalogue.plan import FoundCheckpoint
from marserve.store.fetching.prefixes import is_prefix
from marserve.store.sources.local import LocalStore

FetchBelow = Callable[[str, Callable[[Sequence[str]], Iterable[str]]], Lease]
"""Fetches what lies below an address, of the names those that are chosen, into a folder that is leased."""
_PIECES = ".distcp"


def find_checkpoint(
    named: str,
    folder: Path,
    manifest: Manifest,
    store: LocalStore,
    *,
    is_private: bool,
    is_stopped: Callable[[], bool],
    fetch: FetchBelow,
) -> FoundCheckpoint:
    """The checkpoint of that name, of the archive unpacked at `folder`, which only this server writes if `is_private`.

    `fetch` fetches addresses. The result has to be released. Raises BadArchive for a manifest that it does not go with
    and a folder that is not there, BadCheckpoint for what lies there, UnsafeArchive for pickles in it; Draining once
    `is_stopped` says so; OSError, and what `fetch` raises.
    """
    _check_manifest(named, manifest)
    if is_prefix(named):
        return _fetch(named, fetch, is_stopped)
    inside = folder_inside(folder, named)
    if inside is not None:  # its pickles were checked with the archive's
        return FoundCheckpoint(inside, _read(inside, is_stopped), may_map=is_private, is_beside=False)
    beside = _find_beside(named, store)
    return FoundCheckpoint(beside, _judge(beside, is_stopped), may_map=False, is_beside=True)


def choose(names: Sequence[str]) -> Iterable[str]:
    """Those of the names below a prefix that belong to a checkpoint: what else lies there is not fetched."""
    if METADATA in names:
        return [name for name in names if name == METADATA or name.endswith(_PIECES)]
    return [name for name in names if name.endswith((ENDING, INDEX_ENDING))]


def _fetch(named: str, fetch: FetchBelow, is_stopped: Callable[[], bool]) -> FoundCheckpoint:
    lease = fetch(named, choose)
    try:
        return FoundCheckpoint(lease.folder, _judge(lease.folder, is_stopped), True, True, lease)
    except BaseException:
        lease.release()
        raise


def _judge(folder: Path, is_stopped: Callable[[], bool]) -> Checkpoint:
    """What lies in a folder beside the archive, with its pickles checked."""
    read = _read(folder, is_stopped)
    if read.kind == "dcp":
        check_members(((name, folder / name) for name in (METADATA, *read.files)), is_stopped=is_stopped)
    return read


def _check_manifest(named: str, manifest: Manifest) -> None:
    what = f"checkpoint of the model's configuration is {named}"
    if manifest.serialized_file is not None:
        raise BadArchive(
            f"{what}, and the manifest names the weights {manifest.serialized_file} as serializedFile; leave one out."
        )
    if manifest.model_file is None and manifest.handler in BUILT_IN_HANDLERS:
        raise BadArchive(
            f"{what}, and the manifest names no modelFile, whose class the weights are of; archive the model with "
            "--model-file."
        )


def _find_beside(named: str, store: LocalStore) -> Path:
    """The folder of the model store. Raises BadArchive."""
    what = f"checkpoint of the model's configuration is {named}"
    if "/" in named.strip("/") and not os.path.isabs(named):
        raise BadArchive(f"{what}, and there is no such folder in the archive.")
    try:
        found = store.find(named)
    except ArchiveNotFound:
        raise BadArchive(f"{what}, and neither the archive nor the model store has such a folder.") from None
    if found.kind != "folder":
        raise BadArchive(f"{what}, which is a file of the model store; a checkpoint is a folder.")
    return found.path.resolve()


def _read(folder: Path, is_stopped: Callable[[], bool]) -> Checkpoint:
    try:
        return read_checkpoint(folder, CheckBudget(is_stopped=is_stopped))
    except CheckStopped:
        raise Draining from None
