"""Fetches one archive into the store's folder: by HTTP(S) or from a file, complete or not at all.

Every address is judged by `fetch_guard` before it is connected to, redirects included, and it is the judged address
that is connected to, not the name once more. Time and size are bounded whatever the other side does; what was cut off
goes on where it ended if the other side vouches that it is the same thing. Blocks: run it in a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urljoin

from marserve.errors import ArchiveExists, ArchiveNotFound, DownloadFailed, OutOfMemory
from marserve.store.fetch_guard import (
    AllowedUrls,
    IPAddress,
    Target,
    check_address,
    hide_query,
    parse_target,
    resolve_host,
)

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("marserve.store")

MAX_REDIRECTS = 5
MAX_ATTEMPTS = 4
CONNECT_S = 10.0
SILENCE_S = 30.0
# Slower than this on average, and it is given up: an archive of a GB would take weeks.
LEAST_BYTES_PER_S = 1024
PACE_WINDOW_S = 30.0
FIRST_PAUSE_S = 0.5
CHUNK_BYTES = 256 * 1024
RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class Fetcher:
    """Fetches archives that the operator allows. `resolve` tells the addresses of a host."""

    def __init__(
        self,
        allowed: AllowedUrls,
        *,
        max_bytes: int = 64 * 1024**3,
        resolve: Callable[[Target], list[IPAddress]] = resolve_host,
        silence_s: float = SILENCE_S,
        pace_window_s: float = PACE_WINDOW_S,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._allowed = allowed
        self._max_bytes = max_bytes
        self._resolve = resolve
        self._silence_s = silence_s
        self._pace_window_s = pace_window_s
        self._first_pause_s = first_pause_s
        self._closing = threading.Event()
        self._wires: set[_Wire] = set()
        self._lock = threading.Lock()

    def close(self) -> None:
        """End what is under way, also what waits for an origin that says nothing. Returns at once."""
        self._closing.set()
        with self._lock:
            for wire in self._wires:
                wire.cut()

    def fetch(self, url: str, folder: Path) -> str:
        """Fetch an archive into `folder` under the last part of its path; returns that name.

        Raises ArchiveNotFound (not allowed, no URL that is fetched), ArchiveExists (a file of that name is there),
        DownloadFailed with what happened as its cause, OutOfMemory when the disk is full. Nothing is left after an
        error.
        """
        target = parse_target(url)
        self._allowed.check(target)
        name = target.file_name
        if (folder / name).exists():
            raise ArchiveExists(name)
        part = folder / f".{secrets.token_hex(8)}.part"
        try:
            with part.open("xb") as file:
                if target.scheme == "file":
                    self._copy(target, file)
                else:
                    self._download(target, file)
                file.flush()
                os.fsync(file.fileno())
            os.link(part, folder / name)  # unlike a rename it never takes another's place
        except FileExistsError:
            raise ArchiveExists(name) from None
        except ArchiveNotFound:
            raise
        except OSError as error:
            if error.errno in (28, 122):  # ENOSPC, EDQUOT
                raise OutOfMemory(f"No space is left to save model: {hide_query(url)}") from error
            raise self._failed(url, error) from error
        except _Failed as error:
            raise self._failed(url, error) from error
        finally:
            part.unlink(missing_ok=True)
        log.info("Fetched %s from %s", name, hide_query(url))
        return name

    def _failed(self, url: str, error: BaseException) -> DownloadFailed:
        log.warning("%s could not be fetched: %s", hide_query(url), error)
        return DownloadFailed(hide_query(url), reason=str(error))

    def _copy(self, target: Target, file: BinaryIO) -> None:
        """Copy a file of this machine. Where links lead must be allowed as well."""
        real = Path(target.path).resolve()
        self._allowed.check(Target("file", "", 0, str(real), ""))
        if not real.is_file():
            raise _Failed("there is no such file")
        with real.open("rb") as source:
            if os.fstat(source.fileno()).st_size > self._max_bytes:
                raise _Failed(f"it has more than {self._max_bytes} bytes")
            shutil.copyfileobj(source, file, CHUNK_BYTES)

    # ------------------------------------------------------------------------------------------- http

    def _download(self, target: Target, file: BinaryIO) -> None:
        """Try until the whole is there, each time from where the last one ended if that can be trusted."""
        validator: str | None = None
        pause_s = self._first_pause_s
        for attempt in range(1, MAX_ATTEMPTS + 1):
            have = file.tell()
            try:
                with self._open(target, have if validator else 0, validator) as answer:
                    if answer.status_code == 206 and _validator_of(answer) not in (None, validator):
                        raise _Failed("it was replaced while it was fetched")
                    if answer.status_code != 206 and have:
                        file.seek(0)
                        file.truncate()
                    validator = _validator_of(answer)
                    self._receive(answer, file)
                return
            except _Broken as error:
                if self._closing.is_set():
                    raise _Failed("the server stops") from error
                if attempt == MAX_ATTEMPTS:
                    raise _Failed(f"{error}, {attempt} times") from error
                log.info("%s: %s; trying again in %g s", hide_query(target.url), error, pause_s)
                if self._closing.wait(pause_s):
                    raise _Failed("the server stops") from error
                pause_s *= 2
                if not validator:
                    file.seek(0)
                    file.truncate()

    @contextmanager
    def _open(self, target: Target, begin: int, validator: str | None) -> Iterator[httpx.Response]:
        """The answer to a GET, redirects followed, each hop judged like the first."""
        import httpx  # late: a server that fetches nothing needs none of it

        limits = httpx.Timeout(self._silence_s, connect=CONNECT_S)
        with (
            self._watched() as wire,
            httpx.Client(timeout=limits, trust_env=False, follow_redirects=False) as client,
        ):
            for _ in range(MAX_REDIRECTS + 1):
                headers = {"host": target.authority, "accept-encoding": "identity", "user-agent": "marserve"}
                if begin and validator:
                    headers |= {"range": f"bytes={begin}-", "if-range": validator}
                extensions = {"sni_hostname": target.host, "trace": wire.trace}
                request = client.build_request("GET", self._pinned(target), headers=headers, extensions=extensions)
                try:
                    answer = client.send(request, stream=True)
                except httpx.HTTPError as error:
                    raise _Broken(_sentence(error)) from error
                try:
                    if answer.status_code in (301, 302, 303, 307, 308):
                        target = self._next(target, answer.headers.get("location", ""))
                        continue
                    self._check_status(answer, begin)
                    yield answer
                    if wire.is_cut:  # without an announced length that end would pass for the archive's
                        raise _Broken("its header came too late")
                    return
                except httpx.HTTPError as error:
                    raise _Broken(_sentence(error)) from error
                finally:
                    answer.close()
            raise _Failed(f"more than {MAX_REDIRECTS} redirects")

    @contextmanager
    def _watched(self) -> Iterator[_Wire]:
        """A wire that `close` cuts."""
        wire = _Wire(self._silence_s)
        with self._lock:
            self._wires.add(wire)
        try:
            if self._closing.is_set():
                raise _Failed("the server stops")
            yield wire
        finally:
            with self._lock:
                self._wires.discard(wire)
            wire.stop_clock()

    def _pinned(self, target: Target) -> str:
        """The URL with an address in the place of the host: one that was judged, so that it is the one connected to."""
        try:
            addresses = self._resolve(target)
        except OSError as error:
            raise _Broken(f"{target.host} has no address: {error}") from error
        is_named = self._allowed.names_host(target)
        for address in addresses:
            check_address(target, address, is_named=is_named)
        if not addresses:
            raise _Broken(f"{target.host} has no address")
        address = addresses[0]
        host = f"[{address}]" if address.version == 6 else str(address)
        return f"{target.scheme}://{host}:{target.port}{target.path}{target.query}"

    def _next(self, target: Target, location: str) -> Target:
        following = parse_target(urljoin(target.url, location))
        if following.scheme == "file" or (target.scheme == "https" and following.scheme != "https"):
            raise _Failed(f"it redirects from {target.scheme} to {following.scheme}")
        self._allowed.check(following)
        return following

    def _check_status(self, answer: httpx.Response, begin: int) -> None:
        status = answer.status_code
        if status in RETRIED_STATUSES or status == 416:
            raise _Broken(f"the answer was {status}")
        if status == 206:
            found = _RANGE.fullmatch(answer.headers.get("content-range", ""))
            if not begin or found is None or int(found[1]) != begin:
                raise _Failed("the answer is a part that was not asked for")
        elif status != 200:
            raise _Failed(f"the answer was {status}")
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            raise _Failed("the answer is compressed, which was not asked for")

    def _receive(self, answer: httpx.Response, file: BinaryIO) -> None:
        """Write what comes, in time and within the bounds; the length must be as announced."""
        announced = answer.headers.get("content-length")
        begun, wanted = file.tell(), None
        if announced is not None and announced.isdigit():
            wanted = begun + int(announced)
            if wanted > self._max_bytes:
                raise _Failed(f"it has {wanted} bytes, more than {self._max_bytes}")
        since, mark = time.monotonic(), begun
        for chunk in answer.iter_raw():  # as it comes: what was gathered would be lost with the connection
            if self._closing.is_set():
                raise _Failed("the server stops")
            file.write(chunk)
            have = file.tell()
            if have > self._max_bytes:
                raise _Failed(f"it has more than {self._max_bytes} bytes")
            now = time.monotonic()
            if now - since >= self._pace_window_s:
                if have - mark < LEAST_BYTES_PER_S * (now - since):
                    raise _Failed(f"it comes slower than {LEAST_BYTES_PER_S} bytes a second")
                since, mark = now, have
        if wanted is not None and file.tell() != wanted:
            raise _Broken(f"it ended after {file.tell()} of {wanted} bytes")


class _Wire:
    """The connection of one fetch, as httpcore tells of it, so that another thread can end the wait for it.

    A header must be there within `header_s`: each byte of it begins httpx's own time for silence anew.
    """

    def __init__(self, header_s: float) -> None:
        self._header_s = header_s
        self._socket: socket.socket | None = None
        self._clock: threading.Timer | None = None
        self.is_cut = False

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """Called by httpcore before and after each step."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._socket = info["return_value"].get_extra_info("socket")
            if self.is_cut:
                self.cut()
        elif event == "http11.receive_response_headers.started":
            self._clock = threading.Timer(self._header_s, self.cut)
            self._clock.daemon = True
            self._clock.start()
        elif event.startswith("http11.receive_response_headers."):
            self.stop_clock()

    def cut(self) -> None:
        """Have whoever reads from it read its end. May be called from any thread."""
        self.is_cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # The method of plain sockets: that of TLS forgets its keys, which the other thread is using.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def stop_clock(self) -> None:
        """The header is there, or nobody waits for it any more."""
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


class _Failed(Exception):
    """It cannot be fetched, and trying again would not help."""


class _Broken(Exception):
    """It was not fetched this time."""


def _validator_of(answer: Any) -> str | None:
    """What tells that a later answer is of the same thing: a strong ETag, or nothing."""
    tag: str = answer.headers.get("etag", "")
    return tag if tag.startswith('"') else None


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
