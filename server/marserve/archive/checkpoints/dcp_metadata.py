"""Reads the folders of `torch.distributed.checkpoint`: `.metadata`, a pickle, and the files that it names.

torch unpickles `.metadata`, opens whatever path it names, and unpickles an entry of bytes freely. So it is read here
without its classes, and refused unless each entry is a piece of a tensor, in a file below the folder, in its bounds.
Workers get what was read, and open no `.metadata`.
What torch wrote between saving and loading with extensions (compression, encryption) is refused: they are code.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from marserve.archive.checkpoints.contents import (
    BITS,
    MOST_TENSORS,
    BadCheckpoint,
    Checkpoint,
    Part,
    Saved,
    check_tiling,
    find_inside,
    first_of,
    is_size,
    read_shape,
    shown,
)
from marserve.archive.checkpoints.pickled_values import Built, Name, NotPlain, Pairs, read_values
from marserve.archive.pickles.check_budget import CheckBudget, Overspent
from marserve.archive.pickles.pickle_program import Refused, Span, run
from marserve.files.regular import TooLarge, open_regular, read_regular

METADATA = ".metadata"
MAX_METADATA_BYTES = 64 << 20
_MOST_PIECES = 200_000
# Pairs of pieces of one tensor that are compared with each other.
_MOST_COMPARED = 4_000_000
# Fields of one object; torch's have six at most. An object may stand in a pickle once and be used a million times.
_MOST_FIELDS = 64

_PACKAGE = b"torch.distributed.checkpoint"
_CLASSES = "torch.distributed.checkpoint.metadata"
_METADATA, _INDEX = f"{_CLASSES}.Metadata", f"{_CLASSES}.MetadataIndex"
_TENSOR, _BYTES, _CHUNK = (f"{_CLASSES}.{name}StorageMetadata" for name in ("Tensor", "Bytes", "Chunk"))
_PROPERTIES, _STORAGE_META = f"{_CLASSES}.TensorProperties", f"{_CLASSES}.StorageMeta"
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_SIZE = "torch.Size"

#: All that a `.metadata` may name.
GLOBALS = frozenset(
    [
        *(_METADATA, _INDEX, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _STORAGE_META, _INFO, _SIZE),
        f"{_CLASSES}._MEM_FORMAT_ENCODING",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        *(f"torch.{name}" for name in BITS),
    ]
)
# Where a piece begins in its tensor, and its shape.
_Box = tuple[tuple[int, ...], tuple[int, ...]]
_NEXT_STEP = "Save the state dict of the model alone, by dcp.save(model.state_dict(), checkpoint_id=FOLDER)"


def is_dcp(path: Path) -> bool:
    """Whether a file of that name is a pickle that names torch's package, and not another program's. Raises OSError."""
    with open_regular(path) as file:
        return _PACKAGE in file.read(MAX_METADATA_BYTES)


def read_dcp(folder: Path, budget: CheckBudget | None = None) -> Checkpoint:
    """The checkpoint of a folder with `.metadata`. Blocks. Raises BadCheckpoint, OSError; CheckStopped by the budget.

    The pickles inside of its files are not looked into; `Checkpoint.files` says where each lies.
    """
    try:
        data = read_regular(folder / METADATA, MAX_METADATA_BYTES)
    except TooLarge:
        raise _bad(f"it has more than {MAX_METADATA_BYTES} bytes") from None
    tensors, pieces = parse_metadata(data, budget)
    files: dict[str, list[Part]] = {}
    for path, part in pieces:
        files.setdefault(path, []).append(part)
    found: dict[Path, str] = {}
    sizes = {}
    for path in files:
        real, sizes[path] = find_inside(folder, path, METADATA)
        if (other := found.setdefault(real, path)) != path:
            raise _bad(f"it names one file as {shown(other)} and as {shown(path)}")
    return Checkpoint("dcp", tensors, {path: check_tiling(path, parts, sizes[path]) for path, parts in files.items()})


def parse_metadata(
    data: bytes, budget: CheckBudget | None = None
) -> tuple[Mapping[str, Saved], list[tuple[str, Part]]]:
    """The tensors that a `.metadata` of these bytes describes, and each piece with the path of its file.

    Raises BadCheckpoint for what is not plain metadata of tensors whose pieces fill them; CheckStopped by the budget.
    """
    budget = budget or CheckBudget()
    root = _read_root(data, budget)
    described, stored = _pairs(root, "state_dict_metadata"), _pairs(root, "storage_data")
    if len(described) > MOST_TENSORS or len(stored) > _MOST_PIECES:
        raise _bad(f"it describes {len(described)} tensors in {len(stored)} pieces, more than are read")
    if unread := [str(name) for name, value in described if _is(value, _BYTES)]:
        raise _bad(
            f"{first_of(unread)}: entries of bytes, which torch unpickles with any code that is in them. {_NEXT_STEP}"
        )
    places = _read_places(stored)
    tensors: dict[str, Saved] = {}
    pieces: list[tuple[str, Part]] = []
    for name, value in described:
        if type(name) is not str:
            raise _bad("it names a tensor by what is no text")
        if name in tensors:
            raise _bad(f"it describes {shown(name)} twice")
        try:
            tensors[name], chunks = _read_tensor(name, value, _MOST_PIECES - len(pieces), budget)
        except Overspent as error:
            raise _bad(f"it cannot be looked into to its end: {error}") from None
        for begin, shape in chunks:
            least = Saved(tensors[name].dtype, shape).bytes
            if least or (name, begin) in places:  # a rank that has nothing of a tensor may have stored that
                pieces.append(_take_place(places, name, (begin, shape), least))
    if places:
        raise _bad(f"it stores pieces of {first_of({name for name, _ in places})} that belong to no tensor")
    return tensors, pieces


def _bad(reason: str) -> BadCheckpoint:
    return BadCheckpoint(METADATA, reason)


def _read_root(data: bytes, budget: CheckBudget) -> Any:
    """The pickle's value, once it is known to name nothing else than the classes of metadata."""
    span = Span(io.BytesIO(data), 0, len(data))
    try:
        outcome = run(span, GLOBALS.__contains__, budget=budget)
        if outcome.failure is not None:
            raise _bad(f"it is no pickle that can be read to its end: {outcome.failure}")
        root = read_values(data[: span.tell()])
    except Refused as refused:
        raise _bad(f"it is no metadata of tensors alone: {refused}. {_NEXT_STEP}") from None
    except Overspent as error:
        raise _bad(f"it cannot be looked into to its end: {error}") from None
    except NotPlain as error:
        raise _bad(str(error)) from None
    if not _is(root, _METADATA):
        raise _bad("it holds no metadata of torch.distributed.checkpoint")
    return root


