"""From a body and its type to named inputs (contract §1.3)."""

from __future__ import annotations

import gc
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.api.decoding import MAX_PARTS
from marserve.api.http.request_body import is_form, read_fields, read_parts
from marserve.errors import BadInput
from marserve.messages import Part

FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=q"


def part(headers: str, body: bytes = b"abc") -> bytes:
    """One part of a multipart body."""
    return f"--q\r\n{headers}\r\n\r\n".encode() + body + b"\r\n"


def disposition(rest: str) -> str:
    """A part's Content-Disposition."""
    return f"Content-Disposition: form-data; {rest}"


@pytest.mark.parametrize(
    "content_type",
    [None, "application/json", "text/plain; charset=utf-8", "application/octet-stream", "multipart/mixed; boundary=q",
     "application/x-www-form-urlencodedx", ""],
)  # fmt: skip
def test_a_body_that_is_no_form_is_one_input(content_type: str | None) -> None:
    """Called `body`, with the request's type."""
    assert read_parts(b"x=1&y", content_type) == [Part("body", b"x=1&y", content_type)]


@pytest.mark.parametrize("content_type", [FORM, FORM.upper(), f"{FORM}; charset=UTF-8", f" {FORM} ;a"])
def test_a_urlencoded_form_is_one_input_a_field(content_type: str) -> None:
    """Whatever the spelling of the type; values have no type of their own."""
    assert read_parts(b"data=abc+def&other=%31&empty=&bare", content_type) == [
        Part("data", b"abc def"),
        Part("other", b"1"),
        Part("empty", b""),
        Part("bare", b""),
    ]


def test_an_empty_form_has_no_inputs() -> None:
    """Not even `body` (as recorded)."""
    assert read_parts(b"", FORM) == []


def test_a_json_text_in_a_form_becomes_a_name() -> None:
    """What `curl -d '{…}'` sends without a type."""
    assert read_parts(b'{"a": 1}', FORM) == [Part('{"a": 1}', b"")]


def test_values_are_bytes_and_names_are_text() -> None:
    """Percent signs may hold anything; names that are no UTF-8 are mended."""
    assert read_fields(b"%C3%A9=%ff%00&%ff=1&a=b=c&=x&&") == [
        Part("é", b"\xff\0"),
        Part("\ufffd", b"1"),
        Part("a", b"b=c"),
        Part("", b"x"),
    ]


def test_a_form_of_very_many_fields_is_refused() -> None:
    """With a word on what is likely wrong."""
    assert len(read_fields(b"&".join([b"a=1"] * MAX_PARTS))) == MAX_PARTS
    with pytest.raises(BadInput, match="Content-Type"):
        read_fields(b"&".join([b"a=1"] * (MAX_PARTS + 1)))


def test_repeated_names_are_all_kept_in_order() -> None:
    """The handler sees the last; that is the worker's rule."""
    assert read_fields(b"a=1&a=2") == [Part("a", b"1"), Part("a", b"2")]


def test_a_multipart_file_has_its_own_type() -> None:
    """As the client wrote it; octets where it wrote none."""
    body = (
        part(disposition('name="data"; filename="f.json"') + "\r\nContent-Type: application/JSON; a=b", b'{"x": 1}')
        + part(disposition('name="raw"; filename="f.bin"'), b"\0\xff\r\n--")
        + b"--q--\r\n"
    )

    assert read_parts(body, MULTIPART) == [
        Part("data", b'{"x": 1}', "application/JSON; a=b"),
        Part("raw", b"\0\xff\r\n--", "application/octet-stream"),
    ]


def test_a_multipart_field_has_no_type() -> None:
    """Even where it says one: without a file name it is a field."""
    body = part(disposition('name="a"') + "\r\nContent-Type: application/json", b"1") + b"--q--"

    assert read_parts(body, MULTIPART) == [Part("a", b"1")]


@pytest.mark.parametrize(
    "content_type", ["multipart/form-data;boundary=q", 'Multipart/Form-Data; charset=x; boundary="q"']
)
def test_the_boundary_may_be_written_in_several_ways(content_type: str) -> None:
    """Quoted or not, first or later."""
    assert read_parts(part(disposition("name=a")) + b"--q--", content_type) == [Part("a", b"abc")]


