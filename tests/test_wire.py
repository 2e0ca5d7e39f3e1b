"""Tests for the wire. Frames are spelled out byte by byte here; the encoder makes none of those that are decoded."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve import wire
from marserve.allocator import BY_SERVER
from marserve.errors import BadFrame
from marserve.messages import (
    Batch,
    Hello,
    Item,
    Loaded,
    Metric,
    Metrics,
    NotLoaded,
    Raised,
    Result,
    Results,
    Stop,
    pack_head,
)
from marserve.registry.intake.registration import LARGEST_BATCH

# What a frame is made of, as docs and the head of `wire.py` say it; changing the format must change these lines.
HELLO_METADATA = b"\x93\xa5hello\x07\xa43.11"  # ["hello", 7, "3.11"]
HELLO = (
    b"mW"
    b"\x01\x00"  # version
    b"\x0d\x00\x00\x00"  # bytes of metadata
    b"\x00\x00\x00\x00"  # number of bodies
    b"\x00\x00\x00\x00\x00\x00\x00\x00"  # bytes of bodies
) + HELLO_METADATA

RESULTS_METADATA = (
    b"\x95\xa7results\x02\xcb\x3f\xe0\x00\x00\x00\x00\x00\x00\x92"
    b"\x95\xcc\xc8\xa0\x90\xc0\xc0\x95\xcc\xc8\xa0\x90\xc0\xc0"
    b"\xc0"  # nothing is said of the worker's time
)
RESULTS = (
    (
        b"mW\x01\x00"
        + bytes([len(RESULTS_METADATA)])
        + b"\x00\x00\x00"
        + b"\x02\x00\x00\x00"
        + b"\x05\x00\x00\x00\x00\x00\x00\x00"
        + b"\x02\x00\x00\x00"  # first body
        + b"\x03\x00\x00\x00"  # second body
    )
    + RESULTS_METADATA
    + b"ab"
    + b"\x00\xff\n"
)
RESULTS_MESSAGE = Results(2, 0.5, [Result(200, "", []), Result(200, "", [])])


def header(*, magic: bytes = b"mW", version: int = 1, metadata: int = 0, count: int = 0, total: int = 0) -> bytes:
    """A frame's fixed beginning."""
    return magic + struct.pack("<HIIQ", version, metadata, count, total)


def frame(metadata: bytes, bodies: Sequence[bytes] = ()) -> bytes:
    """A whole frame around metadata that may be nonsense."""
    lengths = b"".join(struct.pack("<I", len(body)) for body in bodies)
    head = header(metadata=len(metadata), count=len(bodies), total=sum(map(len, bodies)))
    return head + lengths + metadata + b"".join(bodies)


def feed_all(data: bytes, *, step: int | None = None) -> list[Any]:
    """What a fresh decoder makes of these bytes, fed whole or in steps."""
    decoder = wire.server_decoder()
    if step is None:
        return decoder.feed(data)
    return [message for at in range(0, len(data), step) for message in decoder.feed(data[at : at + step])]


# ------------------------------------------------------------------------------------------- whole frames


def test_a_frame_without_bodies_is_read() -> None:
    """Twenty bytes of header, then the message."""
    assert feed_all(HELLO) == [(Hello(7, "3.11"), [])]


def test_a_frame_with_bodies_is_read() -> None:
    """The bodies are raw, zero bytes and line ends included."""
    assert feed_all(RESULTS) == [(RESULTS_MESSAGE, [b"ab", b"\x00\xff\n"])]


def test_what_the_encoder_writes_is_what_the_format_says() -> None:
    """Byte by byte."""
    assert b"".join(wire.encode(Hello(7, "3.11"))) == HELLO
    assert b"".join(wire.encode(RESULTS_MESSAGE, [b"ab", b"\x00\xff\n"])) == RESULTS


def test_an_empty_body_is_a_body() -> None:
    """Its place among the others counts."""
    assert feed_all(frame(RESULTS_METADATA, [b"", b"x"])) == [(RESULTS_MESSAGE, [b"", b"x"])]


