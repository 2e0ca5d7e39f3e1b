"""What engines of language models need of their worker: its own device alone, and an end when they have died.

An engine starts processes of its own on the first devices that it sees, whatever its worker's `gpu_id`; and it may die
without its worker, which would then fail every later request.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from marserve_handlers.support.devices.device_errors import words_of_loss

logger = logging.getLogger(__name__)

_DEAD = ("EngineDeadError", "AsyncEngineDeadError", "MQEngineDeadError")
_OF_AMD = ("/dev/kfd", "/dev/nvidiactl")


def show_own_device(context: Any, parallel: int, environment: MutableMapping[str, str] | None = None) -> None:
    """Have this process, and what it starts, see the worker's own device and no other. Before anything uses a device.

    A worker of several devices sees these alone already, and an engine that computes on `parallel` ones needs them.
    """
    environment = os.environ if environment is None else environment
    gpu_id = context.system_properties.get("gpu_id")
    level = (context.model_yaml_config or {}).get("parallelLevel") or 1
    if gpu_id is None or parallel > 1 or level > 1:
        return
    name = _variable(environment)
    shown = [entry.strip() for entry in environment.get(name, "").split(",") if entry.strip()]
    if gpu_id < len(shown):
        environment[name] = shown[gpu_id]
    elif not shown:
        environment[name] = str(gpu_id)


def _variable(environment: Mapping[str, str]) -> str:
    has_amd, has_nvidia = map(os.path.exists, _OF_AMD)
    return (
        "HIP_VISIBLE_DEVICES"
        if "HIP_VISIBLE_DEVICES" in environment or (has_amd and not has_nvidia)
        else ("CUDA_VISIBLE_DEVICES")
    )


def end_if_dead(engine: Any, error: BaseException) -> None:
    """End the worker, by SystemExit, where this error of a request came of an engine that has died.

    As any death of a worker: what it had is run again by the next one.
    """
    if any(base.__name__ in _DEAD for base in type(error).__mro__) or _says_dead(engine) or words_of_loss(error):
        logger.error("the engine has died, and its worker ends: %s: %s", type(error).__name__, str(error)[:1000])
        raise SystemExit(1) from error


def _says_dead(engine: Any) -> bool:
    """By what vLLM (`errored`) and TensorRT-LLM (`_executor`) know of themselves."""
    if getattr(engine, "errored", False) is True:
        return True
    is_shutdown = getattr(getattr(engine, "_executor", None), "is_shutdown", None)
    try:
        return (is_shutdown() if callable(is_shutdown) else is_shutdown) is True
    except Exception:  # a private part of another version
        return False
