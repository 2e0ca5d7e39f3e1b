"""Checks every pickle of an unpacked archive against what may be in it, before anything opens one.

Knows where torch keeps pickles and which reader opens them; `pickle_program` finds what a pickle does.

    TorchScript's own (`data.pkl`, `constants.pkl`, … of a zip file with `constants.pkl`): only torch's C++ reader
        opens them; `__torch__.*`, `torch.jit._pickle.*`, and the list below
    everything else (`.pt`, `.pth`, `.bin`, `.pkl`, `.pt2` weights, constants, inputs, …): Python unpickles them;
        only the list below, which is what torch's `weights_only` loading allows

A pickle is found by its content; names only say that a file must be one. So a handler's own `vocabulary.pkl` of plain
dicts, lists, numbers and texts passes, one that holds objects of classes is refused. Whether an archive is trusted all
the same is the operator's word (`trusted_models`), never the archive's.
"""

from __future__ import annotations

import ast
import contextlib
import io
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import BinaryIO, cast

from marserve.archive.pickles.check_budget import CheckBudget, CheckStopped, Overspent
from marserve.archive.pickles.containers import (
    HEAD_BYTES,
    CannotUnpack,
    Compressed,
    begins_tar,
    opaque_kind,
    recognise,
    tar_files,
    zip_at_end,
)
from marserve.archive.pickles.pickle_program import Outcome, Refused, Span, run
from marserve.archive.reading import zip_records
from marserve.archive.reading.zip_records import Entry, ZipRecords
from marserve.errors import BadArchive, Draining, UnsafeArchive, without_stop
from marserve.files.regular import open_regular

_STORAGES = "BFloat16 Bool Byte Char ComplexDouble ComplexFloat Double Float Half Int Long Short"
_SPARSE = "BFloat16 Byte Char Double Float Half Int Long Short"
_TENSORS = "BFloat16 Bool Byte Char Double Float Half Int Long Short"
_TYPES = """
    bfloat16 bits16 bits1x8 bits2x4 bits4x2 bits8 bool complex128 complex32 complex64 float16 float32
    float4_e2m1fn_x2 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int1 int16 int2
    int3 int32 int4 int5 int6 int64 int7 int8 per_channel_affine per_channel_affine_float_qparams
    per_channel_symmetric per_tensor_affine per_tensor_symmetric qint32 qint8 quint2x4 quint4x2 quint8 uint1 uint16
    uint2 uint3 uint32 uint4 uint5 uint6 uint64 uint7 uint8 Size Tensor device
"""
_REBUILDERS = """
    device_tensor_from_cpu_tensor device_tensor_from_numpy meta_tensor_no_storage nested_tensor parameter
    parameter_with_state qtensor sparse_tensor tensor tensor_v2 tensor_v3 wrapper_subclass
"""

#: What `torch.load(weights_only=True)` of torch 2.13 allows by default; a test compares them.
PYTHON_GLOBALS = frozenset(
    [
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.complex",
        "builtins.set",
        "collections.Counter",
        "collections.OrderedDict",
        "torch._tensor._rebuild_from_type_v2",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.storage.TypedStorage",
        "torch.storage.UntypedStorage",
    ]
    + [f"torch.{name}" for name in _TYPES.split()]
    + [f"torch._utils._rebuild_{name}" for name in _REBUILDERS.split()]
    + [f"torch.{place}{name}Storage" for place in ("", "cuda.") for name in _STORAGES.split()]
    + [f"torch.{name}Storage" for name in ("QInt32", "QInt8", "QUInt2x4", "QUInt4x2", "QUInt8")]
    + [f"torch.{place}{name}Tensor" for place in ("", "cuda.") for name in _TENSORS.split()]
    + [f"torch.{place}sparse.{name}Tensor" for place in ("", "cuda.") for name in _SPARSE.split()]
)

_SCRIPT_GLOBAL = re.compile(r"^(__torch__|torch\.jit\._pickle)\.\w[\w.]*$")