@pytest.mark.parametrize("cut", range(len(RESULTS) + 1))
def test_a_frame_may_be_cut_anywhere(cut: int) -> None:
    """Sockets deliver what they like."""
    decoder = wire.server_decoder()

    first, second = decoder.feed(RESULTS[:cut]), decoder.feed(RESULTS[cut:])

    assert [*first, *second] == [(RESULTS_MESSAGE, [b"ab", b"\x00\xff\n"])]
    assert decoder.is_between_frames


@pytest.mark.parametrize("step", [1, 2, 3, 7, 20, 21, 64])
def test_many_frames_may_come_in_pieces_of_any_size(step: int) -> None:
    """None is lost, none is doubled, the order is kept."""
    messages = feed_all((HELLO + RESULTS) * 3, step=step)

    assert [type(message) for message, _ in messages] == [Hello, Results] * 3


def test_many_frames_may_come_at_once_with_the_beginning_of_another() -> None:
    """The rest waits."""
    decoder = wire.server_decoder()

    messages = decoder.feed(HELLO + RESULTS + HELLO[:5])

    assert len(messages) == 2
    assert not decoder.is_between_frames
    assert decoder.feed(HELLO[5:]) == [(Hello(7, "3.11"), [])]


def test_nothing_makes_nothing() -> None:
    """An empty read changes nothing."""
    decoder = wire.server_decoder()

    assert decoder.feed(b"") == []
    assert decoder.is_between_frames


def test_a_peer_that_closes_within_a_frame_is_seen() -> None:
    """Whoever reads can tell an orderly end from one in the middle."""
    decoder = wire.server_decoder()

    decoder.feed(HELLO[:-1])

    assert not decoder.is_between_frames


def test_the_worker_is_given_bodies_that_it_may_change() -> None:
    """Handlers see `bytearray`, as the contract's §1.3 says."""
    metadata = b"\x93\xa5batch\x01\x91\x94\xa2id\x91\x92\xa4body\xc0\xc4\x03\x92\x90\x90\xc0"

    [(message, bodies)] = wire.worker_decoder().feed(frame(metadata, [b"raw"]))

    assert message == Batch(1, [Item("id", [("body", None)], pack_head([], []), None)])
    assert type(bodies[0]) is bytearray
    assert bodies[0] == b"raw"


def test_a_large_frame_is_written_where_its_bodies_lie() -> None:
    """They are not copied together."""
    body = bytes(wire.JOIN_BELOW_BYTES)

    buffers = wire.encode(Stop(), [b"small", body])

    assert buffers[2] is body
    assert len(buffers) == 3


# ------------------------------------------------------------------------------------------- what no honest peer sends


def test_a_header_alone_is_not_enough() -> None:
    """Nothing is said before the frame is whole."""
    assert feed_all(header(metadata=10)) == []


@pytest.mark.parametrize("magic", [b"Wm", b"\x00\x00", b"GE", b"mw"])
def test_a_wrong_beginning_is_refused(magic: bytes) -> None:
    """Whatever it is, it is not ours."""
    with pytest.raises(BadFrame, match="begins with"):
        feed_all(header(magic=magic))


@pytest.mark.parametrize("version", [0, 2, 256, 65535])
def test_a_version_that_we_do_not_know_is_refused(version: int) -> None:
    """Guessing would be worse."""
    with pytest.raises(BadFrame, match=f"version {version}"):
        feed_all(header(version=version))


@pytest.mark.parametrize(
    "announced",
    [
        {"metadata": 64 * 1024 * 1024 + 1},
        {"metadata": 2**32 - 1},
        {"count": 65_537},
        {"count": 2**32 - 1},
        {"total": 1001},
        {"total": 2**64 - 1},
    ],
    ids=str,
)
def test_lengths_over_their_bounds_are_refused_by_the_header_alone(announced: dict[str, int]) -> None:
    """Before anything is waited for, or kept. A worker's answers are at most those of the largest batch."""
    decoder = wire.server_decoder(max_frame_bytes=1000)

    with pytest.raises(BadFrame, match="the bounds are"):
        decoder.feed(header(**announced))


