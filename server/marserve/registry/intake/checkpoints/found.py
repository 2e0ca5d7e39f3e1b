"""The weights that a model's configuration names by `checkpoint`, apart from its model file: found, and judged.

A word names a folder of the archive, else one of the model store, as the archives of that store are found. An address
that ends in a slash is fetched. What lies there is judged by its headers. Everything blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from marserve.archive.checkpoints.checked_files import check_members
from marserve.archive.checkpoints.checkpoint import read_checkpoint
from marserve.archive.checkpoints.contents import Checkpoint, folder_inside
from marserve.archive.checkpoints.dcp_metadata import MAX_METADATA_BYTES, METADATA, parse_metadata
from marserve.archive.checkpoints.safetensors_index import ENDING, INDEX_ENDING, MAX_INDEX_BYTES, parse_index
from marserve.archive.contents.built_in_handlers import BUILT_IN_HANDLERS
from marserve.archive.contents.manifest import Manifest
from marserve.archive.pickles.check_budget import CheckBudget, CheckStopped
from marserve.errors import ArchiveNotFound, BadArchive, Draining
from marserve.files.leased_folders import Lease
from marserve.registry.catalogue.plan import FoundCheckpoint
from marserve.store.addresses.fetch_guard import hide_query
from marserve.store.fetching.prefixes import is_prefix
from marserve.store.fetching.web_folders import Wanted
from marserve.store.sources.local import LocalStore

FetchBelow = Callable[[str, Wanted], Lease]
"""Fetches what is wanted of what lies below an address into a folder that is leased."""
_PIECES = ".distcp"
_MODEL = f"model{ENDING}"


@dataclass(frozen=True, slots=True)
class Named:
    """The place of a checkpoint, and whose word it is: the model's configuration, or the desired state."""

    place: str
    by: str = "model's configuration"

    def __str__(self) -> str:
        return f"checkpoint of the {self.by} is {hide_query(self.place)}"


def find_checkpoint(
    named: Named,
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
    if is_prefix(named.place):
        return _fetch(named.place, fetch, is_stopped)
    inside = folder_inside(folder, named.place)
    if inside is not None:  # its pickles were checked with the archive's
        return FoundCheckpoint(inside, _read(inside, is_stopped), may_map=is_private, is_beside=False)
    beside = _find_beside(named, store)
    return FoundCheckpoint(beside, _judge(beside, is_stopped), may_map=False, is_beside=True)


class CheckpointFiles:
    """Those of the files below an address that belong to a checkpoint: what else lies there is not fetched."""

    heads: Mapping[str, int] = {f"model{INDEX_ENDING}": MAX_INDEX_BYTES, METADATA: MAX_METADATA_BYTES, _MODEL: 0}

    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self._is_stopped = is_stopped

    def choose(self, names: Sequence[str]) -> Iterable[str]:
        """Of all names."""
        if METADATA in names:
            return [name for name in names if name == METADATA or name.endswith(_PIECES)]
        return [name for name in names if name.endswith((ENDING, INDEX_ENDING))]

    def named_in(self, head: str, data: bytes) -> Iterable[str]:
        """The files that an index or a `.metadata` names. Raises BadCheckpoint for another file, Draining."""
        if head != METADATA:
            return parse_index(data, head).values()
        try:
            return {path for path, _ in parse_metadata(data, CheckBudget(is_stopped=self._is_stopped))[1]}
        except CheckStopped:
            raise Draining from None


def _fetch(named: str, fetch: FetchBelow, is_stopped: Callable[[], bool]) -> FoundCheckpoint:
    lease = fetch(named, CheckpointFiles(is_stopped))
    try:
        return FoundCheckpoint(lease.folder, _judge(lease.folder, is_stopped), True, True, lease, lease.folder.name)
    except BaseException:
        lease.release()
        raise


def _judge(folder: Path, is_stopped: Callable[[], bool]) -> Checkpoint:
    """What lies in a folder beside the archive, with its pickles checked."""
    read = _read(folder, is_stopped)
    if read.kind == "dcp":
        check_members(((name, folder / name) for name in (METADATA, *read.files)), is_stopped=is_stopped)
    return read


def _check_manifest(named: Named, manifest: Manifest) -> None:
    if manifest.serialized_file is not None:
        raise BadArchive(
            f"{named}, and the manifest names the weights {manifest.serialized_file} as serializedFile; leave one out."
        )
    if manifest.model_file is None and manifest.handler in BUILT_IN_HANDLERS:
        raise BadArchive(
            f"{named}, and the manifest names no modelFile, whose class the weights are of; archive the model with "
            "--model-file."
        )


def _find_beside(named: Named, store: LocalStore) -> Path:
    """The folder of the model store. Raises BadArchive."""
    if "/" in named.place.strip("/") and not os.path.isabs(named.place):
        raise BadArchive(f"{named}, and there is no such folder in the archive.")
    try:
        found = store.find(named.place)
    except ArchiveNotFound:
        raise BadArchive(f"{named}, and neither the archive nor the model store has such a folder.") from None
    if found.kind != "folder":
        raise BadArchive(f"{named}, which is a file of the model store; a checkpoint is a folder.")
    return found.path.resolve()


def _read(folder: Path, is_stopped: Callable[[], bool]) -> Checkpoint:
    try:
        return read_checkpoint(folder, CheckBudget(is_stopped=is_stopped))
    except CheckStopped:
        raise Draining from None