# Files that must be what torch or pickle opens, by their name's end.
_DECLARED = re.compile(
    r"(\.(pt|pth|pt2|ptl|pkl|pickle|ckpt|joblib|dill|th|pyt|torch)|(^|/)\.metadata)(\.(gz|bz2|xz|zst|lz4|zip))?$"
)
# Opcodes by which a pickle imports: GLOBAL, INST, STACK_GLOBAL, EXT1, EXT2, EXT4.
_IMPORTS = re.compile(rb"[ci\x93\x82\x83\x84]")
# What is not in the text of a `.pth` that Python's `site` reads.
_NOT_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\xff]")
# The header of an array of numbers, texts, times or raw bytes, or of fields of these, as numpy writes it.
_ELEMENT = rb"'[<>|=]?[biufcSUVmM]\d+(\[\w+\])?'"
_PLAIN_ARRAY = re.compile(
    rb"\{'descr': (%b|\[(\('[^'\\]*', %b(, \([\d, ]*\))?\)(, )?)+\]), 'fortran_order': (True|False), "
    rb"'shape': \([\d, ]*\), \}\s*" % (_ELEMENT, _ELEMENT)
)
_LONGEST_PLAIN_HEADER = 1 << 16
_ARRAY = b"\x93NUMPY"
_ARRAYS_PICKLE = "!array.pkl"
_PROTO = 0x80
_NEWEST_PROTOCOL = 5

_MAX_NESTING = 4
_MAX_ENTRIES = 200_000
_MAX_DIRECTORY_BYTES = 32 << 20
_MAX_INFLATED_BYTES = 2 << 30
_MAX_SKIMMED_BYTES = 16 << 30
_PEEK_BYTES = 1 << 20
# Of other data that long: an end record of a zip file with its comment, and some of its directory.
_ZIP_TAIL_BYTES = 1 << 20
_GUESSED_OPERATIONS = 1_000_000
_ENOUGH_OPERATIONS = 8  # after so many, what began like a pickle is one and not tensor data that looks so
_MAX_FILES = 100_000
# What looking at a file or a member, and at one more pickle of it, costs at least, in operations.
_FILE_COST = 16
_PICKLE_COST = 8
# The same of a piece of what is unpacked; a stop is asked for by these too.
_PIECE_COST = 8

_NEXT_STEP = (
    "Save it in a safe form (state dict, safetensors, JSON), or list the model in trusted_models if you trust "
    "where it comes from."
)


def _never() -> bool:
    return False


def check_folder(folder: Path, *, trusted: bool = False, is_stopped: Callable[[], bool] = _never) -> list[str]:
    """Check every pickle in the unpacked archive at `folder`; blocks.

    Raises UnsafeArchive for the first that holds what it must not, cannot be read to its end, or cannot be looked
    into; the error names the member, inside of other files as `sample.pt!data.pkl`, and the global or opcode. With
    `trusted` (the operator's word) nothing is raised: the sentences are returned, to be logged. Raises Draining
    soon after `is_stopped` says so, which is asked in this thread, with `trusted` too.
    """
    return check_files(list_files(folder), trusted=trusted, is_stopped=is_stopped)


def check_files(
    files: Iterable[tuple[str, Path]],
    *,
    trusted: bool = False,
    is_stopped: Callable[[], bool] = _never,
    slices: Mapping[str, Sequence[tuple[int, int]]] | None = None,
) -> list[str]:
    """Check files like `check_folder` does, given as pairs of the member's name and where it lies.

    `slices` are, by the member's name, where the parts of a file begin and end that are opened alone: each is checked
    as a file of `torch.save`, and the file as a whole is not.
    """
    slices = slices or {}
    checker = _Checker(CheckBudget(is_stopped=is_stopped))
    findings: list[str] = []
    for name, path in files:
        try:
            with open_regular(path) as file:
                parts = slices.get(name)
                if parts is None:
                    checker.check_file(_Subject(name, Span(file, 0, os.fstat(file.fileno()).st_size)))
                for start, end in parts or ():
                    checker.check_file(_Subject(f"{name}@{start}", Span(file, start, end), was_declared=True))
        except UnsafeArchive as error:
            if not trusted:
                raise
            findings.append(error.message)
            if isinstance(error, _OverBudget):
                break
        except CheckStopped:
            raise Draining from None
    return findings


class _OverBudget(UnsafeArchive):
    """The archive took more operations than one may: what was not looked into is refused with it."""