def _is(value: object, name: str) -> bool:
    return isinstance(value, Built) and value.callee.full == name


def _fields(value: Any, name: str, what: str) -> dict[str, Any]:
    """The fields of an object of that class."""
    state = value.state if _is(value, name) else None
    kind = name.rpartition(".")[2]
    if not isinstance(state, Pairs) or value.arguments:
        raise _bad(f"{what} is no {kind}")
    if len(state.items) > _MOST_FIELDS:
        raise _bad(f"{what} has {len(state.items)} fields, and a {kind} at most {_MOST_FIELDS}")
    if not all(type(key) is str for key, _ in state.items):
        raise _bad(f"{what} is no {kind}")
    return dict(state.items)


def _pairs(root: Any, name: str) -> list[tuple[Any, Any]]:
    value = _fields(root, _METADATA, "it").get(name)
    if not isinstance(value, Pairs):
        raise _bad(f"its {name} is no map")
    return value.items


def _size(value: Any) -> tuple[int, ...] | None:
    """What a `torch.Size` holds; None for anything else."""
    if not _is(value, _SIZE) or value.state is not None or len(value.arguments) != 1:
        return None
    return read_shape(value.arguments[0])


def _read_places(stored: Iterable[tuple[Any, Any]]) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    """Path, offset and length of each piece, by the tensor's name and where in the tensor it begins."""
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for key, value in stored:
        index = _fields(key, _INDEX, "a key of its storage_data")
        name, offsets = index.get("fqn"), _size(index.get("offset"))
        if type(name) is not str or offsets is None:
            raise _bad("a piece in its storage_data has no name or no place in a tensor")
        info = _fields(value, _INFO, f"the place of {shown(name)}")
        path, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if type(path) is not str or not is_size(offset) or not is_size(length):
            raise _bad(f"{shown(name)} has no path, offset and length in a file")
        if info.get("transform_descriptors"):
            raise _bad(f"{shown(name)} was saved through extensions, which are not used. {_NEXT_STEP}")
        if places.setdefault((name, offsets), place := (path, offset, length)) is not place:
            raise _bad(f"it stores the same piece of {shown(name)} twice")
    return places


