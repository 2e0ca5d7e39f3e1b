"""Reads checkpoints of `torch.distributed.checkpoint`: tensors alone, and the bytes of the parts that are asked for.

torch's own reader unpickles `.metadata` freely, opens any path that it names, reads ends of files again and again, and
each piece whole, however little of it a rank needs. This one opens no `.metadata`: the server has read it without its
classes, and says where each piece lies. A piece is what `torch.save` writes of a tensor, a zip file in which the
numbers lie one behind the other, so that a part of it is a few runs of bytes. What lies otherwise is read by torch.
"""

from __future__ import annotations

import io
import json
import os
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, NamedTuple, cast

import torch

from marserve_handlers.sharding.stored import Stored, read_into
from marserve_handlers.support.shown import shown_name

# A smaller piece is read as a whole, which takes one read and not five.
READ_AT_ONCE = 64 << 10
_LOCAL_HEADER = 30
# What a zip file, or what torch saved in it, may raise where it is damaged, or another one.
_NOT_PLAIN = (
    zipfile.BadZipFile,
    UnpicklingError,
    EOFError,
    OSError,
    RuntimeError,
    KeyError,
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    NotImplementedError,
)


class NotTensors(ValueError):
    """The checkpoint holds something else than tensors in its own files; the text says what."""


class _Piece(NamedTuple):
    """A piece of a tensor: where it begins in it, its shape, and the bytes of its file that are its."""

    name: str
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    path: str
    offset: int
    length: int


