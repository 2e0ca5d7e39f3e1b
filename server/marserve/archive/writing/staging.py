"""The folder in which the models of `marserve run` lie: a model store whose entries are planned archives.

Each staged model is a folder of its own, with the members that an archive would have. Everything here blocks.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from marserve.archive.contents.manifest import read_manifest
from marserve.archive.reading.reader import Limits, unpack
from marserve.archive.writing.writer import Plan, write_archive
from marserve.errors import BadArchive, CannotArchive

_PLAIN_NAME = re.compile(r"\w[\w.-]*")
_KEPT = 2  # the served one, and the one that takes its place


class Staging:
    """The entries of one folder, `root`, which is made. The caller deletes it."""

    def __init__(self, root: Path) -> None:
        root.mkdir(mode=0o700)
        self.root = root
        self._count = 0

    def stage(self, plan: Plan, *, links: bool = False) -> str:
        """Write the members of a plan; returns the entry's name. Raises CannotArchive.

        With `links` the entry has links to the files, which must not change as long as it is served.
        """
        name = self._next(plan.spec.model_name)
        write_archive(plan, self.root / name, archive_format="no-archive", links=links)
        return name

    def take_archive(self, path: Path) -> tuple[str, str, str]:
        """Bring in an archive, a file or a folder; returns the entry's name, and the model's name and version.

        The entry has the archive's own name, by which `trusted_models` may name it. Raises CannotArchive.
        """
        own = path.resolve().name
        is_free = _PLAIN_NAME.fullmatch(own) is not None and not (self.root / own).exists()
        name = own if is_free else self._next("archive")
        target = self.root / name
        try:
            if path.is_dir():
                shutil.copytree(path, target / path.resolve().name)
                target = target / path.resolve().name
            else:
                unpack(path, target, Limits())
            manifest = read_manifest(target)
        except BadArchive as error:
            raise CannotArchive(error.message) from error
        except OSError as error:
            raise CannotArchive(f"{path} cannot be read ({error.strerror or error}).") from error
        model = manifest.model_name or path.name.partition(".")[0]
        return name, model, manifest.model_version or "1.0"

    def forget_old(self) -> None:
        """Delete what is neither the newest entry nor the one before."""
        for entry in self.root.iterdir():
            number = entry.name.rpartition("-")[2]
            if number.isdigit() and int(number) <= self._count - _KEPT:
                shutil.rmtree(entry, ignore_errors=True)

    def _next(self, model: str) -> str:
        self._count += 1
        return f"{model}-{self._count}"
