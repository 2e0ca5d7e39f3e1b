"""Fetches what lies below a prefix, of a store or of the web, into a folder of this machine, once for all.

    address/ → may it be fetched → list it → a folder named by what the list says (keys, sizes, ETags)
             → there already: a shared lease; else an exclusive one: each object once into a folder beside it, renamed

Processes of the machine that want the same wait for the one that fetches. A folder in use is never deleted. Blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from marserve.errors import AddressNotAllowed
from marserve.files.leased_folders import Lease, LeasedFolders, bytes_below, discard
from marserve.store.addresses.fetch_guard import (
    OBJECT_SCHEMES,
    WEB_SCHEMES,
    AllowedUrls,
    BadTarget,
    Target,
    hide_query,
    parse_target,
)
from marserve.store.fetching.download import DownloadOptions, download
from marserve.store.fetching.download_list import Download
from marserve.store.sources.source import Entry, Failed, Listing, Missing, SourceError

MOST_OBJECTS = 20_000
_SUFFIX = ".part"
_LOOK_S = 0.05
# A name that a file in a store can have, so that a prefix can be judged as an address.
_SAMPLE = "object"
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.][A-Za-z0-9._~+@=,!$&'()\-]{0,199}")
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
ListAt = Callable[[Target], Listing]
"""Makes the listing of an allowed address whose path is a prefix of keys. Asks the store nothing."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The address of a prefix: `base` is where all of it lies, and ends in a slash; `shown` is what was written."""

    base: Target
    shown: str

    @property
    def key(self) -> str:
        """The beginning of the keys."""
        return unquote(self.base.key)

    def target_of(self, name: str) -> Target:
        """The address of an object directly below it."""
        return replace(self.base, path=self.base.path + name)


@dataclass(frozen=True, slots=True)
class Kept:
    """Where folders are kept, and how many bytes they may have with those that are in use."""

    folder: Path
    most_bytes: float = 0.0

    def folders(self) -> LeasedFolders:
        """The folders. Makes the place if it is missing. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return LeasedFolders(self.folder, bytes_below, suffix=_SUFFIX)


def is_prefix(address: str) -> bool:
    """Whether it is an address of what lies below it: it ends in a slash."""
    return "://" in address and address.endswith("/")


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors of a source name this file below the prefix."""
    try:
        yield
    except SourceError as error:
        raise type(error)(f"{name}: {error}") from error


def can_be_name(name: str) -> bool:
    """Whether a file directly below a prefix can have that name."""
    return _NAME.fullmatch(name) is not None


def read_prefix(address: str, allowed: AllowedUrls) -> Prefix:
    """Judge the address of a prefix. Raises BadTarget for one that has no files below it, AddressNotAllowed.

    Of the web it is not known yet what lies there, so that only the single files are held against `allowed`.
    """
    sample = parse_target(address + _SAMPLE)
    if sample.scheme not in (*OBJECT_SCHEMES, *WEB_SCHEMES):
        of_hub = "; https://HUB/ORGANISATION/NAME/resolve/REVISION/ names the same files" * (sample.scheme == "hf")
        raise BadTarget(
            f"Given URL {hide_query(address)} is refused: what lies below {sample.scheme}:// is not fetched; "
            f"s3://, gs://, az://, https:// and http:// are{of_hub}"
        )
    if sample.query or not sample.path.endswith(f"/{_SAMPLE}"):
        raise BadTarget(f"Given URL {hide_query(address)} is refused: the address of a prefix has no version or query")
    try:
        if sample.scheme in OBJECT_SCHEMES:
            allowed.check(sample)
    except AddressNotAllowed:
        raise AddressNotAllowed(hide_query(address)) from None  # not the sample's
    return Prefix(replace(sample, path=sample.path[: -len(_SAMPLE)]), address)


def fetch_below(
    prefix: Prefix,
    list_at: ListAt,
    allowed: AllowedUrls,
    wants: Callable[[Sequence[str]], Iterable[str]],
    kept: Kept,
    options: DownloadOptions,
    listed: Download,
) -> Lease:
    """A lease of the folder with the objects below the prefix that `wants` chooses of their names.

    Raises SourceError, OSError, and AddressNotAllowed for an object that may not be fetched; nothing is left after one.
    """
    with contextlib.closing(list_at(prefix.base)) as listing, listed.cancel.calling(listing.close):
        try:
            entries = _chosen(prefix, listing, wants, options.max_bytes)
        except SourceError:
            listed.cancel.check()
            raise
        for name in entries:
            allowed.check(prefix.target_of(name))
        name, folders = _name_of(prefix, entries), kept.folders()
        while True:
            listed.cancel.check()
            lease = folders.lease(name)
            if lease is None:  # another process fetches it, or deletes it
                listed.cancel.wait(_LOOK_S)
                continue
            if not lease.is_exclusive:
                listed.found(bytes_below(lease.folder))
                return lease
            try:
                _fetch(listing, entries, folders, name, options, listed)
                if not folders.share(lease):
                    continue
            except BaseException:
                lease.release()
                raise
            folders.prune(kept.most_bytes)
            return lease


def _chosen(
    prefix: Prefix, listing: Listing, wants: Callable[[Sequence[str]], Iterable[str]], most_bytes: int
) -> dict[str, Entry]:
    """What is to be fetched, by its name; what lies in folders below the prefix, or could be no file, is not."""
    found: dict[str, Entry] = {}
    for number, entry in enumerate(listing.list(prefix.key), 1):
        if number > MOST_OBJECTS:
            raise Failed(f"more than {MOST_OBJECTS} objects lie below it")
        name = entry.key.removeprefix(prefix.key)
        if can_be_name(name):
            found[name] = entry
    if not found:
        raise Missing("no object lies directly below it")
    chosen = {name: found[name] for name in sorted(found.keys() & set(wants(sorted(found))))}
    size = sum(entry.size or 0 for entry in chosen.values())
    if size > most_bytes:
        raise Failed(f"what lies below it has {size} bytes; at most {most_bytes} are fetched")
    if not chosen:
        raise Missing(f"of {len(found)} objects below it none is of a checkpoint")
    return chosen


def _name_of(prefix: Prefix, entries: dict[str, Entry]) -> str:
    """A word for exactly this content. Without ETags it is that of sizes and times, without these a new one."""
    what = [[name, entry.size, entry.etag or entry.modified or secrets.token_hex()] for name, entry in entries.items()]
    return hashlib.sha256(json.dumps([prefix.base.url, what]).encode()).hexdigest()


def _fetch(
    listing: Listing,
    entries: dict[str, Entry],
    folders: LeasedFolders,
    name: str,
    options: DownloadOptions,
    listed: Download,
) -> None:
    """Each object once, into a folder that gets its name at the end."""
    whole = sum(entry.size or 0 for entry in entries.values())
    staged, before = folders.stage(name), 0
    try:
        for path, entry in entries.items():
            descriptor = os.open(staged / path, _NEW_FILE, 0o600)
            try:
                with naming(path), contextlib.closing(listing.open(entry)) as source:
                    begin = before
                    downloaded = download(
                        source,
                        descriptor,
                        options,
                        cancel=listed.cancel,
                        on_progress=lambda have, _, begin=begin: listed.progress(begin + have, whole),  # type: ignore[misc]
                    )
                now = downloaded.entry
                if now.size != entry.size or not (now.is_of(entry) if entry.etag else now.modified == entry.modified):
                    raise Failed(f"{path} was replaced while it was fetched; try again when all of it is written")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            before += entry.size or 0
        folders.publish(staged, name)
    except BaseException:
        discard(staged)
        raise
