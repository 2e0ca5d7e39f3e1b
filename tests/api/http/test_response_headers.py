"""Heads of answers: what is in each, what a handler may set, what it may not."""

from __future__ import annotations

import pytest

from marserve.api.http.response_headers import ResponseHeaders, phrase_of
from marserve.errors import BadSettings, HandlerFailed


def lines(head: bytes) -> list[str]:
    """A head's lines."""
    assert head.endswith(b"\r\n")
    return head.decode("latin-1").split("\r\n")[:-1]


def test_a_head_begins_with_status_and_reason() -> None:
    """An empty reason is an empty reason: its space stays (contract §1.4)."""
    headers = ResponseHeaders()

    assert lines(headers.head(200, "", [], keep_alive=True))[0] == "HTTP/1.1 200 "
    assert lines(headers.head(418, "Teapot é", [], keep_alive=True))[0] == "HTTP/1.1 418 Teapot é"
    assert lines(headers.head(200, "a\r\n\u4f60b", [], keep_alive=True))[0] == "HTTP/1.1 200 a b"


def test_headers_of_the_handler_keep_name_order_and_repetition() -> None:
    """Two cookies are two lines."""
    head = ResponseHeaders().head(200, "", [("Set-Cookie", "a"), ("X-B", " c\t"), ("Set-Cookie", "b")], keep_alive=True)

    assert lines(head)[1:4] == ["Set-Cookie: a", "X-B: c", "Set-Cookie: b"]


def test_the_connections_word_is_the_last() -> None:
    """`connection` says what will happen, not what the handler wishes."""
    head = ResponseHeaders().head(200, "", [("Connection", "upgrade")], keep_alive=False)

    assert [line for line in lines(head) if line.lower().startswith("connection")] == ["connection: close"]


def test_equal_answers_share_a_head() -> None:
    """And the number of those kept is bounded."""
    headers = ResponseHeaders()

    assert headers.head(200, "", [("a", "b")], keep_alive=True) is headers.head(200, "", [("a", "b")], keep_alive=True)
    for n in range(5000):
        headers.head(200, "", [("a", str(n))], keep_alive=True)
    assert len(headers._kept) <= 512


def test_kept_heads_are_bounded_in_bytes() -> None:
    """Heads of handlers that set much are made anew each time, and those of middling length do not add up."""
    headers = ResponseHeaders()

    for n in range(2000):
        headers.head(200, "", [("a", f"{n:04}" * 15_000)], keep_alive=True)
        headers.head(200, "", [("b", f"{n:04}" * 800)], keep_alive=True)

    held = sum(len(head) + len(key[3][0][1]) for key, head in headers._kept.items() if key[3])
    assert len(headers._kept) > 10
    assert held <= 2 * 512 * 1024


@pytest.mark.parametrize("at", ["reason", "name", "value", "many"])
def test_what_a_handler_sets_is_bounded(at: str) -> None:
    """64 KiB in all, wherever they are; more is a handler's failure, and nothing of it is kept."""
    headers = ResponseHeaders()

    def head(size: int) -> bytes:
        reason = "r" * size if at == "reason" else ""
        name, value = "n" * (size if at == "name" else 1), "v" * (size if at == "value" else 1)
        return headers.head(200, reason, [(name, value)] * (size // 6 if at == "many" else 1), keep_alive=True)

    assert len(head(65_500)) > 60_000
    with pytest.raises(HandlerFailed, match=r"of \d+ bytes; they may have 65536 in all") as caught:
        head(65_550)

    assert caught.value.code == 500
    assert len(headers._kept) == 1


def test_a_header_that_is_no_text_is_a_handlers_failure() -> None:
    """The message names the header, not what it was set to."""
    with pytest.raises(HandlerFailed, match="X-A") as caught:
        ResponseHeaders().head(200, "", [("X-A", "secret\r\n")], keep_alive=True)

    assert "secret" not in str(caught.value)
    assert caught.value.code == 500


def test_cors_values_are_checked_at_the_start() -> None:
    """A setting with a line break is refused where it is set."""
    with pytest.raises(BadSettings, match="Access-Control"):
        ResponseHeaders([("Access-Control-Allow-Origin", "a\r\nb")])


def test_of_several_origins_the_one_that_asks_is_named() -> None:
    """In a browser's spelling; a request from elsewhere is named none, and caches are told that answers differ."""
    ours = ResponseHeaders(
        [("Access-Control-Allow-Origin", "x"), ("Access-Control-Allow-Methods", "GET")],
        ["https://One.example:443", "http://[::1]:8000", "null"],
    )

    def told(*origins: bytes, vary: str = "") -> list[str]:
        lines = [(b"Origin", origin) for origin in origins]
        headers = [("Vary", vary)] if vary else []
        head = ours.of(lines).head(200, "", headers, keep_alive=True).decode().split("\r\n")
        asgi = {name.decode(): value.decode() for name, value in ours.of(lines).complete([], "id")}
        origin = [line.partition(": ")[2] for line in head if line.startswith("access-control-allow-origin")]
        assert origin == ([asgi["access-control-allow-origin"]] if origin else [])
        assert asgi["vary"] == "Origin"
        assert "vary: Origin" in head
        assert "access-control-allow-methods: GET" in head
        return origin

    assert told(b"https://one.example") == ["https://one.example"]
    assert told(b"http://[::1]:8000", vary="Accept") == ["http://[::1]:8000"]
    assert told(b"null") == ["null"]
    assert told(b"https://two.example") == told() == told(b"null", b"https://one.example") == []
    assert ResponseHeaders().of([(b"origin", b"null")]).has_origins is False


def test_phrases_are_the_usual_ones() -> None:
    """And empty for what nobody named."""
    assert phrase_of(404) == "Not Found"
    assert phrase_of(799) == ""
