"""`PUT /archives/{file}`: an archive into the model store, complete or not at all. Registering it is another call."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Final, Protocol

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from marserve.answers.management import UploadedArchive
from marserve.api.http.request_body import is_form
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.models.traffic import Dry, is_dry
from marserve.api.rest.schemas import Flag, Name, error_answers
from marserve.errors import BadInput
from marserve.registry.intake.uploads import Uploaded, Wish

Replace = Annotated[Flag, Query(description="take the place of a file with other content that no version uses")]

# RFC 3230 has `sha-256=BASE64`; RFC 9530 `sha-256=:BASE64:`.
_DIGEST_HEADERS: Final = ("digest", "repr-digest", "content-digest")
_SHA_256: Final = re.compile(r"(?:^|,)\s*sha-256\s*=\s*:?([A-Za-z0-9+/=]*):?\s*(?=,|$)", re.IGNORECASE)
_HEX: Final = re.compile(r"[0-9A-Fa-f]{64}")

_DIGEST_PARAMETERS = [
    {
        "name": name,
        "in": "header",
        "required": False,
        "description": f"SHA-256 of the body ({where}); the upload fails if it is another",
        "schema": {"type": "string"},
        "example": example,
    }
    for name, where, example in (
        ("Digest", "RFC 3230", "sha-256=4REjxQ4yrqUVicfSKYNO/cF9zNj5ANbzgDZt3/h3Qxo="),
        ("Repr-Digest", "RFC 9530", "sha-256=:4REjxQ4yrqUVicfSKYNO/cF9zNj5ANbzgDZt3/h3Qxo=:"),
    )
]
_BODY = {
    "description": "the archive itself, no form",
    "required": True,
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}


# A protocol, so that a test needs no store.
class Uploads(Protocol):
    """What takes archives in."""

    async def take(self, name: str, chunks: AsyncIterator[bytes], wish: Wish) -> Uploaded:
        """Take one in; raises what refuses it."""


def archives_router(uploads: Uploads, check_caller: Callable[[Scope], None]) -> APIRouter:
    """The route. `check_caller` raises what refuses the caller, before a byte of the body is read."""
    router = new_router(PrettyJson)

    @router.put(
        "/archives/{file}",
        operation_id="putArchive",
        summary="Upload an archive into the model store; registers nothing",
        responses={
            200: {"model": UploadedArchive, "description": "the store has it with the same content, or a dry run"},
            201: {"model": UploadedArchive, "description": "it is in the store"},
            **error_answers(400, 403, 409, 413, 503, 507),
        },
        openapi_extra={"requestBody": _BODY, "parameters": _DIGEST_PARAMETERS},
    )
    async def put(request: Request, file: Name, replace: Replace = None, dry_run: Dry = None) -> Response:
        check_caller(request.scope)
        _check_body_is_plain(request)
        length = request.headers.get("content-length")
        is_dry_run = is_dry(request)
        wish = Wish(
            None if length is None else int(length), read_digest(request), (replace or "").lower() == "true", is_dry_run
        )
        taken = await uploads.take(file, request.stream(), wish)
        document = UploadedArchive(taken.name, taken.sha256, taken.size_bytes, True if is_dry_run else None)
        return PrettyJson(document, status_code=201 if taken.is_new and not is_dry_run else 200)

    return router


def read_digest(request: Request) -> str | None:
    """The SHA-256 digest that the request says of its body, in 64 hex digits; None if it says none.

    Raises BadInput for a header without one that can be read: its client wants to be sure.
    """
    found: str | None = None
    for name in _DIGEST_HEADERS:
        for value in request.headers.getlist(name):
            said = _SHA_256.search(value)
            digest = "" if said is None else _decode(said[1])
            if not digest or (found is not None and digest != found):
                raise BadInput(
                    f"The header {name.title()} has no SHA-256 digest that can be used; it is written "
                    "sha-256=, then the digest in base64 or 64 hexadecimal digits."
                )
            found = digest
    return found


def _decode(text: str) -> str:
    """A digest in base64, or in hexadecimal digits, as 64 hex digits; empty if it is neither."""
    if _HEX.fullmatch(text):
        return text.lower()
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return ""
    return raw.hex() if len(raw) == 32 else ""


def _check_body_is_plain(request: Request) -> None:
    """Raise BadInput for what would be stored as something else than the client means."""
    if is_form(request.headers.get("content-type", "")):
        raise BadInput("The body is a form; send the archive itself as the body, as `curl --upload-file` does.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise BadInput("The body has a Content-Encoding; send the archive as it is, without another compression.")
    if "content-range" in request.headers:  # RFC 9110 §14.5: a part is no archive
        raise BadInput("The body is a part, as its Content-Range says; send the archive whole.")