def test_lengths_at_their_bounds_are_waited_for() -> None:
    """The bound itself is allowed, and is the same on both ends: machines of a cluster need not have one build."""
    decoder = wire.server_decoder(max_frame_bytes=1000)

    assert decoder.feed(header(metadata=64 * 1024 * 1024, count=LARGEST_BATCH, total=1000)) == []
    assert wire.worker_decoder().feed(header(metadata=64 * 1024 * 1024, count=1_000_000, total=2**40)) == []
    assert wire.template_decoder().feed(header(metadata=4 * 1024 * 1024)) == []
    for announced in ({"count": 1_000_001}, {"total": 2**40 + 1}):
        with pytest.raises(BadFrame, match="the bounds are"):
            wire.worker_decoder().feed(header(**announced))
    with pytest.raises(BadFrame, match="the bounds are"):
        wire.template_decoder().feed(header(metadata=4 * 1024 * 1024 + 1))


@pytest.mark.parametrize("lengths", [(2, 2), (2, 4), (2**32 - 1, 2**32 - 1)])
def test_lengths_that_do_not_add_up_are_refused(lengths: tuple[int, int]) -> None:
    """They would shift the bodies, and cross answers."""
    broken = bytearray(RESULTS)
    broken[20:28] = struct.pack("<II", *lengths)

    with pytest.raises(BadFrame, match="add up to"):
        feed_all(bytes(broken))


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x90",
        b"\x91\xa5hullo",
        b"\x93\xa5hello\x07",  # cut
        b"\x93\xa5hello\xa3abc\xa43.11",  # a word for a number
        b"\x93\xa5hello\x07\xa2\xff\xfe",  # no UTF-8
        b"\x93\xa5hello\x07\xa43.11\xc0",  # something behind it
        b"\xdd\xff\xff\xff\xff\xa5hello",  # four thousand million elements
        b"\x94\xa5hello\x07\xa43.11" + b"\x91" * 100_000 + b"\xc0",  # nested deeper than any stack
        b"\x93\xa5batch\x01\x90",  # a message for workers only
        b"\x80\x04\x95",  # a pickle
    ],
    ids=lambda metadata: metadata[:12].hex() or "empty",
)
def test_metadata_that_is_no_message_for_us_is_refused(metadata: bytes) -> None:
    """As data, with no exception of another kind: the server goes on."""
    with pytest.raises(BadFrame, match="no message"):
        feed_all(frame(metadata))


def test_frames_before_a_bad_one_do_not_count() -> None:
    """A peer that went wrong is not to be trusted with what it said in the same breath."""
    with pytest.raises(BadFrame):
        feed_all(HELLO + header(magic=b"xx"))


@given(st.binary(max_size=200), st.integers(1, 50))
def test_random_bytes_are_refused_or_waited_for(data: bytes, step: int) -> None:
    """Nothing else may come of them."""
    try:
        messages = feed_all(data, step=step)
    except BadFrame:
        return

    assert messages == []


@given(st.binary(max_size=100), st.lists(st.binary(max_size=8), max_size=3))
def test_random_metadata_in_a_sound_frame_is_refused_or_a_message(metadata: bytes, bodies: list[bytes]) -> None:
    """What a hostile handler with the descriptor could send."""
    try:
        messages = feed_all(frame(metadata, bodies))
    except BadFrame:
        return

    assert [sent for _, sent in messages] == [bodies]


def test_a_body_too_long_for_the_format_cannot_be_sent() -> None:
    """Its length would not fit: the sender hears of it, not the peer."""

    class Endless(bytes):
        def __len__(self) -> int:
            return 2**32

    with pytest.raises(ValueError, match="the wire carries"):
        wire.encode(Stop(), [Endless()])


# ------------------------------------------------------------------------------------------- there and back

TEXT = st.text(max_size=20)
HEADERS = st.lists(st.tuples(TEXT, TEXT), max_size=3)
RESULT = st.builds(Result, st.integers(100, 999), TEXT, HEADERS, st.none() | TEXT)
METRIC = st.builds(
    Metric, TEXT, st.floats(allow_nan=False), TEXT, TEXT, st.lists(st.tuples(TEXT, TEXT), max_size=2), TEXT
)
MESSAGES = st.one_of(
    st.builds(Hello, st.integers(0, 2**31), TEXT),
    st.builds(Loaded, st.floats(0, 1e9), st.lists(TEXT, max_size=2)),
    st.builds(Results, st.integers(0, 2**62), st.floats(0, 1e9), st.lists(RESULT, max_size=4)),
    st.builds(Raised, st.integers(0, 2**62), st.floats(0, 1e9), TEXT, TEXT, st.integers(100, 999), TEXT),
    st.builds(Metrics, st.lists(METRIC, max_size=3)),
)


