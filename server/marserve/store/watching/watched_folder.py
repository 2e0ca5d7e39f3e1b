"""A folder of archives as a place to watch: lists it, and passes on notices of the system about changes.

Archives lie in the folder itself, or up to three folders deep (`model/1.2/model.mar`); a folder with a manifest is an
object of its own, whose key ends with a slash. Hidden names are ignored, as they may be incomplete. This module does
not read archives.

A notice is only a hint: a network file system gives none for changes by other machines, so a watch also looks from time
to time.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from marserve.store.sources.local import ARCHIVE_ENDINGS
from marserve.store.sources.source import Broken, Entry, Failed

log = logging.getLogger("marserve.store")

MANIFEST_FOLDER = "MAR-INF"
DEEPEST = 3
# A folder with more files is not a model store.
MOST_FILES = 200_000
# A file that is being written changes many times.
GATHER_MS = 100
STEP_MS = 50


class WatchedFolder:
    """The archives below `root` whose keys, their paths relative to it, begin with `prefix`."""

    def __init__(self, root: Path, prefix: str = "") -> None:
        self.root = root
        self._prefix = prefix
        self._identity: tuple[int, int] | None = None
        self._had_any = False

    @property
    def shown(self) -> str:
        """Its path, for logs and management."""
        return str(self.root)

    @property
    def identity(self) -> tuple[int, int] | None:
        """The device and inode of the folder at the last look, to notice another one in its place."""
        return self._identity

    def list(self) -> Iterator[Entry]:
        """Every archive, in any order. Raises Failed or Broken if the folder cannot be read.

        An empty folder that is another one than before is an error, as a missing mount looks like that.
        """
        try:
            status = os.stat(self.root)
            identity = (status.st_dev, status.st_ino)
            entries = [entry for entry in _Walk(self.root).entries() if entry.key.startswith(self._prefix)]
        except NotADirectoryError:
            raise Failed("it is no folder") from None
        except FileNotFoundError:
            raise Broken("there is no such folder") from None
        except OSError as error:
            raise Broken(f"it cannot be read ({error.strerror or error})") from None
        if not entries and self._had_any and identity != self._identity:
            raise Broken("it is another folder than before, and empty: is something not mounted?")
        self._identity, self._had_any = identity, bool(entries)
        return iter(entries)

    def stat(self, key: str) -> Entry | None:
        """One archive as it is now, None if it is missing. Raises as `list`."""
        return next((entry for entry in self.list() if entry.key == key), None)

    def path_of(self, key: str) -> Path:
        """The path of a listed archive."""
        return self.root / key.rstrip("/")

    def close(self) -> None:
        """Do nothing."""


class _Walk:
    """One look into a folder, bounded."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen = 0

    def entries(self) -> Iterator[Entry]:
        return self._below(self._root, "", 0)

    def _below(self, folder: Path, prefix: str, depth: int) -> Iterator[Entry]:
        for found in self._scan(folder):
            key = prefix + found.name
            try:
                if found.is_dir():
                    inner = Path(found.path)
                    if _has_manifest(inner):
                        yield self._folder(inner, key + "/")
                    elif depth < DEEPEST - 1:
                        yield from self._below(inner, key + "/", depth + 1)
                elif key.lower().endswith(ARCHIVE_ENDINGS) and found.is_file():
                    yield _file(key, found.stat())
            except OSError as error:
                if depth == 0 and error.errno not in _PASSING:
                    log.warning("%s is left out of what is watched: %s", found.name, error.strerror or error)

    def _scan(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        with os.scandir(folder) as entries:
            for found in entries:
                self._seen += 1
                if self._seen > MOST_FILES:
                    raise OSError(errno.E2BIG, f"there are more than {MOST_FILES} files in it")
                if not found.name.startswith("."):
                    yield found

    def _folder(self, folder: Path, key: str) -> Entry:
        """The entry of a model that is served in place: it changes when any file below it does."""
        digest, size, newest = hashlib.sha256(), 0, 0.0
        for where, _, names in os.walk(folder):
            for name in names:
                self._seen += 1
                if self._seen > MOST_FILES:
                    raise OSError(errno.E2BIG, f"there are more than {MOST_FILES} files in it")
                path = os.path.join(where, name)
                status = os.stat(path)
                size += status.st_size
                newest = max(newest, status.st_mtime)
                digest.update(f"{path}\0{_mark(status)}\n".encode("utf-8", "surrogateescape"))
        return Entry(key, size, f'"{digest.hexdigest()[:32]}"', newest)


# Errors for files that were removed or replaced before they were looked at.
_PASSING = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def _has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST_FOLDER).is_dir()


def _file(key: str, status: os.stat_result) -> Entry:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    return Entry(key, status.st_size, f'"{_mark(status)}"', status.st_mtime)


def _mark(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


class FolderNotices:
    """A thread that waits for the system's notices of changes below a folder, and passes them on.

    `on_notice` is called on that thread, at most a few times a second. `on_end` is called once, with the sentence that
    says why there will be no more notices, unless it was closed.
    """

    def __init__(self, root: Path, on_notice: Callable[[], None], on_end: Callable[[str], None]) -> None:
        self._root = root
        self._on_notice = on_notice
        self._on_end = on_end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"notices-{root.name}", daemon=True)

    def start(self) -> None:
        """Begin to wait."""
        self._thread.start()

    def close(self, limit_s: float = 5.0) -> bool:
        """End the thread; returns whether it ended within `limit_s`. May be called twice."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        reason = "the folder is gone"
        try:
            import watchfiles  # late: a start without it is 30 ms faster

            logging.getLogger("watchfiles").setLevel(logging.WARNING)  # it counts every write
            for _ in watchfiles.watch(
                self._root,
                watch_filter=None,
                debounce=GATHER_MS,
                step=STEP_MS,
                stop_event=self._stop,
                rust_timeout=1000,
                raise_interrupt=False,
                ignore_permission_denied=False,  # true would hide every other error, too
            ):
                self._on_notice()
        except Exception as error:
            # A border: after any error (too many watches, a missing folder) regular looks go on.
            reason = str(error) or type(error).__name__
        if not self._stop.is_set():
            self._on_end(reason)
