"""A download that a command waits for: its progress, and cancelling it. Knows the members of `GET /downloads`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from marserve.answers.management import DownloadEntry, DownloadsList
from marserve.cli.output import CommandFailed, Step
from marserve.cli.remote import Management
from marserve.store.addresses.fetch_guard import BadTarget, hide_query, is_address
from marserve.store.addresses.pinned_digest import split_digest

UNDER_WAY = ("waiting", "downloading")


class AwaitedDownload:
    """The download that the server begins for a registration's `url`: of that address, and not listed before."""

    def __init__(self, server: Management, url: str) -> None:
        self._server = server
        self._url = ""
        self._before: set[int] = set()
        if is_address(url):
            try:
                self._url = hide_query(split_digest(url)[0])
            except BadTarget:
                return  # the server will refuse the address
            self._before = {each.id for each in self._list()}

    def steps(self) -> list[Step]:
        """Its line of progress while it is under way; empty otherwise."""
        return [step_of(each) for each in self._under_way()]

    def cancel(self) -> bool:
        """Cancel it; False if it is not under way, or not any more."""
        ended = False
        for each in self._under_way():
            try:
                self._server.order("DELETE", f"/downloads/{each.id}")
                ended = True
            except CommandFailed:
                continue
        return ended

    def _under_way(self) -> list[DownloadEntry]:
        return [
            each
            for each in (self._list() if self._url else [])
            if each.url == self._url and each.state in UNDER_WAY and each.id not in self._before
        ]

    def _list(self) -> Sequence[DownloadEntry]:
        try:
            return msgspec.convert(self._server.order("GET", "/downloads"), DownloadsList).downloads
        except (CommandFailed, msgspec.ValidationError):
            return []  # an older server, or one that has gone; the order itself will fail then


def step_of(download: DownloadEntry) -> Step:
    """`m.mar: 12.5 of 50.0 MB, 25.0 MB/s`, without unknown parts."""
    have, size = download.bytes, download.size
    if download.state == "waiting":
        return Step(f"{download.name}: waiting for its origin")
    text = f"{download.name}: {have / 1e6:.1f} {'' if size is None else f'of {size / 1e6:.1f} '}MB"
    if download.seconds >= 1:
        text += f", {have / 1e6 / download.seconds:.1f} MB/s"
    return Step(text, have, size)
