"""Builds the watches of places for new versions, by the settings."""

from __future__ import annotations

import os
from pathlib import Path

from marserve.app.building.from_settings import archive_limits
from marserve.app.building.metrics import declare_families
from marserve.archive.reading.unpacked import UnpackedArchives
from marserve.arrivals.arrivals import LiveModels
from marserve.arrivals.watches import FAMILIES, Watches
from marserve.registry.intake.intake import Intake
from marserve.registry.models import Registry
from marserve.rollout.rollouts import Rollouts
from marserve.settings import Settings
from marserve.settings.watches import MODEL_STORE, WatchedPlace
from marserve.store.addresses.fetch_guard import AllowedUrls
from marserve.store.fetching.fetcher import Fetcher
from marserve.store.sources.local import LocalStore
from marserve.store.sources.object_store import ObjectStores
from marserve.telemetry.metrics.server_metrics import Metrics


def build_watches(
    settings: Settings,
    registry: Registry,
    fetcher: Fetcher,
    scratch: Path,
    rollouts: Rollouts,
    metrics: Metrics,
    archives: UnpackedArchives,
) -> Watches:
    """The watches of stores and folders; archives are unpacked below `scratch`.

    Raises BadSettings for a place that cannot be watched.
    """
    store = settings.model_store
    intake = Intake(
        LocalStore(store, roots=[*settings.model_roots, *watched_folders(settings)]),
        scratch / "arrivals",
        archive_limits(settings),
        settings.trusted_models,
        fetcher,
        archives=archives,
    )
    watches = Watches(
        models=LiveModels(registry),
        intake=intake,
        fetcher=fetcher,
        lister=ObjectStores(settings.stores, os.environ),
        allowed=AllowedUrls(settings.allowed_urls),
        model_store=store,
        interval_s=settings.watch_interval,
        settle_s=settings.watch_settle_time,
        late_s=settings.late_event_timeout,
        rollouts=rollouts,
        is_expected=lambda key: store is not None and fetcher.has_placed(store / key),
        coming=registry.coming,
    )
    for spec in watched_places(settings):
        watches.add(spec)
    declare_families(metrics, FAMILIES, watches)
    return watches


def watched_folders(settings: Settings) -> list[Path]:
    """The watched folders; archives below them are found by their absolute paths."""
    folders = [Path(each.place) for each in settings.watches if not each.is_address and each.place != MODEL_STORE]
    watches_store = settings.watch_model_store is not None or any(
        each.place == MODEL_STORE for each in settings.watches
    )
    if watches_store and settings.model_store is not None:
        folders.append(settings.model_store)
    return folders


def watched_places(settings: Settings) -> list[WatchedPlace]:
    """The places that the settings name."""
    places = list(settings.watches)
    if settings.watch_model_store is not None:
        places.insert(0, WatchedPlace(MODEL_STORE, MODEL_STORE, settings.watch_model_store))
    return places
