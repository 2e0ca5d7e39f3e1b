"""Reading the header of a request: what is refused and why, what is taken for what, what handlers are not shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from marserve.api.errors import ExpectationFailed, HeadersTooLarge, MalformedRequest, TargetTooLong
from marserve.api.http.inference import Route
from marserve.api.http.request_head import (
    UNKNOWN_LENGTH,
    Head,
    HttpLimits,
    header_bytes,
    read_head,
    request_line,
    strip_upgrade,
)
from marserve.api.wishes import NO_WISHES
from marserve.app.building.from_settings import http_limits
from marserve.errors import BadInput, BodyTooLarge, MethodNotAllowed
from marserve.settings import load_settings

HOST = (b"Host", b"example.org")
ROUTE = cast("Route", object())
LIMITS = HttpLimits(header_lines=5, request_line_bytes=40, body_bytes=1000)


def read(
    *lines: tuple[bytes, bytes],
    method: bytes = b"POST",
    target: bytes = b"/predictions/m",
    version: str = "1.1",
    keep_alive: bool = True,
    host: bool = True,
    route: Route | None = ROUTE,
) -> Head:
    """What these lines say, behind a Host."""
    asked: list[bytes] = []

    def match(found: bytes) -> Route | None:
        asked.append(found)
        return route

    all_lines = [HOST, *lines] if host else list(lines)
    head = read_head(method, target, version, keep_alive, all_lines, LIMITS, match)
    assert asked in ([], [target])
    return head


# ------------------------------------------------------------------------------------------------------- limits


def test_the_longest_request_line_passes_and_a_byte_more_is_refused() -> None:
    """Method, target, version, two blanks and the line's end."""
    room = 40 - len("POST  HTTP/1.1\r\n")

    assert read(target=b"/" + b"a" * (room - 1)).line == f"POST /{'a' * (room - 1)} HTTP/1.1"
    with pytest.raises(TargetTooLong, match="40"):
        read(target=b"/" + b"a" * room)


def test_as_many_lines_as_allowed_pass_and_one_more_is_refused() -> None:
    """The Host is one of them."""
    lines = [(b"X-A", b"1")] * 4

    assert len(read(*lines).lines) == 5
    with pytest.raises(HeadersTooLarge, match="5"):
        read(*lines, (b"X-A", b"1"))


@pytest.mark.parametrize(("length", "passes"), [(b"0", True), (b"1000", True), (b"1001", False)])
def test_the_longest_body_passes_and_a_byte_more_is_refused(length: bytes, passes: bool) -> None:
    """By what is announced, before any of it has come."""
    if passes:
        assert read((b"Content-Length", length)).body_bytes == int(length)
    else:
        with pytest.raises(BodyTooLarge, match="1000"):
            read((b"Content-Length", length))


def test_the_bytes_of_lines_are_those_of_the_wire() -> None:
    """A colon, a blank, and the line's end each."""
    assert header_bytes([(b"Host", b"a"), (b"X", b"")]) == len(b"Host: a\r\nX: \r\n")
    assert header_bytes([]) == 0


def test_limits_that_nobody_set_are_those_of_the_settings_and_of_the_docs(tmp_path: Path) -> None:
    """But for how many connections there may be; eight MiB wait for a slow reader of a stream."""
    settings = load_settings("marserve", {}, {}, tmp_path)

    of_settings = http_limits(settings)

    numbers = {"connections": of_settings.connections, "connections_per_address": of_settings.connections_per_address}
    assert of_settings == replace(HttpLimits(), **numbers)
    assert HttpLimits().stream_buffer_bytes == 8 << 20


# ------------------------------------------------------------------------------------------------------- the first line


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_http_1_is_read(version: str) -> None:
    """Both of it."""
    head = read(version=version)

    assert head.is_http10 is (version == "1.0")
    assert head.line == f"POST /predictions/m HTTP/{version}"


@pytest.mark.parametrize("version", ["0.9", "1.2", "2.0", ""])
def test_another_version_is_refused(version: str) -> None:
    """It would be read otherwise by somebody."""
    with pytest.raises(MalformedRequest, match=r"HTTP/1\.1 or HTTP/1\.0"):
        read(version=version)


@pytest.mark.parametrize("method", [b"CONNECT", b"PRI", b"SETUP", b"FLUSH", b"GET_PARAMETER"])
def test_methods_of_other_protocols_are_not_allowed(method: bytes) -> None:
    """The parser knows them; here is no tunnel and no player."""
    with pytest.raises(MethodNotAllowed):
        read(method=method, target=b"/")


