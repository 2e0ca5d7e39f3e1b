"""Following pickles symbolically: whatever the real unpickler would import or call, `run` has refused before."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from marserve.archive.pickles.pickle_program import Refused, Span, run


class Inert:
    """Stands in for every global; takes every call and change and notes the calls."""

    calls = 0

    def __init__(self, *_: object, **__: object) -> None:
        type(self).calls += 1

    def __call__(self, *_: object, **__: object) -> Inert:
        """A call of what a call gave."""
        return Inert()

    def __setstate__(self, _: object) -> None:
        """BUILD."""

    def __setitem__(self, _: object, __: object) -> None:
        """SETITEM."""

    def append(self, _: object) -> None:
        """APPEND."""

    def extend(self, _: object) -> None:
        """APPENDS."""

    def add(self, _: object) -> None:
        """ADDITEMS."""


class Watching:
    """What is watched of an unpickler: nothing is imported, names are kept."""

    names: list[str]

    def find_class(self, module: str, name: str) -> Any:
        """Every way to a global ends here."""
        self.names.append(f"{module}.{name}")
        return Inert

    def persistent_load(self, _: object) -> object:
        """As torch's storages."""
        return 1


class InC(Watching, pickle.Unpickler):
    """The real unpickler."""


class InPython(Watching, pickle._Unpickler):  # type: ignore[name-defined, misc]  # what dill and joblib build on
    """Its twin in Python."""


def follow(data: bytes, *, must_call: bool = False) -> str:
    """`refused`, `failed` or `ended`."""
    try:
        outcome = run(Span(io.BytesIO(data), 0, len(data)), lambda _: False, must_call=must_call)
    except Refused:
        return "refused"
    return "ended" if outcome.failure is None else "failed"


def text(word: bytes) -> bytes:
    """Push a text."""
    return b"\x8c" + bytes([len(word)]) + word