def test_an_empty_part_is_an_empty_input() -> None:
    """And a form of no parts has no inputs."""
    assert read_parts(part(disposition('name="a"'), b"") + b"--q--", MULTIPART) == [Part("a", b"")]
    assert read_parts(b"--q--\r\n", MULTIPART) == []


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"--x\r\n", "multipart/form-data"),
        (b"--x\r\n", "multipart/form-data; boundary="),
        (b"--x\r\n", "multipart/form-data; boundary=" + "x" * 201),
        (b"", MULTIPART),
        (b"no boundary at all", MULTIPART),
        (part(disposition('name="a"'))[:-2], MULTIPART),
        (part(disposition('name="a"')) + b"--q", MULTIPART),
        (b"--q\n" + disposition('name="a"').encode() + b"\n\nabc\n--q--", MULTIPART),
        (part("Content-Type: a/b") + b"--q--", MULTIPART),
        (part('Content-Disposition: attachment; name="a"') + b"--q--", MULTIPART),
        (part(disposition('name="a"') + "\r\nno colon") + b"--q--", MULTIPART),
        (part(disposition('name="a"') + "\r\nA B: c") + b"--q--", MULTIPART),
        (part(disposition('name="a"') + "\r\nContent-Length: 7") + b"--q--", MULTIPART),
        (part("A: b\r\n" * 17 + disposition('name="a"')) + b"--q--", MULTIPART),
        (part(disposition('name="a"') + "\r\nA: " + "b" * 1_000_000) + b"--q--", MULTIPART),
        (b"--q\r\n" + b"A" * 1_000_000, MULTIPART),
        (part(disposition('name="\xff"'), b"").replace(b"\xc3\xbf", b"\xff") + b"--q--", MULTIPART),
    ],
)
def test_a_multipart_body_that_cannot_be_read_is_refused(body: bytes, content_type: str) -> None:
    """With a sentence that says why (RELIABILITY A7)."""
    with pytest.raises(BadInput, match="multipart"):
        read_parts(body, content_type)


def test_very_many_parts_are_refused_early() -> None:
    """100,000 cost no more than the first thousand (RELIABILITY A7)."""
    body = part(disposition('name="a"; filename="b"'), b"") * 100_000 + b"--q--"
    began = time.process_time()

    with pytest.raises(BadInput, match=str(MAX_PARTS)):
        read_parts(body, MULTIPART)

    assert time.process_time() - began < 1.0


def test_line_breaks_in_names_stay_in_names() -> None:
    """A browser's `%0D%0A` is a line break in a name, and nothing more."""
    body = part(disposition('name="a%0D%0AX: y"')) + b"--q--"

    assert read_parts(body, MULTIPART) == [Part("a\r\nX: y", b"abc")]


@pytest.mark.parametrize("tail", [b"", b"\r\n--x" * 2000])
def test_a_multipart_body_that_is_refused_is_kept_by_nothing(tail: bytes) -> None:
    """Nor by a cycle of the parser's error and its frames: clients choose how large it is, and how many come."""

    def refuse() -> None:
        head = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
        with pytest.raises(BadInput):
            read_parts(head + bytes(5_000_000) + tail, "multipart/form-data; boundary=x")

    refuse()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        refuse()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()

    assert kept < 1_000_000


@given(st.binary(), st.sampled_from([FORM, MULTIPART, "multipart/form-data", None]))
def test_any_bytes_are_inputs_or_bad_input(body: bytes, content_type: str | None) -> None:
    """Nothing else comes out."""
    try:
        parts = read_parts(body, content_type)
    except BadInput:
        return
    assert all(isinstance(found.name, str) and isinstance(found.body, bytes) for found in parts)


@given(st.lists(st.binary().filter(lambda body: b"--q" not in body), min_size=1, max_size=5))
def test_multipart_bodies_come_back_as_they_were(bodies: list[bytes]) -> None:
    """Whatever stands in them."""
    written = b"".join(part(disposition(f'name="{n}"; filename="f"'), body) for n, body in enumerate(bodies))

    assert [found.body for found in read_parts(written + b"--q--", MULTIPART)] == bodies


def test_is_form_knows_two_types() -> None:
    """Parameters and case do not matter."""
    assert is_form("multipart/FORM-data; boundary=x")
    assert is_form(FORM)
    assert not is_form("multipart/mixed")
