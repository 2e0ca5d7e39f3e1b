"""The folder of an archive that holds a model of transformers: where it is, and what its files say. Imports no library.

config.json, *.safetensors, tokenizer.json, …      at the archive's top, or in one of its folders
modules.json, 1_Pooling/config.json                what sentence-transformers adds: how embeddings are pooled
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.ready.transformers.tasks import TASKS, Task, task_of

CONFIG = "config.json"
_UNSAFE_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a model. `config` is its config.json."""

    path: Path
    config: dict[str, Any]

    @property
    def architecture(self) -> str:
        """The first class that config.json names; empty if it names none."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else ""

    def find_task(self) -> Task:
        """The task of the model's class. Raises ModelNotLoadable if that does not say."""
        task = task_of(self.architecture)
        if task is None:
            named = f"names {self.architecture}" if self.architecture else "names no architecture"
            raise ModelNotLoadable(
                f"The model's task is not known: {CONFIG} {named}. Set handler.task in the model's configuration to "
                f"one of {', '.join(TASKS)}."
            )
        return task

    def check_weights(self, *, is_trusted: bool) -> None:
        """Raise ModelNotLoadable if there are no safetensors, and the operator does not trust other weights."""
        if any(self.path.glob("*.safetensors")):
            return
        others = sorted(path.name for pattern in _UNSAFE_WEIGHTS for path in self.path.glob(pattern))
        if not others:
            raise ModelNotLoadable("The model's folder holds no weights: a file that ends in .safetensors is missing.")
        if not is_trusted:
            raise ModelNotLoadable(
                f"The weights of {others[0]} are not loaded, since such files can run code: save the model with "
                "save_pretrained, which writes .safetensors, or have the operator name the archive in trusted_models."
            )

    def pooling(self) -> str | None:
        """How sentence-transformers pools this model's embeddings, None if the folder does not say.

        Raises ModelNotLoadable for a way that is neither `mean` nor `cls`.
        """
        path = self.path / "1_Pooling" / CONFIG
        if not path.is_file():
            return None
        document = _read_object(path)
        modes = [key for key, value in document.items() if key.startswith("pooling_mode_") and value is True]
        if len(modes) != 1 or modes[0] not in _POOLINGS:
            raise ModelNotLoadable(
                f"1_Pooling/{CONFIG} pools by {', '.join(modes) or 'nothing'}; set handler.pooling to mean or cls."
            )
        return _POOLINGS[modes[0]]

    def is_normalized(self) -> bool:
        """Whether sentence-transformers brings this model's embeddings to length 1."""
        path = self.path / "modules.json"
        return path.is_file() and any(
            str(module.get("type", "")).endswith("Normalize") for module in _read_list(path) if isinstance(module, dict)
        )


def find_folder(model_dir: str, name: str | None) -> ModelFolder:
    """The archive's folder of that name, else its top if that holds config.json, else its only folder that does.

    Raises ModelNotLoadable for no such folder, and for more than one.
    """
    root = Path(model_dir)
    if name is not None:
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()) or not (path / CONFIG).is_file():
            raise ModelNotLoadable(
                f"handler.model of the model's configuration is {name!r}; it must be a folder of the archive with "
                f"{CONFIG}."
            )
        return ModelFolder(path, _read_object(path / CONFIG))
    if (root / CONFIG).is_file():
        return ModelFolder(root, _read_object(root / CONFIG))
    found = sorted(path.parent for path in root.glob(f"*/{CONFIG}"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found)
        raise ModelNotLoadable(
            f"Several folders of the archive hold {CONFIG}: {names}. Name one with handler.model."
            if found
            else f"The archive holds no {CONFIG}, neither at its top nor in a folder: add the folder that "
            "save_pretrained wrote (marserve archive --extra-file FOLDER)."
        )
    return ModelFolder(found[0], _read_object(found[0] / CONFIG))


def _read_object(path: Path) -> dict[str, Any]:
    document = _read(path)
    if not isinstance(document, dict):
        raise ModelNotLoadable(f"{path.name} is no JSON object.")
    return document


def _read_list(path: Path) -> list[Any]:
    document = _read(path)
    if not isinstance(document, list):
        raise ModelNotLoadable(f"{path.name} is no JSON list.")
    return document


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelNotLoadable(f"{path.name} is not JSON: {error}") from None
