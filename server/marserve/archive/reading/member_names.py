"""Which names an archive's members may have. Knows no files and no archive format.

This is the one function that makes a member's name safe: what it returns are path components that can be joined below
a folder of ours and stay below it, on this file system and on one that folds case or Unicode forms.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field

from marserve.errors import UnsafeArchive

_DRIVE = re.compile(r"^[A-Za-z]:")
_COMPONENT_BYTES = 255  # what ext4, xfs and APFS take for one name


def split_name(name: str, *, max_bytes: int = 1024, max_depth: int = 32) -> tuple[str, ...]:
    """Split a member's name into safe path components; a trailing slash and `.` components are dropped.

    Raises UnsafeArchive, naming the member as it was written: empty, absolute, with a drive letter, `..`, a backslash,
    control characters, text that is no Unicode, a form that compatibility normalisation turns into any of these, or
    over the bounds on length (bytes of UTF-8) and depth.
    """
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise UnsafeArchive(name, "its name is not valid Unicode") from None
    if length > max_bytes:
        raise UnsafeArchive(f"{name[:80]}…", f"its name has {length} bytes; at most {max_bytes} are unpacked")
    _refuse_escapes(name, name)
    _refuse_escapes(name, unicodedata.normalize("NFKC", name))
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if not parts:
        raise UnsafeArchive(name, "its name is empty")
    if len(parts) > max_depth:
        raise UnsafeArchive(f"{name[:80]}…", f"it lies {len(parts)} folders deep; at most {max_depth} are unpacked")
    for part in parts:
        if len(part.encode()) > _COMPONENT_BYTES:
            raise UnsafeArchive(f"{name[:80]}…", f"a part of its name has more than {_COMPONENT_BYTES} bytes")
    return parts


def _refuse_escapes(name: str, form: str) -> None:
    """Refuse `name` when `form`, the name or its normalised form, leads outside or means different things elsewhere."""
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in form):
        raise UnsafeArchive(name, "its name holds control characters")
    if "\\" in form:
        raise UnsafeArchive(name, "its name holds a backslash")
    if form.startswith("/"):
        raise UnsafeArchive(name, "its name is an absolute path")
    if _DRIVE.match(form):
        raise UnsafeArchive(name, "its name begins with a drive letter")
    if ".." in form.split("/"):
        raise UnsafeArchive(name, "its name leads outside of the archive")
    if form.count("/") != name.count("/"):
        raise UnsafeArchive(name, "its name holds a character that other systems read as a slash")


@dataclass(slots=True)
class NameSpace:
    """The names taken so far in one target folder; refuses those that could mean the same file.

    Two names clash when they are equal after Unicode normalisation and case folding, or when one is a file where the
    other needs a folder.
    """

    _files: dict[tuple[str, ...], str] = field(default_factory=dict)
    _folders: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)

    def add_file(self, name: str, parts: tuple[str, ...]) -> None:
        """Take `parts` for a file and its parents for folders. Raises UnsafeArchive when a name clashes."""
        key = self._add_folders(name, parts[:-1])
        key = (*key, _fold(parts[-1]))
        taken = self._files.get(key)
        if taken is not None:
            raise UnsafeArchive(name, "it is in the archive twice" if taken == name else _same(taken))
        if key in self._folders:
            raise UnsafeArchive(name, "it is a file where another member needs a folder")
        self._files[key] = name

    def add_folder(self, name: str, parts: tuple[str, ...]) -> None:
        """Take `parts` for a folder; naming the same folder again is no clash."""
        self._add_folders(name, parts)

    def _add_folders(self, name: str, parts: tuple[str, ...]) -> tuple[str, ...]:
        key: tuple[str, ...] = ()
        for depth, part in enumerate(parts, 1):
            key = (*key, _fold(part))
            if key in self._files:
                raise UnsafeArchive(name, f"it needs a folder where {self._files[key]!r} is a file")
            written = self._folders.setdefault(key, parts[:depth])
            if written != parts[:depth]:
                raise UnsafeArchive(name, _same("/".join(written)))
        return key


def _fold(part: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", part).casefold())


def _same(other: str) -> str:
    return f"its name differs from {other!r} only by case or Unicode form"
