"""Which addresses may be fetched from: what a URL is, whether the operator allows it, which hosts never are allowed.

Everything is pure except `resolve_host`, which asks the system's resolver. A URL is judged in one normal form, the one
that is fetched; an ambiguous URL is refused.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from marserve.errors import AddressNotAllowed, ArchiveNotFound
from marserve.settings.shown_address import hide_query as hide_query
from marserve.settings.stores import SCHEMES
from marserve.store.addresses.object_address import SIGNED, read_address
from marserve.store.addresses.object_address import is_store_address as is_store_address

Scheme = Literal["http", "https", "file", "s3", "gs", "az", "hf"]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_URL_BYTES = 8192
DEFAULT_PORTS = {"http": 80, "https": 443}
WEB_SCHEMES: tuple[Scheme, ...] = ("http", "https")
OBJECT_SCHEMES: tuple[Scheme, ...] = ("s3", "gs", "az")
STORE_SCHEMES: tuple[Scheme, ...] = (*OBJECT_SCHEMES, "hf")
"""Schemes of object stores: `s3://bucket/key`, `gs://bucket/key`, `az://container/key`, `hf://organisation/name`."""

_ADDRESS = re.compile(r"(https?|s3\+https|file)://", re.IGNORECASE)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+]*)://([^/?]*)([^?]*)(\?.*)?")
# As in RFC 3986, without `#`: a fragment is never sent, so it could only serve to make a pattern match.
_PLAIN = re.compile(r"[A-Za-z0-9\-._~:/?\[\]@!$&'()*+,;=%]+")
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9\-_]{0,62})(\.[a-z0-9_]([a-z0-9\-_]{0,62}))*")
_LOOKS_NUMERIC = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+))*")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._~+@=,%!$&'()\-]{0,199}")

# Clouds' metadata services, which know secrets, at addresses that are not link-local: Alibaba, Amazon's IPv6, Oracle.
_NEVER = tuple(ipaddress.ip_network(each) for each in ("100.100.100.200/32", "fd00:ec2::/32", "192.0.0.192/32"))


@dataclass(frozen=True, slots=True)
class Target:
    """A URL in its normal form. `host` is lower case, an IPv6 address without its brackets; empty for files.

    For an object store `host` is the bucket (as it is written) and `path` a slash and the key.
    """

    scheme: Scheme
    host: str
    port: int
    path: str
    query: str
    written: str = ""
    """Scheme and bucket as they were written, where that is another spelling than the normal form (`s3a://bucket`)."""

    @property
    def url(self) -> str:
        """The normal form, which is matched against patterns and fetched."""
        return f"{self.scheme}://{self.authority}{self.path}{self.query}"

    @property
    def key(self) -> str:
        """The key in an object store: the path without its slash."""
        return self.path.removeprefix("/")

    @property
    def authority(self) -> str:
        """Host and port for the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS.get(self.scheme, 0) else f"{host}:{self.port}"

    @property
    def file_name(self) -> str:
        """The last part of the path, which is the archive's name in the store."""
        return self.path.rpartition("/")[2]


class BadTarget(ArchiveNotFound):
    """The URL is not one that can be fetched."""


def is_address(url: str) -> bool:
    """Whether a registration's `url` is an address: its scheme can be fetched, allowed or not.

    With any other scheme, such as ftp, the last part is a name in the store.
    """
    return bool(_ADDRESS.match(url)) or is_store_address(url)


def parse_target(url: str, *, may_be_hidden: bool = False) -> Target:
    """Read a URL strictly. Raises BadTarget for a scheme that cannot be fetched, or an unclear URL.

    `may_be_hidden`: the name may begin with a dot, which none in the store does.
    """

    def refuse(why: str) -> BadTarget:
        return BadTarget(f"Given URL {hide_query(url)[:500]} is refused: {why}")

    if len(url) > MAX_URL_BYTES:
        raise refuse(f"it has more than {MAX_URL_BYTES} characters")
    if not _PLAIN.fullmatch(url):
        raise refuse("it holds characters that no URL has unescaped (a fragment counts as one)")
    found = _URL.fullmatch(url)
    if found is None or (scheme := found[1].lower()) not in (*DEFAULT_PORTS, "file", *SCHEMES, SIGNED):
        raise refuse(f"only http, https, file, {', '.join(STORE_SCHEMES[:-1])} and {STORE_SCHEMES[-1]} are fetched")
    authority, path, query = found[2], found[3], found[4] or ""
    if any(part in (".", "..") for part in unquote(unquote(path)).replace("\\", "/").split("/")):
        raise refuse("its path leads through `.` or `..`")
    if re.search(r"%(?![0-9A-Fa-f]{2})|%00|%2[fF]|%5[cC]", path):
        raise refuse("its path holds an invalid escape, or one that hides a separator")
    if not _FILE_NAME.fullmatch(path.rpartition("/")[2].removeprefix("." if may_be_hidden else "")):
        raise refuse("its path ends with no name that a file in the store can have")
    if scheme == "file":
        if authority.lower() not in ("", "localhost") or query:
            raise refuse("a file has no host and no query")
        return Target("file", "", 0, path, "")
    if scheme in SCHEMES or scheme == SIGNED:
        try:
            read = read_address(scheme, authority, path, query)
        except ValueError as error:
            raise refuse(str(error)) from None
        return Target(read.kind, read.host, 0, read.path, read.query, written=read.written)
    host, port = _read_authority(authority, refuse)
    default = DEFAULT_PORTS[scheme]
    return Target("https" if scheme == "https" else "http", host, port or default, path, query)


