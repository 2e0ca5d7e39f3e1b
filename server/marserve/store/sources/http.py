"""Reads objects by HTTP(S). Each hop is checked: its address, its scheme and its answer.

`fetch_guard` checks every address before the connection, redirects included. The connection goes to the checked IP
address; the name is not resolved again. Time is bounded whatever the other side does. HEAD is never used: presigned
addresses refuse it, and a GET of a first range has the same information. Blocks: threads call it.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import parse_qsl, urljoin

from marserve.store.addresses.fetch_guard import (
    AllowedUrls,
    BadTarget,
    IPAddress,
    Target,
    check_address,
    hide_query,
    parse_target,
    resolve_host,
)
from marserve.store.sources.source import Broken, Denied, Entry, Failed, Missing, Replaced

MAX_REDIRECTS = 5
CONNECT_S = 10.0
SILENCE_S = 30.0
# The time for headers over all redirects and attempts, until one is complete, as a multiple of `SILENCE_S`.
HEADER_SILENCES = 2
CHUNK_BYTES = 256 * 1024
RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# The answers of a redirect's target once its link has expired.
_EXPIRED = frozenset({400, 401, 403, 404, 410})
_LENGTH = re.compile(r"[0-9]{1,30}")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
# Parts of a query that only sign it: they differ each time a link is signed.
_SIGNATURES = (
    ("x-amz-signature", re.compile(r"x-amz-.*")),
    ("x-goog-signature", re.compile(r"x-goog-.*")),
    ("signature", re.compile(r"signature|expires|awsaccesskeyid|googleaccessid|key-pair-id|policy")),
    ("sig", re.compile(r"s[a-z]|s[a-z]{2}|srt|skoid|sktid")),
)


class HttpOrigins:
    """Opens sources of http and https addresses. `resolve` returns the addresses of a host."""

    def __init__(
        self,
        allowed: AllowedUrls,
        *,
        resolve: Callable[[Target], list[IPAddress]] = resolve_host,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`silence_s`: how long an origin may be silent, in seconds; also the time for its whole header."""
        self._allowed = allowed
        self._resolve = resolve
        self._silence_s = silence_s

    def __call__(self, target: Target) -> HttpSource:
        """The object at an allowed address."""
        return HttpSource(target, self._allowed, self._resolve, self._silence_s)


