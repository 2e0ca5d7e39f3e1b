"""Builds the fetcher of archives from the settings. A server has one for all that it fetches."""

from __future__ import annotations

import os
from collections.abc import Mapping

from marserve.errors import BadSettings
from marserve.settings.table import Settings
from marserve.store.addresses.fetch_guard import OBJECT_SCHEMES, AllowedUrls
from marserve.store.fetching.cache import Cache
from marserve.store.fetching.download import DownloadOptions
from marserve.store.fetching.download_list import DownloadList
from marserve.store.fetching.fetcher import Fetcher, FetchOptions
from marserve.store.sources.hub import Hub
from marserve.store.sources.object_store import ObjectStores


def build_fetcher(
    settings: Settings, max_bytes: int, downloads: DownloadList, environment: Mapping[str, str] = os.environ
) -> Fetcher:
    """The server's fetcher, for archives of up to `max_bytes`. Raises BadSettings. Blocks: it looks at folders."""
    objects = ObjectStores(settings.stores, environment)
    options = FetchOptions(
        DownloadOptions(connections=settings.download_connections, max_bytes=max_bytes),
        digests=settings.archive_digests,
        late_s=settings.late_archive_timeout,
        temporary=settings.temporary_folder,
    )
    return Fetcher(
        AllowedUrls(settings.allowed_urls),
        options,
        openers=dict.fromkeys(OBJECT_SCHEMES, objects.open),
        gathers={"hf": Hub(settings.stores, environment, max_bytes=max_bytes).gather},
        cache=_build_cache(settings),
        downloads=downloads,
        list_at=objects.list_at,
    )


def _build_cache(settings: Settings) -> Cache | None:
    folder = settings.download_cache
    if folder is None:
        return None
    try:
        return Cache(folder, settings.download_cache_size)
    except OSError as error:
        raise BadSettings(
            f"The folder {folder} cannot be used ({error.strerror}); name one that the server may write to, or none.",
            key="download_cache",
        ) from error
