"""Tries a start: reads and builds everything as a start does, and looks at every archive, but serves nothing.

It starts no worker, binds no port and fetches nothing. It writes into a folder that is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from marserve.app.building.access import prepare_access
from marserve.app.building.cannot_start import CannotStart
from marserve.app.building.parts import Parts, build_parts
from marserve.errors import BadSettings, MarserveError
from marserve.machine.describe import describe_machine
from marserve.registry.changes.load_at_start import parameters_of_model, parameters_of_version
from marserve.registry.intake.registration import RegisterParameters
from marserve.registry.intake.startup import models_to_load
from marserve.settings import Settings
from marserve.store.addresses.fetch_guard import hide_query, is_address
from marserve.store.sources.local import LocalStore
from marserve.telemetry.logs.logs import configure_logs

_WRITTEN_FOLDERS = ("temporary_folder", "log_location", "state_folder", "download_cache", "environment_folder")


def try_start(settings: Settings) -> list[BadSettings]:
    """The errors that would keep the server from starting, or a model of the start from loading.

    Each has its key, if it is about one, and the place where that is set. Blocks for about a second.
    """
    with tempfile.TemporaryDirectory(prefix="marserve-trial-") as folder:
        return asyncio.run(_try(_apart(settings, Path(folder))))


def _apart(settings: Settings, folder: Path) -> Settings:
    """The settings, changed so that the server writes only in `folder`."""
    apart: dict[str, Any] = {name: folder / name for name in _WRITTEN_FOLDERS}
    for path in apart.values():
        path.mkdir()
    return replace(settings, **apart, metrics_location=None, token_file=folder / "key_file.json")


async def _try(settings: Settings) -> list[BadSettings]:
    logs = configure_logs(folder=settings.log_location, to_stdout=False)
    try:
        async with contextlib.AsyncExitStack() as stack:
            is_strict, uses_devices = settings.entry == "marserve", settings.number_of_gpu != 0
            machine = await asyncio.to_thread(
                describe_machine, os.environ, is_strict=is_strict, uses_devices=uses_devices
            )
            access = await prepare_access(settings)
            parts = await build_parts(settings, logs, machine, access, stack, lambda reason: None)
            return [problem async for problem in _try_models(settings, parts)]
    except CannotStart as error:
        cause = error.__cause__
        return [_placed(cause if isinstance(cause, BadSettings) else BadSettings(str(error)), settings)]
    except BadSettings as error:
        return [_placed(error, settings)]
    finally:
        logs.close()


async def _try_models(settings: Settings, parts: Parts) -> AsyncIterator[BadSettings]:
    for key, parameters in _models(settings, parts):
        if is_address(parameters.url):
            continue
        try:
            await parts.registry.rehearsal.register(parameters)
        except MarserveError as error:
            said = f"{hide_query(parameters.url)} would not be loaded: {error}"
            yield _placed(BadSettings(said, key), settings)


def _models(settings: Settings, parts: Parts) -> Iterator[tuple[str, RegisterParameters]]:
    """The models of the start, each with the key that names it: of a snapshot, else of `load_models`."""
    if parts.desired.place is not None:
        return
    if parts.restored is not None:
        for version in parts.restored:
            yield "model_snapshot", parameters_of_version(version)
    elif settings.load_models:
        names = LocalStore(settings.model_store, roots=settings.model_roots).names()
        for model in models_to_load(settings.load_models, names):
            yield "load_models", parameters_of_model(model)


def _placed(error: BadSettings, settings: Settings) -> BadSettings:
    """The error with the place of its key added, if it lacks it."""
    origins = settings.origins.get(error.key or "", ())
    if error.source is not None or not origins:
        return error
    return BadSettings(error.message, error.key, origins[-1].where)
