"""Reads the body of a route that takes a few words."""

from __future__ import annotations

from starlette.requests import Request

from marserve.errors import BadInput


async def read_short_body(request: Request, most_bytes: int, words: str = "The body") -> bytes:
    """The body, bounded as it comes; `words` name it in the error. Raises BadInput for a longer one."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > most_bytes:
            raise BadInput(f"{words} may have {most_bytes} bytes.")
    return body