# Every string that Python has, lone surrogates included.
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)


class Text(str):
    """Text of a class of its own, as numpy's `str_` is."""


@given(ANY_TEXT, ANY_TEXT)
def test_text_that_utf_8_cannot_say_arrives_escaped(reason: str, name: str) -> None:
    """The rest of it arrives as it is."""
    sent = Results(1, 0.5, [Result(200, reason, [(name, Text(reason))])])

    [(message, _)] = feed_all(b"".join(wire.encode(sent)))

    seen = reason.encode("utf-8", "backslashreplace").decode()
    assert message == Results(1, 0.5, [Result(200, seen, [(name.encode("utf-8", "backslashreplace").decode(), seen)])])


def test_a_lone_surrogate_is_escaped_as_python_writes_it() -> None:
    """Clients see what was meant."""
    [(message, _)] = feed_all(b"".join(wire.encode(Raised(1, 0.0, "k", "a \ud800 b", 503, "t"))))

    assert message.message == "a \\ud800 b"


def test_what_no_message_holds_is_refused_as_before() -> None:
    """It would be a defect of ours."""
    with pytest.raises(TypeError):
        wire.encode(Hello(1, object()))  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        wire.encode(Hello(2**64, "3.11"))


def test_more_metadata_than_a_peer_takes_is_not_sent() -> None:
    """The peer would close the connection for it, and end its worker."""
    with pytest.raises(ValueError, match="metadata has"):
        wire.encode(Hello(1, "x" * wire.MAX_METADATA_BYTES))


@given(st.lists(st.tuples(MESSAGES, st.lists(st.binary(max_size=50), max_size=4)), max_size=4), st.integers(1, 100))
def test_what_is_sent_arrives(sent: list[tuple[Any, list[bytes]]], step: int) -> None:
    """Any messages with any bodies, read in pieces of any size."""
    data = b"".join(b"".join(wire.encode(message, bodies)) for message, bodies in sent)

    assert feed_all(data, step=step) == sent


def test_a_body_of_many_megabytes_arrives_whole() -> None:
    """Read as a socket gives it, 64 KiB at a time."""
    body = bytes(range(256)) * 65536
    data = b"".join(wire.encode(RESULTS_MESSAGE, [body, b"end"]))

    [(message, bodies)] = feed_all(data, step=65536)

    assert message == RESULTS_MESSAGE
    assert bodies == [body, b"end"]


def test_the_decoder_keeps_nothing_of_frames_that_are_done() -> None:
    """A connection that lives for months must not grow."""
    decoder = wire.server_decoder()

    for _ in range(1000):
        decoder.feed(RESULTS[:30])
        decoder.feed(RESULTS[30:])

    assert decoder.is_between_frames
    assert len(decoder._kept) == 0


def test_headers_that_are_no_utf8_travel() -> None:
    """A client's header values are bytes, and stay so."""
    item = Item("id", [("body", None)], pack_head([(b"X-Name", b"\xff\xfe")], []), None)

    [(message, _)] = wire.worker_decoder().feed(b"".join(wire.encode(Batch(1, [item]))))

    assert message == Batch(1, [item])


def test_every_message_has_a_tag_of_its_own() -> None:
    """Two alike could not be told apart."""
    tags = [
        msgspec.inspect.type_info(kind).tag  # type: ignore[union-attr]
        for union in (wire.ToServer, wire.ToWorker)
        for kind in union.__args__
    ]

    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("step", [1, 7, 4096, 65_536, 1_000_000])