class HttpSource:
    """One address. Connections are kept between reads, at most one for each thread that reads."""

    def __init__(
        self,
        target: Target,
        allowed: AllowedUrls,
        resolve: Callable[[Target], list[IPAddress]],
        silence_s: float,
    ) -> None:
        self._target = target
        self._allowed = allowed
        self._resolve = resolve
        self._silence_s = silence_s
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._final: Target | None = None  # where redirects led last
        self._idle: list[_Connection] = []
        self._live: set[_Connection] = set()
        self._series = threading.local()  # of attempts of one thread without a header: when it began and last failed

    @property
    def shown(self) -> str:
        """The address without its query."""
        return hide_query(self._target.url)

    @property
    def identity(self) -> str:
        """The address without its signature."""
        return _without_signature(self._target)

    @property
    def file_name(self) -> str:
        """The last part of the path."""
        return self._target.file_name

    def close(self) -> None:
        """End every read under way, also one that waits for a silent origin."""
        self._closing.set()
        with self._lock:
            for connection in self._live:
                connection.cut()
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def stat(self) -> Entry:
        """Ask for the first byte; the answer describes the whole object."""
        with self.read(0, 1) as reading:
            for _ in reading:
                break
            return reading.entry

    @contextmanager
    def read(self, begin: int, end: int | None, of: Entry | None = None) -> Iterator[HttpReading]:
        """As `Source.read`."""
        connection, answer = self._open(begin, end, of)
        try:
            reading = self._take(connection, answer, begin, of)
            yield reading
            if reading.is_over and not answer.will_close and not connection.is_cut:
                answer.close()
                with self._lock:
                    if not self._closing.is_set():
                        self._idle.append(connection)
                        return
        finally:
            with self._lock:
                self._live.discard(connection)
                is_kept = connection in self._idle
            if not is_kept:
                answer.close()
                connection.close()

    # ------------------------------------------------------------------------------------------- hops

    def _open(self, begin: int, end: int | None, of: Entry | None) -> tuple[_Connection, http.client.HTTPResponse]:
        """A connection and the header of the last hop's answer, which is 200, 206 or 416.

        Raises Broken if it does not come in time; the attempts of a thread share that time until one gets an answer.
        """
        now = time.monotonic()
        began, failed = getattr(self._series, "times", (now, now))
        if now - failed > self._silence_s:
            began = now  # a new request
        self._series.times = (now, now)
        try:
            return self._follow(begin, end, of, began + HEADER_SILENCES * self._silence_s)
        except Broken:
            self._series.times = (began, time.monotonic())
            raise

    def _follow(
        self, begin: int, end: int | None, of: Entry | None, until: float
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        target = self._final or self._target
        is_remembered = self._final is not None
        hops = 0
        while True:
            connection, answer = self._ask(target, begin, end, of, until)
            try:
                status = answer.status
                if status in _REDIRECTS:
                    hops += 1
                    if hops > MAX_REDIRECTS:
                        raise Failed(f"more than {MAX_REDIRECTS} redirects")
                    target = self._next(target, answer.getheader("location", ""))
                elif is_remembered and status in _EXPIRED:
                    # The signed link has expired: ask the first address for another one.
                    target, is_remembered, self._final = self._target, False, None
                elif status == 416 and begin == 0 and end is not None:
                    end = None  # an empty object has no first byte: ask without a range
                else:
                    _check_status(status)
                    if target != self._target:
                        self._final = target
                    return connection, answer
            except BaseException:
                self._forget(connection)
                raise
            self._forget(connection)

    def _ask(
        self, target: Target, begin: int, end: int | None, of: Entry | None, until: float
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        headers = {"Host": target.authority, "Accept-Encoding": "identity", "User-Agent": "marserve"}
        if begin or end is not None:
            headers["Range"] = f"bytes={begin}-{'' if end is None else end - 1}"
            if of is not None and of.etag is not None:
                headers["If-Range"] = of.etag
        path = (target.path or "/") + target.query
        while True:
            connection, is_used = self._connection(target)
            try:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise Broken(f"no header came within {HEADER_SILENCES * self._silence_s:g} s")
                answer = connection.ask(path, headers, min(self._silence_s, left_s))
                if not connection.is_cut:
                    return connection, answer
                answer.close()
                raise Broken("its header came too late")
            except (OSError, http.client.HTTPException, Broken) as error:
                self._forget(connection)
                if self._closing.is_set():
                    raise Failed("it was given up") from error
                is_stale = isinstance(error, ConnectionError | http.client.BadStatusLine)
                if is_used and is_stale and not connection.is_cut:
                    continue  # the origin had closed a kept connection; a new one loses nothing
                if isinstance(error, Broken):
                    raise
                raise Broken("its header came too late" if connection.is_cut else _sentence(error)) from error

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._live.discard(connection)
        connection.close()

    def _connection(self, target: Target) -> tuple[_Connection, bool]:
        """A connection to the target's host, and whether it was used before."""
        where = (target.scheme, target.authority)
        with self._lock:
            if self._closing.is_set():
                raise Failed("it was given up")
            for connection in self._idle:
                if connection.where == where:
                    self._idle.remove(connection)
                    self._live.add(connection)
                    return connection, True
        addresses = self._judged(target)
        error: OSError | None = None
        for address in addresses:
            connection = _Connection(where, target)
            with self._lock:
                if self._closing.is_set():
                    raise Failed("it was given up")
                self._live.add(connection)
            try:
                connection.dial(address, self._silence_s)
            except OSError as failure:
                self._forget(connection)
                if self._closing.is_set():
                    raise Failed("it was given up") from failure
                error = failure
            else:
                return connection, False
        if isinstance(error, ssl.SSLCertVerificationError):
            raise Failed(
                f"the certificate of {target.host} is not trusted: {error.verify_message}; name the PEM file of its "
                "authority in the variable SSL_CERT_FILE, and restart"
            ) from error
        raise Broken(f"{target.host} cannot be connected to: {_sentence(error)}" if error else "no address") from error

    def _judged(self, target: Target) -> list[IPAddress]:
        """The allowed addresses of a host. If one of them is forbidden, all are refused."""
        try:
            addresses = self._resolve(target)
        except OSError as error:
            raise Broken(f"{target.host} has no address: {error}") from error
        is_named = self._allowed.names_host(target)
        for address in addresses:
            check_address(target, address, is_named=is_named)
        if not addresses:
            raise Broken(f"{target.host} has no address")
        return addresses

    def _next(self, target: Target, location: str) -> Target:
        try:
            following = parse_target(urljoin(target.url, location), may_be_hidden=True)
        except ValueError:
            raise BadTarget(f"Given URL {self.shown} is refused: it redirects to what is no URL") from None
        if following.scheme not in ("http", "https") or (target.scheme == "https" and following.scheme != "https"):
            raise Failed(f"it redirects from {target.scheme} to {following.scheme}")
        self._allowed.check(following)
        return following

    # ------------------------------------------------------------------------------------------- answers

    def _take(
        self, connection: _Connection, answer: http.client.HTTPResponse, begin: int, of: Entry | None
    ) -> HttpReading:
        """Read the answer's header: its object, and its first byte. Raises Replaced and Failed."""
        if answer.getheader("content-encoding", "identity").lower() != "identity":
            raise Failed("the answer is compressed, which was not asked for")
        etag = _validator_of(answer)
        length = answer.getheader("content-length", "")
        if length and not _LENGTH.fullmatch(length):
            raise Failed(f"its Content-Length is no number: {length[:20]!r}")
        announced = int(length) if length and answer.length is not None else None
        if answer.status == 206:
            found = _RANGE.fullmatch(answer.getheader("content-range", ""))
            if found is None or int(found[1]) != begin or found[3] == "*" or int(found[2]) >= int(found[3]):
                raise Failed("the answer is a part that was not asked for")
            announced, size = int(found[2]) + 1 - begin, int(found[3])
            if of is not None and etag is None:
                etag = of.etag  # If-Range has confirmed it
        elif answer.status == 416:
            if of is None:
                raise Failed("the answer was 416")
            raise Replaced("it is shorter than it was")
        else:
            begin, size = 0, announced  # type: ignore[assignment]
        entry = Entry(self._target.path, size, etag, _modified_of(answer), has_ranges=answer.status == 206)
        if of is not None and _differ(of, entry):
            raise Replaced("it was replaced while it was fetched")
        return HttpReading(self, connection, answer, entry, begin, announced)

    @property
    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self._closing.is_set()


class HttpReading:
    """The body of one answer. `is_over`: it was read to its end."""

    def __init__(
        self,
        source: HttpSource,
        connection: _Connection,
        answer: http.client.HTTPResponse,
        entry: Entry,
        begin: int,
        announced: int | None,
    ) -> None:
        self.entry = entry
        self.begin = begin
        self.is_over = False
        self._source = source
        self._connection = connection
        self._answer = answer
        self._announced = announced

    def __iter__(self) -> Iterator[bytes]:
        """As `Reading.__iter__`."""
        have = 0
        while self._announced is None or have < self._announced:
            wanted = CHUNK_BYTES if self._announced is None else min(CHUNK_BYTES, self._announced - have)
            try:
                chunk = self._answer.read1(wanted)  # as it comes: gathered bytes would be lost with the connection
            except (OSError, http.client.HTTPException) as error:
                self._check_closed(error)
                raise Broken(_sentence(error)) from error
            if not chunk:
                break
            have += len(chunk)
            yield chunk
        # Without an announced length, the end of a connection that was cut here would look like the object's end.
        self._check_closed(None)
        if self._announced is not None and have != self._announced:
            raise Broken(f"it ended after {have} of {self._announced} bytes")
        self.is_over = True

    def _check_closed(self, error: BaseException | None) -> None:
        if self._source.is_closing or self._connection.is_cut:
            raise Failed("it was given up") from error


class _Connection(http.client.HTTPConnection):
    """A connection to a checked address. Another thread may cut it.

    The whole header has a time limit, because each of its bytes restarts the socket's own time limit.
    """

    def __init__(self, where: tuple[str, str], target: Target) -> None:
        super().__init__(target.host, target.port)
        self.where = where
        self.is_cut = False
        self._target = target
        self._raw: socket.socket | None = None

    def connect(self) -> None:
        """Raise: http.client would reconnect a lost connection by itself, and resolve the name again."""
        raise ConnectionResetError("the connection is gone")

    def dial(self, address: IPAddress, silence_s: float) -> None:
        """Connect, with TLS for https. Raises OSError."""
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        self._raw = raw = socket.socket(family, socket.SOCK_STREAM)
        raw.settimeout(min(CONNECT_S, silence_s))
        raw.connect((str(address), self._target.port))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._target.scheme == "https":
            self._raw = raw = _tls().wrap_socket(raw, server_hostname=self._target.host)
        raw.settimeout(silence_s)
        self.sock = raw
        if self.is_cut:
            raise ConnectionAbortedError("it was given up")

    def ask(self, path: str, headers: dict[str, str], header_s: float) -> http.client.HTTPResponse:
        """Send a GET and return the answer once its header is there. Sets `is_cut` if that took too long."""
        self.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            self.putheader(name, value)
        clock = threading.Timer(header_s, self.cut)
        clock.daemon = True
        clock.start()
        try:
            self.endheaders()
            return self.getresponse()
        finally:
            clock.cancel()

    def cut(self) -> None:
        """Make a read that is under way return the end. May be called from any thread."""
        self.is_cut = True
        if self._raw is not None:
            with contextlib.suppress(OSError):
                # The method of plain sockets: that of TLS sockets drops the keys, which the other thread is using.
                socket.socket.shutdown(self._raw, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; may be called twice."""
        super().close()
        if self._raw is not None:
            self._raw.close()


@functools.cache
def _tls() -> ssl.SSLContext:
    """TLS with the system's certificates, or those of SSL_CERT_FILE; and certifi's, if it is installed."""
    context = ssl.create_default_context()
    if not os.environ.get("SSL_CERT_FILE") and not os.environ.get("SSL_CERT_DIR"):
        with contextlib.suppress(ImportError, OSError):
            import certifi

            context.load_verify_locations(certifi.where())
    return context


def _check_status(status: int) -> None:
    if status in RETRIED_STATUSES:
        raise Broken(f"the answer was {status}")
    if status in (404, 410):
        raise Missing(f"the answer was {status}")
    if status in (401, 403):
        raise Denied(f"the answer was {status}")
    if status not in (200, 206, 416):
        raise Failed(f"the answer was {status}")


def _validator_of(answer: Any) -> str | None:
    """A strong ETag, which shows that a later answer is of the same content, or None."""
    tag: str = answer.getheader("etag", "")
    return tag if tag.startswith('"') and tag.isascii() and tag.isprintable() else None


def _differ(one: Entry, other: Entry) -> bool:
    """Whether two answers are of different contents."""
    if one.etag is not None and one.etag != other.etag:
        return True
    return one.size is not None and other.size is not None and one.size != other.size


def _modified_of(answer: http.client.HTTPResponse) -> float | None:
    try:
        return parsedate_to_datetime(answer.getheader("last-modified", "")).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def _without_signature(target: Target) -> str:
    pairs = parse_qsl(target.query.removeprefix("?"), keep_blank_values=True)
    names = {name.lower() for name, _ in pairs}
    for mark, signature in _SIGNATURES:
        if mark in names:
            pairs = [(name, value) for name, value in pairs if not signature.fullmatch(name.lower())]
    return "\n".join((replace(target, query="").url, *(f"{name}={value}" for name, value in pairs)))


def _sentence(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
