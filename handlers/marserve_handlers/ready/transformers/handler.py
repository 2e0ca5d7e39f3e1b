"""The built-in handler `transformers`: a folder that `save_pretrained` wrote, served without code of the author's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from PIL import Image

from marserve_handlers.context import Context
from marserve_handlers.errors import BadInput, BadPicture, ModelNotLoadable
from marserve_handlers.ready.handler import ReadyHandler
from marserve_handlers.ready.items import Item, join, read_fields, read_text
from marserve_handlers.ready.options import count_or_all, flag, names, text, whole, word
from marserve_handlers.ready.transformers.encoding import Embeddings, Encoder, Pipeline
from marserve_handlers.ready.transformers.folder import ModelFolder, find_folder
from marserve_handlers.ready.transformers.generation import Generation
from marserve_handlers.ready.transformers.loading import Loader, limit_of, pad_with, set_labels
from marserve_handlers.ready.transformers.tasks import KEYS_OF_TASKS, TASKS, Task
from marserve_handlers.support.labels import load_label_mapping
from marserve_handlers.support.pictures import open_picture
from marserve_handlers.support.timing import timed


class TransformersHandler(ReadyHandler):
    """Answers texts or pictures by one of `TASKS`; `keys` are those of `handler` in the model's configuration."""

    name = "transformers"
    keys = (
        word("task", TASKS),
        text("model", "the name of a folder of the archive"),
        names("labels"),
        count_or_all("top_k", None),
        word("function_to_apply", ("sigmoid", "softmax", "none")),
        word("aggregation_strategy", ("none", "simple", "first", "average", "max"), "none"),
        word("pooling", ("mean", "cls")),
        flag("normalize", None),
        whole("max_length", None),
        whole("max_new_tokens", 128),
        word("dtype", ("auto", "float32", "bfloat16", "float16"), "auto"),
    )

    def load(self, context: Context) -> None:
        """Load the folder's model for its task. Raises ModelNotLoadable."""
        folder = find_folder(self.model_dir, self.options["model"])
        named = self.options["task"]
        self.task = folder.find_task() if named is None else TASKS[named]
        self._refuse_keys_of_other_tasks(self.task)
        folder.check_weights(is_trusted=context.is_trusted)
        loader = Loader(folder, is_trusted=context.is_trusted)
        self.device = self._find_device(context.system_properties.get("gpu_id"))
        self.model = loader.model(self.task, self.device, self.options["dtype"])
        if self.task.name in KEYS_OF_TASKS["labels"]:
            path = os.path.join(self.model_dir, "index_to_name.json")
            set_labels(self.model, self.options["labels"], load_label_mapping(path) if os.path.isfile(path) else None)
        self._generation: Generation | None = None
        self._encoder: Encoder | None = None
        self._mask: int | None = None
        if self.task.name == "image-classification":
            if not context.system_properties.get("limit_max_image_pixels", True):
                Image.MAX_IMAGE_PIXELS = None
            self._encoder = Pipeline(
                loader.library, self.task.name, self.model, loader.image_processor(), self.options, None
            )
            return
        self._prepare_texts(loader, folder)

    def _prepare_texts(self, loader: Loader, folder: ModelFolder) -> None:
        tokenizer = self.tokenizer = loader.tokenizer()
        pad_with(tokenizer, self.model)
        limit = self._limit = limit_of(self.model, tokenizer, self.options["max_length"])
        if limit is not None:
            tokenizer.model_max_length = limit
        if self.task.is_generated:
            self._generation = Generation(loader.torch, self.task, self.model, tokenizer, self.options, limit)
        elif self.task.name == "embeddings":
            self._encoder = self._embeddings(loader, folder)
        else:
            self._encoder = Pipeline(loader.library, self.task.name, self.model, tokenizer, self.options, limit)
        if self.task.name == "fill-mask":
            self._mask = tokenizer.mask_token_id

    def _embeddings(self, loader: Loader, folder: ModelFolder) -> Embeddings:
        if self.model.config.is_encoder_decoder:
            raise ModelNotLoadable("The task embeddings needs a model that is an encoder; this one has a decoder, too.")
        normalize = self.options["normalize"]
        return Embeddings(
            loader.torch,
            self.model,
            self.tokenizer,
            self._limit,
            pooling=self.options["pooling"] or folder.pooling() or "mean",
            normalize=folder.is_normalized() if normalize is None else normalize,
        )

    def _refuse_keys_of_other_tasks(self, task: Task) -> None:
        for key in self.model_yaml_config.get("handler") or {}:
            tasks = KEYS_OF_TASKS.get(key)
            if tasks is not None and task.name not in tasks:
                raise ModelNotLoadable(
                    f"handler.{key} of the model's configuration is not for the task {task.name}; it is for "
                    f"{', '.join(tasks)}."
                )

    # ----------------------------------------------------------------------------------------------- answering

    def read(self, value: Any, where: str) -> Any:
        """A text, a pair of texts, a prompt or a picture. Raises BadInput."""
        fields = self.task.fields
        if isinstance(value, dict):
            read_fields(value, where, fields, "messages" if "messages" in fields and "messages" in value else fields[0])
        else:
            value = {fields[0]: value}
        field = join(where, fields[0])
        if fields[0] == "image":
            return _picture(value["image"], field)
        if self._generation is not None:
            return self._generation.read(value, where)
        said = read_text(value["text"], field)
        if self._mask is not None:
            self._check_mask(said, field)
        if "text_pair" in value:
            return {"text": said, "text_pair": read_text(value["text_pair"], join(where, "text_pair"))}
        return said

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer the items of the rows."""
        self._asked = data
        return super().inference(data, *args, **kwargs)

    def answer(self, items: Sequence[Item]) -> list[Any]:
        """One answer for each item, as the task has it."""
        if self._generation is not None:
            return self._generation.answer(items, self.context, self._asked.rows, self._asked.errors)
        assert self._encoder is not None
        return self._encoder.answer([item.value for item in items])

    def _check_mask(self, said: str, field: str) -> None:
        cut = {} if self._limit is None else {"truncation": True, "max_length": self._limit}
        if self._mask not in self.tokenizer(said, **cut)["input_ids"]:
            within = "" if self._limit is None else f" within its first {self._limit} tokens"
            raise BadInput(f"expected a text with {self.tokenizer.mask_token}{within}", field)


def _picture(value: Any, field: str) -> Any:
    """A picture: the bytes of an image file, or base64 text of them."""
    if not isinstance(value, (bytes, bytearray, str)):
        raise BadInput("expected an image file, or base64 text of one", field)
    try:
        return open_picture(value)
    except BadPicture as error:
        raise BadInput(error.message, field) from None
