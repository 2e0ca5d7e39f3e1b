"""Finds archives in the model store, a folder. Knows no network and does not open archives beyond their first bytes.

A registration's `url` that is not an address names an entry of the store by its last path component (contract 2.2).
Files elsewhere cannot be reached, except by an absolute path below a folder of `roots`. Links in the store are followed
wherever they lead; below a root only files that really lie in a root are found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from marserve.errors import AddressNotAllowed, ArchiveNotFound, NotInStore
from marserve.files.regular import open_regular
from marserve.store.addresses.fetch_guard import hide_query, is_address

_ZIP_STARTS = (b"PK\x03\x04", b"PK\x05\x06")
ARCHIVE_ENDINGS = (".mar", ".model", ".tar.gz", ".tgz")

Kind = Literal["zip", "tar", "folder"]


@dataclass(frozen=True, slots=True)
class Found:
    """An archive of the store. `kind` follows from its content; any file but a zip file is read as a tar file.

    A `folder` is served in place: `path` is where its manifest is looked for. `name` is the entry of the store; below a
    further root it is the absolute path.
    """

    path: Path
    kind: Kind
    name: str


class LocalStore:
    """The model store at `root`; without a root nothing is found.

    `roots` are further folders, below which absolute paths are found. `missing` is the sentence for a missing archive,
    with places for `url` and for the `name` that was looked for.
    """

    def __init__(
        self, root: Path | None, *, roots: Sequence[Path] = (), missing: str = "Model not found at: {url}"
    ) -> None:
        self.root = root
        self._roots = tuple(roots)
        self._missing = missing

    def find(self, url: str) -> Found:
        """Find what `url` names: an archive's file, or a folder.

        A folder whose only entry is a folder stands for that inner one. Raises ArchiveNotFound, in TorchServe's words,
        for an empty `url`, one with `..`, an address (those are for `allowed_urls`), and a missing archive.
        """
        if not url:
            raise ArchiveNotFound("empty url")
        if ".." in url:
            raise ArchiveNotFound(f"Relative path is not allowed in url: {hide_query(url)}")
        elsewhere = self._find_below_roots(url)
        if elsewhere is not None:
            return elsewhere
        if self.root is None:
            raise ArchiveNotFound("Model store has not been configured.")
        if is_address(url):
            raise AddressNotAllowed(hide_query(url))
        name = re.split(r"[/\\]", url.rstrip("/"))[-1]
        path = self.root / name
        try:
            if name not in ("", ".") and path.is_file():
                return Found(path, _kind_of(path), name)
            if name not in ("", ".") and path.is_dir():
                return Found(_inner_folder(path), "folder", name)
        except (OSError, ValueError):  # a name too long, or with a NUL, or a file that may not be read
            raise NotInStore(self._missing.format(url=hide_query(url), name=hide_query(name))) from None
        raise NotInStore(self._missing.format(url=hide_query(url), name=hide_query(name)))

    def _find_below_roots(self, url: str) -> Found | None:
        """The archive at an absolute path below a further root; None for any other word.

        Raises ArchiveNotFound for a path below a root that leads out of all roots, or does not exist.
        """
        if not self._roots or not url.startswith("/"):
            return None
        try:
            # The path as written must begin with a root as written, or with a root's real path.
            written = Path(url)
            if not any(
                written.is_relative_to(form) and written != form
                for root in self._roots
                for form in (root, root.resolve())
            ):
                return None
            real = written.resolve(strict=True)
            if not any(real.is_relative_to(root.resolve()) and real != root.resolve() for root in self._roots):
                raise ArchiveNotFound(f"Given path {url} leads out of model_roots")
            if real.is_file():
                return Found(real, _kind_of(real), str(real))
            if real.is_dir():
                return Found(_inner_folder(real), "folder", str(real))
        except (OSError, ValueError):
            pass
        raise NotInStore(self._missing.format(url=hide_query(url), name=hide_query(url.rpartition("/")[2])))

    def names(self) -> list[str]:
        """The names that `load_models=all` loads, in order: folders and archives (contract 6.4) that are not hidden.

        Empty without a store.
        """
        if self.root is None or not self.root.is_dir():
            return []
        return sorted(
            path.name
            for path in self.root.iterdir()
            if not path.name.startswith(".")
            and (path.is_dir() or (path.is_file() and path.name.lower().endswith(ARCHIVE_ENDINGS)))
        )


def look_at(path: Path, name: str) -> Found:
    """An archive or a folder that is not in the store. Raises OSError."""
    if path.is_dir():
        return Found(_inner_folder(path), "folder", name)
    return Found(path, _kind_of(path), name)


def _kind_of(path: Path) -> Kind:
    with open_regular(path) as file:
        return "zip" if file.read(4) in _ZIP_STARTS else "tar"


def _inner_folder(folder: Path) -> Path:
    entries = list(folder.iterdir())
    if len(entries) != 1 or not entries[0].is_dir() or entries[0].is_symlink():
        return folder
    return folder if _is_part_of_a_model(entries[0]) else entries[0]


def _is_part_of_a_model(folder: Path) -> bool:
    """Whether a folder is only a part of a model: that of a manifest, or the scripts of a SageMaker model."""
    return folder.name == "MAR-INF" or (folder.name == "code" and not (folder / "MAR-INF").is_dir())
