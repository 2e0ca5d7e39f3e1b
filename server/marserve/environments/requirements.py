"""Reads an archive's requirements file: every line is parsed, checked, and written anew for pip, or refused.

An archive is not trusted, and a requirements file is powerful: it can name sources of packages, files anywhere on the
machine, variables of the environment. So pip never sees the file. It gets lines that are made here, of four kinds: a
named requirement, a file or folder of the archive, an address that the operator allows (`allowed_urls`), a harmless
option. The operator chooses the index in pip's own configuration.

Knows nothing of pip's process, of caches and of models; reads files of the archive's folder, so it runs in a thread.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from marserve.errors import RequirementsRefused
from marserve.files.digests import digest_of
from marserve.files.regular import open_regular

MAX_BYTES = 1 << 20
MAX_FILES = 16
MAX_LINES = 10_000
PACKAGE_ENDINGS = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tar.xz", ".txz", ".tar")

# Without the blanks before it: to match any number of them takes time in the square of that number.
_COMMENT = re.compile(r"(?<!\S)#.*$")
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")
_ADDRESS = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*:")
_PLAIN_ADDRESS = re.compile(r"(?:git\+)?https?://[A-Za-z0-9.-]+(?::[0-9]+)?(?:/[!-\[\]-~]*)?")
_NAMED = re.compile(r"^([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(\[[A-Za-z0-9._,\s-]*\])?\s*(.*)$", re.DOTALL)
_HASH = re.compile(r"^--hash=[a-z0-9]+:[0-9a-fA-F]+$")
_EXTRAS = re.compile(r"^(.+?)(\[[A-Za-z0-9._,\s-]*\])?$", re.DOTALL)
_FORMAT_WORDS = re.compile(r"^[A-Za-z0-9:._,-]+$")

_FLAGS = ("--no-index", "--pre", "--prefer-binary", "--require-hashes")
_FORMATS = ("--no-binary", "--only-binary")
_SHORT = {
    "-r": "--requirement",
    "-c": "--constraint",
    "-i": "--index-url",
    "-f": "--find-links",
    "-e": "--editable",
}
_VALUED = (*_SHORT.values(), "--pypi-url", "--extra-index-url", *_FORMATS)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line for pip: `text`; or, with `local`, a file or folder of the archive between `text` and `tail`.

    With `local` `text` is empty or `name @`, and `extras` has a path's extras in brackets.
    """

    text: str
    local: Path | None = None
    extras: str = ""
    tail: str = ""

    def render(self, place: Callable[[Path], Path]) -> str:
        """The line, with the file at the path that `place` returns for it."""
        if self.local is None:
            return self.text
        path = place(self.local)
        where = f"{path}{self.extras}" if self.extras and not self.text else path.as_uri()
        return f"{self.text}{where}{self.tail}"


@dataclass(frozen=True, slots=True)
class Requirements:
    """An archive's requirements.

    `file` is the file's name in the archive, empty without one. `links` are the packages in the folders that its
    `--find-links` name. `digest` changes with every byte of the archive that the result may depend on.
    """

    file: str = ""
    entries: tuple[Entry, ...] = ()
    constraints: tuple[Entry, ...] = ()
    links: tuple[Path, ...] = ()
    has_links: bool = False
    digest: str = ""

    @property
    def asks_for_something(self) -> bool:
        """Whether any line names a package to install."""
        return any(entry.local is not None or not entry.text.startswith("-") for entry in self.entries)


def read_requirements(folder: Path, file: str, allowed_urls: Sequence[str] = ()) -> Requirements:
    """Read `file` of the unpacked archive at `folder`. `allowed_urls` are patterns of whole addresses.

    Raises RequirementsRefused, with file and line, for anything that is missing, cannot be read or is not allowed.
    """
    return _Reader(folder, allowed_urls).read(file)


class _Refused(Exception):
    """A line is not allowed; the message says why, and what to do instead."""