def list_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Regular files below `folder`, in order; links to folders are followed once: a store may hold them."""
    seen: set[Path] = set()
    count = 0
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        real = current.resolve()
        if real in seen:
            continue
        seen.add(real)
        for path in sorted(current.iterdir()):
            if path.is_dir():
                waiting.append(path)
            elif path.is_file():
                count += 1
                if count > _MAX_FILES:
                    raise BadArchive(f"the folder holds more than {_MAX_FILES} files")
                yield path.relative_to(folder).as_posix(), path


class _Reader(Enum):
    """The program that opens a pickle."""

    PYTHON = "python"
    SCRIPT = "torch's C++ reader"


@dataclass(frozen=True, slots=True)
class _Subject:
    """One file, or one member inside of a file, to look at. `depth` counts the files around it.

    `was_declared`: it comes out of a compressed file whose name says that it holds a pickle. `is_content`: what its
    name says was held against what is in it.
    """

    name: str
    span: Span
    reader: _Reader = _Reader.PYTHON
    depth: int = 0
    was_declared: bool = False
    is_content: bool = False

    @property
    def is_declared(self) -> bool:
        return (
            self.was_declared
            or _DECLARED.search(self.name.lower().rpartition("!")[2]) is not None
            or self.reader is _Reader.SCRIPT
        )

    def refuse(self, reason: str) -> UnsafeArchive:
        return UnsafeArchive(self.name, f"{without_stop(reason)}. {_NEXT_STEP}")


def _allows_python(name: str) -> bool:
    return name in PYTHON_GLOBALS


def _allows_script(name: str) -> bool:
    return name in PYTHON_GLOBALS or _SCRIPT_GLOBAL.match(name) is not None


class _Checker:
    """Looks into files; its budgets span one archive, so that many nested files cost no more than one."""

    def __init__(self, budget: CheckBudget) -> None:
        self._budget = budget
        self._entries_left = _MAX_ENTRIES
        self._inflated_left = _MAX_INFLATED_BYTES
        self._skimmed_left = _MAX_SKIMMED_BYTES

    def check_file(self, subject: _Subject) -> None:
        """Check one file of the archive, with all that is in it. Raises UnsafeArchive, CheckStopped."""
        try:
            self.check(subject)
        except Overspent as error:
            raise _OverBudget(
                subject.name, f"it cannot be looked into to its end: {without_stop(error)}. {_NEXT_STEP}"
            ) from None

    def check(self, subject: _Subject) -> None:
        """Check one file, or one member of a file."""
        self._budget.spend(_FILE_COST)
        span = subject.span
        span.seek(0)
        head = span.read(HEAD_BYTES)
        if head[:4] in (zip_records.START, zip_records.EMPTY):
            self._check_zip(subject)
            self._check_pickles(replace(subject, is_content=True), 0)
            return
        self._check_zip_at_end(subject)
        if kind := opaque_kind(head):
            raise subject.refuse(f"it is compressed ({kind}) and cannot be looked into")
        is_container = False
        if begins_tar(head):
            self._check_tar(subject)
            is_container = True
        else:
            for compressed in recognise(head):
                is_container |= self._check_compressed(subject, compressed)
        # What is in a container was judged as what its name says; its own bytes may be a pickle all the same.
        self._check_pickles(replace(subject, is_content=True) if is_container else subject, 0)

    # ----------------------------------------------------------------------------------- compressed files and tars

    def _check_compressed(self, subject: _Subject, compressed: Compressed) -> bool:
        """Check what is compressed in it; whether anything is."""
        inner = f"{subject.name}!unpacked"
        has_come = False

        def pieces() -> Iterator[bytes]:
            nonlocal has_come
            try:
                for piece in compressed.read(subject.span, self._budget):
                    if not has_come:
                        self._refuse_depth(subject)
                    has_come = True
                    yield piece
            except CannotUnpack as error:
                if error.is_certain:
                    raise subject.refuse(f"it cannot be looked into: {error}") from None

        is_declared = subject.is_declared and compressed.is_usual
        what = _Subject(inner, subject.span, subject.reader, subject.depth + 1, is_declared)
        self._check_pieces(what, pieces(), may_skim=compressed.is_usual)
        return has_come and compressed.is_usual

    def _check_tar(self, subject: _Subject) -> None:
        self._refuse_depth(subject)
        span = subject.span
        try:
            for name, start, size in tar_files(span):
                self._entries_left -= 1
                if self._entries_left < 0:
                    raise CannotUnpack(f"there are more than {_MAX_ENTRIES} files in files")
                inner = Span(span.file, span.start + start, span.start + start + size)
                self.check(_Subject(f"{subject.name}!{name}", inner, subject.reader, subject.depth + 1))
        except CannotUnpack as error:
            raise subject.refuse(f"it is a tar file and cannot be looked into: {error}") from None

    @staticmethod
    def _refuse_depth(subject: _Subject) -> None:
        if subject.depth >= _MAX_NESTING:
            raise subject.refuse(
                f"it is a file of files {subject.depth} such files deep; at most {_MAX_NESTING} are looked into"
            )

    # --------------------------------------------------------------------------------------------------- pickles

    def _check_pickles(self, subject: _Subject, offset: int) -> None:
        """Check the pickle at `offset` and those right behind it: torch's old form is five in a row, then raw data.

        numpy's arrays may stand between them, as one handle is read by several calls.
        """
        span = subject.span
        is_first = True
        while offset < len(span):
            self._budget.spend(_PICKLE_COST)
            span.seek(offset)
            start = span.read(len(_ARRAY))
            if start == _ARRAY:
                offset = self._check_array(subject, offset)
                subject = replace(subject, is_content=True)
                continue
            start = start[:2]
            is_marked = len(start) == 2 and start[0] == _PROTO and start[1] <= _NEWEST_PROTOCOL
            must_be = subject.is_declared and not subject.is_content and is_first
            if must_be and not is_marked and self._is_harmless_text(subject, offset):
                return
            span.seek(offset)
            outcome = self._run(subject, must_call=not (must_be or is_marked))
            if outcome.is_unfinished and (outcome.has_noted or self._may_import(span)):
                raise subject.refuse(f"it goes on like a pickle and cannot be followed to its end: {outcome.failure}")
            if outcome.failure is not None:
                if self._is_damaged(outcome, must_be=must_be, is_marked=is_marked, is_first=is_first):
                    raise subject.refuse(f"it is no pickle that can be read to its end: {outcome.failure}")
                return
            offset, is_first = span.tell(), False

    def _is_harmless_text(self, subject: _Subject, offset: int) -> bool:
        """Whether it is text that no unpickler gets through, as the `.pth` files are that Python's `site` reads.

        `import os; …` begins with INST, whose module is then no name. Text that is a pickle of the oldest protocol, and
        imports anything, is not such text.
        """
        span = subject.span
        if subject.reader is not _Reader.PYTHON or not subject.name.lower().endswith(".pth"):
            return False
        span.seek(offset)
        if len(span) - offset > _PEEK_BYTES or _NOT_TEXT.search(span.read(len(span) - offset)):
            return False
        span.seek(offset)
        outcome = self._run(subject, must_call=True)
        return outcome.failure is not None and not outcome.has_noted and not outcome.is_unfinished

    def _may_import(self, span: Span) -> bool:
        """Whether any byte from here on may be an opcode that imports."""
        while piece := span.read(_PEEK_BYTES):
            self._budget.spend(_PIECE_COST)
            if _IMPORTS.search(piece):
                return True
        return False

    def _run(self, subject: _Subject, *, must_call: bool) -> Outcome:
        allows = _allows_script if subject.reader is _Reader.SCRIPT else _allows_python
        try:
            most = _GUESSED_OPERATIONS if must_call else None
            return run(subject.span, allows, must_call=must_call, max_operations=most, budget=self._budget)
        except Refused as refused:
            raise subject.refuse(str(refused)) from None

    @staticmethod
    def _is_damaged(outcome: Outcome, *, must_be: bool, is_marked: bool, is_first: bool) -> bool:
        """Whether a failed program counts as a damaged pickle, and not as data of another kind.

        What fails for want of a value, or at a byte that is no opcode, fails there in every unpickler, and nothing
        was imported before (that was judged). So text in a file called `.pt` is not our concern: torch says so.
        """
        if must_be:
            return is_marked or not outcome.is_mistaken
        return is_marked and is_first and outcome.operations >= _ENOUGH_OPERATIONS

    def _check_array(self, subject: _Subject, offset: int) -> int:
        """Check a numpy array; returns where it ends. One of objects is a pickle behind a header.

        numpy reads any literal there, and writes one form.
        """
        self._budget.spend(_FILE_COST)
        span = subject.span
        span.seek(offset + len(_ARRAY))
        version = span.read(2)
        width = 2 if version[:1] == b"\x01" else 4
        length = int.from_bytes(span.read(width), "little")
        begin = offset + len(_ARRAY) + 2 + width + length
        header = span.read(length) if length <= _LONGEST_PLAIN_HEADER else b""
        if _PLAIN_ARRAY.fullmatch(header):
            return begin + _array_bytes(header)
        name = subject.name.removesuffix(_ARRAYS_PICKLE) + _ARRAYS_PICKLE
        self._check_pickles(_Subject(name, span, depth=subject.depth), begin)
        return len(span)

    # ------------------------------------------------------------------------------------------------- zip files

    def _check_zip_at_end(self, subject: _Subject) -> None:
        """Look into a zip file that other data stands before, whether its offsets count that data or not."""
        span = subject.span
        place = zip_at_end(span)
        if place is None:
            return
        start, end = place
        if not 0 <= start < end:
            raise subject.refuse("it ends like a zip file but cannot be looked into")
        # Offsets that count what stands before give the start of the file.
        self._check_zip(replace(subject, span=Span(span.file, span.start + start, span.start + end)), how="ends")

    def _check_zip(self, subject: _Subject, *, how: str = "begins") -> None:
        """Look into a zip file."""
        file = cast("BinaryIO", _SpanFile(subject.span))
        try:
            records = ZipRecords(
                file,
                subject.name,
                max_entries=self._entries_left,
                max_directory_bytes=_MAX_DIRECTORY_BYTES,
                prefix=f"{subject.name}!",
            )
        except UnsafeArchive:
            raise
        except BadArchive as error:
            raise subject.refuse(f"it {how} like a zip file but cannot be looked into ({error})") from None
        self._refuse_depth(subject)
        if not records.entries:
            return
        self._entries_left -= len(records.entries)
        layout = _Layout.of(records.entries)
        self._refuse_twins(subject, layout, records.entries)
        for entry in records.entries:
            if not entry.is_folder or entry.size or entry.compressed:  # readers unpack what folders hold, too
                self._check_entry(subject, layout, records, entry)

    def _refuse_twins(self, subject: _Subject, layout: _Layout, entries: list[Entry]) -> None:
        """Refuse names that stand twice: another reader may open the other one. torch's ignores case."""
        seen: set[str] = set()
        for entry in entries:
            name = entry.name.lower() if _DECLARED.search(entry.name.lower()) else entry.name
            if name in seen:
                raise UnsafeArchive(f"{subject.name}!{layout.inner(entry)}", "it is in there twice")
            seen.add(name)

    def _check_entry(self, subject: _Subject, layout: _Layout, records: ZipRecords, entry: Entry) -> None:
        inner = layout.inner(entry)
        is_script = subject.reader is _Reader.SCRIPT or layout.is_script
        reader = (
            _Reader.SCRIPT
            if (is_script and layout.is_script_pickle(inner)) or layout.is_script_file(inner)
            else _Reader.PYTHON
        )
        name = f"{subject.name}!{inner}"
        try:
            if entry.method == zip_records.STORED:
                at = records.find_data(entry)
                span = Span(subject.span.file, subject.span.start + at, subject.span.start + at + entry.size)
                if entry.size != entry.compressed:
                    raise BadArchive("its two sizes differ")
                self.check(_Subject(name, span, reader, subject.depth + 1))
            else:
                self._check_pieces(_Subject(name, subject.span, reader, subject.depth + 1), records.read(entry))
        except UnsafeArchive:
            raise
        except BadArchive as error:
            # Another reader may get further: with more methods, or up to what is damaged.
            raise _Subject(name, subject.span).refuse(f"it cannot be looked into ({error})") from None

    def _check_pieces(self, subject: _Subject, pieces: Iterator[bytes], *, may_skim: bool = True) -> None:
        """Check what these pieces are together, under the subject's name. The first megabyte tells most that is no
        pickle; of the rest only the end is looked at then, where a zip file may be, or nothing without `may_skim`.
        """
        with tempfile.SpooledTemporaryFile(max_size=8 << 20) as spool:
            file = cast("BinaryIO", spool)
            size = 0
            is_peeked = False
            for chunk in pieces:
                self._budget.spend(_PIECE_COST)
                self._inflated_left -= len(chunk)
                if self._inflated_left < 0:
                    raise UnsafeArchive(
                        subject.name, f"what is nested unpacks to more than {_MAX_INFLATED_BYTES} bytes"
                    )
                spool.write(chunk)
                size += len(chunk)
                if size >= _PEEK_BYTES and not is_peeked:
                    is_peeked = True
                    if self._is_other_data(replace(subject, span=Span(file, 0, size))):
                        if may_skim:
                            self._skim(subject, pieces)
                        return
                    spool.seek(size)
            self.check(replace(subject, span=Span(file, 0, size)))

    def _skim(self, subject: _Subject, pieces: Iterator[bytes]) -> None:
        """Unpack the rest of other data, of which nothing is kept, and refuse a zip file at its end."""
        tail = bytearray()
        for piece in pieces:
            self._budget.spend(_PIECE_COST)
            self._skimmed_left -= len(piece)
            if self._skimmed_left < 0:
                raise UnsafeArchive(subject.name, f"what is nested unpacks to more than {_MAX_SKIMMED_BYTES} bytes")
            tail += piece
            if len(tail) > 2 * _ZIP_TAIL_BYTES:
                del tail[:-_ZIP_TAIL_BYTES]
        end = tail.rfind(zip_records.EMPTY)
        if end >= 0 and b"PK\x01\x02" in tail[:end]:
            raise subject.refuse("it ends like a zip file but cannot be looked into")

    def _is_other_data(self, subject: _Subject) -> bool:
        """Whether the beginning of a member shows that it is no zip file and no pickle."""
        if subject.is_declared:
            return False
        head = subject.span.read(HEAD_BYTES)
        if head[:4] in (zip_records.START, zip_records.EMPTY) or head.startswith(_ARRAY) or head[0] == _PROTO:
            return False
        if opaque_kind(head) or begins_tar(head):
            return False
        if not all(self._unpacks_to_other_data(subject, compressed) for compressed in recognise(head)):
            return False
        subject.span.seek(0)
        outcome = self._run(subject, must_call=True)
        return outcome.failure is not None and outcome.is_mistaken

    def _unpacks_to_other_data(self, subject: _Subject, compressed: Compressed) -> bool:
        """Whether it is no compressed file, or one that is only looked into where its beginning shows a pickle."""
        if compressed.is_usual or subject.depth >= _MAX_NESTING:
            return False
        begin = io.BytesIO()
        with contextlib.suppress(CannotUnpack):
            for piece in compressed.read(subject.span, self._budget):
                begin.write(piece)
                if begin.tell() >= _PEEK_BYTES:
                    break
        inner = replace(subject, span=Span(begin, 0, begin.tell()), depth=subject.depth + 1)
        return begin.tell() == 0 or self._is_other_data(inner)


