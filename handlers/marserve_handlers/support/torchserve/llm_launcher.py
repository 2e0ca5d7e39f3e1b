"""`python -m ts.llm_launcher`: from the name of a language model to a server that answers for it.

Writes a model folder (no archive) into the model store, starts `torchserve` without snapshots, and waits.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from marserve_handlers.support.torchserve.hub import download_model
from marserve_handlers.support.torchserve.launcher import find_command, start, stop


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, of this process where none are given."""
    parser = argparse.ArgumentParser(prog="python -m ts.llm_launcher", description="Serve a language model.")
    add = parser.add_argument
    add("--model_name", default="model", help="Name under which the model is served.")
    add("--model_store", default="model_store", help="Folder that the model is written into.")
    add("--model_id", default="meta-llama/Meta-Llama-3.1-8B-Instruct", help="Name on the hub, or a folder.")
    add("--disable_token_auth", action="store_true", help="Serve without tokens.")
    add("--engine", choices=("vllm", "trt_llm"), default="vllm", help="What runs the model.")
    add("--dtype", default="bfloat16", help="Type of the weights.")
    add("--startup_timeout", type=int, default=1200, help="Seconds that loading the model may take.")
    add("--vllm_engine.max_num_seqs", type=int, default=256, help="Most sequences at once.")
    add("--vllm_engine.max_model_len", type=int, default=None, help="Longest context, in tokens.")
    add("--vllm_engine.download_dir", default=None, help="Folder that vLLM downloads models into.")
    add("--trt_llm_engine.max_batch_size", type=int, default=4, help="Most requests at once.")
    add("--trt_llm_engine.kv_cache_free_gpu_memory_fraction", type=float, default=0.1, help="Share of memory for keys.")
    return parser.parse_args(argv)


def get_model_config(args: argparse.Namespace, model_snapshot_path: str | None = None) -> dict[str, Any]:
    """The model's configuration. `model_snapshot_path` is the folder of the downloaded model, for TensorRT-LLM."""
    config: dict[str, Any] = {
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 1,
        "maxBatchDelay": 100,
        "responseTimeout": 1200,
        "startupTimeout": args.startup_timeout,
        "deviceType": "gpu",
        "asyncCommunication": True,
    }
    devices = _count_gpus()
    if args.engine == "trt_llm":
        folder = model_snapshot_path or args.model_id
        fraction = getattr(args, "trt_llm_engine.kv_cache_free_gpu_memory_fraction")
        handler: dict[str, Any] = {
            "tokenizer_dir": folder,
            "engine_dir": create_tensorrt_llm_engine(
                args.model_store,
                args.model_name,
                args.dtype,
                folder,
                getattr(args, "trt_llm_engine.max_batch_size"),
            ),
            "kv_cache_config": {"free_gpu_memory_fraction": fraction},
        }
    else:
        engine = {
            "max_num_seqs": getattr(args, "vllm_engine.max_num_seqs"),
            "max_model_len": getattr(args, "vllm_engine.max_model_len"),
            "download_dir": getattr(args, "vllm_engine.download_dir"),
            "tensor_parallel_size": max(1, devices),
            "dtype": args.dtype,
        }
        handler = {
            "model_path": args.model_id,
            "vllm_engine_config": {key: value for key, value in engine.items() if value is not None},
        }
        if devices > 1:
            config |= {"parallelType": "custom", "parallelLevel": devices}
    return {**config, "handler": handler}


def create_mar_file(args: argparse.Namespace, model_snapshot_path: str | None = None) -> str:
    """Write the model's folder into the model store, over one of the same name: its path."""
    config = get_model_config(args, model_snapshot_path)
    os.makedirs(args.model_store, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "model-config.yaml")
        file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        subprocess.run(
            [
                find_command("torch-model-archiver"),
                *("--model-name", args.model_name),
                *("--version", "1.0"),
                *("--handler", f"{args.engine}_handler"),
                *("--config-file", str(file)),
                *("--archive-format", "no-archive"),
                *("--export-path", args.model_store),
                "--force",
            ],
            check=True,
        )
    return os.path.join(str(args.model_store), str(args.model_name))


def create_tensorrt_llm_engine(
    model_store: str, model_name: str, dtype: str, snapshot_path: str, max_batch_size: int
) -> str:
    """Build TensorRT-LLM's engine of the model of `snapshot_path`, and give the folder that it was saved to."""
    trt = importlib.import_module("tensorrt_llm")
    folder = os.path.abspath(os.path.join(model_store, f"{model_name}-engine"))
    engine = trt.LLM(model=snapshot_path, dtype=dtype, max_batch_size=max_batch_size)
    engine.save(folder)
    return folder


def main(args: argparse.Namespace | None = None) -> None:
    """Write the model, serve it, and wait until interrupted. Exits with status 1 when the server ends before that."""
    args = read_arguments() if args is None else args
    is_local = os.path.isdir(args.model_id)
    snapshot = None
    if args.engine == "trt_llm":
        snapshot = os.path.abspath(args.model_id) if is_local else download_model(args.model_id, model_path=".cache")
    create_mar_file(args, snapshot)
    printed = start(
        model_store=args.model_store,
        no_config_snapshots=True,
        disable_token=args.disable_token_auth,
        models=args.model_name,
    )
    try:
        while printed.get() is not None:
            pass
        sys.exit("The server has ended; what it printed says why.")
    except KeyboardInterrupt:
        sys.stdout.write("Stopping ...\n")
    finally:
        stop()


def _count_gpus() -> int:
    """How many accelerators torch sees; 0 without torch."""
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        return 0
    count: int = torch.cuda.device_count()
    return count
