"""What a cache of downloads has used of its limit."""

from __future__ import annotations

from marserve.store.fetching.cache import Cache


def used_bytes(cache: Cache) -> int:
    """The bytes of the files that count: what a model store links to costs the cache nothing."""
    counted = (path.stat() for path in (cache.folder / "blobs").iterdir())
    return sum(status.st_size for status in counted if status.st_nlink == 1)