@pytest.mark.parametrize(
    ("method", "target", "passes"),
    [
        (b"GET", b"/", True),
        (b"GET", b"http://h/a", True),
        (b"GET", b"HTTPS://h/a", True),
        (b"OPTIONS", b"*", True),
        (b"GET", b"*", False),
        (b"OPTIONS", b"**", False),
        (b"GET", b"a", False),
        (b"GET", b"", False),
        (b"GET", b"ftp://h/a", False),
        (b"GET", b"http:/h/a", False),
        (b"GET", b"/a#b", False),
        (b"GET", b"http://h/a#b", False),
    ],
)
def test_a_target_is_a_path_or_an_http_address(method: bytes, target: bytes, passes: bool) -> None:
    """And the asterisk for OPTIONS alone; a fragment is in none of them."""
    if passes:
        assert read(method=method, target=target).method == method
    else:
        with pytest.raises(MalformedRequest, match="neither a path nor an http URL"):
            read(method=method, target=target)


def test_a_route_is_looked_for_unless_a_browser_asks_what_it_may_send() -> None:
    """OPTIONS is for the application behind."""
    assert read().route is ROUTE
    assert read(method=b"GET").route is ROUTE
    assert read(method=b"OPTIONS").route is None


def test_what_a_connection_needs_to_know_is_in_the_header() -> None:
    """Whether it stays, whether the answer has a body, and whether the same bytes may be taken for the same again."""
    plain = read((b"Content-Length", b"5"))
    assert (plain.keep_alive, plain.is_head, plain.is_plain, plain.is_repeatable) == (True, False, True, True)
    head = read(method=b"HEAD")
    assert (head.is_head, head.is_plain, head.is_repeatable) == (True, False, True)
    last = read(keep_alive=False)
    assert (last.is_plain, last.is_repeatable) == (False, False)
    assert not read(route=None).is_repeatable
    assert not read((b"X-Request-Id", b"a")).is_repeatable
    assert not read((b"Transfer-Encoding", b"chunked")).is_repeatable
    assert not read((b"Content-Length", b"5"), (b"Expect", b"100-continue")).is_repeatable


# ------------------------------------------------------------------------------------------------------- its lines


@pytest.mark.parametrize(
    "host",
    [b"a", b"example.org:8080", b"[::1]:8080", b"[fe80::1%25eth0]", b"a_b", b"", b"a:", b"127.0.0.1"],
)
def test_a_host_is_read(host: bytes) -> None:
    """With a port or without; an empty one is one."""
    assert read((b"host", host), host=False).lines == [(b"host", host)]


@pytest.mark.parametrize("host", [b"a b", b"a/b", b"a@b", b"a:b", b"[::1", b"a,b/", b"\xe9"])
def test_what_is_no_host_is_refused(host: bytes) -> None:
    """A cache before this server might read another."""
    with pytest.raises(MalformedRequest, match="no host name"):
        read((b"Host", host), host=False)


def test_a_request_has_one_host_and_of_http_1_0_one_at_most() -> None:
    """Two could be read as either."""
    assert read(version="1.0", host=False).is_http10
    assert read(version="1.0").is_http10
    for version, lines in (("1.1", ()), ("1.1", (HOST, HOST)), ("1.0", (HOST, HOST))):
        with pytest.raises(MalformedRequest, match="exactly one Host"):
            read(*lines, version=version, host=False)


def test_a_chunked_body_has_no_length() -> None:
    """In any case of letters, and with blanks around."""
    for value in (b"chunked", b" Chunked "):
        head = read((b"transfer-encoding", value))
        assert head.body_bytes == UNKNOWN_LENGTH == -1


@pytest.mark.parametrize(
    ("lines", "version"),
    [
        (((b"Transfer-Encoding", b"gzip"),), "1.1"),
        (((b"Transfer-Encoding", b"gzip, chunked"),), "1.1"),
        (((b"Transfer-Encoding", b""),), "1.1"),
        (((b"Transfer-Encoding", b"chunked"), (b"Transfer-Encoding", b"chunked")), "1.1"),
        (((b"Transfer-Encoding", b"chunked"),), "1.0"),
    ],
)
def test_another_encoding_is_refused(lines: tuple[tuple[bytes, bytes], ...], version: str) -> None:
    """And chunks twice, and chunks in HTTP/1.0."""
    with pytest.raises(MalformedRequest, match="the only Transfer-Encoding"):
        read(*lines, version=version)


def test_who_waits_to_be_asked_for_its_body_is_known_where_there_is_one() -> None:
    """HTTP/1.0 knows nothing of it."""
    length = (b"Content-Length", b"5")
    assert read(length, (b"Expect", b"100-Continue ")).expects_continue
    assert read((b"Expect", b"100-continue"), (b"Transfer-Encoding", b"chunked")).expects_continue
    assert not read((b"Expect", b"100-continue")).expects_continue
    assert not read((b"Expect", b"100-continue"), (b"Content-Length", b"0")).expects_continue
    assert not read(length, (b"Expect", b"anything"), version="1.0").expects_continue
    with pytest.raises(ExpectationFailed):
        read(length, (b"Expect", b"200-ok"))


def test_the_type_is_that_of_the_body_as_it_is_written() -> None:
    """None where there is none."""
    assert read().content_type is None
    assert read((b"CONTENT-TYPE", b"text/plain; x=\xe9")).content_type == "text/plain; x=é"


