"""What both clients are made of: addresses, keys, connections. How a function that makes a call becomes a method."""

from __future__ import annotations

import inspect
import ipaddress
import json
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from marserve_client.calls import After, Api, Before, Session
from marserve_client.errors import BadInput
from marserve_client.retries import Retries

LOCAL_INFERENCE: Final = "http://127.0.0.1:8080"
LOCAL_MANAGEMENT: Final = "http://127.0.0.1:8081"
Key = str | Callable[[Api], str | None] | None
"""One key for both APIs, or what returns the key of one for each request (`key_file`)."""
_UNIX_BASE: Final = "http://localhost"


def key_file(path: Path | str) -> Callable[[Api], str | None]:
    """The keys of a server's `key_file.json`, read again whenever the file has changed.

    A file that is not there, or cannot be read, has no keys: the server then says that the key is missing.
    """
    file = Path(path)
    known: tuple[object, dict[str, str]] = (None, {})

    def key(api: Api) -> str | None:
        nonlocal known
        try:
            found = os.stat(file)
            mark = (found.st_ino, found.st_mtime_ns, found.st_size)
            if known[0] != mark:
                document = json.loads(file.read_text("utf-8"))
                known = (mark, {name: str(each["key"]) for name, each in document.items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return known[1].get(api)

    return key


def read_address(api: str, address: str) -> str:
    """The address without a slash at its end. Raises BadInput for what is no address, without a password in it."""
    try:
        parts = urlsplit(address)
        is_http = parts.scheme in ("http", "https") and _is_host(parts.hostname)
        if is_http:
            is_http = bool(httpx.URL(address).host) and (parts.port is None or parts.port > 0)
    except (ValueError, AttributeError, httpx.InvalidURL):  # httpx refuses more, such as line ends
        is_http, parts = False, urlsplit("")
    if is_http and "@" in parts.netloc:
        raise BadInput(
            f"{api}: an address has no user name or password; give {parts.scheme}://{parts.netloc.rpartition('@')[2]}, "
            "and headers={'authorization': 'Basic …'}."
        )
    if (is_http and not parts.query and not parts.fragment) or (parts.scheme == "unix" and parts.path):
        return address.rstrip("/")
    raise BadInput(f"{api}: {address!r} is no address; it looks like http://127.0.0.1:8080 or unix:/run/marserve.sock.")


def _is_host(name: str | None) -> bool:
    """Whether a host's name can be looked up. Raises UnicodeError where a part of it is empty or too long."""
    return name is not None and bool(name.encode("idna"))


class Setup:
    """The arguments of a client, checked."""

    def __init__(
        self,
        inference: str | None,
        management: str | None,
        *,
        key: Key,
        timeout: float | None,
        connect_timeout: float,
        retries: Retries,
        max_connections: int,
        headers: Mapping[str, str] | None,
        verify: bool | ssl.SSLContext,
        before: Before | Sequence[Before],
        after: After | Sequence[After],
    ) -> None:
        if inference is None and management is None:
            inference, management = LOCAL_INFERENCE, LOCAL_MANAGEMENT
        named: dict[Api, str | None] = {"inference": inference, "management": management}
        found = {api: read_address(api, address) for api, address in named.items() if address is not None}
        self.sockets = {api: urlsplit(each).path for api, each in found.items() if each.startswith("unix:")}
        # A server that listens on all addresses is asked on loopback.
        self.addresses: dict[Api, str] = {
            api: _UNIX_BASE
            if api in self.sockets
            else each.replace("//0.0.0.0", "//127.0.0.1", 1).replace("//[::]", "//[::1]", 1)
            for api, each in found.items()
        }
        self._verify, self._max_connections = verify, max_connections
        self.session = Session(
            addresses=self.addresses,
            key=key if callable(key) else lambda api: key,
            retries=retries,
            timeout_s=timeout,
            connect_timeout_s=connect_timeout,
            headers={name.lower(): value for name, value in (headers or {}).items()},
            before=(before,) if callable(before) else tuple(before),
            after=(after,) if callable(after) else tuple(after),
        )

    def options(self, api: Api) -> dict[str, Any]:
        """What httpx's client for this API is made with, its transport aside."""
        address = self.addresses[api]
        is_local = api in self.sockets or _is_loopback(urlsplit(address).hostname or "")
        # A proxy of the environment does not lead to this machine, and plain HTTP to it needs no trusted certificates:
        # reading them takes 30 ms.
        is_plain = is_local and not address.startswith("https:")
        limits = httpx.Limits(max_connections=self._max_connections, max_keepalive_connections=self._max_connections)
        return {
            "trust_env": not is_local,
            "verify": False if is_plain else self._verify,
            "limits": limits,
            # Callers share the client: what a handler sets for one of them is not sent for others.
            "cookies": CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            "follow_redirects": False,
        }


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def as_method(build: Callable[..., object], method: Callable[..., object]) -> None:
    """Let `method` show name, text and parameters of `build`, with `self` before them."""
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(build)
    method.__name__ = method.__qualname__ = build.__name__
    method.__doc__ = build.__doc__
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[itself, *signature.parameters.values()], return_annotation=inspect.Signature.empty
    )


def read_piece(file: Any, piece_bytes: int) -> bytes:
    """The next bytes of an open file. Raises BadInput."""
    try:
        return bytes(file.read(piece_bytes))
    except OSError as error:
        raise BadInput(f"file: {file.name} cannot be read ({error.strerror or error}).") from None
