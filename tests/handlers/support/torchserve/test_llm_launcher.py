"""From the name of a language model to a model folder."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from marserve_handlers.support.torchserve import llm_launcher
from marserve_handlers.support.torchserve.llm_launcher import create_mar_file, get_model_config, read_arguments
from support.inventory import inventory

FLAGS = [flag for flag in inventory("cli_flags") if flag["program"] == "python -m ts.llm_launcher"]


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag["flag"])
def test_every_flag_of_torchserves_launcher_is_taken(flag: dict[str, Any]) -> None:
    """With its default, and with a value."""
    name = flag["flag"].removeprefix("--")
    value = {"int": "7", "number": "0.5", "vllm|trt_llm": "trt_llm"}.get(flag["argument"], "text")

    plain = vars(read_arguments([]))[name]
    given = vars(read_arguments([flag["flag"]] if flag["argument"] is None else [flag["flag"], value]))[name]

    assert plain == (False if flag["argument"] is None else flag["default"])
    assert str(given) == ("True" if flag["argument"] is None else value)


def test_a_model_for_vllm_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker, batches of one, side by side; as many devices as there are."""
    monkeypatch.setattr(llm_launcher, "_count_gpus", lambda: 2)

    config = get_model_config(read_arguments(["--model_id", "a/b", "--vllm_engine.max_model_len", "9"]))

    assert config["handler"] == {
        "model_path": "a/b",
        "vllm_engine_config": {
            "max_num_seqs": 256,
            "max_model_len": 9,
            "tensor_parallel_size": 2,
            "dtype": "bfloat16",
        },
    }
    expected = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "asyncCommunication": True, "startupTimeout": 1200}
    assert expected.items() <= config.items()
    assert (config["parallelType"], config["parallelLevel"], config["deviceType"]) == ("custom", 2, "gpu")


def test_a_model_for_tensorrt_llm_has_an_engine_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the downloaded model, into the model store."""
    built: dict[str, Any] = {}

    class Engine:
        def __init__(self, **options: Any) -> None:
            built.update(options)

        def save(self, folder: str) -> None:
            built["folder"] = folder

    monkeypatch.setitem(sys.modules, "tensorrt_llm", SimpleNamespace(LLM=Engine))
    arguments = read_arguments(["--engine", "trt_llm", "--model_store", str(tmp_path)])

    config = get_model_config(arguments, "snapshot")

    assert built == {
        "model": "snapshot",
        "dtype": "bfloat16",
        "max_batch_size": 4,
        "folder": str(tmp_path / "model-engine"),
    }
    assert config["handler"]["engine_dir"] == built["folder"]
    assert config["handler"]["tokenizer_dir"] == "snapshot"
    assert config["handler"]["kv_cache_config"] == {"free_gpu_memory_fraction": 0.1}


def test_the_model_is_written_as_a_folder(tmp_path: Path) -> None:
    """Into the model store, over one that is there; the server loads it by its name."""
    if not (Path(sys.executable).parent / "torch-model-archiver").exists():
        pytest.skip("marserve's commands are not installed beside this Python")
    arguments = read_arguments(["--model_store", str(tmp_path / "store"), "--model_name", "llama"])

    for _ in range(2):
        folder = Path(create_mar_file(arguments))

    assert folder == tmp_path / "store" / "llama"
    assert yaml.safe_load((folder / "model-config.yaml").read_text())["handler"]["model_path"].startswith("meta-llama/")
    assert "vllm_handler" in (folder / "MAR-INF" / "MANIFEST.json").read_text()


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_the_server_runs_until_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_by_itself: bool
) -> None:
    """Started without snapshots, with the model alone; stopped in the end. One that ends before that is an error."""
    told: list[Any] = []

    class Printed:
        lines = iter(["a line\n", None])

        def get(self) -> str | None:
            line = next(self.lines)
            if line is None and not ends_by_itself:
                raise KeyboardInterrupt
            return line

    def start(**options: Any) -> Printed:
        told.append(options)
        return Printed()

    monkeypatch.setattr(llm_launcher, "create_mar_file", lambda args, snapshot: told.append(("write", snapshot)))
    monkeypatch.setattr(llm_launcher, "start", start)
    monkeypatch.setattr(llm_launcher, "stop", lambda: told.append("stop"))
    with pytest.raises(SystemExit, match="has ended") if ends_by_itself else contextlib.nullcontext():
        llm_launcher.main(read_arguments(["--model_store", str(tmp_path), "--disable_token_auth"]))

    options = {"model_store": str(tmp_path), "no_config_snapshots": True, "disable_token": True, "models": "model"}
    assert told == [("write", None), options, "stop"]
