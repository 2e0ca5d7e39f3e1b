"""The memory that a declared version will take, before it is loaded; and whether its archive is available at all.

The memory is declared, or estimated from the archive's directory.

Archives of the store are read in place; of remote archives the directory and the heads of weights are read by ranges,
mostly a few hundred kilobytes. An estimate has a time limit, and is None if it is not known. Everything here blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from marserve.archive.checkpoints.checkpoint import read_checkpoint
from marserve.archive.contents.weight_size import Seekable, WeightSize, weigh, weigh_file
from marserve.desired_state.document import DesiredVersion
from marserve.errors import AddressNotAllowed, MarserveError
from marserve.memory.needs import need_of
from marserve.model_options import read_value
from marserve.store.addresses.fetch_guard import hide_query, is_address
from marserve.store.addresses.pinned_digest import split_digest
from marserve.store.sources.local import LocalStore
from marserve.store.sources.source import Source, SourceError

log = logging.getLogger("marserve.rollout")

BLOCK_BYTES = 1 << 18
MOST_BYTES = 64 << 20
MOST_KEPT = 256


class MemoryCost:
    """Estimates; each archive is read once."""

    def __init__(self, store: LocalStore, open_source: Callable[[str], Source | None]) -> None:
        """`open_source` opens an address that may be fetched; it returns None without an address or ranges."""
        self._store = store
        self._open = open_source
        self._known: dict[str, WeightSize | None] = {}

    def __call__(self, version: DesiredVersion) -> int | None:
        """The bytes that the version will take with its least number of workers; None if unknown."""
        size, beside = self._size(version), self._bytes_beside(version)
        if size is None or beside is None:
            return None
        config = version.config
        declared = _bytes(config.get("memory"))
        need = need_of(
            declared_bytes=declared,
            learned=None,
            weight_bytes=size.weights + beside,
            shares_weights=config.get("workerStart") != "fresh" and config.get("deviceType") != "gpu",
            uses_devices=config.get("deviceType") == "gpu",
        )
        workers = version.workers[0] if version.workers is not None else 1
        return need.loading(workers)

    def trouble(self, version: DesiredVersion) -> str | None:
        """Why its archive is not available now: missing, not allowed or out of reach; None if it seems available.

        Of weights at an address of their own only the permission is checked.

        An archive with a digest may be in a cache, so that only the permission is checked. Others ask the origin each
        time.
        """
        url, weights = split_digest(version.source)[0], str(version.config.get("checkpoint", ""))
        if is_address(weights):
            try:
                source = self._open(f"{weights}model.safetensors")
                if source is not None:
                    source.close()
            except AddressNotAllowed:
                return str(AddressNotAllowed(hide_query(weights)))
            except (MarserveError, SourceError) as error:
                return str(error)
        if not is_address(url):
            try:
                self._store.find(url)
            except (MarserveError, OSError) as error:
                return str(error)
            return None
        try:
            source = self._open(url)
            if source is None or version.sha256 is not None:
                return None
            try:
                source.stat()
            finally:
                source.close()
        except MarserveError as error:
            return str(error)
        except (SourceError, OSError) as error:
            return f"{version_shown(url)}: {error}"
        return None

    def _bytes_beside(self, version: DesiredVersion) -> int | None:
        """The bytes of weights that lie in a folder of the store; None for those at an address, which are unknown."""
        named = str(version.config.get("checkpoint", ""))
        if is_address(named):
            return None
        try:
            found = self._store.find(named) if named else None
            return 0 if found is None or found.kind != "folder" else read_checkpoint(found.path).bytes
        except (
            MarserveError,
            OSError,
        ):  # it may lie in the archive, which counts it; else loading it says what is wrong
            return 0

    def _size(self, version: DesiredVersion) -> WeightSize | None:
        url = split_digest(version.source)[0]
        try:
            return weigh(self._store.find(url).path)
        except (MarserveError, OSError):
            pass
        if version.source not in self._known:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            self._known[version.source] = self._ask(url)
        return self._known[version.source]

    def _ask(self, url: str) -> WeightSize | None:
        try:
            source = self._open(url)
            if source is None:
                return None
            try:
                size = source.stat().size
                return None if size is None else weigh_file(cast(BinaryIO, RangeFile(source, size)), size)
            finally:
                source.close()
        except (MarserveError, SourceError, OSError) as error:
            log.info("The size of %s cannot be estimated: %s", version_shown(url), error)
            return None


def version_shown(url: str) -> str:
    """An address for logs."""
    return hide_query(url)


def _bytes(value: Any) -> int | None:
    if value is None:
        return None
    try:
        read = read_value("memory", value)
    except (KeyError, ValueError):
        return None
    return read if isinstance(read, int) else None


class RangeFile(Seekable):
    """A remote object as a file that can seek: read in blocks, and bounded in all. Raises OSError."""

    def __init__(self, source: Source, size: int) -> None:
        super().__init__(size)
        self._source = source
        self._blocks: dict[int, bytes] = {}

    def read(self, size: int = -1) -> bytes:
        """Read the next bytes; fewer than asked for only at the end."""
        end = self._size if size < 0 else min(self._size, self._at + size)
        pieces = []
        while self._at < end:
            number, begin = divmod(self._at, BLOCK_BYTES)
            piece = self._block(number)[begin : begin + end - self._at]
            if not piece:
                raise OSError("the object is shorter than it says")
            pieces.append(piece)
            self._at += len(piece)
        return b"".join(pieces)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            if (len(self._blocks) + 1) * BLOCK_BYTES > MOST_BYTES:
                raise OSError("its directory is too large to be read for an estimate")
            begin = number * BLOCK_BYTES
            end = min(self._size, begin + BLOCK_BYTES)
            with self._source.read(begin, end) as reading:
                if reading.begin != begin:
                    raise OSError("its origin has no ranges")
                self._blocks[number] = b"".join(bytes(piece) for piece in reading)
        return self._blocks[number]
