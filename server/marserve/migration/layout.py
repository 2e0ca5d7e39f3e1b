"""Finds the pieces of a TorchServe installation in a folder: by their names, and by what other pieces say of them.

Looks at names and at the first bytes of no file. Links are not followed out of the folder, hidden folders and those of
environments are left out, and there is a bound on how much is looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_DEPTH = 6
MAX_FILES = 20_000
ARCHIVE_ENDINGS = (".mar", ".war", ".model", ".tar.gz", ".tgz")
SCRIPT_ENDINGS = (".sh", ".bash", ".service", ".bat", ".ps1")
SCRIPT_NAMES = ("Dockerfile", "Procfile", "Makefile", "docker-compose.yml", "docker-compose.yaml", "compose.yaml")
_LEFT_OUT = ("node_modules", "site-packages", "venv", "env", "__pycache__")


@dataclass(frozen=True, slots=True)
class Layout:
    """The pieces below `root`, each a path; `cut_short`: there was more than is looked at."""

    root: Path
    configs: list[Path] = field(default_factory=list)
    snapshots: list[Path] = field(default_factory=list)
    archives: list[Path] = field(default_factory=list)
    scripts: list[Path] = field(default_factory=list)
    cut_short: bool = False

    def shown(self, path: Path) -> str:
        """A path as the report names it: relative to the root."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)

    def find_folder(self, named: str) -> Path | None:
        """The folder that a setting or a flag names, here: as it stands, or of that name below the root.

        Settings of containers name folders that exist inside of them alone.
        """
        path = self.root / named
        if path.is_dir():
            return path
        last = Path(named).name
        return next((folder for folder in sorted(self._folders()) if folder.name == last), None) if last else None

    def find_file(self, named: str) -> Path | None:
        """The file that a setting names, here, as `find_folder` does."""
        path = self.root / named
        if path.is_file():
            return path
        last = Path(named).name
        known = [*self.configs, *self.snapshots, *self.archives, *self.scripts]
        return next((file for file in known if file.name == last), None)

    def _folders(self) -> Iterator[Path]:
        for folder, names, _ in _walk(self.root):
            yield folder
            names.sort()


def find_layout(root: Path) -> Layout:
    """Look through `root`. Raises NotADirectoryError where there is no such folder."""
    root = root.resolve()
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is no folder")
    configs: list[Path] = []
    snapshots: list[Path] = []
    archives: list[Path] = []
    scripts: list[Path] = []
    seen = 0
    cut_short = False
    for folder, _, names in _walk(root):
        for name in sorted(names):
            seen += 1
            if seen > MAX_FILES:
                cut_short = True
                break
            path = folder / name
            lower = name.lower()
            if lower.endswith(".cfg") and folder.name == "config":
                snapshots.append(path)
            elif lower.endswith(".properties") and "log4j" not in lower:
                configs.append(path)
            elif lower.endswith(ARCHIVE_ENDINGS):
                archives.append(path)
            elif lower.endswith(SCRIPT_ENDINGS) or name in SCRIPT_NAMES or lower.startswith("dockerfile"):
                scripts.append(path)
    return Layout(root, configs, snapshots, archives, scripts, cut_short)


def _walk(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        depth = len(here.relative_to(root).parts)
        folders[:] = sorted(
            name
            for name in folders
            if depth < MAX_DEPTH
            and not name.startswith(".")
            and name not in _LEFT_OUT
            and not (here / name).is_symlink()
        )
        yield here, folders, [name for name in files if not (here / name).is_dir()]
