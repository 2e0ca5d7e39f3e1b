"""Zip files read record by record: what comes out of good ones. What is refused is in test_reader."""

from __future__ import annotations

import io
import struct
import zipfile

import pytest

from marserve.archive.reading.zip_records import ZipRecords
from marserve.errors import BadArchive
from support.archives import ZipMember, raw_zip, zip64_end, zip_of


def read_all(data: bytes) -> dict[str, bytes]:
    """Every entry's bytes."""
    records = ZipRecords(io.BytesIO(data), "it", max_entries=100, max_directory_bytes=100_000)
    return {entry.name: b"".join(records.read(entry)) for entry in records.entries}


def test_what_the_standard_library_writes_is_read() -> None:
    """Stored, deflated, streamed with sizes behind the data, with a comment, in other scripts."""
    raw = io.BytesIO()

    class Unseekable(io.RawIOBase):
        """A pipe: sizes cannot be written in front."""

        def write(self, data: object) -> int:
            """Pass on."""
            return raw.write(bytes(data))  # type: ignore[call-overload, no-any-return]

        def writable(self) -> bool:
            """It is."""
            return True

    with zipfile.ZipFile(Unseekable(), "w") as file:  # type: ignore[arg-type]
        file.comment = b"a comment"
        file.writestr("stored", b"1" * 1000)
        file.writestr("Größe.txt", b"2" * 1000, zipfile.ZIP_DEFLATED)
        file.writestr("empty", b"", zipfile.ZIP_DEFLATED)

    assert read_all(raw.getvalue()) == {"stored": b"1" * 1000, "Größe.txt": b"2" * 1000, "empty": b""}


def test_a_large_entry_comes_in_pieces() -> None:
    """Neither form holds an entry whole in memory."""
    data = bytes(range(256)) * 8192
    for method in (0, 8):
        raw = raw_zip([ZipMember("large", data, method=method)])
        records = ZipRecords(io.BytesIO(raw), "it", max_entries=1, max_directory_bytes=100)

        chunks = list(records.read(records.entries[0]))

        assert b"".join(chunks) == data
        assert max(map(len, chunks)) <= 1 << 18


def test_names_without_a_flag_are_utf_8_or_the_old_code_page() -> None:
    """Java writes UTF-8 without saying so, DOS wrote its own."""
    assert list(read_all(raw_zip([ZipMember("ä".encode()), ZipMember(b"\x94")]))) == ["ä", "ö"]


def test_the_end_record_of_64_bits_is_read() -> None:
    """Archives of more than 65,535 entries or 4 GB have it."""
    one = raw_zip([ZipMember("a", b"data")])
    directory_at = one.index(b"PK\x01\x02")
    end_at = one.index(b"PK\x05\x06")

    data = one[:end_at] + zip64_end(1, end_at - directory_at, directory_at, end_at)

    assert read_all(data) == {"a": b"data"}


@pytest.mark.parametrize(
    "change",
    [
        lambda end: end[:12] + struct.pack("<Q", 5) + end[12:],
        lambda end: end.replace(b"PK\x06\x06", b"PK\x06\x05"),
        lambda end: end[:64] + struct.pack("<Q", 1 << 40) + end[72:],
        lambda end: end[:72] + struct.pack("<L", 3) + end[76:],
    ],
    ids=["longer record", "other record", "far away", "three disks"],
)
def test_an_end_record_of_64_bits_that_is_elsewhere_is_damage(change: object) -> None:
    """Two readers could take two records."""
    one = raw_zip([ZipMember("a", b"data")])
    directory_at, end_at = one.index(b"PK\x01\x02"), one.index(b"PK\x05\x06")
    end = zip64_end(1, end_at - directory_at, directory_at, end_at)
    assert callable(change)

    with pytest.raises(BadArchive):
        read_all(one[:end_at] + change(end))


def test_the_bounds_are_those_of_the_end_record() -> None:
    """They hold before the directory is read."""
    data = zip_of({"a": b"", "b": b""})

    with pytest.raises(BadArchive, match="2 entries; at most 1"):
        ZipRecords(io.BytesIO(data), "it", max_entries=1, max_directory_bytes=1000)
    with pytest.raises(BadArchive, match="at most 10"):
        ZipRecords(io.BytesIO(data), "it", max_entries=10, max_directory_bytes=10)
