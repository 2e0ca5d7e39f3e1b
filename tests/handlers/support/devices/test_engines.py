"""Tests for what engines of language models need of their worker: its own device, and an end with them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from marserve_handlers.support.devices.engines import end_if_dead, show_own_device
from support.model_context import make_context


@pytest.mark.parametrize(
    ("gpu_id", "before", "after"),
    [
        (2, {}, {"CUDA_VISIBLE_DEVICES": "2"}),
        (1, {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
        (0, {"CUDA_VISIBLE_DEVICES": "MIG-a"}, {"CUDA_VISIBLE_DEVICES": "MIG-a"}),
        (1, {"HIP_VISIBLE_DEVICES": "4,5"}, {"HIP_VISIBLE_DEVICES": "5"}),
        (7, {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "0"}),
        (None, {}, {}),
    ],
)
def test_an_engine_sees_its_workers_device_alone(
    monkeypatch: pytest.MonkeyPatch, gpu_id: int | None, before: dict[str, str], after: dict[str, str]
) -> None:
    """The entry of the list that the worker has, or its number; a list that is shorter is left alone."""
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl")
    environment = dict(before)

    show_own_device(make_context(gpu_id=gpu_id), 1, environment)

    assert environment == after


def test_amds_variable_is_used_where_amds_driver_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And NVIDIA's is not."""
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/kfd")
    environment: dict[str, str] = {}

    show_own_device(make_context(gpu_id=3), 1, environment)

    assert environment == {"HIP_VISIBLE_DEVICES": "3"}


@pytest.mark.parametrize(("config", "parallel"), [({"parallelLevel": 2}, 1), ({}, 2)])
def test_an_engine_of_several_devices_sees_what_it_saw(config: dict[str, Any], parallel: int) -> None:
    """The server shows a worker of several devices these alone."""
    environment = {"CUDA_VISIBLE_DEVICES": "2,3"}

    show_own_device(make_context(gpu_id=0, config=config), parallel, environment)

    assert environment == {"CUDA_VISIBLE_DEVICES": "2,3"}


class EngineDeadError(Exception):
    """vLLM's."""


def lost(text: str) -> Exception:
    """An error of TensorRT-LLM's own."""
    error: Exception = type("RequestError", (Exception,), {"__module__": "tensorrt_llm.executor.utils"})(text)
    return error


@pytest.mark.parametrize(
    ("engine", "error"),
    [
        (None, EngineDeadError("EngineCore encountered an issue")),
        (SimpleNamespace(errored=True), ValueError("x")),
        (SimpleNamespace(_executor=SimpleNamespace(is_shutdown=lambda: True)), ValueError("x")),
        (SimpleNamespace(_executor=SimpleNamespace(is_shutdown=True)), ValueError("x")),
        (SimpleNamespace(), lost("CUDA runtime error in x: an illegal memory access was encountered")),
    ],
)
def test_a_dead_engine_ends_its_worker(engine: Any, error: Exception) -> None:
    """By its error's name, by what it knows of itself, or by the runtime's words."""
    with pytest.raises(SystemExit) as caught:
        end_if_dead(engine, error)

    assert caught.value.code == 1


def broken() -> bool:
    """Another version's."""
    raise AttributeError


@pytest.mark.parametrize(
    "engine",
    [
        SimpleNamespace(errored=False),
        SimpleNamespace(_executor=SimpleNamespace(is_shutdown=lambda: False)),
        SimpleNamespace(_executor=SimpleNamespace(is_shutdown=broken)),
        None,
    ],
)
def test_an_engine_that_lives_goes_on(engine: Any) -> None:
    """An error of one request is that request's."""
    end_if_dead(engine, ValueError("the prompt is too long"))