class _Window(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0
        self.bytes_read = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The place in this part."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place in this part. Raises OSError for one before it."""
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if at < 0:
            raise OSError("there is nothing before the beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or its beginning with what is left of this part. Raises EOFError where the file ends."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        wanted = len(view)
        while view:
            count = os.preadv(self._file.fileno(), [view], self._offset + self._at)
            if not count:
                raise EOFError("the file ends inside of a tensor")
            view, self._at = view[count:], self._at + count
        self.bytes_read += wanted
        return wanted


class TensorReader:
    """Reads the tensors of a folder; `bytes_read` counts what was read of its files.

    `tensors` are the dtype and the shape of each.
    """

    def __init__(self, folder: str | os.PathLike[str], layout: bytes) -> None:
        """`layout` says what lies where, as `context.checkpoint` has it. Raises ValueError, KeyError for any other."""
        self._folder = Path(folder)
        document = json.loads(layout)
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            name: (getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in document["tensors"].items()
        }
        self._pieces: dict[str, list[_Piece]] = {name: [] for name in self.tensors}
        for path, parts in document["files"].items():
            for name, offset, length, begin, shape in parts:
                self._pieces[name].append(_Piece(name, tuple(begin), tuple(shape), path, offset, length))
        self.bytes_read = 0

    def read_part(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor, of the pieces that have some of it. Each slice has a begin and an end.

        Raises NotTensors, OSError, EOFError, and what torch raises for a piece that it is to read.
        """
        tensor = torch.empty([each.stop - each.start for each in part], dtype=self.tensors[name][0])
        for piece in self._pieces[name]:
            spans = [
                (max(begin, each.start), min(begin + size, each.stop))
                for begin, size, each in zip(piece.begin, piece.shape, part, strict=True)
            ]
            if any(begin >= end for begin, end in spans):
                continue
            inside = tuple(slice(a - at, b - at) for (a, b), at in zip(spans, piece.begin, strict=True))
            to = tuple(slice(a - each.start, b - each.start) for (a, b), each in zip(spans, part, strict=True))
            with open(self._find(piece.path), "rb", buffering=0) as file:
                self._read(piece, inside, tensor[to], file)
        return tensor

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill these tensors, each of the shape of its name, file by file and in the order the pieces lie.

        Another dtype is converted. Raises as `read_part`.
        """
        by_file: dict[str, list[_Piece]] = {}
        for name in tensors:
            for piece in self._pieces[name]:
                by_file.setdefault(piece.path, []).append(piece)
        for path, pieces in by_file.items():
            with open(self._find(path), "rb", buffering=0) as file:
                for piece in sorted(pieces, key=lambda piece: piece.offset):
                    to = tuple(slice(a, a + length) for a, length in zip(piece.begin, piece.shape, strict=True))
                    inside = tuple(slice(0, length) for length in piece.shape)
                    self._read(piece, inside, tensors[piece.name][to], file)

    def _find(self, relative: str) -> str:
        path = os.path.realpath(self._folder / relative)
        if not Path(path).is_relative_to(os.path.realpath(self._folder)):
            raise NotTensors(f"{shown_name(relative)} leads out of it")
        return path

    def _read(self, piece: _Piece, inside: tuple[slice, ...], target: torch.Tensor, file: IO[bytes]) -> None:
        """Fill a target, which is a view, with a part of a piece."""
        if not 0 <= piece.offset <= piece.offset + piece.length <= os.fstat(file.fileno()).st_size:
            raise NotTensors(f"{shown_name(piece.name)} lies beyond the end of {shown_name(piece.path)}")
        window = _Window(file, piece.offset, piece.length)
        try:
            stored = None if piece.length <= READ_AT_ONCE else _find_numbers(window, piece, str(file.name))
            if stored is not None and (stored.dtype, stored.shape) == (self.tensors[piece.name][0], piece.shape):
                self.bytes_read += read_into(file.fileno(), stored, piece.name, inside, target)
                return
            window.seek(0)
            # torch reads both ends of a file several times; of a large piece that is little, and a copy would be much
            source: Any = io.BytesIO(window.read(piece.length)) if piece.length <= READ_AT_ONCE else window
            tensor = torch.load(source, map_location="cpu", weights_only=True)
        finally:
            self.bytes_read += window.bytes_read
        if not isinstance(tensor, torch.Tensor):
            raise NotTensors(f"{shown_name(piece.name)} is no tensor in {shown_name(piece.path)}")
        if tuple(tensor.shape) != piece.shape:
            raise NotTensors(f"{shown_name(piece.name)} has the shape {list(tensor.shape)} in {shown_name(piece.path)}")
        target.copy_(tensor[inside].detach())


# ----------------------------------------------------------------------------------------------- in a torch.save


def _find_numbers(window: _Window, piece: _Piece, path: str) -> Stored | None:
    """Where in its file the numbers of a piece lie; None unless they lie one behind the other, as they are.

    torch says what the tensor is: on the meta device it reads no numbers.
    """
    try:
        with zipfile.ZipFile(window) as archive:
            known = {info.filename: info for info in archive.infolist()}
            (top,) = (name.removesuffix("data.pkl") for name in known if name.endswith("/data.pkl"))
            (record,) = (info for name, info in known.items() if name.startswith(f"{top}data/"))
            order = archive.read(f"{top}byteorder").decode() if f"{top}byteorder" in known else "little"
        if order != sys.byteorder or record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
            return None
        window.seek(record.header_offset)
        header = window.read(_LOCAL_HEADER)
        window.seek(0)
        tensor = torch.load(cast(Any, window), map_location="meta", weights_only=True)
    except _NOT_PLAIN:
        return None  # torch reads it, or says what is wrong with it
    if not isinstance(tensor, torch.Tensor) or not _is_plain(tensor) or header[:4] != b"PK\x03\x04":
        return None
    begin = record.header_offset + _LOCAL_HEADER
    begin += sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))  # its name, and what aligns it
    first = int(tensor.storage_offset()) * tensor.itemsize
    if first + tensor.nbytes > record.file_size or begin + record.file_size > piece.length:
        return None
    at = piece.offset + begin + first
    return Stored(path, tensor.dtype, tuple(tensor.shape), at, at + tensor.nbytes)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its numbers are those of its memory, in their order."""
    is_changed = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return tensor.layout == torch.strided and not is_changed and tensor.is_contiguous()
