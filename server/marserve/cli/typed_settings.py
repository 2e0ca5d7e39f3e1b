"""The settings as a command reads them; messages name flags as they were typed.

It knows which settings have a flag of their own in `marserve`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from marserve.errors import BadSettings
from marserve.plugins import find_snapshot_store
from marserve.remarks import Remark
from marserve.settings import Settings, load_settings

FLAGS = {
    "model_store": "--model-store",
    "load_models": "--models",
    "default_workers_per_model": "--workers",
    "inference_address": "--inference-address",
    "management_address": "--management-address",
    "metrics_address": "--metrics-address",
    "desired_state": "--desired-state",
    "workflow_store": "--workflow-store",
}
"""The settings with a flag of their own. All others are set with `--set`."""

# Keys of a model, with the option of `marserve run` that sets them.
_OF_MODELS = {
    **dict.fromkeys(("batchSize", "batch_size"), "--batch-size"),
    **dict.fromkeys(("maxBatchDelay", "max_batch_delay"), "--max-batch-delay"),
    **dict.fromkeys(("minWorkers", "maxWorkers", "min_workers", "max_workers"), "--workers"),
    **dict.fromkeys(("deviceType", "deviceIds"), "--device"),
}


def load_as_typed(
    flags: Mapping[str, object],
    set_keys: Collection[str] = (),
    *,
    spelling: Mapping[str, str] = FLAGS,
    reads_file: bool = True,
) -> Settings:
    """The settings of this folder and environment, overridden by these flags; `set_keys` were given with `--set`.

    Raises BadSettings. Its message, and the settings' warnings, name the flags as `spelling` has them. Without
    `reads_file` this folder's settings are not read.
    """
    # The settings name every flag after its key, as TorchServe does.
    spelled = {
        _as_settings_say(key): f"--set {key}" if key in set_keys or key not in spelling else spelling[key]
        for key in flags
        if key != "ts_config"
    }
    try:
        settings = load_settings("marserve", flags, os.environ, Path.cwd(), find_snapshot_store, reads_file=reads_file)
    except BadSettings as error:
        if error.key == "ts_config":
            raise BadSettings(_say_missing_file(flags), key="ts_config") from None
        source = spelled.get(error.source or "", error.source)
        option = _OF_MODELS.get(error.key or "") if error.key in set_keys else None
        more = f", or {option} of `marserve run`" if option else ""
        raise BadSettings(f"{error.sentence}{more}", error.key, source) from None
    warnings = tuple(
        warning.said_at(spelled[warning.source])
        if isinstance(warning, Remark) and warning.source in spelled
        else warning
        for warning in settings.warnings
    )
    origins = {
        key: tuple(replace(origin, where=spelled.get(origin.where, origin.where)) for origin in found)
        for key, found in settings.origins.items()
    }
    return replace(settings, warnings=warnings, origins=origins)


def _as_settings_say(key: str) -> str:
    return "--models" if key == "load_models" else f"--{key.replace('_', '-')}"


def _say_missing_file(flags: Mapping[str, object]) -> str:
    if flags.get("ts_config"):
        typed = "--ts-config" if any(word.split("=")[0] == "--ts-config" for word in sys.argv) else "--config"
        return f"There is no settings file {flags['ts_config']} ({typed})"
    name = "MARSERVE_CONFIG_FILE" if os.environ.get("MARSERVE_CONFIG_FILE") else "TS_CONFIG_FILE"
    return f"There is no settings file {os.environ.get(name)} (variable {name})"
