"""Rewrites TorchScript files without debug records. Knows torch's zip layout, and no torch.

`torch.jit.save` stores the origin of each line of code, full paths of the machine included (`code/….debug_pkl`). torch
loads and runs a file without these; only the Python line in the traceback of an error inside of the model is lost.
Tensor records must begin at multiples of 64 bytes, so that torch can map them into memory: records are padded by an
extra field, as torch does it.
"""

from __future__ import annotations

import struct
import zipfile
from typing import BinaryIO

from marserve.archive.reading.zip_records import Entry, ZipRecords
from marserve.errors import BadArchive

_ALIGNMENT = 64
_PADDING_FIELD = b"FB"
_LOCAL_BYTES = 30
_ZIP64_FIELD_BYTES = 20
_EPOCH = (1980, 1, 1, 0, 0, 0)


def strip_debug_records(source: BinaryIO, target: BinaryIO) -> list[str]:
    """Write the TorchScript file `source` to `target` without debug records; give the names left out.

    Nothing is written, and the list is empty, if `source` is not a TorchScript file or has no debug records.
    """
    try:
        records = ZipRecords(source, "the file", max_entries=1_000_000, max_directory_bytes=1 << 28)
    except BadArchive:
        return []
    if not records.entries:
        return []
    root = records.entries[0].name.partition("/")[0]
    dropped = [entry.name for entry in records.entries if _is_debug(root, entry.name)]
    if not dropped or all(entry.name != f"{root}/constants.pkl" for entry in records.entries):
        return []
    with zipfile.ZipFile(target, "w") as rewritten:
        for entry in records.entries:
            if not _is_debug(root, entry.name):
                _copy(records, entry, rewritten, target)
    return dropped


def _is_debug(root: str, name: str) -> bool:
    return name.startswith(f"{root}/code/") and name.endswith(".debug_pkl")


def _copy(records: ZipRecords, entry: Entry, rewritten: zipfile.ZipFile, target: BinaryIO) -> None:
    info = zipfile.ZipInfo(entry.name, _EPOCH)
    info.compress_type = entry.method
    info.create_system = 3
    info.file_size = entry.size
    is_wide = entry.size * 1.05 > zipfile.ZIP64_LIMIT
    start = target.tell() + _LOCAL_BYTES + len(entry.name.encode()) + (_ZIP64_FIELD_BYTES if is_wide else 0)
    padding = -(start + 4) % _ALIGNMENT
    info.extra = _PADDING_FIELD + struct.pack("<H", padding) + b"Z" * padding
    with rewritten.open(info, "w", force_zip64=is_wide) as record:
        for chunk in records.read(entry):
            record.write(chunk)
