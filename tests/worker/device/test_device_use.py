"""Tests for models that cannot compute on the device that their worker was given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from marserve.messages import Load
from marserve.worker.device.device_use import check_device_use
from marserve.worker.load import LoadedModel
from marserve_handlers.errors import ModelNotLoadable
from support.model_context import make_context

LOAD = Load("m", "1.0", "", "h.py", None, None, 4, gpu_id=1, must_use_device=True)
REASON = "The worker was given device 1, which torch cannot use"


class Raises(ModuleType):
    """A module that raises at names that it does not have, as some of torch's."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.fixture(autouse=True)
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A process that has imported torch, which cannot use device 1; which devices were asked about."""
    numbers: list[int] = []

    def why_unusable(gpu_id: int) -> str:
        numbers.append(gpu_id)
        return REASON if gpu_id == 1 else ""

    module = ModuleType("marserve_handlers.runtimes.assigned")
    module.why_unusable = why_unusable  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch = ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.classes", Raises("torch.classes"))
    author = ModuleType("author")
    author.__file__ = str(tmp_path / "author.py")
    author.anything = torch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "author", author)
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    return numbers


def model_of(folder: Path, **load: object) -> LoadedModel:
    """A loaded model."""
    order = msgspec.structs.replace(LOAD, model_dir=str(folder), **load)
    return LoadedModel(lambda rows, context: rows, make_context(), order)


def test_a_handler_that_went_on_without_its_device_is_not_served(tmp_path: Path) -> None:
    """It asked `is_available()`, and computes on the processor."""
    with pytest.raises(ModelNotLoadable, match="given device 1"):
        check_device_use(model_of(tmp_path))


@pytest.mark.parametrize(
    ("load", "other"), [({"must_use_device": False}, None), ({}, "onnxruntime")], ids=["torchserve", "another runtime"]
)
def test_it_is_a_warning_where_devices_need_not_be_used_or_another_runtime_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: dict[str, object], other: str | None
) -> None:
    """Describe has it."""
    if other is not None:
        monkeypatch.setitem(sys.modules, other, ModuleType(other))
    model = model_of(tmp_path, **load)

    check_device_use(model)

    assert model.context.load_warnings == [REASON]


def test_nothing_is_asked_without_a_device_without_torch_and_of_handlers_that_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    """A device that can be used is no word worth."""
    looked = model_of(tmp_path)
    looked.context.computes_on = "CUDAExecutionProvider"
    for model in (model_of(tmp_path, gpu_id=None), looked):
        check_device_use(model)
    check_device_use(model_of(tmp_path, gpu_id=0))
    monkeypatch.delitem(sys.modules, "torch")
    check_device_use(model_of(tmp_path))

    assert asked == [0]


@pytest.mark.parametrize("name", ["nn", "Pipeline", "nothing"])
def test_a_handler_that_has_nothing_of_torchs_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[int], name: str
) -> None:
    """Though its process has imported torch; a module or a class of torch's or transformers' is something."""
    values: dict[str, Any] = {
        "nn": ModuleType("torch.nn"),
        "Pipeline": type("Pipeline", (), {"__module__": "transformers.pipelines"}),
        "nothing": json,
    }
    sys.modules["author"].anything = values[name]  # type: ignore[attr-defined]

    if name == "nothing":
        check_device_use(model_of(tmp_path))
    else:
        with pytest.raises(ModelNotLoadable):
            check_device_use(model_of(tmp_path))

    assert asked == [1][: name != "nothing"]
