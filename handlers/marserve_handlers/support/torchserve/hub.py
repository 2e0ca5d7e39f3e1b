"""Downloads a model from the Hugging Face hub, where `huggingface_hub` is installed. Never called in a worker by us."""

from __future__ import annotations

import importlib


def download_model(
    model_id: str = "meta-llama/Meta-Llama-3.1-8B-Instruct",
    revision: str = "main",
    model_path: str = ".cache",
    use_auth_token: bool = True,
) -> str:
    """Download `revision` of `model_id` into the cache folder `model_path`, and give the folder of its files.

    Weights are taken as safetensors, never as pickles. `use_auth_token` sends the token that `hf auth login` has kept.
    Raises ModuleNotFoundError without the package huggingface_hub.
    """
    try:
        hub = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Downloading from the hub needs the package huggingface_hub: pip install huggingface_hub.", name=error.name
        ) from None
    folder: str = hub.snapshot_download(
        repo_id=model_id,
        revision=revision,
        cache_dir=model_path,
        token=use_auth_token or None,
        allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
    )
    return folder
