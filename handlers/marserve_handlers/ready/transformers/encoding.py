"""Tasks with one pass of the model: classes of texts, tokens and pictures, masked words, embeddings.

All but the embeddings are the library's own pipelines, called with a batch: it is padded by the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from marserve_handlers.ready.options import ALL

_USUAL_TOP_K = {"text-classification": 1, "fill-mask": 5, "image-classification": 5}


class Encoder(Protocol):
    """Answers a batch of values, each independent of the others."""

    def answer(self, values: Sequence[Any]) -> list[Any]:
        """One answer for each value."""


class Pipeline:
    """A pipeline of the library. `limit` is the most tokens of a text; longer ones are cut."""

    def __init__(
        self, library: Any, task: str, model: Any, reader: Any, options: Mapping[str, Any], limit: int | None
    ) -> None:
        place = "image_processor" if task == "image-classification" else "tokenizer"
        self._pipeline = library.pipeline(task, model=model, device=model.device, **{place: reader})
        self._arguments = _arguments(task, options, model, limit)

    def answer(self, values: Sequence[Any]) -> list[Any]:
        """What the pipeline gives for each value, as JSON has it."""
        found = self._pipeline(list(values), batch_size=len(values), **self._arguments)
        # Some pipelines give the one answer alone then, not in a list: a list of dicts, or of one list a mask.
        if len(values) == 1 and found and (len(found) != 1 or isinstance(found[0], Mapping)):
            found = [found]
        return [_plain(each) for each in found]


def _arguments(task: str, options: Mapping[str, Any], model: Any, limit: int | None) -> dict[str, Any]:
    """The arguments of the pipeline's call."""
    arguments: dict[str, Any] = {}
    if task in _USUAL_TOP_K:
        top_k = options["top_k"] or _USUAL_TOP_K[task]
        classes = model.config.vocab_size if task == "fill-mask" else model.config.num_labels
        arguments["top_k"] = classes if top_k == ALL else min(top_k, classes)
    if options["function_to_apply"] is not None:
        arguments["function_to_apply"] = options["function_to_apply"]
    if task == "token-classification":
        arguments["aggregation_strategy"] = options["aggregation_strategy"]
    cut = {} if limit is None else {"truncation": True, "max_length": limit}
    if task == "text-classification":
        arguments |= cut
    elif task == "fill-mask":
        arguments["tokenizer_kwargs"] = cut
    return arguments


class Embeddings:
    """The vectors of texts: the mean over their tokens' last hidden states, or the first token's with `cls`."""

    def __init__(
        self, torch: Any, model: Any, tokenizer: Any, limit: int | None, *, pooling: str, normalize: bool
    ) -> None:
        self._torch = torch
        self._model = model
        self._tokenizer = tokenizer
        self._limit = limit
        self._is_mean = pooling == "mean"
        self._is_normalized = normalize

    def answer(self, values: Sequence[Any]) -> list[Any]:
        """A list of numbers for each text; padding counts nowhere."""
        batch = self._tokenizer(
            list(values), padding=True, truncation=self._limit is not None, max_length=self._limit, return_tensors="pt"
        ).to(self._model.device)
        with self._torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state
            if self._is_mean:
                mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
                vectors = (hidden * mask).sum(1) / mask.sum(1)
            else:
                vectors = hidden[:, 0]
            if self._is_normalized:
                vectors = self._torch.nn.functional.normalize(vectors, dim=-1)
            found: list[Any] = vectors.float().tolist()
        return found


def _plain(value: Any) -> Any:
    """The same with numbers of Python for those of numpy."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.item() if hasattr(value, "item") else value
