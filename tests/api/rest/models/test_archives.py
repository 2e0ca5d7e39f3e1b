"""Archives that clients upload over HTTP: what is asked, who may ask, and what is answered."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from marserve.answers.management import ErrorBody, UploadedArchive
from marserve.api.browsers import BrowserRules, OwnHosts
from marserve.api.rest.application import build_app
from marserve.api.rest.models.archives import archives_router
from marserve.api.rest.only_here import KeylessUploads
from marserve.errors import OtherArchiveThere, TooManyUploads
from marserve.registry.intake.uploads import Uploaded, Wish
from support.documents import document_of

pytestmark = pytest.mark.anyio

DATA = b"an archive"
DIGEST = hashlib.sha256(DATA)
BASE64 = base64.b64encode(DIGEST.digest()).decode()


class FakeUploads:
    """Takes all, and keeps what it was asked."""

    def __init__(self, *, is_new: bool = True, error: Exception | None = None) -> None:
        self.is_new, self.error = is_new, error
        self.asked: list[tuple[str, bytes, Wish]] = []

    async def take(self, name: str, chunks: AsyncIterator[bytes], wish: Wish) -> Uploaded:
        """As `Uploads.take`."""
        if self.error is not None:
            raise self.error
        body = b"".join([chunk async for chunk in chunks])
        self.asked.append((name, body, wish))
        return Uploaded(name, hashlib.sha256(body).hexdigest(), len(body), self.is_new)


def client_of(
    uploads: FakeUploads, *, client: str = "127.0.0.1", elsewhere: BrowserRules | None = None
) -> httpx.AsyncClient:
    """A client of the route of a server without keys."""
    check = KeylessUploads(BrowserRules("http", OwnHosts(["box.lan"])), elsewhere).check
    app = build_app([archives_router(uploads, check)], title="t")
    transport = httpx.ASGITransport(app=app, client=(client, 4711))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8081")


async def put(uploads: FakeUploads, path: str = "/archives/m.mar", **more: Any) -> httpx.Response:
    """The answer to an upload."""
    options = {name: more.pop(name) for name in ("client", "elsewhere") if name in more}
    async with client_of(uploads, **options) as client:
        return await client.put(path, **{"content": DATA, **more})


@pytest.mark.parametrize(("is_new", "status"), [(True, 201), (False, 200)])
async def test_the_answer_names_the_archive_its_digest_and_its_length(is_new: bool, status: int) -> None:
    """201 for a new one, 200 for one that was there with the same content."""
    uploads = FakeUploads(is_new=is_new)

    answer = await put(uploads)

    assert answer.status_code == status
    assert answer.json() == {"archive": "m.mar", "sha256": DIGEST.hexdigest(), "bytes": len(DATA)}
    document_of(UploadedArchive, answer.json())
    assert uploads.asked == [("m.mar", DATA, Wish(len(DATA)))]


async def test_a_name_arrives_as_it_was_meant() -> None:
    """Escapes are decoded once, a slash among them: the one function that judges names sees it."""
    uploads = FakeUploads()

    for path in ("/archives/m%20%C3%B6.mar", "/archives/..%2F..%2Fm.mar", "/archives/%2e%2e%2fm.mar"):
        await put(uploads, path)

    assert [name for name, _, _ in uploads.asked] == ["m ö.mar", "../../m.mar", "../m.mar"]


@pytest.mark.parametrize("path", ["/archives", "/archives/", "/archives/a/m.mar"])
async def test_what_is_no_file_is_not_found(path: str) -> None:
    """A name has no slash, and is there."""
    answer = await put(FakeUploads(), path)

    assert answer.status_code == 404


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_other_methods_are_not_there(method: str) -> None:
    """Nothing is read or deleted."""
    async with client_of(FakeUploads()) as client:
        answer = await client.request(method, "/archives/m.mar")

    assert answer.status_code == 405


@pytest.mark.parametrize(
    "headers",
    [
        {"Digest": f"sha-256={BASE64}"},
        {"Digest": f"SHA-256={BASE64}"},
        {"Digest": f"md5=HUXZLQLMuI/KZ5KDcJPcOA==, sha-256={BASE64}"},
        {"Digest": f"sha-256={DIGEST.hexdigest().upper()}"},
        {"Repr-Digest": f"sha-256=:{BASE64}:"},
        {"Content-Digest": f"sha-512=:AAAA:, sha-256=:{BASE64}:"},
        {"Digest": f"sha-256={BASE64}", "Repr-Digest": f"sha-256=:{BASE64}:"},
    ],
)
async def test_a_digest_is_read_in_each_form(headers: dict[str, str]) -> None:
    """RFC 3230's and RFC 9530's."""
    uploads = FakeUploads()

    await put(uploads, headers=headers)

    assert uploads.asked[0][2].sha256 == DIGEST.hexdigest()


@pytest.mark.parametrize(
    "headers",
    [
        {"Digest": DIGEST.hexdigest()},
        {"Digest": "sha-256=AAAA"},
        {"Digest": "md5=HUXZLQLMuI/KZ5KDcJPcOA=="},
        {"Digest": ""},
        {"Digest": f"sha-256={BASE64}", "Repr-Digest": "sha-256=:AAAA:"},
        {"Digest": f"sha-256={BASE64}", "Content-Digest": f"sha-256=:{base64.b64encode(bytes(32)).decode()}:"},
        {"Content-Type": "multipart/form-data; boundary=b"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Encoding": "gzip"},
        {"Content-Range": "bytes 0-9/20"},
    ],
)
async def test_what_the_client_means_otherwise_is_refused_unread(headers: dict[str, str]) -> None:
    """A digest that cannot be read or contradicts another, a form, a part: one sentence."""
    uploads = FakeUploads()

    answer = await put(uploads, headers=headers)

    assert answer.status_code == 400
    document_of(ErrorBody, answer.json())
    assert uploads.asked == []


async def test_a_query_says_what_may_be_done() -> None:
    """A dry run is answered as one, and is no 201."""
    uploads = FakeUploads()

    answer = await put(uploads, "/archives/m.mar?replace=true&dry_run=true")

    assert (answer.status_code, answer.json()["isDryRun"]) == (200, True)
    assert uploads.asked[0][2] == Wish(len(DATA), None, replaces=True, is_dry_run=True)


@pytest.mark.parametrize(
    ("error", "status", "cause"),
    [(OtherArchiveThere("m.mar"), 409, "archive_exists"), (TooManyUploads(4), 503, "uploads")],
)
async def test_a_refusal_has_its_status(error: Exception, status: int, cause: str) -> None:
    """And its cause; a full server says when to come back."""
    answer = await put(FakeUploads(error=error))

    assert (answer.status_code, answer.headers["x-marserve-cause"]) == (status, cause)
    assert ("retry-after" in answer.headers) is (status == 503)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 201),
        ({"Host": "box.lan"}, 201),
        ({"Origin": "http://localhost:8081"}, 201),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
async def test_no_page_of_another_site_uploads(headers: dict[str, str], status: int) -> None:
    """Nor one that led its own name here; a page of this server may."""
    uploads = FakeUploads()

    answer = await put(uploads, headers=headers)

    assert answer.status_code == status
    assert bool(uploads.asked) is (status == 201)


async def test_without_keys_only_this_machine_uploads_unless_it_is_allowed() -> None:
    """Then pages of other sites still do not."""
    rules = BrowserRules("http")
    closed = await put(FakeUploads(), client="10.0.0.7")
    opened = await put(FakeUploads(), client="10.0.0.7", elsewhere=rules, headers={"Host": "models.example"})
    page = await put(FakeUploads(), client="10.0.0.7", elsewhere=rules, headers={"Origin": "https://evil.example"})

    assert [closed.status_code, opened.status_code, page.status_code] == [403, 201, 403]
    assert "allow_uploads=true" in closed.json()["message"]
