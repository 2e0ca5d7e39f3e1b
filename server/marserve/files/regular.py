"""Opens regular files, and refuses anything else that has their name.

Opening a named pipe would wait for its other end, and reading `/dev/zero` would never end. Links to regular files are
followed: Kubernetes mounts ConfigMaps and Secrets as links.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


class NotRegular(OSError):
    """The path names another kind of file; `strerror` says which."""


class TooLarge(OSError):
    """The file has more bytes than may be read; `strerror` has the bound."""


def open_regular(path: Path | str) -> BufferedReader:
    """Open for reading, without waiting. Raises NotRegular, IsADirectoryError, and OSError as `open` does."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if kind != stat.S_IFREG:
            raise NotRegular(errno.EINVAL, _describe(kind), str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path | str, most_bytes: int) -> bytes:
    """The file's content. Raises TooLarge, and as `open_regular`."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise TooLarge(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return data


def why_not_regular(path: Path | str) -> str:
    """Why `open_regular` would refuse it, in a few words, without opening it; empty for a regular file."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return "there is no such file"
    except (OSError, ValueError) as error:
        return f"it cannot be looked at ({getattr(error, 'strerror', None) or error})"
    return "" if kind == stat.S_IFREG else _describe(kind)


def _describe(kind: int) -> str:
    return f"it is {_KINDS.get(kind, 'of an unknown kind')}, not a regular file"
