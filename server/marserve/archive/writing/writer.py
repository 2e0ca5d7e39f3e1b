"""Makes model archives in TorchServe's formats (contract 8.1, 9.2), the same bytes each time.

    `ArchiveSpec`, what the author names → `plan_archive`: which file becomes which member → `write_archive`

What differs from machine to machine stays out: entries are sorted and carry a fixed date and mode, `createdOn` is the
newest input's time (or the caller's), debug records with paths are left out of TorchScript files. An archive appears
under its name when it is whole. Knows no terminal; prints nothing, reads no environment.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import re
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal, cast, get_args

from marserve import __version__
from marserve.archive.contents.built_in_handlers import BUILT_IN_HANDLERS
from marserve.archive.contents.declaration import DECLARATION_PATH
from marserve.archive.contents.manifest import MANIFEST_PATH, RUNTIMES
from marserve.archive.contents.model_config import parse_model_config
from marserve.archive.contents.torchscript import strip_debug_records
from marserve.archive.reading import zip_records
from marserve.archive.reading.member_names import NameSpace, split_name
from marserve.archive.writing.declaring import Declaring, Importing
from marserve.errors import CannotArchive, UnsafeArchive, without_stop
from marserve.files.atomic import placing
from marserve.names import name_fault

ArchiveFormat = Literal["default", "zip-store", "tgz", "no-archive"]
FORMATS: tuple[str, ...] = get_args(ArchiveFormat)

# A file of an author's wins over these: archives with such names may be older than the handlers.
_NAMED_AS_LIBRARIES = ("transformers", "sklearn", "xgboost", "lightgbm")
_BUILT_IN_CPP_HANDLERS = ("BaseHandler", "TorchScriptHandler")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")
_WILDCARD = re.compile(r"[*?\[]")
_LEFT_OUT = ("__MACOSX", "__pycache__")
_CHUNK = 1 << 20
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest a zip file can hold
_FILE_MODE = 0o100644


@dataclass(frozen=True, slots=True)
class ArchiveSpec:
    """What the author of an archive names. Paths are of this machine; only their last parts go into the archive.

    `handler` is a built-in's name, or `path/to/x.py`, `path/to/x`, with or without `:function`. `extra_files` are
    files, folders and wildcards (`* ? [ ]`). The contents of a folder go to the top, or with `keeps_folders` into a
    folder of its name; those of `folder/.` go to the top in any case.
    """

    model_name: str
    version: str
    handler: str
    serialized_file: Path | None = None
    model_file: Path | None = None
    extra_files: tuple[str, ...] = ()
    requirements_file: Path | None = None
    config_file: Path | None = None
    runtime: str = "python"
    keeps_folders: bool = False

    @property
    def brings_program(self) -> bool:
        """Whether its workers are a program in another language, by `workerProgram` of its configuration.

        Raises BadArchive for a configuration that no server takes.
        """
        if self.config_file is None or not self.config_file.is_file():
            return False
        config = parse_model_config(self.config_file.read_bytes(), self.config_file.name)
        return bool(config.options.worker_program)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which file becomes which member, in order of names; `warnings` are sentences for the author.

    `made` are members that are no files: their names and bytes.
    """

    spec: ArchiveSpec
    members: dict[str, Path]
    warnings: list[str]
    total_bytes: int
    made: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Packed:
    """One member as it went in. `left_out` names records of a TorchScript file that did not."""

    name: str
    size_bytes: int
    sha256: str
    left_out: list[str] = field(default_factory=list)


