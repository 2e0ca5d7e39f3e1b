"""Times the steps of a handler where its model's configuration asks for it (`handler: {profile: true}`)."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def timed(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate a handler's method: each call adds the metric `ts_handler_{name}`, in milliseconds.

    Nothing is measured unless the handler has a context whose configuration has `handler: {profile: true}`. Work
    queued on a CUDA device is waited for, so that it is counted where it was asked for.
    """
    metric = f"ts_handler_{func.__name__}"

    @functools.wraps(func)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        handler = args[0] if args else None
        if not _is_profiled(handler):
            return func(*args, **kwargs)
        _finish_device_work()
        began = time.perf_counter()
        result = func(*args, **kwargs)
        _finish_device_work()
        metrics = handler.context.metrics  # type: ignore[attr-defined] # _is_profiled has looked
        if metrics is not None:
            metrics.add_time(metric, round((time.perf_counter() - began) * 1000, 3), None, "ms")
        return result

    return run


def timeit(func: Callable[P, R]) -> Callable[P, R]:
    """Decorate any function: each call logs its name and how long it took, in milliseconds."""

    @functools.wraps(func)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        began = time.perf_counter()
        try:
            return func(*args, **kwargs)
        finally:
            logger.info("%s took %.3f ms", func.__qualname__, (time.perf_counter() - began) * 1000)

    return run


def _is_profiled(handler: Any) -> bool:
    context = getattr(handler, "context", None)
    config = getattr(context, "model_yaml_config", None)
    if not config:
        return False
    section = config.get("handler")
    return isinstance(section, dict) and section.get("profile") is True


def _finish_device_work() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
