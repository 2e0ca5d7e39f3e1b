"""Folders that processes make once and share, each named by what it holds: whole or not there, never deleted in use.

    FOLDER/NAME             is there when it is whole: it gets its name at one stroke
    FOLDER/NAME.lock        shared by those who use it, exclusive while it is made or deleted; its time: the last use
    STAGING/NAME.…SUFFIX    in the making, or being deleted; with the lock free, what a killed process left

All of it blocks, for moments but where folders are deleted; threads and processes may do it at the same time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from marserve.files.atomic import replace_file
from marserve.files.locks import open_locked, try_lock


@dataclass(slots=True)
class Lease:
    """A folder that stays as it is until `release`; with `is_exclusive` it is not there, and the holder's to make.

    A child process that inherits the `descriptor` holds it as well.
    """

    folder: Path
    descriptor: int
    is_exclusive: bool

    def release(self) -> None:
        """End it. May be called twice."""
        if self.descriptor >= 0:
            if self.is_exclusive:
                _drop_lock_of_nothing(self.folder)
            os.close(self.descriptor)
            self.descriptor = -1


class Pruned(NamedTuple):
    """Names of folders that were deleted, and of those of which a killed process had left something."""

    unused: list[str]
    left: list[str]


class LeasedFolders:
    """The folders below `folder`, where no other process than such as this writes.

    `staging` is on the same disk, `folder` itself if not given; names there end in `suffix`. `is_whole` says whether a
    folder may be used, `bytes_of` how large one is, None for what is left alone. `beside` are endings of files that are
    deleted with the folder.
    """

    def __init__(
        self,
        folder: Path,
        bytes_of: Callable[[Path], int | None],
        *,
        staging: Path | None = None,
        suffix: str = "",
        is_whole: Callable[[Path], bool] = Path.is_dir,
        beside: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self._staging = staging or folder
        self._suffix = suffix
        self._is_whole = is_whole
        self._bytes_of = bytes_of
        self._beside = beside

    def lease(self, name: str) -> Lease | None:
        """A lease of what is whole, an exclusive one of what is not there; None while others exclude that: ask again.

        Raises OSError.
        """
        folder = self.folder / name
        is_whole = self._is_whole(folder)
        descriptor = open_locked(_lock_of(folder), is_shared=is_whole)
        if descriptor is None:
            return None
        lease = Lease(folder, descriptor, not is_whole)
        try:
            if self._is_whole(folder) == is_whole:
                os.utime(descriptor)
                return lease
        except BaseException:
            lease.release()
            raise
        lease.is_exclusive = False  # it was made, or deleted, before the lock was there
        lease.release()
        return None

    def share(self, lease: Lease) -> bool:
        """Let others use what was made. False where another process deleted it first: the lease has ended then."""
        lease.is_exclusive = False
        if try_lock(lease.descriptor, is_shared=True) and self._is_whole(lease.folder):
            os.utime(lease.descriptor)
            return True
        lease.release()
        return False

    def stage(self, name: str) -> Path:
        """A new folder to make it in, with an exclusive lease; what was left of it is deleted first. Raises OSError."""
        self._clear(name)
        staged = self._new_name(name)
        staged.mkdir(mode=0o700)
        return staged

    def publish(self, whole: Path, name: str) -> None:
        """Give its name to what was made, in the place of what is not whole. Raises OSError."""
        final = self.folder / name
        shutil.rmtree(final, ignore_errors=True)
        whole.rename(final)

    def prune(self, most_bytes: float) -> Pruned:
        """Delete what killed processes left, and what is not in use, longest unused first, until the rest fits.

        What cannot be deleted stays.
        """
        pruned = Pruned([], [])
        for name in {path.name.partition(".")[0] for path in self._staging.glob(f"*.*{self._suffix}") if path.is_dir()}:
            with self._unused(name) as is_unused:
                if is_unused and self._clear(name):
                    pruned.left.append(name)
        sizes = self._sizes()
        total = sum(sizes.values())
        for folder in sorted(sizes, key=_used_at):
            if total <= most_bytes:
                break
            with self._unused(folder.name) as is_unused, contextlib.suppress(OSError):
                if is_unused:
                    self._delete(folder)
                    pruned.unused.append(folder.name)
                    total -= sizes[folder]
        return pruned

    def _sizes(self) -> dict[Path, int]:
        """All folders, with their bytes; without those in the making."""
        sizes = {}
        for path in self.folder.glob("*"):
            if path.is_dir() and not (self._suffix and path.name.endswith(self._suffix)):
                size = self._bytes_of(path)
                if size is not None:
                    sizes[path] = size
        return sizes

    @contextmanager
    def _unused(self, name: str) -> Iterator[bool]:
        """Whether no process uses, makes or deletes it; none does as long as the block lasts."""
        folder, descriptor = self.folder / name, None
        with contextlib.suppress(OSError):  # a full disk has no room for a lock
            descriptor = open_locked(_lock_of(folder))
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                Lease(folder, descriptor, is_exclusive=True).release()

    def _delete(self, folder: Path) -> None:
        # First its name, at one stroke: half of it must never have that.
        folder.rename(self._new_name(folder.name))
        self._clear(folder.name)
        for ending in self._beside:
            folder.with_name(folder.name + ending).unlink(missing_ok=True)

    def _clear(self, name: str) -> bool:
        """Delete what is left of making or deleting it, alone with it; says whether there was any."""
        left = [path for path in self._staging.glob(f"{name}.*{self._suffix}") if path.is_dir()]
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        return bool(left)

    def _new_name(self, name: str) -> Path:
        return self._staging / f"{name}.{secrets.token_hex(8)}{self._suffix}"


def discard(staged: Path) -> None:
    """Delete what was not finished. A process that was just killed may still write: it is tried for two seconds."""
    for _ in range(20):
        shutil.rmtree(staged, ignore_errors=True)
        if not staged.exists():
            return
        time.sleep(0.1)


def bytes_below(folder: Path) -> int:
    """The bytes of all files below a folder, links not followed."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def find_stranger(folder: Path) -> str | None:
    """Who else may have put into a folder what workers would run; None where only this process's user or root could."""
    try:
        state = folder.stat()
    except OSError:
        return None  # then there is nothing to be read either
    if state.st_mode & 0o002:
        return "others on this machine may write there"
    me = os.geteuid()
    if me and state.st_uid not in (0, me):
        return "it belongs to another user"
    return None


def tag_as_cache(folder: Path, what: str) -> None:
    """Say to programs that make backups that they may leave a folder out. Raises OSError."""
    tag = folder / "CACHEDIR.TAG"
    if not tag.exists():
        replace_file(tag, f"Signature: 8a477f597d28d172789f06886806bc55\n# {what}\n".encode())


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _drop_lock_of_nothing(folder: Path) -> None:
    """Delete the lock file of a folder that is not there, alone with it: processes that wait for it make another."""
    with contextlib.suppress(OSError):
        if not folder.exists():
            _lock_of(folder).unlink(missing_ok=True)


def _used_at(folder: Path) -> float:
    try:
        return _lock_of(folder).stat().st_mtime
    except OSError:
        return 0.0
