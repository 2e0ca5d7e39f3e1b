"""The files of the page at `/docs` and of the dashboard, from memory.

Their headers let a browser keep them, and run nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

STATIC: Final = Path(__file__).parent / "static"

PAGE: Final = "/docs"
DASHBOARD: Final = "/dashboard"
_SCRIPT: Final = "text/javascript; charset=utf-8"
_STYLES: Final = "text/css; charset=utf-8"
_HTML: Final = "text/html; charset=utf-8"
_SCRIPTS: Final = ("answer.js", "app.js", "call.js", "calls.js", "key.js", "model.js", "routes.js", "schema.js")
_DASHBOARD_SCRIPTS: Final = (
    "app.js",
    "charts.js",
    "confirm.js",
    "copied.js",
    "explained.js",
    "figures.js",
    "logs.js",
    "model.js",
    "overview.js",
    "poll.js",
    "optimise.js",
    "profile.js",
    "recorded.js",
    "register.js",
    "registering.js",
    "requests.js",
    "rollout.js",
    "routes.js",
    "samples.js",
    "sending.js",
    "versions.js",
    "waterfall.js",
    "workers.js",
)
# Paths, files and their types. Only these are ever opened.
FILES: Final[Mapping[str, tuple[str, str]]] = {
    PAGE: ("docs.html", _HTML),
    **{f"/docs/{name}": (name, _SCRIPT) for name in _SCRIPTS},
    "/docs/app.css": ("app.css", _STYLES),
    "/docs/icon.svg": ("icon.svg", "image/svg+xml"),
    "/docs/vendored/htm-preact.module.js": ("vendored/htm-preact.module.js", _SCRIPT),
}
# Those that only the dashboard has. They are below `/docs` as in the folder, so that they find what both import.
DASHBOARD_FILES: Final[Mapping[str, tuple[str, str]]] = {
    DASHBOARD: ("dashboard/dashboard.html", _HTML),
    **{f"/docs/dashboard/{name}": (f"dashboard/{name}", _SCRIPT) for name in _DASHBOARD_SCRIPTS},
    "/docs/dashboard/dashboard.css": ("dashboard/dashboard.css", _STYLES),
    "/docs/dashboard/explorer.css": ("dashboard/explorer.css", _STYLES),
    "/docs/vendored/uPlot.iife.min.js": ("vendored/uPlot.iife.min.js", _SCRIPT),
    "/docs/vendored/uPlot.min.css": ("vendored/uPlot.min.css", _STYLES),
}
# No script or style within the page, nothing from elsewhere, nothing sent elsewhere, no text that becomes HTML.
# `blob:` pictures are those that the user chose and that a model answered.
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Kept, and asked about each time: a server of another version has other files.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file. `etag` changes with its content."""

    content: bytes
    media_type: str
    etag: str


class PageFiles:
    """All files of both pages; a thread reads them when the first client asks."""

    def __init__(self, folder: Path = STATIC) -> None:
        self._folder = folder
        self._files: Mapping[str, PageFile] | None = None

    async def answer(self, path: str, request: Request) -> Response:
        """The file at a path of `FILES` or `DASHBOARD_FILES`, or 304 for a client that has it. Raises OSError."""
        if self._files is None:
            self._files = await asyncio.to_thread(read_files, self._folder)
        file = self._files[path]
        headers = {**HEADERS, "etag": file.etag}
        if has_etag(request.headers.get("if-none-match", ""), file.etag):
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)


def read_files(folder: Path = STATIC) -> dict[str, PageFile]:
    """Read all files. Blocks. Raises OSError."""
    found = {}
    for path, (name, media_type) in {**FILES, **DASHBOARD_FILES}.items():
        content = (folder / name).read_bytes()
        found[path] = PageFile(content, media_type, f'"{sha256(content).hexdigest()[:24]}"')
    return found


def has_etag(if_none_match: str, etag: str) -> bool:
    """Whether an `If-None-Match` names this entity, weakly compared (RFC 9110, 13.1.2)."""
    return any(each.strip().removeprefix("W/") in ("*", etag) for each in if_none_match.split(","))
