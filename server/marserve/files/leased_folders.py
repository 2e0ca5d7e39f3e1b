"""Folders that processes make once and share, each named by its content: whole or missing, never deleted in use.

    FOLDER/NAME             a whole folder: it gets its name by one rename
    FOLDER/NAME.lock        shared by its users, exclusive while it is made or deleted; its time is the last use
    STAGING/NAME.…SUFFIX    being made or deleted; with the lock free, a leftover of a killed process

All of it blocks, only for moments except when folders are deleted. Threads and processes may use it at the same time.
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
    """A folder that stays as it is until `release`; with `is_exclusive` it is missing, and the holder may make it.

    A child process that inherits the `descriptor` holds the lease as well.
    """

    folder: Path
    descriptor: int
    is_exclusive: bool

    def release(self) -> None:
        """End the lease. May be called twice."""
        if self.descriptor >= 0:
            if self.is_exclusive:
                _drop_lock_of_nothing(self.folder)
            os.close(self.descriptor)
            self.descriptor = -1


class Pruned(NamedTuple):
    """Names of folders that were deleted, and of folders with leftovers of a killed process."""

    unused: list[str]
    left: list[str]


class LeasedFolders:
    """The folders below `folder`, where only processes of this kind write.

    `staging` is on the same disk, `folder` itself if not given; names there end in `suffix`. `is_whole` says whether a
    folder may be used, `bytes_of` how large it is, None to leave it alone. `beside` are endings of files that are
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
        """A lease of a whole folder, or an exclusive one of a missing folder; None while others exclude that.

        The caller then tries again. Raises OSError.
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
        lease.is_exclusive = False  # it was made or deleted before it was locked
        lease.release()
        return None

    def share(self, lease: Lease) -> bool:
        """Let others use the new folder. False if another process deleted it first; the lease has then ended."""
        lease.is_exclusive = False
        if try_lock(lease.descriptor, is_shared=True) and self._is_whole(lease.folder):
            os.utime(lease.descriptor)
            return True
        lease.release()
        return False

    def stage(self, name: str) -> Path:
        """A new folder to make it in, under an exclusive lease; leftovers of it are deleted first. Raises OSError."""
        self._clear(name)
        staged = self._new_name(name)
        staged.mkdir(mode=0o700)
        return staged

    def publish(self, whole: Path, name: str) -> None:
        """Give the new folder its name; one that is not whole is replaced. Raises OSError."""
        final = self.folder / name
        shutil.rmtree(final, ignore_errors=True)
        whole.rename(final)

    def prune(self, most_bytes: float) -> Pruned:
        """Delete leftovers of killed processes, and unused folders, longest unused first, until the rest fits.

        Folders that cannot be deleted stay.
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
        """All folders with their bytes, except those that are being made."""
        sizes = {}
        for path in self.folder.glob("*"):
            if path.is_dir() and not (self._suffix and path.name.endswith(self._suffix)):
                size = self._bytes_of(path)
                if size is not None:
                    sizes[path] = size
        return sizes

    @contextmanager
    def _unused(self, name: str) -> Iterator[bool]:
        """Whether no process uses, makes or deletes it; none can start to during the block."""
        folder, descriptor = self.folder / name, None
        with contextlib.suppress(OSError):  # a full disk has no room for a lock
            descriptor = open_locked(_lock_of(folder))
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                Lease(folder, descriptor, is_exclusive=True).release()

    def _delete(self, folder: Path) -> None:
        # First its name, by one rename: half a folder must never have it.
        folder.rename(self._new_name(folder.name))
        self._clear(folder.name)
        for ending in self._beside:
            folder.with_name(folder.name + ending).unlink(missing_ok=True)

    def _clear(self, name: str) -> bool:
        """Delete leftovers of making or deleting it, under its lock; returns whether there were any."""
        left = [path for path in self._staging.glob(f"{name}.*{self._suffix}") if path.is_dir()]
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        return bool(left)

    def _new_name(self, name: str) -> Path:
        return self._staging / f"{name}.{secrets.token_hex(8)}{self._suffix}"


def discard(staged: Path) -> None:
    """Delete an unfinished folder. Tries for two seconds, as a process that was just killed may still write."""
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
    """A sentence about others who may write code into a folder; None if only this process's user or root may."""
    try:
        state = folder.stat()
    except OSError:
        return None  # without a folder there is nothing to run
    if state.st_mode & 0o002:
        return "others on this machine may write there"
    me = os.geteuid()
    if me and state.st_uid not in (0, me):
        return "it belongs to another user"
    return None


def tag_as_cache(folder: Path, what: str) -> None:
    """Tell backup programs that they may leave a folder out. Raises OSError."""
    tag = folder / "CACHEDIR.TAG"
    if not tag.exists():
        replace_file(tag, f"Signature: 8a477f597d28d172789f06886806bc55\n# {what}\n".encode())


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _drop_lock_of_nothing(folder: Path) -> None:
    """Delete the lock file of a missing folder, under its lock; processes that wait for it make a new one."""
    with contextlib.suppress(OSError):
        if not folder.exists():
            _lock_of(folder).unlink(missing_ok=True)


def _used_at(folder: Path) -> float:
    try:
        return _lock_of(folder).stat().st_mtime
    except OSError:
        return 0.0
