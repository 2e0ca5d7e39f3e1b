"""Downloads on the management API: lists archives that are being fetched, and cancels one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

from fastapi import APIRouter, Path
from starlette.responses import Response

from marserve.answers.management import DownloadEntry, DownloadsList, ErrorBody, StatusMessage
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.errors import DownloadNotFound

Number = Annotated[str, Path(description="`id` in the list of downloads")]


# A protocol: the API may not import the store, whose `DownloadList` this is.
class Downloads(Protocol):
    """The list of downloads, as this surface uses it."""

    def statuses(self) -> Sequence[DownloadEntry]:
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
        return PrettyJson(DownloadsList(downloads=downloads.statuses()))

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
