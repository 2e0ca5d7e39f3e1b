"""A download that a command waits for: how far it is, and ending it. Knows the members of `GET /downloads`."""

from __future__ import annotations

from typing import Any

from marserve.cli.output import CommandFailed, Step
from marserve.cli.remote import Management
from marserve.store.addresses.fetch_guard import BadTarget, hide_query, is_address
from marserve.store.addresses.pinned_digest import split_digest

UNDER_WAY = ("waiting", "downloading")


class AwaitedDownload:
    """The download that a registration's `url` makes the server begin, among those that are not there yet."""

    def __init__(self, server: Management, url: str) -> None:
        self._server = server
        self._url = ""
        self._before: set[int] = set()
        if is_address(url):
            try:
                self._url = hide_query(split_digest(url)[0])
            except BadTarget:
                return  # the server says what is wrong with it
            self._before = {each["id"] for each in self._list()}

    def steps(self) -> list[Step]:
        """Its line of progress while it is under way; none otherwise."""
        return [step_of(each) for each in self._under_way()]

    def cancel(self) -> bool:
        """End it; False where it is not under way (any more)."""
        ended = False
        for each in self._under_way():
            try:
                self._server.order("DELETE", f"/downloads/{each['id']}")
                ended = True
            except CommandFailed:
                continue
        return ended

    def _under_way(self) -> list[dict[str, Any]]:
        return [
            each
            for each in (self._list() if self._url else [])
            if each["url"] == self._url and each["state"] in UNDER_WAY and each["id"] not in self._before
        ]

    def _list(self) -> list[dict[str, Any]]:
        try:
            return list(self._server.order("GET", "/downloads")["downloads"])
        except CommandFailed:
            return []  # an older server, or one that is gone, as the order itself will show


def step_of(download: dict[str, Any]) -> Step:
    """`m.mar: 12.5 of 50.0 MB, 25.0 MB/s`, as far as it is known."""
    have, size = int(download["bytes"]), download.get("size")
    if download["state"] == "waiting":
        return Step(f"{download['name']}: waiting for its origin")
    text = f"{download['name']}: {have / 1e6:.1f} {'' if size is None else f'of {size / 1e6:.1f} '}MB"
    seconds = float(download["seconds"])
    if seconds >= 1:
        text += f", {have / 1e6 / seconds:.1f} MB/s"
    return Step(text, have, size)
