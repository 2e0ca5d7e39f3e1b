"""Tests for what every request to an application passes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse

from marserve.api.errors import ErrorRules
from marserve.api.rest.application import PrettyJson, build_app, split_path
from marserve.errors import DigestMismatch, DownloadFailed, HandlerNotFound, LoadFailed, NoWorker, QueueFull
from support.management_house import client_of

pytestmark = pytest.mark.anyio


def app_that(fails_with: BaseException | None = None, **options: Any) -> Any:
    """An application of a few routes; `/fail` raises what is given."""
    router = APIRouter()

    @router.get("/fail")
    async def fail() -> None:
        assert fails_with is not None
        raise fails_with

    @router.get("/number")
    async def number(value: int) -> PrettyJson:
        return PrettyJson(value)

    @router.get("/breaks")
    async def breaks(request: Request) -> StreamingResponse:
        async def pieces() -> Any:
            yield b"begun"
            raise RuntimeError("on purpose")

        return StreamingResponse(pieces())

    return build_app([router], title="test", **options)


async def get(app: Any, path: str) -> httpx.Response:
    """The answer to a GET."""
    async with client_of(app) as client:
        return await client.get(path)


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b"/", "/"),
        (b"", "/"),
        (b"/a/b", "/a/b"),
        (b"/a/b///", "/a/b"),
        (b"/a%2Fb/c", "/a%2Fb/c"),
        (b"/%61", "/a"),
        (b"/a%25b", "/a%25b"),
        (b"/a:predict", "/a:predict"),
        (b"/%C3%A4", "/%C3%A4"),
        ("/ä".encode(), "/%C3%A4"),
        (b"/a%0A", "/a%0A"),
        (b"/%zz%", "/%25zz%25"),
        (b"//a", "//a"),
    ],
)
async def test_a_path_is_split_before_it_is_decoded(raw: bytes, path: str) -> None:
    """Equal names are spelt alike, and no escape makes two segments of one."""
    assert split_path(raw) == path


async def test_what_the_framework_refuses_is_an_error_object() -> None:
    """A value of the wrong type, and a refusal of its own."""
    wrong_type = await get(app_that(), "/number?value=x")
    refused = await get(app_that(HTTPException(415, "not this")), "/fail")

    assert (wrong_type.status_code, wrong_type.json()["message"]) == (
        400,
        "The request cannot be used: query.value.",
    )
    assert (refused.status_code, refused.json()["type"]) == (400, "BadRequestException")


async def test_the_status_for_overload_is_a_setting() -> None:
    """Only for what is full or going."""
    full = await get(app_that(QueueFull("m", retry_after_s=3.2), error_rules=ErrorRules(429)), "/fail")
    lacking = await get(app_that(NoWorker("m"), error_rules=ErrorRules(429)), "/fail")

    assert (full.status_code, full.json()["code"]) == (429, 429)
    assert full.headers["retry-after"] in {"4", "5", "6"}
    assert lacking.status_code == 503


async def test_a_download_that_failed_says_why_beside_torchserves_sentence() -> None:
    """In a header, for the sentence is recorded; not twice where the sentence has it."""
    plain = await get(app_that(DownloadFailed("https://h/m.mar", "its answer was 403")), "/fail")
    told = await get(app_that(DownloadFailed("s3://b/m.mar", "it is not there", is_told=True)), "/fail")
    digest = await get(app_that(DigestMismatch("https://h/m.mar", "a", "b")), "/fail")

    assert plain.json()["message"] == "Failed to download archive from: https://h/m.mar"
    assert plain.headers["x-marserve-reason"] == "its answer was 403"
    assert "x-marserve-reason" not in {**told.headers, **digest.headers}


async def test_why_a_version_was_not_loaded_stands_in_the_body_but_not_in_a_recorded_one() -> None:
    """A user of curl sees no headers. What the sentence says is not said twice."""
    failed, missing = LoadFailed("m", "1", reason="ValueError: no weights"), HandlerNotFound("m", "1", "h.py is away.")
    own = ErrorRules(as_recorded=False)
    ours = await get(app_that(failed, error_rules=own), "/fail")
    recorded = await get(app_that(failed), "/fail")
    told = await get(app_that(missing, error_rules=own), "/fail")

    assert ours.json()["reason"] == "ValueError: no weights"
    assert (recorded.json().keys(), told.json().keys()) == ({"code", "type", "message"},) * 2


async def test_a_client_that_hangs_up_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is logged, and nobody is answered."""
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/fail", "headers": [], "query_string": b""}
    await app_that(ClientDisconnect())(scope, receive, send)

    assert (sent, caplog.text) == ([], "")


async def test_an_answer_that_breaks_off_is_not_ended_by_another(caplog: pytest.LogCaptureFixture) -> None:
    """The connection is left to cut it; the log tells."""
    with pytest.raises(RuntimeError, match="on purpose"):
        await get(app_that(), "/breaks")

    assert "failed: GET /breaks" in caplog.text


async def test_json_holds_any_text() -> None:
    """Half of a surrogate pair becomes a question mark; letters stay letters."""
    assert PrettyJson({"a": "ä\ud800<"}).body == '{\n  "a": "ä?<"\n}\n'.encode()


async def test_fastapi_s_own_page_is_never_served() -> None:
    """It loads scripts from outside."""
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert (await get(app_that(), path)).status_code == 404