def _array_bytes(header: bytes) -> int:
    """How many bytes an array takes, by its plain header."""
    try:
        fields = ast.literal_eval(header.decode("latin-1").strip())
    except (ValueError, SyntaxError):  # a number of too many digits, say; numpy then fails, too
        return 0
    descr = fields["descr"]
    kinds = [("", descr)] if isinstance(descr, str) else descr
    one = sum(_element_bytes(kind) * math.prod(shape[0] if shape else ()) for _, kind, *shape in kinds)
    return int(one * math.prod(fields["shape"]))


def _element_bytes(kind: str) -> int:
    size = re.sub(r"\D*(\d+).*", r"\1", kind)
    return int(size) * (4 if "U" in kind[:2] else 1)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What kind of zip file it is, by its entries' names: torch's have one folder around all."""

    root: str
    is_script: bool
    is_torch: bool

    @classmethod
    def of(cls, entries: list[Entry]) -> _Layout:
        # As torch does: the folder is the first entry's, and `constants.pkl` in it makes the file TorchScript.
        root = entries[0].name.partition("/")[0] + "/"
        names = {entry.name for entry in entries}
        is_script = f"{root}constants.pkl" in names
        lower = {name.lower() for name in names}
        marks = ("data.pkl", "constants.pkl", "archive_format", "models/model.json")
        is_torch = any(f"{root.lower()}{mark}" in lower for mark in marks)
        return cls(root if all(name.startswith(root) for name in names) else "", is_script, is_torch)

    def inner(self, entry: Entry) -> str:
        return entry.name.removeprefix(self.root)

    @staticmethod
    def is_script_pickle(inner: str) -> bool:
        """Pickles of a TorchScript file that its C++ reader opens."""
        return ("/" not in inner and inner.endswith(".pkl")) or (
            inner.startswith("code/") and inner.endswith(".debug_pkl")
        )

    @staticmethod
    def is_script_file(inner: str) -> bool:
        """C++ objects of an exported program: zip files that torch's C++ reader opens."""
        return re.match(r"^data/constants/custom_obj_\d+$", inner) is not None


class _SpanFile:
    """A span as the file that `ZipRecords` reads: seek and read, with a position of its own."""

    def __init__(self, span: Span) -> None:
        self._span = Span(span.file, span.start, span.end)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._span.seek(offset + (0 if whence == os.SEEK_SET else len(self._span)))
        return self._span.tell()

    def read(self, size: int) -> bytes:
        return self._span.read(size)
