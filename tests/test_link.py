"""Tests for what travels between the server and an agent: records in pieces, bounds, and what is no record."""

from __future__ import annotations

import random
from typing import Any

import pytest

from marserve import link
from marserve.errors import BadFrame


def data(body: bytes) -> bytes:
    """A DATA record."""
    return link.HEADER.pack(link.DATA_KIND, len(body)) + body


def joined(found: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """What was found, with the pieces of one record of data after the other put together."""
    whole: list[tuple[int, Any]] = []
    for kind, held in found:
        if kind == link.DATA_KIND and whole and whole[-1][0] == link.DATA_KIND:
            whole[-1] = (kind, whole[-1][1] + held)
        else:
            whole.append((kind, held))
    return whole


@pytest.mark.parametrize("seed", range(30))
def test_records_come_out_as_they_went_in_however_they_are_cut(seed: int) -> None:
    """The network may deliver any pieces."""
    chance = random.Random(seed)
    line = link.Line("stdout", "INFO", "x" * 500)
    part = bytes(chance.randbytes(3000))
    stream = b"".join(
        [
            link.control(line),
            link.page_record(3, 0.25, 2),
            data(b"abc" * 1000),
            link.control(link.WireClosed()),
            link.HEADER.pack(link.FILE_KIND, len(part)) + part,
            data(b""),
            data(b"end"),
        ]
    )
    decoder: link.RecordDecoder[Any] = link.RecordDecoder(link.ToLinkServer)
    found: list[tuple[int, Any]] = []
    while stream:
        size = chance.choice([1, 2, 7, 100, 1000, 5000])
        found += decoder.feed(stream[:size])
        stream = stream[size:]

    assert joined(found) == [
        (link.CONTROL_KIND, line),
        (link.PAGE_KIND, (3, 0.25, 2)),
        (link.DATA_KIND, b"abc" * 1000),
        (link.CONTROL_KIND, link.WireClosed()),
        (link.FILE_KIND, part),
        (link.DATA_KIND, b"end"),
    ]


def test_data_is_handed_on_before_its_record_is_whole() -> None:
    """A large body is held once, by whoever it is for."""
    decoder: link.RecordDecoder[Any] = link.RecordDecoder(link.ToAgent)

    assert decoder.feed(link.HEADER.pack(link.DATA_KIND, 10) + b"abc") == [(link.DATA_KIND, b"abc")]
    assert decoder.feed(b"defghij") == [(link.DATA_KIND, b"defghij")]


@pytest.mark.parametrize(
    "stream",
    [
        link.HEADER.pack(9, 1) + b"x",
        link.HEADER.pack(link.PAGE_KIND, link.PAGE.size + 1),
        link.HEADER.pack(link.PAGE_KIND, 3) + b"abc",
        link.HEADER.pack(link.FILE_KIND, link.MAX_FILE_PART_BYTES + 1),
        link.HEADER.pack(link.CONTROL_KIND, (1 << 32) - 1),
        link.HEADER.pack(link.CONTROL_KIND, 3) + b"\xc1\xc1\xc1",
        link.control(link.Signal(9)),
    ],
    ids=["kind", "long page", "short page", "long file", "long control", "no message", "the other side's"],
)
def test_what_is_no_record_is_refused(stream: bytes) -> None:
    """Before anything is kept for it."""
    decoder: link.RecordDecoder[Any] = link.RecordDecoder(link.ToLinkServer)

    with pytest.raises(BadFrame):
        decoder.feed(stream)