PIECES = st.sampled_from(
    [
        *(
            bytes([code])
            for code in b"(0210NRbaestuldo)]}\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94QN.\x80\x95\x97\x98"
        ),
        b"cos\nexec\n",
        b"ios\nexec\n",
        text(b"os"),
        text(b"exec"),
        b"Vos\n",
        b"S'os'\n",
        b"X\x02\0\0\0os",
        b"\x8d\x02\0\0\0\0\0\0\0os",
        b"U\x02os",
        b"I0x10\n",
        b"I01\n",
        b"L5L\n",
        b"L5\n",
        b"F1.5\n",
        b"K\x01",
        b"M\x01\x02",
        b"J\x01\x02\x03\x04",
        b"\x8a\x01\x01",
        b"\x8b\x01\0\0\0\x01",
        b"G" + struct.pack(">d", 1.0),
        b"C\x01x",
        b"B\x01\0\0\0x",
        b"h\x00",
        b"h\x01",
        b"j\x00\0\0\0",
        b"g0\n",
        b"p0\n",
        b"q\x00",
        b"q\x01",
        b"r\x01\0\0\0",
        b"Pid\n",
        b"\x80\x02",
        b"\x80\x04",
        b"\x95\x10\0\0\0\0\0\0\0",
    ]
)
PROGRAMS = st.lists(PIECES, max_size=25).map(b"".join)
CALL = [text(b"os"), text(b"exec"), b"\x93", b")", b"R", b"."]
SPREAD_CALLS = st.lists(PROGRAMS, min_size=6, max_size=6).map(
    lambda gaps: b"".join(gap + piece for gap, piece in zip(gaps, CALL, strict=True))
)
MUTATED = st.tuples(SPREAD_CALLS, st.integers(0, 200), st.integers(0, 255)).map(
    lambda parts: parts[0][: parts[1]] + bytes([parts[2]]) + parts[0][parts[1] + 1 :]
)


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """64 MiB more than there is now: a random program can ask the real machines for all the memory of this one."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def unpickle(data: bytes) -> tuple[list[str], int]:
    """What the real unpicklers would import, and how often they call something, until they end or fail."""
    Inert.calls = 0
    names: list[str] = []
    readers: list[Any] = [
        InC(io.BytesIO(data)),
        InC(io.BufferedReader(io.BytesIO(data), 16)),  # reads ahead
        InPython(io.BytesIO(data)),
    ]
    for reader in readers:
        reader.names = names
        with little_memory(), contextlib.suppress(Exception):
            reader.load()
    return names, Inert.calls


@given(PROGRAMS | SPREAD_CALLS | MUTATED | st.binary(max_size=60))
@example(b"I0x10\n0cos\nmkdir\n.")
@example(b"\x80\x04\x8c\x02os\x94\x8c\x05mkdir\x94000h\x00h\x01\x93.")
@example(b"\x95\x04\0\0\0\0\0\0\0N\x8c\x09xB\xff\x93N\x8c\x02os\x8c\x05mkdir\x93.")
@example(b"\x95\x10\0\0\0\0\0\0\0\x89\x8c\x05mkdirN\x8c\x02os\x8c\x05mkdird\x93\x96R.")
@example(b"\x8c\x02os\x95\n\0\0\0\0\0\0\0p\x95\x10\0\0\0\0\0\0\x000\n\x8c\x05mkdir\x93.")
@example(b"\x95" + struct.pack("<Q", 70_001) + b"p" + b"1" * 70_000 + b"0\ncos\nmkdir\n.")
@example(b"ios\nmkdir\n.")
@example(b"cos\nmkdirX")
@example(b"\x95\xff\0\0\0\0\0\0\0cos\nmkdir\n.")
@example(b"L" + b"1" * 70_000 + b"L\n0cos\nmkdir\n.")
def test_whatever_the_unpickler_imports_was_refused(data: bytes) -> None:
    """The one promise that matters: no program gets past `run` to an import that was not allowed."""
    names, _ = unpickle(data)

    if names:
        assert follow(data) == "refused"


@given(PROGRAMS | SPREAD_CALLS | MUTATED)
@example(b"\x8c\x02os\x8c\x04exec\x93r\x01\x00\x00\xf4)R.")
@example(b"Nr\xff\xff\xff\x7f.")
@example(b"N\x95\x01\0\0\0\0\0\0\0r\xff\xff\xff\x7f.")
@example(b"\x96\xff\xff\xff\xff\x01\0\0\0.")
@example(b"S'os'\nS'mkdir'\n\x93)R.")
def test_whatever_the_unpickler_calls_was_refused_also_in_data_that_may_be_no_pickle(data: bytes) -> None:
    """With `must_call` an import alone is let go, and one of what cannot be a name; a call of anything else never."""
    names, calls = unpickle(data)

    if calls and all(re.fullmatch(r"\w+\.[\w.]+", name) for name in names):
        assert follow(data, must_call=True) == "refused"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    ),
    st.integers(0, 5),
)
def test_plain_values_are_followed_to_their_end(value: object, protocol: int) -> None:
    """In each protocol, but for `bytes` in the old ones, which call a codec."""
    data = pickle.dumps(value, protocol)

    if b"_codecs" not in data and b"bytes" not in data:
        assert follow(data) == "ended"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80\x04\x95\x03\0\0\0\0\0\0\0\x8c\x02os.", "crosses the end of its FRAME"),
        (b"\x80\x04\x95\x04\0\0\0\0\0\0\0N.NN", "goes on behind its STOP"),
        (b"\x80\x04\x95\xff\0\0\0\0\0\0\0N.", "longer than the file"),
        (b"\x80\x04\x95\x20\0\0\0\0\0\0\0N\x95" + bytes(40), "begins inside of a frame"),
    ],
)
def test_frames_that_do_not_fit_their_opcodes_are_refused(data: bytes, words: str) -> None:
    """Behind them the unpickler goes on where nobody looks."""
    with pytest.raises(Refused, match=words):
        run(Span(io.BytesIO(data), 0, len(data)), lambda _: True)


def test_a_span_is_read_like_a_file_of_its_own() -> None:
    """It never reads over its end, and knows where it is."""
    span = Span(io.BytesIO(b"....first\nsecond\nthird...."), 4, 22)

    assert span.readline() == (b"first", True)
    assert span.tell() == 6
    assert span.read(3) == b"sec"
    assert span.skip_line()
    assert span.tell() == 13
    assert not span.skip(6)
    assert span.skip(2)
    assert span.readline() is None
    assert span.read(10) == b"ird"
    assert span.read(1) == b""
    span.seek(1)
    assert span.read(2) == b"ir"


@pytest.mark.parametrize("length", [100_000, 300_000])
def test_arguments_longer_than_the_buffer_are_stepped_over(length: int) -> None:
    """Nothing of them is kept."""
    data = b"\x80\x04B" + struct.pack("<I", length) + b"c" * length + b"0L" + b"1" * length + b"L\n."

    assert follow(data) == "ended"


CALL_OF_THE_OLDEST = b"cos\nmkdir\n(Vx\ntR."
LONG = b"a" * 140_000
LONG_LINES = {
    "a text": b"V" + LONG + b"\n0" + CALL_OF_THE_OLDEST,
    "a text behind a mark of the protocol": b"\x80\x02V" + LONG + b"\n0" + CALL_OF_THE_OLDEST,
    "a number": b"I" + b"0" * 140_000 + b"\n0" + CALL_OF_THE_OLDEST,
    "a memo index": b"Np" + b" " * 140_000 + b"1\n0" + CALL_OF_THE_OLDEST,
    "a memo index to a zero byte": b"Np1\0x\n0" + CALL_OF_THE_OLDEST,
    "a memo index to a zero byte, read": b"Np1\0x\n0g1\0y\n0" + CALL_OF_THE_OLDEST,
    "a dotted name": b"\x80\x04cos\n" + b"path.os." * 20_000 + b"mkdir\n(Vx\ntR.",
    "a dotted name of 300 letters": b"N0\x80\x04cos\n" + b"path.os." * 40 + b"mkdir\n(Vx\ntR.",
    "a dotted name on the stack": b"N0\x80\x04Vos\nV" + b"path.os." * 40 + b"mkdir\n\x93(Vx\ntR.",
}


@pytest.mark.parametrize("what", LONG_LINES)
@pytest.mark.parametrize("must_call", [False, True])
def test_lines_and_names_of_any_length_are_followed_or_refused(what: str, must_call: bool) -> None:
    """The unpicklers read them, whatever their length, and so reach the call behind them."""
    _, calls = unpickle(LONG_LINES[what])

    assert calls, "this program calls nothing"
    assert follow(LONG_LINES[what], must_call=must_call) == "refused"


@pytest.mark.parametrize(
    "data",
    [
        b"V" + LONG,
        b"c" + LONG + b"\n" + LONG + b"\n)R.",
        b"(i" + LONG + b"\n" + LONG + b"\n.",
        b"(in one long line " + LONG + b"\nand another\n",
        b"g" + LONG + b"\nN.",
    ],
)
def test_long_lines_of_other_data_are_still_taken_for_that(data: bytes) -> None:
    """No module has a name of so many letters, and no memo an index of letters."""
    assert follow(data, must_call=True) == "failed"
