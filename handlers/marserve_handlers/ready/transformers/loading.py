"""Loads a model of transformers, its tokenizer and its image processor; nothing is ever downloaded.

No thread is left behind that would forbid a fork (`worker/template.py` of the server looks): torch computes with one
thread meanwhile, progress bars are off, and the tokenizer's own threads are not started.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.ready.options import check_labels, refuse
from marserve_handlers.ready.packages import needed
from marserve_handlers.ready.transformers.folder import ModelFolder
from marserve_handlers.ready.transformers.tasks import Task
from marserve_handlers.support.devices.device_errors import is_out_of_memory

HANDLER, PACKAGE = "transformers", "transformers>=5"
# A tokenizer that has no limit says so with a number beyond this.
_NO_LIMIT = 1 << 40
# Weights that a model may lack, since its task does not use them.
_UNUSED = {"embeddings": ("pooler.",)}


class Loader:
    """Loads from one folder. With `is_trusted` also pickled weights, and code that the folder brings."""

    def __init__(self, folder: ModelFolder, *, is_trusted: bool) -> None:
        # Before the library is imported: its threads do not survive a fork, and would deadlock in a worker.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.library = needed("transformers", HANDLER, PACKAGE)
        if int(self.library.__version__.partition(".")[0]) < 5:
            raise ModelNotLoadable(
                f"The handler {HANDLER} needs transformers 5 or newer; {self.library.__version__} is installed."
            )
        self.library.utils.logging.disable_progress_bar()
        self.torch = needed("torch", HANDLER, "torch")
        self._folder = folder
        self._is_trusted = is_trusted
        self._where = {"local_files_only": True, "trust_remote_code": is_trusted}

    def model(self, task: Task, device: Any, dtype: str) -> Any:
        """The model, for evaluation, on the device. Raises ModelNotLoadable if the weights lack a part of it."""
        self._refuse_own_code()
        auto_class = getattr(self.library, task.auto_class)
        with self._one_thread(), self._naming("model"):
            model, report = auto_class.from_pretrained(
                str(self._folder.path),
                **self._where,
                dtype=dtype if dtype == "auto" else getattr(self.torch, dtype),
                use_safetensors=None if self._is_trusted else True,
                output_loading_info=True,
            )
        unused = _UNUSED.get(task.name, ())
        missing = sorted(name for name in report["missing_keys"] if not name.startswith(unused))
        if missing:
            of = f" of {self._folder.architecture}" if self._folder.architecture else ""
            raise ModelNotLoadable(
                f"The weights{of} do not fit the task {task.name}: {missing[0]} is missing"
                f"{f', with {len(missing) - 1} others' if missing[1:] else ''}. Set handler.task to the task that the "
                "model was trained for."
            )
        with self._one_thread():
            return model.to(device).eval()

    def tokenizer(self) -> Any:
        """The tokenizer. Raises ModelNotLoadable without one."""
        with self._naming("tokenizer"):
            return self.library.AutoTokenizer.from_pretrained(str(self._folder.path), **self._where)

    def image_processor(self) -> Any:
        """What makes tensors of pictures."""
        with self._naming("image processor"):
            return self.library.AutoImageProcessor.from_pretrained(str(self._folder.path), **self._where)

    def _refuse_own_code(self) -> None:
        """Raise ModelNotLoadable if only code of the folder can load the model, and the operator does not trust it."""
        kind = self._folder.config.get("model_type")
        if self._is_trusted or not self._folder.config.get("auto_map") or kind in self.library.CONFIG_MAPPING:
            return
        raise ModelNotLoadable(
            f"The model's type {kind} needs code of its own (auto_map in config.json), which is run only if the "
            "operator names the archive in trusted_models."
        )

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Says of what the library raises that the folder's `what` cannot be loaded."""
        try:
            yield
        except Exception as error:  # the library raises what it stumbles over
            if is_out_of_memory(error):
                raise
            raise ModelNotLoadable(f"The model's folder has no {what} that can be loaded: {error}") from error

    @contextlib.contextmanager
    def _one_thread(self) -> Iterator[None]:
        """Has torch compute without further threads, which stay once they are started."""
        threads = self.torch.get_num_threads()
        self.torch.set_num_threads(1)
        try:
            yield
        finally:
            self.torch.set_num_threads(threads)


def limit_of(model: Any, tokenizer: Any, wanted: int | None) -> int | None:
    """The most tokens of an input: those that the model has places for, or fewer if `wanted` says so; None for any.

    Raises ModelNotLoadable if more are wanted than the model has places for.
    """
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    places = getattr(config, "max_position_embeddings", None)
    if isinstance(places, int) and places > 0:
        # Some models number places from behind the padding's number on.
        places -= max(
            (
                module.padding_idx + 1
                for name, module in model.named_modules()
                if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
            ),
            default=0,
        )
    else:
        places = None
    if wanted is not None and places is not None and wanted > places:
        raise refuse("max_length", wanted, f"a whole number from 1 to {places}, the places of the model")
    limits = [each for each in (wanted, places, tokenizer.model_max_length) if each is not None and each < _NO_LIMIT]
    return min(limits, default=None)


def set_labels(model: Any, labels: list[str] | None, mapping: Mapping[str, str] | None) -> None:
    """Name the model's classes: by the option, else by index_to_name.json, else as config.json has it."""
    if labels is not None:
        check_labels(labels, model.config.num_labels)
        model.config.id2label = dict(enumerate(labels))
    elif mapping is not None:
        known = model.config.id2label
        model.config.id2label = {number: mapping.get(str(number), name) for number, name in known.items()}


def pad_with(tokenizer: Any, model: Any) -> None:
    """Give a tokenizer without a padding token the one that ends texts, so that batches can be padded."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelNotLoadable("The tokenizer has neither a padding token nor one that ends texts.")
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