class _Reader:
    def __init__(self, folder: Path, allowed_urls: Sequence[str]) -> None:
        self._folder = folder.resolve()
        self._allowed = [re.compile(pattern, re.IGNORECASE) for pattern in allowed_urls]
        self._entries: list[Entry] = []
        self._constraints: list[Entry] = []
        self._links: dict[str, Path] = {}
        self._has_links = False
        self._open: list[Path] = []
        self._count = 0

    def read(self, file: str) -> Requirements:
        self._read_file(file, file, self._entries)
        return Requirements(
            file=file,
            entries=tuple(self._entries),
            constraints=tuple(self._constraints),
            links=tuple(self._links.values()),
            has_links=self._has_links,
            digest=self._digest(),
        )

    def _read_file(self, word: str, shown: str, into: list[Entry]) -> None:
        """Read one file of the archive, and the files that it names."""
        try:
            path = self._inside(word, self._open[-1].parent if self._open else self._folder)
            text = _read_text(path)
        except _Refused as refused:
            if self._open:
                raise  # with the line that names it
            raise RequirementsRefused(f"{shown}: {refused}") from None
        if len(self._open) >= MAX_FILES or path in self._open:
            raise RequirementsRefused(
                f"{shown} is named by files that it names, or they are nested over {MAX_FILES} deep"
            )
        self._open.append(path)
        for number, line in _logical_lines(text):
            self._count += 1
            if self._count > MAX_LINES:
                raise RequirementsRefused(f"{shown} and the files it names have over {MAX_LINES} lines")
            try:
                self._read_line(line, into)
            except _Refused as refused:
                place = str(path.relative_to(self._folder))
                raise RequirementsRefused(str(refused), file=place, line=number) from None
        self._open.pop()

    def _read_line(self, line: str, into: list[Entry]) -> None:
        if _VARIABLE.search(line):
            raise _Refused(
                "variables of the server's environment are not filled in; name the index in pip's own configuration "
                "(PIP_INDEX_URL, pip.conf) on the server"
            )
        if line.startswith("-"):
            self._read_options(line, into)
        else:
            into.append(self._requirement(line))

    # --------------------------------------------------------------------------------------------- options

    def _read_options(self, line: str, into: list[Entry]) -> None:
        try:
            words = shlex.split(line)
        except ValueError:
            raise _Refused(f"{line[:80]!r} has a quotation mark without its other half") from None
        while words:
            name, value = _split_option(words)
            if name in _FLAGS and value is None:
                into.append(Entry(name))
            elif name in _FORMATS and value and _FORMAT_WORDS.match(value):
                into.append(Entry(f"{name} {value}"))
            elif name in ("--index-url", "--pypi-url", "--extra-index-url") and value:
                self._check_address(value, name)
                into.append(Entry(f"{'--index-url' if name == '--pypi-url' else name} {shlex.quote(value)}"))
            elif name == "--find-links" and value:
                self._find_links(value, into)
            elif name == "--requirement" and value:
                self._read_file(value, value, into)
            elif name == "--constraint" and value:
                self._read_file(value, value, self._constraints)
            elif name == "--editable" and value:
                entry = self._requirement(value)
                if entry.local is None and not _ADDRESS.match(entry.text):
                    raise _Refused(f"-e {value[:80]} names no folder of the archive")
                into.append(entry)  # installed as a copy: the archive's folder does not outlive the model
            else:
                raise _Refused(
                    f"the option {name[:80]} is not allowed in an archive; remove it, or set it in pip's own "
                    "configuration on the server"
                )

    def _find_links(self, value: str, into: list[Entry]) -> None:
        if _ADDRESS.match(value) and not value.startswith("file:"):
            self._check_address(value, "--find-links")
            into.append(Entry(f"--find-links {shlex.quote(value)}"))
            return
        try:
            folder = self._inside(_without_file_scheme(value), self._open[-1].parent)
        except _Refused:
            folder = self._inside(_without_file_scheme(value), self._folder)
        if not folder.is_dir():
            raise _Refused(f"--find-links {value[:80]} is no folder of the archive")
        self._has_links = True
        for path in sorted(folder.iterdir()):
            # Only packages: a page of links in this folder would lead pip to addresses that are not allowed.
            if path.name.lower().endswith(PACKAGE_ENDINGS) and path.is_file():
                self._links.setdefault(path.name, self._inside(str(path.relative_to(self._folder)), self._folder))

    # --------------------------------------------------------------------------------------------- requirements

    def _requirement(self, line: str) -> Entry:
        line, tail = _split_hashes(line)
        body, separator, marker = line.partition(";")
        body = body.strip()
        if separator:
            _check_marker(marker.strip())
        tail = f"{' ; ' + marker.strip() if separator else ''}{tail}"
        if _looks_local(body):
            word, extras = _split_extras(_without_file_scheme(body))
            return Entry("", self._package(word), extras, tail)
        if _ADDRESS.match(body):
            self._check_address(body, "an address")
            return Entry(f"{body}{tail}")
        named = _NAMED.match(body)
        if named is None:
            raise _Refused(f"{body[:80]!r} is no requirement, and no file of the archive")
        name, extras, rest = named.groups()
        if not rest.startswith("@"):
            _check_named(body)
            return Entry(f"{name}{extras or ''}{rest}{tail}")
        target = rest[1:].strip()
        if target.startswith("file:") or not _ADDRESS.match(target):
            return Entry(f"{name}{extras or ''} @ ", self._package(_without_file_scheme(target)), "", tail)
        self._check_address(target, "an address")
        return Entry(f"{name}{extras or ''} @ {target}{tail}")

    def _package(self, word: str) -> Path:
        path = self._inside(word, self._folder)
        if path.is_dir() or path.name.lower().endswith(PACKAGE_ENDINGS):
            return path
        raise _Refused(f"{word[:80]!r} is neither a package ({', '.join(PACKAGE_ENDINGS[:3])} …) nor a folder of one")

    def _check_address(self, address: str, what: str) -> None:
        # Unambiguous only: no user name that looks like a host, nothing that pip would decode or drop.
        if _PLAIN_ADDRESS.fullmatch(address) is None:
            raise _Refused(
                f"{what} {address[:200]!r} is not one that could be allowed: http, https or git+https, and a host"
            )
        if not any(pattern.fullmatch(address.removeprefix("git+")) for pattern in self._allowed):
            raise _Refused(
                f"{what} {address[:200]} matches none of allowed_urls; name it there, or in pip's own configuration on "
                "the server"
            )

    def _inside(self, word: str, base: Path) -> Path:
        """The file or folder of the archive that `word` names, relative to `base`; links are followed first."""
        if not word or "\0" in word or "\\" in word or word.startswith(("/", "~")):
            raise _Refused(f"{word[:80]!r} must be a path inside of the archive, from its top folder on")
        try:
            path = (base / word).resolve(strict=True)
        except (OSError, RuntimeError):
            raise _Refused(f"the archive holds no {word[:80]!r}") from None
        if not path.is_relative_to(self._folder):
            raise _Refused(f"{word[:80]!r} lies outside of the archive")
        return path

    # --------------------------------------------------------------------------------------------- digest

    def _digest(self) -> str:
        seen = hashlib.sha256()
        for kind, entries in (("requirement", self._entries), ("constraint", self._constraints)):
            for entry in entries:
                seen.update(repr((kind, entry.text, entry.extras, entry.tail)).encode())
                if entry.local is not None:
                    self._digest_path(seen, entry.local)
        for name, path in self._links.items():
            seen.update(repr(("link", name)).encode())
            self._digest_path(seen, path)
        return seen.hexdigest()

    def _digest_path(self, seen: hashlib._Hash, path: Path) -> None:
        files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
        for file in files:
            seen.update(repr((str(file.relative_to(path.parent)), digest_of(file))).encode())


