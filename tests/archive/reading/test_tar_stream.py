"""Gzip-compressed tar files read in one pass: what the formats allow. What is refused is in test_reader."""

from __future__ import annotations

import gzip
import io

import pytest

from marserve.archive.reading.tar_stream import GzipSource, Member, TarStream
from marserve.errors import BadArchive
from support.archives import raw_tar_header

END = bytes(1024)


def read_all(data: bytes) -> list[tuple[Member, bytes]]:
    """Every member with its bytes."""
    stream = TarStream(GzipSource(io.BytesIO(data), "it"), "it")
    return [(member, b"".join(stream.read())) for member in stream]


def pax(records: bytes) -> bytes:
    """A pax header with these records."""
    return raw_tar_header(b"pax", len(records), b"x") + records.ljust(512, b"\0")


def test_a_file_of_several_gzip_streams_is_one() -> None:
    """As `cat a.gz b.gz` makes it, with padding at the end as tapes have it."""
    head, data = raw_tar_header(b"m/x", 700), b"y" * 700

    members = read_all(gzip.compress(head) + gzip.compress(data + bytes(324)) + gzip.compress(END) + bytes(4096))

    assert members == [(Member("m/x", 700, False), data)]


def test_members_that_nobody_reads_are_skipped() -> None:
    """The next header is found behind them."""
    data = b"".join(raw_tar_header(b"m/%d" % n, 1000) + b"z" * 1000 + bytes(24) for n in range(3))
    stream = TarStream(GzipSource(io.BytesIO(gzip.compress(data + END)), "it"), "it")

    assert [member.name for member in stream] == ["m/0", "m/1", "m/2"]


def test_an_extended_header_names_and_measures_the_member_behind_it() -> None:
    """And only that one."""
    data = pax(b"15 path=m/long\n9 size=3\n") + raw_tar_header(b"short", 0) + b"abc".ljust(512, b"\0")
    data += raw_tar_header(b"m/next", 0)

    members = read_all(gzip.compress(data + END))

    assert members == [(Member("m/long", 3, False), b"abc"), (Member("m/next", 0, False), b"")]


def test_old_folders_are_known_by_their_slash() -> None:
    """Before POSIX a folder was a file whose name ends so."""
    assert read_all(gzip.compress(raw_tar_header(b"m/", 0, b"\0") + END)) == [(Member("m/", 0, True), b"")]


def test_an_archive_without_its_end_blocks_is_whole() -> None:
    """Some programs leave them out."""
    assert len(read_all(gzip.compress(raw_tar_header(b"m/x", 0)))) == 1


@pytest.mark.parametrize(
    "records", [b"99 path=x\n", b"3 path=x\n", b"nonsense", b"0 path=x\n", b"-5 path=x\n", b"10 path=xy"]
)
def test_an_extended_header_that_cannot_be_read_is_damage(records: bytes) -> None:
    """Never a hang, never another name than its writer meant."""
    with pytest.raises(BadArchive, match="damaged"):
        read_all(gzip.compress(pax(records) + raw_tar_header(b"x", 0) + END))


def test_data_behind_the_end_is_bounded() -> None:
    """A bomb there is never inflated."""
    with pytest.raises(BadArchive, match="behind the end"):
        read_all(gzip.compress(raw_tar_header(b"m/x", 0) + END + bytes(3 << 20)))


def test_what_was_inflated_is_counted_by_what_was_taken() -> None:
    """The ratio of a bomb is judged by the bytes that it came from, not by those that lie ready."""
    source = GzipSource(io.BytesIO(gzip.compress(bytes(1 << 24))), "it")

    source.read(1 << 20)

    assert source.packed < 5000