def _read_authority(authority: str, refuse: Callable[[str], BadTarget]) -> tuple[str, int]:
    if "@" in authority:
        raise refuse("user information does not belong into it")
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::([0-9]{1,5}))?", authority)
    if found is None:
        raise refuse("its host and port are invalid")
    host = found[1].removeprefix("[").removesuffix("]").lower()
    port = int(found[2]) if found[2] else 0
    if port > 65535 or (found[2] and not port):
        raise refuse(f"{found[2]} is no port")
    if authority.startswith("["):
        try:
            return ipaddress.IPv6Address(host).compressed, port
        except ValueError:
            raise refuse("its host is no IPv6 address") from None
    if _LOOKS_NUMERIC.fullmatch(host):
        try:
            return str(ipaddress.IPv4Address(host)), port
        except ValueError:
            raise refuse("its host is a number that is no IPv4 address in its usual form") from None
    if not _HOST.fullmatch(host):
        raise refuse("its host is no name in lower ASCII letters, digits, dashes and dots")
    return host, port


class AllowedUrls:
    """The operator's patterns: a URL is allowed when one matches its normal form as a whole, whatever the case."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]
        self._plain = [_plain_text(pattern) for pattern in patterns]

    def check(self, target: Target) -> None:
        """Raises AddressNotAllowed, in TorchServe's words, if no pattern matches."""
        forms = [target.url]
        if target.written:
            forms.append(f"{target.written}{target.path}{target.query}")
        if not any(pattern.fullmatch(form) for pattern in self._patterns for form in forms):
            raise AddressNotAllowed(hide_query(target.url))

    def names_host(self, target: Target) -> bool:
        """Whether a matching pattern spells the host out: only then it may be a host of a private network."""
        host = f"[{target.host}]" if ":" in target.host else target.host
        literal = re.compile(rf"{re.escape(host)}(:{target.port})?", re.IGNORECASE)
        return any(
            plain is not None and literal.fullmatch(plain) is not None
            for pattern, plain in zip(self._patterns, self._plain, strict=True)
            if pattern.fullmatch(target.url)
        )


# A port that a pattern leaves open matches digits alone: `[0-9]+`, `\d{4}`, `80[0-9]{2}`.
_DIGIT = r"(?:[0-9]|\\d|\[[0-9\-]+\])"
_OPEN_PORT = rf"\\?:{_DIGIT}(?:{_DIGIT}|[+*?]|\{{[0-9]+(?:,[0-9]*)?\}})*"
_SPELLED_OUT = re.compile(
    r"(?:https?\??|http\((?:\?:)?s\)\?|\((?:\?:)?https?\|https?\))"  # the scheme, also `https?` and `http(s)?`
    r"\\?:(?:\\?/){2}"
    r"(?P<host>(?:\\[.\-:\[\]]|[A-Za-z0-9.\-:_])+)"
    rf"(?:{_OPEN_PORT}|\((?:\?:)?{_OPEN_PORT}\)\??)?"
    r"(?=\\?/|$)"
)


def _plain_text(pattern: str) -> str | None:
    """The host, and the port unless it is open, that a pattern spells out; None if it may match other hosts."""
    found = _SPELLED_OUT.match(pattern.removeprefix("^"))
    return re.sub(r"\\(.)", r"\1", found["host"]) if found else None


def check_address(target: Target, address: IPAddress, *, is_named: bool) -> None:
    """Raises ArchiveNotFound for a forbidden address. `is_named`: a pattern spells the host out."""
    meanings = _meanings(address)
    if any(_is_never_fetched(each) for each in meanings):
        raise BadTarget(
            f"Given URL {hide_query(target.url)} is refused: {target.host} is {address}, which is never fetched"
        )
    if not is_named and not all(each.is_global for each in meanings):
        raise BadTarget(
            f"Given URL {hide_query(target.url)} is refused: {target.host} is {address}, an address that is not "
            "public; a pattern of allowed_urls must spell the host out to allow that"
        )


def _is_never_fetched(address: IPAddress) -> bool:
    return (
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or (address.is_reserved and not address.is_loopback)
        or any(address in network for network in _NEVER)
    )


def _meanings(address: IPAddress) -> list[IPAddress]:
    """The address, and the IPv4 addresses that an IPv6 one may stand for.

    Other forms that contain one (`64:ff9b::a9fe:a9fe` of NAT64, `::169.254.169.254`) are themselves reserved.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]  # that IPv4 address and nothing else
    return [address, *filter(None, (address.sixtofour, *(address.teredo or ())))]


def resolve_host(target: Target) -> list[IPAddress]:
    """The addresses of a target's host, each once. Blocks. Raises OSError without any."""
    found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found))