def _read_text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError:
        raise _Refused("it cannot be read") from None
    if len(data) > MAX_BYTES:
        raise _Refused(f"it has more than {MAX_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _Refused("it is no UTF-8 text") from None


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; continued lines are joined, comments and empty lines left out."""
    begun, held = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        begun = begun or number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            held += line[:-1]
            continue
        whole = _COMMENT.sub("", held + line).strip()
        if whole:
            yield begun, whole
        begun, held = 0, ""
    whole = _COMMENT.sub("", held).strip()
    if whole:
        yield begun, whole


def _split_option(words: list[str]) -> tuple[str, str | None]:
    """Take one option, and its value, off the words of a line."""
    word = words.pop(0)
    for short, long in _SHORT.items():
        if word == short:
            return long, words.pop(0) if words else None
        if word.startswith(short) and not word.startswith("--"):
            return long, word[2:].removeprefix("=")
    name, separator, value = word.partition("=")
    if separator:
        return name, value
    return name, words.pop(0) if name in _VALUED and words else None


def _split_hashes(line: str) -> tuple[str, str]:
    """A requirement without its options, and its options, which may only be hashes."""
    match = re.search(r"\s-", line)
    if match is None:
        return line, ""
    try:
        options = shlex.split(line[match.start() :])
    except ValueError:
        options = [line[match.start() :].strip()]
    hashes: list[str] = []
    while options:
        option = options.pop(0)
        if option == "--hash" and options:
            option = f"--hash={options.pop(0)}"
        if not _HASH.match(option):
            raise _Refused(f"the option {option[:80]} of a requirement is not allowed in an archive; only --hash is")
        hashes.append(option)
    return line[: match.start()], "".join(f" {each}" for each in hashes)


def _check_named(body: str) -> None:
    """Check a name with extras and versions as pip reads it, so that a wrong one is refused before pip is started."""
    # For a quicker start: most archives have no requirements.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(body)
    except InvalidRequirement as error:
        raise _Refused(f"{body[:80]!r} is no requirement, and no file of the archive: {_first_line(error)}") from None


def _check_marker(marker: str) -> None:
    # For a quicker start: most archives have no requirements.
    from packaging.markers import InvalidMarker, Marker

    try:
        Marker(marker)
    except InvalidMarker as error:
        raise _Refused(f"{marker[:80]!r} is no environment marker: {_first_line(error)}") from None


def _first_line(error: ValueError) -> str:
    return str(error).partition("\n")[0][:200]


def _looks_local(body: str) -> bool:
    if body.startswith(("file:", ".", "/", "~")):
        return True
    if _ADDRESS.match(body) or "@" in body:
        return False
    word, _ = _split_extras(body)
    return "/" in word or word.lower().endswith(PACKAGE_ENDINGS)


def _split_extras(word: str) -> tuple[str, str]:
    match = _EXTRAS.match(word)
    return (match.group(1), match.group(2) or "") if match else (word, "")


def _without_file_scheme(word: str) -> str:
    return unquote(word.removeprefix("file:")) if word.startswith("file:") else word
