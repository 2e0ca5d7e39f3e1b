"""Downloads on the management API: lists archives that are being fetched, and cancels one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Path
from starlette.responses import Response

from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.schemas import DownloadsList, ErrorBody, StatusMessage
from marserve.errors import DownloadNotFound

Number = Annotated[str, Path(description="`id` in the list of downloads")]


class Status(Protocol):
    """How far one download is."""

    @property
    def id(self) -> int:
        """Its number."""

    @property
    def url(self) -> str:
        """Its address, without secrets."""

    @property
    def name(self) -> str:
        """The archive's name."""

    @property
    def state(self) -> str:
        """As in `DownloadEntry`."""

    @property
    def bytes(self) -> int:
        """How many bytes have come."""

    @property
    def size(self) -> int | None:
        """How many bytes there will be; None if unknown."""

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""

    @property
    def is_cached(self) -> bool:
        """Whether it was in the cache and nothing was fetched."""

    @property
    def reason(self) -> str:
        """Why it failed; empty otherwise."""


# A protocol: the API may not import the store, whose `DownloadList` this is.
class Downloads(Protocol):
    """The list of downloads, as this surface uses it."""

    def statuses(self) -> Sequence[Status]:
        """All, the oldest first."""

    def cancel(self, number: int, reason: str) -> bool:
        """Cancel one; False if none of that number is under way."""


def downloads_router(downloads: Downloads, *, enable_model_api: bool) -> APIRouter:
    """The routes below `/downloads`; without `enable_model_api` none that cancels."""
    router = new_router(PrettyJson)

    @router.get(
        "/downloads",
        operation_id="listDownloads",
        summary="List downloads: those under way, and the last that ended",
        responses={200: {"model": DownloadsList}},
    )
    async def list_downloads() -> Response:
        return PrettyJson({"downloads": [_document(status) for status in downloads.statuses()]})

    if enable_model_api:

        @router.delete(
            "/downloads/{download}",
            operation_id="cancelDownload",
            summary="End a download; the registration that asked for it fails",
            responses={200: {"model": StatusMessage}, 404: {"model": ErrorBody}},
        )
        async def cancel_download(download: Number) -> Response:
            number = int(download) if download.isdecimal() and len(download) < 20 else 0
            if not downloads.cancel(number, "it was cancelled by DELETE /downloads"):
                raise DownloadNotFound(download[:20])
            return PrettyJson({"status": f"Download {download} is cancelled"})

    return router


def _document(status: Status) -> dict[str, Any]:
    document: dict[str, Any] = {
        "id": status.id,
        "url": status.url,
        "name": status.name,
        "state": status.state,
        "bytes": status.bytes,
        "seconds": round(status.seconds, 3),
        "fromCache": status.is_cached,
    }
    if status.size is not None:
        document["size"] = status.size
    if status.reason:
        document["reason"] = status.reason
    return document