def _read_tensor(name: str, value: Any, most_pieces: int, budget: CheckBudget) -> tuple[Saved, list[_Box]]:
    """A tensor, and its pieces. Many tensors may have one list of pieces, so that each is counted again."""
    what = f"the description of {shown(name)}"
    described = _fields(value, _TENSOR, what)
    shape = _size(described.get("size"))
    chunks = described.get("chunks")
    if shape is None or type(chunks) is not list:
        raise _bad(f"{what} has no size or no chunks")
    if len(chunks) > most_pieces:
        raise _bad(f"its tensors have more than {_MOST_PIECES} pieces")
    budget.spend(len(chunks))
    dtype = _dtype(described.get("properties"), what)
    boxes = [_read_box(chunk, shape, what) for chunk in chunks]
    _check_cover(boxes, shape, what, budget)
    return Saved(dtype, shape), boxes


def _dtype(properties: Any, what: str) -> str:
    state = properties.state if _is(properties, _PROPERTIES) else None
    if isinstance(state, Pairs):  # of torch before 2.0
        state = [value for key, value in state.items[:_MOST_FIELDS] if key == "dtype"]
    found = state[0] if isinstance(state, list | tuple) and state else None
    name = found.full.removeprefix("torch.") if isinstance(found, Name) else ""
    if name not in BITS:
        raise _bad(f"{what} has no dtype that is known")
    return name


def _read_box(chunk: Any, shape: tuple[int, ...], what: str) -> _Box:
    fields = _fields(chunk, _CHUNK, f"a chunk in {what}")
    begin, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
    if begin is None or sizes is None or not len(begin) == len(sizes) == len(shape):
        raise _bad(f"a chunk in {what} does not have the dimensions of the tensor, which are {len(shape)}")
    if any(at + size > whole for at, size, whole in zip(begin, sizes, shape, strict=True)):
        raise _bad(f"a chunk in {what} reaches beyond the tensor")
    return begin, sizes


def _check_cover(boxes: list[_Box], shape: tuple[int, ...], what: str, budget: CheckBudget) -> None:
    """Raise BadCheckpoint unless the boxes fill the shape and no two have an element in common."""
    filled = sum(math.prod(sizes) for _, sizes in boxes)
    if filled != math.prod(shape):
        raise _bad(f"the chunks in {what} have {filled} elements together, and the tensor {math.prod(shape)}")
    boxes = sorted(box for box in boxes if math.prod(box[1]))
    if not shape and len(boxes) > 1:
        raise _bad(f"the chunks in {what} overlap")
    compared = 0
    for number, (begin, sizes) in enumerate(boxes):
        for other in range(number + 1, len(boxes)):
            compared += 1
            budget.spend()
            if compared > _MOST_COMPARED:
                raise _bad(f"{what} has too many chunks that lie beside each other: {len(boxes)}")
            if shape and boxes[other][0][0] >= begin[0] + sizes[0]:
                break  # they are in the order of their first dimension
            if _overlap((begin, sizes), boxes[other]):
                raise _bad(f"the chunks in {what} overlap")


def _overlap(one: _Box, other: _Box) -> bool:
    return all(
        a < b + b_size and b < a + a_size
        for a, a_size, b, b_size in zip(one[0], one[1], other[0], other[1], strict=True)
    )


_Places = dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]


def _take_place(places: _Places, name: str, box: _Box, least: int) -> tuple[str, Part]:
    offsets, shape = box
    place = places.pop((name, offsets), None)
    if place is None:
        raise _bad(f"it says of no file where the piece of {shown(name)} at {list(offsets)} is, or says it of two")
    path, offset, length = place
    if length < least:
        raise _bad(f"the piece of {shown(name)} at {list(offsets)} has {least} bytes, and its place in a file {length}")
    return path, Part(name, offset, length, offsets, shape)