@pytest.mark.parametrize("name", [b"describe", b"Explain", b"URL_PATH", b"Url_Path"])
def test_what_only_the_server_says_handlers_are_not_told_by_clients(name: bytes) -> None:
    """The lines themselves stay, for logs and the application behind."""
    head = read((b"X-A", b"1"), (name, b"true"), (b"X-B", b"2"))

    assert head.headers == [HOST, (b"X-A", b"1"), (b"X-B", b"2")]
    assert head.lines == [HOST, (b"X-A", b"1"), (name, b"true"), (b"X-B", b"2")]
    plain = read((b"X-A", b"1"))
    assert plain.headers is plain.lines


WISHES = [
    (b"x-marserve-timeout-ms", b"1500", "timeout_s", 1.5),
    (b"X-Marserve-Priority", b"7", "priority", 7),
    (b"X-MARSERVE-VERSION", b" 2%2E0 ", "asked_version", "2.0"),
]


@pytest.mark.parametrize(("name", "value", "field", "expected"), WISHES)
def test_a_wish_is_read_and_said_twice_it_is_none(name: bytes, value: bytes, field: str, expected: Any) -> None:
    """The request is answered with what is wrong; the connection is none the worse."""
    once, twice = read((name, value)), read((name, value), (name, value))

    assert getattr(once.wishes, field) == expected
    assert once.fault is None
    assert isinstance(twice.fault, BadInput)
    assert f"{name.decode().lower()} stands in the request more than once" in str(twice.fault)
    assert read().wishes == NO_WISHES


def test_a_wish_that_cannot_be_meant_is_a_fault_of_the_request_alone() -> None:
    """In a sentence with the value."""
    fault = read((b"X-Marserve-Priority", b"10")).fault

    assert isinstance(fault, BadInput)
    assert "x-marserve-priority is '10'" in str(fault)


# ------------------------------------------------------------------------------------------------------- other words


def test_an_offer_to_change_the_protocol_is_taken_out() -> None:
    """With its word in `Connection`, of which the rest stays."""
    lines = [
        HOST,
        (b"Connection", b"keep-alive, Upgrade ,x"),
        (b"UPGRADE", b"h2c"),
        (b"connection", b"upgrade"),
        (b"X-Upgrade", b"1"),
    ]

    assert strip_upgrade(lines) == [HOST, (b"Connection", b"keep-alive,x"), (b"X-Upgrade", b"1")]
    assert strip_upgrade([HOST]) == [HOST]


def test_a_secret_is_not_logged() -> None:
    """Each of them; what only ends like its name is none."""
    assert request_line(b"GET", b"/a?secret=x&b=1&secret=y", "1.1") == "GET /a?secret=…&b=1&secret=… HTTP/1.1"
    assert request_line(b"GET", b"/a?mysecret=x", "1.0") == "GET /a?mysecret=x HTTP/1.0"


def test_each_address_of_a_line_is_judged() -> None:
    """A second `url` is no way around the first."""
    line = request_line(b"POST", b"/a?url=http://u:p@h/m&b=1&url=http://u:p@h/n", "1.1")

    assert line == "POST /a?url=http://h/m&b=1&url=http://h/n HTTP/1.1"


def test_the_host_of_an_absolute_target_replaces_the_one_of_its_line() -> None:
    """As a proxy's request means it, whatever the client wrote (RFC 9112 §3.2.2); other lines stay."""
    head = read((b"X-Host", b"example.org"), target=b"http://o.x/predictions/m")

    assert head.lines == [(b"Host", b"o.x"), (b"X-Host", b"example.org")]


@pytest.mark.parametrize(("target", "passes"), [(b"/ping", True), (b"/ping/?a", True), (b"/pingx", False)])
def test_the_health_check_alone_may_come_without_a_host(target: bytes, passes: bool) -> None:
    """Old balancers ask so, with HTTP/1.1."""
    if passes:
        assert read(method=b"GET", target=target, host=False).body_bytes == 0
    else:
        with pytest.raises(MalformedRequest, match="exactly one Host"):
            read(method=b"GET", target=target, host=False)


@pytest.mark.parametrize(
    ("lines", "client_id"),
    [
        ([(b"X-Request-Id", b"order-17")], "order-17"),
        ([(b"x-ReQuest-ID", b"order-17")], "order-17"),
        ([(b"X-Request-Id", b"a b")], ""),
        ([(b"X-Request-Id", b"x" * 10_000)], ""),
        ([(b"X-Request-Id", b"a"), (b"X-Request-Id", b"b")], ""),
        ([(b"X-Request-Id", b"a"), (b"X-Request-Id", b"")], ""),
        ([], ""),
    ],
)
def test_a_clients_id_is_read_if_there_is_one(lines: list[tuple[bytes, bytes]], client_id: str) -> None:
    """Of several none is taken; one that cannot be taken refuses nothing."""
    assert read(*lines).client_id == client_id
