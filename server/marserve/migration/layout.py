"""Finds the pieces of a TorchServe installation in a folder, by their names and by the volumes of its containers.

It opens no file and follows no links out of the folder. Hidden folders, environments and folders that the server
unpacked are left out. The number of files is bounded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

MAX_DEPTH = 6
MAX_FILES = 20_000
ARCHIVE_ENDINGS = (".mar", ".war", ".model", ".tar.gz", ".tgz")
SCRIPT_ENDINGS = (".sh", ".bash", ".service", ".bat", ".ps1", ".env")
SCRIPT_NAMES = ("Dockerfile", "Procfile", "Makefile")
DEPLOYMENT_ENDINGS = (".yaml", ".yml")
MODEL_FOLDER_MARK = "MAR-INF"
# Files of packages to install: pip's and conda's, and projects that list them.
_PACKAGE_LISTS = re.compile(
    r"(requirements|constraints)[\w.\-]*\.(txt|in)|environment[\w.\-]*\.ya?ml|pyproject\.toml|Pipfile"
)
_LOG_CONFIGS = re.compile(r"log4j[\w.\-]*\.(xml|properties|ya?ml|json)", re.IGNORECASE)
_UNPACKED = re.compile(r"[0-9a-f]{32}")
_LEFT_OUT = ("node_modules", "site-packages", "venv", "env", "__pycache__")


@dataclass(frozen=True, slots=True)
class Volume:
    """A folder that a container has at `inside`: `outside` on this machine, or None for a volume that Docker keeps.

    `source` is the written form, in the file `shown` at `line`.
    """

    inside: str
    source: str
    outside: Path | None
    shown: str
    line: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The pieces below `root`, and in the folders of its containers' `volumes`.

    `cut_short`: there were more files than the bound.
    """

    root: Path
    configs: list[Path] = field(default_factory=list)
    snapshots: list[Path] = field(default_factory=list)
    archives: list[Path] = field(default_factory=list)
    scripts: list[Path] = field(default_factory=list)
    model_folders: list[Path] = field(default_factory=list)
    deployments: list[Path] = field(default_factory=list)
    package_lists: list[Path] = field(default_factory=list)
    log_configs: list[Path] = field(default_factory=list)
    key_files: list[Path] = field(default_factory=list)
    jars: list[Path] = field(default_factory=list)
    volumes: list[Volume] = field(default_factory=list)
    cut_short: bool = False

    @property
    def has_archives(self) -> bool:
        """Whether there is any archive."""
        return bool(self.archives or self.model_folders)

    @property
    def archive_names(self) -> set[str]:
        """The names that settings and snapshots can use: of archives, and of models in folders."""
        return {path.name for path in (*self.archives, *self.model_folders)}

    def shown(self, path: Path) -> str:
        """A path as the report names it: relative to the root."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)

    def find_folder(self, named: str) -> Path | None:
        """The folder here that a setting or a flag names: through a volume, by its path, or by its name below the root.

        Settings of containers name folders that exist only inside of them.
        """
        seen = self._seen_in_container(named)
        if seen is not None and seen.is_dir():
            return seen
        path = self.root / named
        if path.is_dir():
            return path
        last = Path(named).name
        return next((folder for folder in sorted(self._folders()) if folder.name == last), None) if last else None

    def find_file(self, named: str) -> Path | None:
        """The file here that a setting names, found as by `find_folder`."""
        seen = self._seen_in_container(named)
        if seen is not None and seen.is_file():
            return seen
        path = self.root / named
        if path.is_file():
            return path
        last = Path(named).name
        known = [*self.configs, *self.snapshots, *self.archives, *self.scripts, *self.deployments, *self.log_configs]
        return next((file for file in known if file.name == last), None)

    def docker_volume(self, named: str) -> str | None:
        """The volume kept by Docker, which was not looked into, that holds this path of a container; or None."""
        volume = self._volume_of(named)
        return volume.source if volume is not None and volume.outside is None else None

    def _seen_in_container(self, named: str) -> Path | None:
        volume = self._volume_of(named)
        if volume is None or volume.outside is None:
            return None
        return volume.outside / named[len(volume.inside) :].strip("/")

    def _volume_of(self, named: str) -> Volume | None:
        """The innermost volume that a container's path lies in."""
        holds = [each for each in self.volumes if f"{named.rstrip('/')}/".startswith(f"{each.inside.rstrip('/')}/")]
        return max(holds, key=lambda each: len(each.inside), default=None)

    def _folders(self) -> Iterator[Path]:
        for folder, names, _ in _walk(self.root):
            yield folder
            names.sort()


def find_layout(root: Path) -> Layout:
    """Look through `root`. Raises NotADirectoryError if there is no such folder."""
    root = root.resolve()
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is no folder")
    return _collect(Layout(root), root)


def follow_volumes(layout: Layout, volumes: Sequence[Volume]) -> Layout:
    """The layout with the volumes of its containers, and the pieces in folders outside of the root."""
    layout = replace(layout, volumes=list(volumes))
    # dict.fromkeys: several containers may have the same folder.
    for folder in dict.fromkeys(each.outside for each in volumes):
        if folder is not None and folder.is_dir() and not folder.is_relative_to(layout.root):
            layout = _collect(layout, folder)
    return layout


def _collect(layout: Layout, within: Path) -> Layout:
    seen = 0
    for folder, folders, names in _walk(within):
        if MODEL_FOLDER_MARK in folders:
            layout.model_folders.append(folder)
            folders.clear()
            continue
        for name in sorted(names):
            seen += 1
            if seen > MAX_FILES:
                return replace(layout, cut_short=True)
            _sort_in(layout, folder / name)
    return layout


def _sort_in(layout: Layout, path: Path) -> None:
    name, lower = path.name, path.name.lower()
    if lower.endswith(".cfg") and path.parent.name == "config":
        layout.snapshots.append(path)
    elif _LOG_CONFIGS.fullmatch(name):
        layout.log_configs.append(path)
    elif _PACKAGE_LISTS.fullmatch(name):
        layout.package_lists.append(path)
    elif lower.endswith(".properties"):
        layout.configs.append(path)
    elif lower.endswith(ARCHIVE_ENDINGS):
        layout.archives.append(path)
    elif lower.endswith(".jar"):
        layout.jars.append(path)
    elif name == "key_file.json":
        layout.key_files.append(path)
    elif lower.endswith(SCRIPT_ENDINGS) or name in SCRIPT_NAMES or lower.startswith("dockerfile"):
        layout.scripts.append(path)
    elif lower.endswith(DEPLOYMENT_ENDINGS):
        layout.deployments.append(path)


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
            and not _UNPACKED.fullmatch(name)
            and not (here / name).is_symlink()
        )
        yield here, folders, [name for name in files if not (here / name).is_dir()]
