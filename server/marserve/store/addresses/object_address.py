"""The addresses of object stores: reads the spellings in use, and writes one normal form. Pure.

`s3://bucket/key` (also `s3a`, `s3n`), `gs://bucket/key` (also `gcs`), `az://container/key` (also `azure`, `adl`,
`abfs`, `abfss`, `wasb`, `wasbs`), and with the account `abfss://container@account.dfs.core.windows.net/key`, whose
normal form is `az://container@account/key`. `hf://organisation/name@revision`, and a file behind it.
`s3+https://bucket.s3.region.amazonaws.com/key` is S3's own https address, requested with a signature: this is the
meaning of TorchServe's `s3_sse_kms=true`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from marserve.settings.shown_address import CONTAINER
from marserve.settings.stores import AZURE_HOST, SCHEMES, StoreKind

# The providers' rules, older names with underscores included; none can be mistaken for part of a host's name.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._\-]{1,220}[a-z0-9]")
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_ORGANISATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,95}")
_VERSION = {
    "s3": re.compile(r"\?versionId=[A-Za-z0-9._\-+/=]{1,1024}"),
    "gs": re.compile(r"\?generation=[0-9]{1,20}"),
    "az": re.compile(r"\?versionid=[0-9TZ:.\-]{1,40}"),
}
SIGNED = "s3+https"
_STARTS = re.compile(rf"({'|'.join(map(re.escape, (*SCHEMES, SIGNED)))})://", re.IGNORECASE)
_S3_HOST = re.compile(r"(?:([a-z0-9][a-z0-9._\-]*)\.)?s3(?:[.\-](?:dualstack\.)?[a-z0-9\-]+)?\.amazonaws\.com(?:\.cn)?")


@dataclass(frozen=True, slots=True)
class ObjectAddress:
    """The parts of an address: `host` is the bucket, for Azure with `@account` if it names one; `query` a version."""

    kind: StoreKind
    host: str
    path: str
    query: str
    written: str = ""
    """What stood in place of scheme and host, where that was another spelling."""


def is_store_address(url: str) -> bool:
    """Whether this is an address of an object store, in any of the spellings."""
    return bool(_STARTS.match(url))


def read_address(scheme: str, authority: str, path: str, query: str) -> ObjectAddress:
    """The parts of an address; `scheme` is one of `SCHEMES`, or `SIGNED`. Raises ValueError with what is wrong."""
    if "//" in path:
        raise ValueError("its key has an empty part")
    if scheme == SIGNED:
        return _read_signed(authority, path, query)
    kind = SCHEMES[scheme]
    found = _read(kind, authority, path, query)
    written = f"{scheme}://{authority}"
    return found if written == f"{kind}://{found.host}" else replace(found, written=written)


def _read_signed(authority: str, path: str, query: str) -> ObjectAddress:
    """An address with the bucket in the host, or at the beginning of the path."""
    found = _S3_HOST.fullmatch(authority.lower())
    if found is None:
        raise ValueError("s3_sse_kms asks for a signature, and this is no host of S3")
    if found[1]:
        return replace(_read("s3", found[1], path, query), written=f"https://{authority}")
    bucket, _, key = path.removeprefix("/").partition("/")
    if not key:
        raise ValueError("it names a bucket and no key")
    return replace(_read("s3", bucket, f"/{key}", query), written=f"https://{authority}/{bucket}")


def _read(kind: StoreKind, authority: str, path: str, query: str) -> ObjectAddress:
    if kind == "hf":
        if query or not _ORGANISATION.fullmatch(authority):
            raise ValueError("an address of a hub is hf://organisation/name@revision, without user, port and query")
        return ObjectAddress(kind, authority, path, "")
    if query and not _VERSION[kind].fullmatch(query):
        raise ValueError(
            "an address of an object store is a bucket and a key (and a version, as ?versionId=…), without user, port "
            "and credentials"
        )
    if kind == "az":
        return ObjectAddress(kind, _read_container(authority), path, query)
    if not _BUCKET.fullmatch(authority):
        raise ValueError("it begins with no name that a bucket can have")
    return ObjectAddress(kind, authority, path, query)


def _read_container(authority: str) -> str:
    container, at, account = AZURE_HOST.sub("", authority).partition("@")
    if not CONTAINER.fullmatch(container):
        raise ValueError("it begins with no name that a container can have")
    if at and not _ACCOUNT.fullmatch(account):
        raise ValueError("behind the container stands no account as in abfss://container@account.dfs.core.windows.net/")
    return f"{container}@{account}" if at else container
