"""Tests for what travels between the server and an agent: records in pieces, bounds, and what is no record."""

from __future__ import annotations

import random
from typing import Any

import pytest

from marserve import agent_link
from marserve.errors import BadFrame


def data(body: bytes) -> bytes:
    """A DATA record."""
    return agent_link.HEADER.pack(agent_link.DATA_KIND, len(body)) + body


def joined(found: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """What was found, with the pieces of one record of data after the other put together."""
    whole: list[tuple[int, Any]] = []
    for kind, held in found:
        if kind == agent_link.DATA_KIND and whole and whole[-1][0] == agent_link.DATA_KIND:
            whole[-1] = (kind, whole[-1][1] + held)
        else:
            whole.append((kind, held))
    return whole


@pytest.mark.parametrize("seed", range(30))
def test_records_come_out_as_they_went_in_however_they_are_cut(seed: int) -> None:
    """The network may deliver any pieces."""
    chance = random.Random(seed)
    line = agent_link.Line("stdout", "INFO", ["x" * 500])
    part = bytes(chance.randbytes(3000))
    stream = b"".join(
        [
            agent_link.control(line),
            agent_link.page_record(3, 0.25, 2),
            data(b"abc" * 1000),
            agent_link.control(agent_link.WireClosed()),
            agent_link.HEADER.pack(agent_link.FILE_KIND, len(part)) + part,
            data(b""),
            data(b"end"),
        ]
    )
    decoder: agent_link.RecordDecoder[Any] = agent_link.RecordDecoder(agent_link.ToLinkServer)
    found: list[tuple[int, Any]] = []
    while stream:
        size = chance.choice([1, 2, 7, 100, 1000, 5000])
        found += decoder.feed(stream[:size])
        stream = stream[size:]

    assert joined(found) == [
        (agent_link.CONTROL_KIND, line),
        (agent_link.PAGE_KIND, (3, 0.25, 2)),
        (agent_link.DATA_KIND, b"abc" * 1000),
        (agent_link.CONTROL_KIND, agent_link.WireClosed()),
        (agent_link.FILE_KIND, part),
        (agent_link.DATA_KIND, b"end"),
    ]


def test_data_is_handed_on_before_its_record_is_whole() -> None:
    """A large body is held once, by whoever it is for."""
    decoder: agent_link.RecordDecoder[Any] = agent_link.RecordDecoder(agent_link.ToAgent)

    assert decoder.feed(agent_link.HEADER.pack(agent_link.DATA_KIND, 10) + b"abc") == [(agent_link.DATA_KIND, b"abc")]
    assert decoder.feed(b"defghij") == [(agent_link.DATA_KIND, b"defghij")]


@pytest.mark.parametrize(
    "stream",
    [
        agent_link.HEADER.pack(9, 1) + b"x",
        agent_link.HEADER.pack(agent_link.PAGE_KIND, agent_link.PAGE.size + 1),
        agent_link.HEADER.pack(agent_link.PAGE_KIND, 3) + b"abc",
        agent_link.HEADER.pack(agent_link.FILE_KIND, agent_link.MAX_FILE_PART_BYTES + 1),
        agent_link.HEADER.pack(agent_link.CONTROL_KIND, (1 << 32) - 1),
        agent_link.HEADER.pack(agent_link.CONTROL_KIND, 3) + b"\xc1\xc1\xc1",
        agent_link.control(agent_link.Signal(9)),
    ],
    ids=["kind", "long page", "short page", "long file", "long control", "no message", "the other side's"],
)
def test_what_is_no_record_is_refused(stream: bytes) -> None:
    """Before anything is kept for it."""
    decoder: agent_link.RecordDecoder[Any] = agent_link.RecordDecoder(agent_link.ToLinkServer)

    with pytest.raises(BadFrame):
        decoder.feed(stream)
