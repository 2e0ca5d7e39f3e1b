"""The block of lines that the server log begins with, under the labels that TorchServe prints.

Tools of its users look for them under `torchserve`. Under `marserve` the labels of a JVM are left out.
"""

from __future__ import annotations

import sys
import tempfile

from marserve.settings.table import KEYS, Settings
from marserve.settings.values import OPTIONAL_TEXT, TEXT

_OF_TORCHSERVE = frozenset(
    {
        *("TS Home", "Max heap size", "Netty threads", "Netty client threads"),
        *("Prefer direct buffer", "CPP log config"),
    }
)


def workers_at_start(settings: Settings, *, cores: int, accelerators: int) -> int:
    """The workers of a model of the start without a number of its own.

    Without an accelerator TorchServe starts one for each core. marserve starts one, which computes on all cores, as for
    a model that `marserve register` or `marserve run` brings.
    """
    on_cores = cores if settings.entry == "torchserve" else 1
    return settings.default_workers_per_model or accelerators or on_cores


def startup_report(settings: Settings, *, version: str, cores: int, accelerators: int) -> list[str]:
    """One line a fact. `cores` and `accelerators` are what the server may use."""
    workers = workers_at_start(settings, cores=cores, accelerators=accelerators)

    def show(name: str) -> str:
        return "N/A" if getattr(settings, name) is None else _show(settings, name) or "N/A"

    log_folder = settings.log_location or "standard output only"
    is_torchserve = settings.entry == "torchserve"
    facts: dict[str, object] = {
        "Torchserve version" if is_torchserve else "marserve version": version,
        "TS Home": "built in",
        "Current directory": settings.working_directory,
        "Temp directory": settings.temporary_folder or tempfile.gettempdir(),
        "Metrics config path": settings.metrics_config or "built in",
        "Number of GPUs": accelerators,
        "Number of CPUs": cores,
        "Max heap size": "N/A",
        "Python executable": sys.executable,
        "Config file": settings.source_file or "N/A",
        "Inference address": settings.inference_address,
        "Management address": settings.management_address,
        "Metrics address": settings.metrics_address,
        "Model Store": show("model_store"),
        "Initial Models": show("load_models"),
        "Log dir": log_folder,
        "Metrics dir": settings.metrics_location or log_folder,
        "Netty threads": show("number_of_netty_threads"),
        "Netty client threads": show("netty_client_threads"),
        "Default workers per model": workers,
        "Blacklist Regex": show("blacklist_env_vars"),
        "Maximum Response Size": show("max_response_size"),
        "Maximum Request Size": show("max_request_size"),
        "Limit Maximum Image Pixels": show("limit_max_image_pixels"),
        "Prefer direct buffer": show("prefer_direct_buffer"),
        "Allowed Urls": show("allowed_urls"),
        "Custom python dependency for model allowed": show("install_py_dep_per_model"),
        "Enable metrics API": show("enable_metrics_api"),
        "Metrics mode": show("metrics_mode"),
        "Disable system metrics": show("disable_system_metrics"),
        "Workflow Store": show("workflow_store"),
        "CPP log config": show("cpp_log_config"),
        "Model config": show("models"),
        "System metrics command": show("system_metrics_cmd"),
        "Model API enabled": show("enable_model_api"),
    }
    return [f"{label}: {fact}" for label, fact in facts.items() if is_torchserve or label not in _OF_TORCHSERVE]


def sources_report(settings: Settings) -> list[str]:
    """The source of each key that was given, a line each, and what decides about models."""
    if settings.desired_state is not None:
        kept = "written and not read" if settings.config_snapshots else "off"
        decides = (
            f"the desired state {_show(settings, 'desired_state')} decides alone (calls that change models: "
            f"{settings.desired_state_changes}; snapshots are {kept})"
        )
    elif settings.model_snapshot is not None:
        decides = f"the snapshot {settings.restored_from or 'in model_snapshot'}"
    else:
        decides = f"load_models={_show(settings, 'load_models')}" if settings.load_models else "calls"
    lines = [f"Which models there are is said by: {decides}"]
    for name, origins in sorted(settings.origins.items()):
        if origins and name in KEYS and name != "model_snapshot":
            *overruled, winner = origins
            over = "".join(f", over {origin.where}" for origin in reversed(overruled))
            lines.append(f"{name}={_show(settings, name)} is set by {winner.where}{over}")
    return lines


def _show(settings: Settings, name: str) -> str:
    """A value without its secrets; a text as it was written, before variables were replaced."""
    key, origins = KEYS[name], settings.origins.get(name, ())
    if origins and origins[-1].raw is not None and key.kind in (TEXT, OPTIONAL_TEXT):
        return key.show_text(origins[-1].raw)
    return key.show(getattr(settings, name))