def write_archive(
    spec: ArchiveSpec | Plan,
    export_path: Path,
    *,
    archive_format: str = "default",
    force: bool = False,
    source_date_epoch: int | None = None,
    on_member: Callable[[Packed], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
    links: bool = False,
    file_name: str | None = None,
) -> Path:
    """Write the archive into the folder `export_path` (made where it is missing) and give its path.

    `archive_format` is one of `FORMATS`. `source_date_epoch` (seconds UTC) becomes `createdOn`, else the newest input's
    time does. `on_member` is called as each member is in, `on_bytes` with the number of input bytes as they go in.
    With `links` a folder gets symbolic links to the files, unread, in the place of copies. `file_name` is the archive's
    name where it is not the model's.

    Raises CannotArchive: a wrong name, format or runtime, a file that is missing, names that clash, something at that
    path already (unless `force`).
    """
    if archive_format not in FORMATS:
        raise CannotArchive(f"There is no archive format {archive_format!r}; choose one of {', '.join(FORMATS)}.")
    plan = spec if isinstance(spec, Plan) else plan_archive(spec)
    output = output_path(plan.spec.model_name, export_path, archive_format)
    output = output if file_name is None else output.with_name(file_name)
    try:
        export_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotArchive(f"The export path {export_path} is no folder and cannot be made one ({error}).") from None
    packing = Packing(
        plan.members,
        output,
        MANIFEST_PATH,
        lambda created: _manifest(plan.spec, created),
        made=plan.made,
        source_date_epoch=source_date_epoch,
        on_member=on_member,
        on_bytes=on_bytes,
        links=links,
    )
    write_packing(packing, output, archive_format, force=force)
    return output


def write_packing(packing: Packing, output: Path, archive_format: str, *, force: bool) -> None:
    """Write a planned archive whole or not at all; its folder exists. Raises CannotArchive."""
    refuse_existing(output, force=force)
    try:
        with placing(output, replaces_folder=True) as partial:
            if archive_format == "no-archive":
                packing.write_folder(partial)
            elif archive_format == "tgz":
                packing.write_tar(partial, top=output.name.removesuffix(".tar.gz"))
            else:
                packing.write_zip(partial, zipfile.ZIP_DEFLATED if archive_format == "default" else zipfile.ZIP_STORED)
    except OSError as error:
        raise CannotArchive(f"{output} cannot be written ({error}).") from error


def refuse_existing(output: Path, *, force: bool) -> None:
    """Raise CannotArchive for something at that path already, unless it is to be overwritten."""
    if os.path.lexists(output) and not force:
        raise CannotArchive(f"{output} already exists. Use --force (-f) to overwrite it.")


def check_export_path(export_path: Path) -> None:
    """Refuse a folder that is not there, as TorchServe's archivers do. Raises CannotArchive."""
    if not export_path.is_dir():
        raise CannotArchive(f"The export path {export_path} is no folder; name one that is there.")


def output_path(model_name: str, export_path: Path, archive_format: str) -> Path:
    """Where the archive goes."""
    ending = {"tgz": ".tar.gz", "no-archive": ""}.get(archive_format, ".mar")
    return export_path / f"{model_name}{ending}"


def plan_archive(
    spec: ArchiveSpec, further: Mapping[str, Path] | None = None, made: Mapping[str, bytes] | None = None
) -> Plan:
    """Find every file of the archive and judge its name. Raises CannotArchive.

    `further` are files beside those of `spec`, by the names of their members; `made` are members without a file.
    """
    made = dict(made or {})
    check_name("model", spec.model_name)
    if spec.runtime not in RUNTIMES:
        raise CannotArchive(f"There is no runtime {spec.runtime!r}; choose one of {', '.join(RUNTIMES)}.")
    if not spec.version:
        raise CannotArchive("The version is empty; name one, such as 1.0.")
    if (fault := name_fault("version", spec.version)) is not None:
        raise CannotArchive(f"{fault[0].upper()}{fault[1:]}; name another, such as 1.0.")
    warnings: list[str] = []
    collected = Collection()
    handler = handler_file(spec.handler, spec.runtime, is_program=spec.brings_program)
    if handler is not None:
        collected.add(handler.name, handler)
        if handler.stem in sys.stdlib_module_names:
            warnings.append(
                f"The handler {handler.name} has the name of a module that Python itself brings, and a worker may get "
                f"that one in its place; rename the file, to {handler.stem}_handler.py say"
            )
    for path in (spec.serialized_file, spec.model_file, spec.requirements_file, spec.config_file):
        if path is not None and path.name not in made:
            if not path.is_file():
                raise CannotArchive(f"File does not exist: {path}")
            collected.add(path.name, path)
    for name, path in (further or {}).items():
        collected.add(name, path)
    collected.add_extra(spec.extra_files, warnings, leave_out=MANIFEST_PATH, keeps_folders=spec.keeps_folders)
    total_bytes = sum(path.stat().st_size for path in collected.members.values())
    return Plan(spec, dict(sorted(collected.members.items())), warnings, total_bytes, made)


def begin_import(plan: Plan, *, always: bool = False) -> Importing:
    """Begin to import a plan's handler, in a process of its own, with `always` though it marks no model."""
    members = {name: path for name, path in plan.members.items() if name != DECLARATION_PATH}
    return Importing(members, plan.spec.handler, always=always)


def with_declaration(plan: Plan, found: Declaring) -> Plan:
    """The plan with what its handler declares as a further member, where it declares something."""
    members = {name: path for name, path in plan.members.items() if name != DECLARATION_PATH}
    warnings = [*plan.warnings, found.warning] if found.warning else plan.warnings
    made = {name: text for name, text in plan.made.items() if name != DECLARATION_PATH}
    if found.text is not None:
        made[DECLARATION_PATH] = found.text
    return replace(plan, members=members, warnings=warnings, made=made)


def handler_file(handler: str, runtime: str = "python", *, is_program: bool = False) -> Path | None:
    """The file that a handler's word names; None for built-in ones. Raises CannotArchive without such a file.

    With `is_program` it is a file in any language.
    """
    if is_program:
        if not Path(handler).is_file():
            raise CannotArchive(
                f"Handler file does not exist: {handler}. With workerProgram it is a file in any language."
            )
        return Path(handler)
    module = handler.partition(":")[0]
    built_in: tuple[str, ...] = BUILT_IN_HANDLERS
    ending = ".py"
    if runtime == "LSP":
        built_in, ending = _BUILT_IN_CPP_HANDLERS, ".dylib" if sys.platform == "darwin" else ".so"
    if not module:
        raise CannotArchive(f"The handler {handler!r} names no module.")
    if module in built_in and not (module in _NAMED_AS_LIBRARIES and Path(module + ending).is_file()):
        return None
    path = Path(module if module.endswith(ending) else module + ending)
    if not path.is_file():
        raise CannotArchive(f"Handler file does not exist: {path}. Built-in handlers are {', '.join(built_in)}.")
    return path


def check_name(what: str, name: str) -> None:
    """Refuse a name of a `model` or `workflow` that TorchServe's archivers refuse. Raises CannotArchive."""
    if not _NAME.fullmatch(name):
        raise CannotArchive(
            f"The {what} name {name!r} cannot be used: it must begin with a letter or digit and hold only "
            "letters, digits, hyphens, underscores and dots."
        )


class Collection:
    """The members so far; refuses names that our own reader would, and two files of one name."""

    def __init__(self) -> None:
        self.members: dict[str, Path] = {}
        self._names = NameSpace()

    def add_extra(
        self, words: Sequence[str], warnings: list[str], *, leave_out: str, keeps_folders: bool = False
    ) -> None:
        """Add files, the contents of folders, and what wildcards match, but no file that would be `leave_out`.

        With `keeps_folders` the contents of a folder keep its name before theirs, unless its word is `folder/.`.
        """
        for path, is_content in _expand(words, warnings):
            if path.is_dir():
                top = f"{path.resolve().name if path.name in ('', '..') else path.name}/"
                top = top if keeps_folders and not is_content else ""
                for inner_name, inner in walk(path):
                    name = top + inner_name
                    if name != leave_out:
                        self.add(name, inner)
            elif path.is_file():
                self.add(path.name, path)
            else:
                why = f"{path} is no file or folder" if path.exists() else f"File does not exist: {path}"
                raise CannotArchive(why)

    def add(self, name: str, path: Path) -> None:
        """Add one file under this name. Raises CannotArchive."""
        other = self.members.get(name)
        if other is not None:
            if not other.samefile(path) and not _same_bytes(other, path):
                raise CannotArchive(f"{other} and {path} would both become {name} in the archive; rename one.")
            return
        try:
            self._names.add_file(name, split_name(name))
        except UnsafeArchive as error:
            raise CannotArchive(
                f"{path} cannot go into the archive as {name!r}: {without_stop(error.reason)}."
            ) from None
        self.members[name] = path


def _same_bytes(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as first, other.open("rb") as second:
        return all(chunk == second.read(_CHUNK) for chunk in iter(lambda: first.read(_CHUNK), b""))


def _expand(words: Sequence[str], warnings: list[str]) -> Iterator[tuple[Path, bool]]:
    """The paths that the words name, and whether a folder's content alone is meant."""
    for word in words:
        if _WILDCARD.search(word) and not os.path.lexists(word):
            matches = sorted(glob.glob(word))
            if not matches:
                warnings.append(f"No file matches {word}")
            yield from ((Path(match), False) for match in matches)
        else:
            yield Path(word), word == "." or word.endswith("/.")


def walk(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files below `folder` by their names in it, without hidden folders and those that systems leave behind."""
    for current, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _LEFT_OUT)
        for name in sorted(files):
            path = Path(current, name)
            yield path.relative_to(folder).as_posix(), path


class Packing:
    """One archive being written: `members`, and the manifest that `make_manifest` makes of a time in seconds UTC.

    That is `source_date_epoch`, else the newest member's. `on_member`, `on_bytes` and `links` as for `write_archive`.
    """

    def __init__(
        self,
        members: dict[str, Path],
        output: Path,
        manifest_path: str,
        make_manifest: Callable[[float], bytes],
        *,
        made: Mapping[str, bytes] | None = None,
        source_date_epoch: int | None = None,
        on_member: Callable[[Packed], None] | None = None,
        on_bytes: Callable[[int], None] | None = None,
        links: bool = False,
    ) -> None:
        # An earlier archive of this name, found in an extra folder, is no part of the new one.
        target = output.resolve()
        members = {name: path for name, path in members.items() if not path.resolve().is_relative_to(target)}
        newest = max((path.stat().st_mtime for path in members.values()), default=0.0)
        manifest = make_manifest(newest if source_date_epoch is None else source_date_epoch)
        own = {**(made or {}), manifest_path: manifest}
        self._linked = members if links else {}
        together: dict[str, Path | bytes] = {**({} if links else members), **own}
        self._members = dict(sorted(together.items()))
        self._scratch = output.parent
        self._on_member, self._on_bytes = on_member or _ignore, on_bytes or _ignore

    def write_zip(self, partial: Path, method: int) -> None:
        """Write a zip file, its members compressed by `method`."""
        with zipfile.ZipFile(partial, "x") as archive:
            for name, size, chunks in self._contents():
                info = zipfile.ZipInfo(name, _ZIP_DATE)
                info.compress_type = method
                info.create_system = 3
                info.external_attr = _FILE_MODE << 16
                info.file_size = size
                with archive.open(info, "w") as member:
                    for chunk in chunks:
                        member.write(chunk)

    def write_tar(self, partial: Path, top: str) -> None:
        """Write a gzip-compressed tar file with one folder, `top`, around all."""
        with (
            partial.open("xb") as file,
            gzip.GzipFile("", "wb", 6, file, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name, size, chunks in self._contents():
                info = tarfile.TarInfo(f"{top}/{name}")
                info.size = size
                info.mode = 0o644
                archive.addfile(info, cast("BinaryIO", _ChunkFile(chunks)))

    def write_folder(self, partial: Path) -> None:
        """Write a folder."""
        partial.mkdir()
        for name, path in self._linked.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).symlink_to(path.resolve())
        for name, _, chunks in self._contents():
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.writelines(chunks)

    def _contents(self) -> Iterator[tuple[str, int, Iterator[bytes]]]:
        """Each member's name, size and bytes; tells the caller as it goes in."""
        for name, path in self._members.items():
            with self._open(path) as (file, left_out):
                size = file.seek(0, io.SEEK_END)
                file.seek(0)
                digest = hashlib.sha256()
                yield name, size, self._chunks(file, digest.update)
                if isinstance(path, Path):
                    self._on_bytes(path.stat().st_size - size if left_out else 0)
                self._on_member(Packed(name, size, digest.hexdigest(), left_out))

    def _chunks(self, file: BinaryIO, update: Callable[[bytes], None]) -> Iterator[bytes]:
        while chunk := file.read(_CHUNK):
            update(chunk)
            self._on_bytes(len(chunk))
            yield chunk

    @contextmanager
    def _open(self, path: Path | bytes) -> Iterator[tuple[BinaryIO, list[str]]]:
        if isinstance(path, bytes):
            yield io.BytesIO(path), []
            return
        with path.open("rb") as file:
            if file.read(4) != zip_records.START:
                yield file, []
                return
            with tempfile.TemporaryFile(dir=self._scratch) as stripped:
                left_out = strip_debug_records(file, cast("BinaryIO", stripped))
                yield (cast("BinaryIO", stripped) if left_out else file), left_out


class _ChunkFile:
    """Chunks as the file that `tarfile` reads from."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._ready = b""
        self._used = 0

    def read(self, size: int) -> bytes:
        """Give `size` bytes, fewer at the end."""
        pieces: list[bytes] = []
        while size > 0:
            if self._used == len(self._ready):
                self._ready, self._used = next(self._chunks, b""), 0
                if not self._ready:
                    break
            piece = self._ready[self._used : self._used + size]
            self._used += len(piece)
            size -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)


def _manifest(spec: ArchiveSpec, created: float) -> bytes:
    """The manifest's bytes, keys in the order of TorchServe's archiver; `created` in seconds UTC."""

    def name(path: Path | None) -> str | None:
        return None if path is None else path.name

    model = {
        "modelName": spec.model_name,
        "serializedFile": name(spec.serialized_file),
        "handler": spec.handler.rpartition("/")[2],
        "modelFile": name(spec.model_file),
        "modelVersion": spec.version,
        "requirementsFile": name(spec.requirements_file),
        "configFile": name(spec.config_file),
    }
    document = {
        "createdOn": created_on(created),
        "runtime": spec.runtime,
        "model": {key: value for key, value in model.items() if value is not None},
        "archiverVersion": __version__,
    }
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def created_on(seconds: float) -> str:
    """A time, in seconds UTC, as manifests have it. Raises CannotArchive."""
    try:
        return datetime.fromtimestamp(int(seconds), UTC).strftime("%d/%m/%Y %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        raise CannotArchive(f"{seconds} seconds is no time that `createdOn` can hold.") from None


def _ignore(_: object) -> None:
    return