def test_a_large_frame_is_filled_as_its_bytes_come(step: int) -> None:
    """However the bytes are cut, bodies keep their order, empty ones too, and what follows the frame is not lost."""
    bodies = [b"", b"a" * 70_000, b"", b"b" * (3 if step == 1 else 200_000), b""]
    large = b"".join(wire.encode(Loaded(1.5), bodies))
    sent = large + b"".join(wire.encode(Loaded(2.5), [b"small"])) + b"".join(wire.encode(Loaded(3.5), bodies))
    decoder = wire.server_decoder()

    heard = []
    for at in range(0, len(sent), step):
        heard += decoder.feed(sent[at : at + step])

    assert [message for message, _ in heard] == [Loaded(1.5), Loaded(2.5), Loaded(3.5)]
    assert [[bytes(body) for body in got] for _, got in heard] == [bodies, [b"small"], bodies]
    assert decoder.is_between_frames


def test_a_peer_that_closes_in_a_large_frame_is_seen() -> None:
    """Half a large body is an unfinished frame."""
    decoder = wire.server_decoder()
    frame = b"".join(wire.encode(Loaded(1.5), [b"x" * 100_000]))

    assert decoder.feed(frame[:50_000]) == []

    assert not decoder.is_between_frames


# ------------------------------------------------------------------------------------------- at the bounds


class Long(bytes):
    """A body of any length, for an encoder that must not look at it."""

    said = 0

    def __len__(self) -> int:
        return self.said


def long(length: int) -> Long:
    """A body that says it is so long."""
    body = Long()
    body.said = length
    return body


def test_the_longest_bodies_and_frames_can_be_sent_and_nothing_longer() -> None:
    """4 GiB less a byte is what a length can say; a terabyte is what a peer takes."""
    longest = [long(2**32 - 1)] * 256

    assert len(wire.encode(Stop(), [long(2**32 - 1)])) == 2
    assert len(wire.encode(Stop(), [*longest, long(256)])) == 258
    with pytest.raises(ValueError, match="the wire carries"):
        wire.encode(Stop(), [*longest, long(257)])


def test_frames_below_64_kib_are_one_piece_and_from_there_on_bodies_are_filled_where_they_stay() -> None:
    """Both ends draw the line at the same place; the server's small bodies are `bytes`."""
    below, at = b"a" * (64 * 1024 - 1), b"a" * (64 * 1024)

    assert len(wire.encode(Stop(), [below])) == 1
    assert len(wire.encode(Stop(), [at])) == 2
    for body, kind in ((below, bytes), (at, bytearray)):
        data = b"".join(wire.encode(Loaded(1.5), [body]))
        ((_, (whole,)),) = wire.server_decoder().feed(data)
        assert type(whole) is kind or kind is bytearray
        decoder = wire.server_decoder()
        assert decoder.feed(data[:-1]) == []
        ((_, (cut,)),) = decoder.feed(data[-1:])
        assert type(cut) is kind


def test_what_has_come_of_a_large_frame_is_in_its_place_and_nowhere_else() -> None:
    """A body of a gigabyte is held once: the decoder collects no bytes of it."""
    decoder = wire.server_decoder()
    data = b"".join(wire.encode(Loaded(1.5), [b"x" * 100_000]))

    for at in range(0, len(data) - 1, 1000):
        decoder.feed(data[at : min(at + 1000, len(data) - 1)])
        assert len(decoder._kept) < 1000

    ((_, (body,)),) = decoder.feed(data[-1:])
    assert body == b"x" * 100_000


def test_small_frames_that_are_waited_for_are_not_looked_at_again_for_each_byte() -> None:
    """The decoder knows how many bytes it needs; afterwards it needs a header again."""
    decoder = wire.server_decoder()
    data = b"".join(wire.encode(RESULTS_MESSAGE, [b"a" * 500, b"b" * 500]))
    looks: list[int] = []
    cut = decoder._cut

    def count(view: memoryview, at: int, end: int) -> Any:
        looks.append(end - at)
        return cut(view, at, end)

    decoder._cut = count  # type: ignore[method-assign]
    heard = [message for at in range(len(data)) for message in decoder.feed(data[at : at + 1])]

    assert heard == [(RESULTS_MESSAGE, [b"a" * 500, b"b" * 500])]
    assert looks == [20, len(data)]
    assert decoder.feed(HELLO) == [(Hello(7, "3.11"), [])]


