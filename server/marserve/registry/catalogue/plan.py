"""What a version is made of: what was unpacked, what its workers are told, what describe says of it. Plain data."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from marserve.agent_link import ArchiveRef
from marserve.archive.contents.manifest import Manifest
from marserve.archive.contents.model_config import ModelConfig
from marserve.archive.reading.unpacked import UnpackedArchives
from marserve.environments.environments import Environment
from marserve.environments.requirements import Requirements
from marserve.messages import Load
from marserve.registry.catalogue.describe import Facts


@dataclass(frozen=True, slots=True)
class Unpacked:
    """An archive that was taken in. With `is_private` its folder belongs to whoever holds this.

    `warnings` tell what was found in pickles of an archive that the operator trusts. `archive` is the word by which a
    later start finds it again. `origin` is what other machines fetch, None for a folder; its digest is empty
    where the archive was changed while it was unpacked. `placed` is the file that the store got of it.
    `archives` has the private folder noted.
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

    def discard(self) -> None:
        """Delete the folder if it is private. Blocks; may be called twice."""
        if self.is_private and self.archives is not None:
            self.archives.discard(self.folder)
        elif self.is_private:
            shutil.rmtree(self.folder, ignore_errors=True)

    def take_away(self) -> None:
        """Take from the store what it got of it, for nobody is to have it. Blocks; may be called twice."""
        if self.placed is not None:
            self.placed.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be installed before a version can be, and as what."""

    requirements: Requirements
    kind: Literal["packages", "venv"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A version that could be: what describe says of it, what its workers are told, and what it was unpacked to.

    `wanted` is what it requires, `environment` where that is, once it is installed (`equip`).
    """

    facts: Facts
    load: Load
    unpacked: Unpacked
    wanted: Wanted | None = None
    environment: Environment | None = None

    def borrowed(self) -> Plan:
        """The same, whose files belong to somebody else: its `discard` leaves them where they are."""
        return replace(self, unpacked=replace(self.unpacked, is_private=False), environment=None)

    def discard(self) -> None:
        """Let go of everything on disk. Blocks."""
        if self.environment is not None:
            self.environment.release()
        self.unpacked.discard()
