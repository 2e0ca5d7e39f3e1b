"""Refuses what a browser sends for another site's page, on routes that need no key. Pure.

Two attacks reach a port without keys through a browser that can reach it. In the first a page of another site sends a
request that changes something (a form, `fetch` without reading the answer); `Origin` or `Sec-Fetch-Site` shows it. In
the second a page points its own name at this machine (DNS rebinding), so that the browser takes both for one site; the
`Host` shows it, if the names of this server are known. Other clients send no `Origin` and pass.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from starlette.types import Scope

from marserve.api.errors import ForeignHost, ForeignOrigin

SAFE_METHODS: Final = frozenset(("GET", "HEAD", "OPTIONS", b"GET", b"HEAD", b"OPTIONS"))
# Probes name a pod by its address, KServe's those of the Open Inference Protocol too.
OPEN_PATHS: Final = ("/ping", "/livez", "/readyz", "/startupz", "/metrics", "/v2/health/live", "/v2/health/ready")
# A request for these takes one of a few places, as long as it follows: judged as if it changed something.
SCARCE_PATHS: Final = ("/logs",)
DEFAULT_PORTS: Final = {"http": 80, "https": 443}

_ORIGIN = re.compile(r"(https?)://(\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@\s]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
_HOST = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::([0-9]{0,5}))?")
_NUMERIC = re.compile(r"(?:0[xX][0-9A-Fa-f]*|[0-9]+)(?:\.(?:0[xX][0-9A-Fa-f]*|[0-9]+)){0,3}")

Lines = Iterable[tuple[bytes, bytes]]


class Origin(NamedTuple):
    """Where a page comes from, as browsers compare it. An IPv6 host has no brackets."""

    scheme: str
    host: str
    port: int


class OwnHosts:
    """The hosts that requests to one listener may name: this machine's own, the listener's address, and `allowed`.

    `allowed` are names or addresses in lower case; `*.example.com` stands for the names below one, `*` for all.
    """

    def __init__(self, allowed: Sequence[str] = (), address_host: str = "") -> None:
        self._names = frozenset(("localhost", *filter(None, map(_plain, (address_host, *allowed)))))
        self._endings = tuple(each[1:] for each in allowed if each.startswith("*."))
        self._takes_all = "*" in allowed

    def has(self, value: bytes) -> bool:
        """Whether a `Host` names this server. An empty `Host` passes: it names no other server."""
        host, _ = split_host(value)
        if not value or self._takes_all or host in self._names or host.endswith(self._endings):
            return True
        address = _read_address(host)
        return address is not None and (address.is_loopback or address.is_unspecified)


class BrowserRules:
    """The rules of one listener. With `own_hosts` None any `Host` passes.

    `allowed_origins` are those of `cors_allowed_origin`, `*` for all. `check_scope` lets `open_paths`, and the paths
    below them, pass: health and metrics say little and change nothing. It is strict with `SCARCE_PATHS`.
    """

    def __init__(
        self,
        scheme: str,
        own_hosts: OwnHosts | None = None,
        allowed_origins: Sequence[str] = (),
        open_paths: Sequence[str] = OPEN_PATHS,
    ) -> None:
        self._open_paths = tuple(open_paths)
        self._scheme = scheme
        self._own_hosts = own_hosts
        self._takes_all = "*" in allowed_origins
        # `null` and other values without scheme and host are compared as written.
        self._allowed = frozenset(read_origin(each) or each for each in allowed_origins)

    def check(self, method: str | bytes, lines: Lines, *, is_scarce: bool = False) -> None:
        """Check a request by its method and header. Raises ForeignHost and ForeignOrigin.

        `is_scarce`: a GET is judged as well. A page of the same site may send one without `Origin`.
        """
        host, sites, origins = b"", [], []
        for name, value in lines:
            size = len(name)
            if size == 4 and name.lower() == b"host":
                host = value
            elif size == 6 and name.lower() == b"origin":
                origins.append(value.decode("latin-1").strip())
            elif size == 14 and name.lower() == b"sec-fetch-site":
                sites.append(value.strip().lower())
        if self._own_hosts is not None and not self._own_hosts.has(host):
            raise ForeignHost(host.decode("latin-1"))
        if self._takes_all or (method in SAFE_METHODS and not is_scarce):
            return
        is_told_same = sites == [b"same-origin"]
        for origin in origins:
            if not self._may_call(origin, host, is_told_same=is_told_same):
                raise ForeignOrigin(origin)
        is_foreign = b"cross-site" in sites or (is_scarce and b"same-site" in sites)
        if is_foreign and not (origins and all(map(self._is_allowed, origins))):
            raise ForeignOrigin(origins[0] if origins else "")

    def check_scope(self, scope: Scope) -> None:
        """As `check`, for a request on its way through an application. Its path must be split already."""
        path = scope["path"]
        if not any(path == each or path.startswith(f"{each}/") for each in self._open_paths):
            self.check(scope["method"], scope["headers"], is_scarce=scope["method"] == "GET" and path in SCARCE_PATHS)

    def check_host(self, lines: Lines) -> None:
        """As `check`, for the `Host` alone."""
        self.check(b"GET", lines)

    def _may_call(self, text: str, host: bytes, *, is_told_same: bool) -> bool:
        if self._is_allowed(text):
            return True
        origin = read_origin(text)
        if origin is None:
            return False
        own_host, own_port = split_host(host)
        if is_told_same and origin.host == own_host:
            return True  # the browser has compared the rest; a proxy in front may end TLS, or have another port
        return origin == Origin(self._scheme, own_host, own_port or DEFAULT_PORTS[self._scheme])

    def _is_allowed(self, text: str) -> bool:
        return (read_origin(text) or text) in self._allowed


def read_origin(text: str) -> Origin | None:
    """An `Origin` in its one form; None for another scheme than http and https, and for `null`."""
    found = _ORIGIN.fullmatch(text.strip())
    if found is None:
        return None
    scheme = found[1].lower()
    return Origin(scheme, _plain(found[2]), int(found[3] or DEFAULT_PORTS[scheme]))


def write_origin(text: str) -> str:
    """An origin as browsers write and compare it; other text unchanged."""
    origin = read_origin(text)
    if origin is None:
        return text
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    port = "" if origin.port == DEFAULT_PORTS[origin.scheme] else f":{origin.port}"
    return f"{origin.scheme}://{host}{port}"


def split_host(value: bytes) -> tuple[str, int]:
    """The host of a `Host`, in lower case, without brackets and a last dot; and its port, 0 if not given."""
    text = value.decode("latin-1").strip()
    found = _HOST.fullmatch(text)
    return (_plain(found[1]), int(found[2] or 0)) if found else (text, 0)


def _plain(host: str) -> str:
    host = host.lower().removesuffix(".").removeprefix("[").removesuffix("]")
    if ":" not in host:
        return host
    try:
        return ipaddress.IPv6Address(host).compressed
    except ValueError:
        return host


def _read_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host stands for, in any spelling that people type (`127.1`); None for a name."""
    try:
        if _NUMERIC.fullmatch(host):
            return ipaddress.IPv4Address(socket.inet_aton(host))
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except (ValueError, OSError):
        return None
    return address.ipv4_mapped or address