def test_a_decoder_of_a_rank_takes_what_ranks_say_and_no_more() -> None:
    """Bodies are theirs to change; a worker's messages are none of theirs."""
    with pytest.raises(BadFrame, match="no message"):
        wire.rank_decoder().feed(HELLO)
    with pytest.raises(BadFrame, match="no message"):
        wire.worker_decoder().feed(HELLO)


def test_the_way_lengths_are_written_is_remembered_for_a_bounded_number_of_sizes() -> None:
    """Batches are of a few sizes; a peer that sends others costs no memory for good."""
    lengths = wire._Lengths()

    for count in range(2000):
        assert lengths[count].size == 4 * count

    assert len(lengths) == 1024
    assert lengths[7] is lengths[7]


def test_a_head_alone_costs_no_memory() -> None:
    """A worker may announce whatever a batch's answers may hold, and then die."""
    decoder = wire.server_decoder()
    announced = frame(msgspec.msgpack.encode(Loaded(1.5)), [long(2**32 - 1)])

    tracemalloc.start()
    try:
        decoder.feed(announced)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 2 * wire.ALLOCATED_AHEAD_BYTES
    assert not decoder.is_between_frames


def test_a_body_for_a_worker_is_allocated_once() -> None:
    """One that grew with what came was copied now and then, and held twice: a worker's allocator moves no blocks."""
    body = b"x" * (3 * wire.ALLOCATED_AHEAD_BYTES)
    data = b"".join(wire.encode(Batch(1, [Item("id", [("body", None)], pack_head([], []), None)]), [body]))
    decoder = wire.worker_decoder()
    heard: list[tuple[Any, list[wire.Body]]] = []

    tracemalloc.start()
    try:
        heard += decoder.feed(data[:1000])
        announced, _ = tracemalloc.get_traced_memory()
        for at in range(1000, len(data), 100_000):
            heard += decoder.feed(data[at : at + 100_000])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert [bodies for _, bodies in heard] == [[body]]
    assert len(body) < announced <= most < 1.1 * len(body)


def test_a_body_that_grows_begins_as_a_block_that_glibc_moves_without_copying_it() -> None:
    """Else a large answer would be held twice whenever it grows."""
    assert BY_SERVER.block_bytes <= wire.ALLOCATED_AHEAD_BYTES


@pytest.mark.parametrize("more", [-1, 0, 1, 3_000_000])
def test_a_body_that_outgrows_what_is_allocated_ahead_arrives_whole(more: int) -> None:
    """From there on it grows with what comes; the next body begins anew."""
    bodies = [bytes(range(251)) * 17_000, b"second"]
    bodies[0] = bodies[0][: wire.ALLOCATED_AHEAD_BYTES] + b"z" * more if more > 0 else bodies[0][: more or None]
    data = b"".join(wire.encode(Loaded(1.5), bodies))
    decoder = wire.server_decoder()

    heard = [message for at in range(0, len(data), 300_007) for message in decoder.feed(data[at : at + 300_007])]

    assert heard == [(Loaded(1.5), bodies)]
    assert decoder.is_between_frames


def test_what_is_forgotten_is_gone() -> None:
    """Of a connection that has ended nothing is kept, in a large frame or a small one."""
    for body in (b"x" * 1000, b"x" * 100_000):
        decoder = wire.server_decoder()
        decoder.feed(b"".join(wire.encode(Loaded(1.5), [body]))[:-1])

        decoder.forget()

        assert decoder.is_between_frames


def test_a_template_sends_no_bodies_and_only_short_messages() -> None:
    """Refused by the header alone: the author's code runs in a template, and the server reads it on its event loop."""
    longest = NotLoaded("load_failed", "\u20ac" * 4096, "\u20ac" * 2**17)
    assert wire.template_decoder().feed(b"".join(wire.encode(longest))) == [(longest, [])]

    for announced in ({"count": 1, "total": 2**32 - 1}, {"count": 1}, {"total": 1}, {"metadata": 5 * 2**20}):
        with pytest.raises(BadFrame, match="announces"):
            wire.template_decoder().feed(header(**announced))
