"""Whether an archive's file looks finished, before it is opened. Reads only its two ends.

A zip file ends with a record of its directory, which a file that is cut, or still being written, lacks. A compressed
tar shows only by its checksum, when it is unpacked, whether it is finished. A file that looks finished may still be
broken, which the reader finds.
"""

from __future__ import annotations

from pathlib import Path

from marserve.archive.reading import tar_stream, zip_records
from marserve.archive.reading.reader import Limits
from marserve.errors import BadArchive, UnsafeArchive
from marserve.files.regular import open_regular

_NOTHING_YET = b"\0\0\0\0"


def why_incomplete(path: Path) -> str | None:
    """What the file lacks, in a sentence without its path; None if it looks whole. Blocks."""
    limits = Limits()
    try:
        with open_regular(path) as file:
            start = file.read(4)
            file.seek(0)
            if len(start) < 4 or start == _NOTHING_YET:
                return f"{path.name} has no beginning yet"
            if start[:2] == tar_stream.GZIP or start not in (zip_records.START, zip_records.EMPTY):
                return None
            zip_records.ZipRecords(
                file, path.name, max_entries=limits.max_entries, max_directory_bytes=limits.max_names_bytes
            )
    except UnsafeArchive:
        return None  # it is complete, and will be refused
    except BadArchive as error:
        return error.message
    except IsADirectoryError:
        return None
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror or type(error).__name__})"
    return None
