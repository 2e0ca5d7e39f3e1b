"""DeepSpeed's engine, with a stand-in for DeepSpeed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marserve_handlers.distributed.deepspeed import BaseDeepSpeedHandler, create_checkpoints_json, get_ds_engine
from marserve_handlers.errors import ModelNotLoadable
from support.model_context import make_context


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What DeepSpeed was asked for."""
    asked: list[Any] = []
    monkeypatch.setitem(
        sys.modules,
        "deepspeed",
        SimpleNamespace(init_inference=lambda model, config: asked.append((model, config)) or "engine"),
    )
    return asked


def test_the_engine_is_set_up_as_the_configuration_says(tmp_path: Path, engines: list[Any]) -> None:
    """Its own file, and the checkpoints' list and folder."""
    (tmp_path / "ds.json").write_text('{"dtype": "float16"}')
    config = {"deepspeed": {"config": "ds.json", "checkpoint": "list.json"}, "handler": {"model_path": "weights"}}

    assert get_ds_engine("model", make_context(tmp_path, config=config)) == "engine"
    assert engines == [
        (
            "model",
            {
                "dtype": "float16",
                "checkpoint": str(tmp_path / "list.json"),
                "base_dir": str(tmp_path / "weights"),
            },
        )
    ]


@pytest.mark.parametrize("config", [{}, {"deepspeed": {}}, {"deepspeed": {"config": "missing.json"}}])
def test_without_its_file_there_is_no_engine(tmp_path: Path, engines: list[Any], config: dict[str, Any]) -> None:
    """A sentence instead."""
    with pytest.raises(ModelNotLoadable, match=r"deepspeed\.config|cannot be read"):
        get_ds_engine("model", make_context(tmp_path, config=config))


def test_without_deepspeed_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which package is missing."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    (tmp_path / "ds.json").write_text("{}")

    with pytest.raises(ModelNotLoadable, match="needs the package deepspeed"):
        get_ds_engine("model", make_context(tmp_path, config={"deepspeed": {"config": "ds.json"}}))


def test_checkpoints_are_listed(tmp_path: Path) -> None:
    """All weight files below the folder, by their names in it."""
    (tmp_path / "weights" / "b").mkdir(parents=True)
    for name in ("b/1.bin", "2.pt", "config.json", "3.safetensors"):
        (tmp_path / "weights" / name).write_bytes(b"")

    create_checkpoints_json(str(tmp_path / "weights"), str(tmp_path / "list.json"))

    document = json.loads((tmp_path / "list.json").read_text())
    assert document["checkpoints"] == ["2.pt", "3.safetensors", "b/1.bin"]


@pytest.mark.torch
def test_a_handler_knows_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment of its group; it loads no model."""
    pytest.importorskip("torch")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    class Own(BaseDeepSpeedHandler):
        """An author's."""

    handler = Own()
    handler.initialize(make_context())

    assert (handler.local_rank, handler.world_size, handler.model) == (1, 2, None)
    assert handler.device.type in ("cpu", "cuda")
