"""The plan of a version: its unpacked archive, what its workers load, what describe shows of it. Plain data."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from marserve.agent_link import ArchiveRef
from marserve.archive.checkpoints.contents import Checkpoint
from marserve.archive.contents.declaration import Declared
from marserve.archive.contents.manifest import Manifest
from marserve.archive.contents.model_config import ModelConfig
from marserve.archive.reading.unpacked import UnpackedArchives
from marserve.environments.environments import Environment
from marserve.environments.requirements import Requirements
from marserve.files.leased_folders import Lease
from marserve.messages import Load
from marserve.registry.catalogue.describe import Facts


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The weights that a configuration names by `checkpoint`, as their headers have them, and the folder they lie in.

    `may_map`: only this server writes there, so that workers may map the files: overwriting a mapped file ends its
    worker. `is_beside`: the folder is no part of the archive. With a `lease` it was fetched, and is not deleted before
    that is released; `content` is then a word for exactly what was fetched.
    """

    folder: Path
    read: Checkpoint
    may_map: bool
    is_beside: bool
    lease: Lease | None = None
    content: str = ""

    def release(self) -> None:
        """End the lease. May be called twice."""
        if self.lease is not None:
            self.lease.release()


@dataclass(frozen=True, slots=True)
class Unpacked:
    """An archive after intake. With `is_private` the holder of this object has to delete its folder.

    `warnings` are findings in pickles of an archive that the operator trusts. `archive` is the URL or name by which a
    later start finds it again. `origin` is what other machines fetch, None for a folder; its digest is empty
    if the archive was changed while it was unpacked. `placed` is the file that was added to the store for it.
    `archives` is the record in which the private folder is noted. `declared` is what the archive says that its model
    takes and gives. `is_trusted`: the operator allows any pickles in it. `checkpoint` are the weights apart from it.
    """

    folder: Path
    manifest: Manifest
    config: ModelConfig
    is_private: bool = True
    warnings: tuple[str, ...] = ()
    archive: str = ""
    origin: ArchiveRef | None = None
    placed: Path | None = None
    archives: UnpackedArchives | None = None
    declared: Declared | None = None
    is_trusted: bool = False
    checkpoint: FoundCheckpoint | None = None

    def discard(self) -> None:
        """Delete the folder if it is private, and release its checkpoint. Blocks; may be called twice."""
        if self.checkpoint is not None:
            self.checkpoint.release()
        if self.is_private and self.archives is not None:
            self.archives.discard(self.folder)
        elif self.is_private:
            shutil.rmtree(self.folder, ignore_errors=True)

    def take_away(self) -> None:
        """Delete the file that was added to the store for it. Blocks; may be called twice."""
        if self.placed is not None:
            self.placed.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The requirements that are to be installed before a version can exist, and how."""

    requirements: Requirements
    kind: Literal["packages", "venv"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A version before its workers start: what describe shows, what workers load, and its unpacked archive.

    `wanted` is what it requires; `environment` is where that is, once installed (`equip`).
    """

    facts: Facts
    load: Load
    unpacked: Unpacked
    wanted: Wanted | None = None
    environment: Environment | None = None

    def borrowed(self) -> Plan:
        """The same plan without owning its files: its `discard` leaves them where they are."""
        checkpoint = self.unpacked.checkpoint
        if checkpoint is not None:
            checkpoint = replace(checkpoint, lease=None)
        unpacked = replace(self.unpacked, is_private=False, checkpoint=checkpoint)
        return replace(self, unpacked=unpacked, environment=None)

    def discard(self) -> None:
        """Release the environment, and delete the unpacked folder if it is private. Blocks."""
        if self.environment is not None:
            self.environment.release()
        self.unpacked.discard()
