"""Tasks that generate text token by token: summarisation and text generation, whole or in pieces.

Prompts of a batch with the same parameters are generated together. Between two tokens it is looked whether the client
of each has gone, or is past its deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marserve_handlers.context import Context, send_intermediate_predict_response
from marserve_handlers.errors import BadInput
from marserve_handlers.ready.items import Item, join, read_text
from marserve_handlers.ready.options import Key, flag, shown, whole
from marserve_handlers.ready.transformers.pieces import PieceStreamer, Text
from marserve_handlers.ready.transformers.tasks import Task


def _number(name: str, least: float, most: float, *, is_least_allowed: bool = True) -> Key:
    """A number from `least` (or above it) to `most`."""
    allowed = (
        f"a number {'from' if is_least_allowed else 'above'} {least:g} {'to' if is_least_allowed else 'up to'} {most:g}"
    )

    def is_allowed(value: Any) -> bool:
        return (
            type(value) in (int, float) and (least < value or (is_least_allowed and value == least)) and value <= most
        )

    return Key(name, is_allowed, allowed)


# What a request may ask for, beside `max_new_tokens`.
_PARAMETERS = {
    key.name: key
    for key in (
        flag("do_sample", None),
        _number("temperature", 0, 100, is_least_allowed=False),
        _number("top_p", 0, 1, is_least_allowed=False),
        whole("top_k", None, most=1_000_000),
        _number("repetition_penalty", 0, 10, is_least_allowed=False),
        whole("num_beams", None, most=16),
    )
}
_BEAMS = "num_beams"


@dataclass(frozen=True)
class Prompt:
    """The tokens of one prompt, the parameters of its generation, and whether its answer is sent in pieces."""

    tokens: list[int]
    parameters: dict[str, Any]
    is_streamed: bool


class Generation:
    """Answers prompts. `limit` is the most tokens of a prompt and its answer (of a text to summarise: of the text)."""

    def __init__(
        self, torch: Any, task: Task, model: Any, tokenizer: Any, options: Mapping[str, Any], limit: int | None
    ) -> None:
        self._torch = torch
        self._task = task
        self._model = model
        self._tokenizer = tokenizer
        self._limit = limit
        self._most_new = options["max_new_tokens"]
        self._is_prompt_kept = not model.config.is_encoder_decoder  # the model's output begins with the prompt
        self._known = {
            _k.name: _k for _k in (whole("max_new_tokens", None, most=self._most_new), *_PARAMETERS.values())
        }
        if self._is_prompt_kept:
            tokenizer.padding_side = "left"

    # ------------------------------------------------------------------------------------------------- reading

    def read(self, value: Mapping[str, Any], where: str) -> Prompt:
        """The prompt of an item's fields. Raises BadInput."""
        parameters = self._read_parameters(value.get("parameters"), join(where, "parameters"))
        stream = value.get("stream", False)
        if stream in (b"true", b"false"):  # of a form
            stream = stream == b"true"
        if type(stream) is not bool:
            raise BadInput(f"expected true or false, got {shown(stream)}", join(where, "stream"))
        if stream and where:
            raise BadInput("expected false: a list of items is not answered in pieces", join(where, "stream"))
        if stream and parameters.get(_BEAMS, 1) > 1:
            raise BadInput("expected 1 for an answer in pieces", join(where, f"parameters.{_BEAMS}"))
        if "messages" in value:
            tokens = self._read_messages(value, where)
        else:
            tokens = self._tokenize(read_text(value["text"], join(where, "text")))
        if self._is_prompt_kept and self._limit is not None:
            room = self._limit - parameters["max_new_tokens"]
            if len(tokens) > room:
                raise BadInput(
                    f"expected at most {max(0, room)} tokens with max_new_tokens {parameters['max_new_tokens']}, got "
                    f"{len(tokens)}",
                    join(where, "messages" if "messages" in value else "text"),
                )
        return Prompt(tokens, parameters, stream)

    def _tokenize(self, text: str) -> list[int]:
        is_cut = not self._is_prompt_kept and self._limit is not None
        cut = {"truncation": True, "max_length": self._limit} if is_cut else {}
        tokens: list[int] = self._tokenizer(text, **cut)["input_ids"]
        return tokens

    def _read_messages(self, value: Mapping[str, Any], where: str) -> list[int]:
        field = join(where, "messages")
        if "text" in value:
            raise BadInput("expected either text or messages, got both", field)
        if self._tokenizer.chat_template is None:
            raise BadInput("is not known: the model has no chat template", field)
        messages = value["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise BadInput('expected a list of {"role": …, "content": …}, got ' + shown(messages), field)
        try:
            tokens: list[int] = self._tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # templates are programs: they raise what they like at messages they do not expect
            raise BadInput(f"the model's chat template does not take these messages: {error}", field) from None
        return tokens

    def _read_parameters(self, given: Any, field: str) -> dict[str, Any]:
        """What the request asks for, with `max_new_tokens` in any case."""
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise BadInput(f"expected an object, got {shown(given)}", field)
        for name, value in given.items():
            key = self._known.get(name)
            if key is None:
                raise BadInput(f"is not known; the parameters are {', '.join(self._known)}", join(field, str(name)))
            if not key.is_allowed(value):
                raise BadInput(f"expected {key.allowed}, got {shown(value)}", join(field, name))
        return {"max_new_tokens": self._most_new, **given}

    # ----------------------------------------------------------------------------------------------- answering

    def answer(
        self, items: Sequence[Item], context: Context, rows: int, errors: Mapping[int, BaseException]
    ) -> list[Any]:
        """One answer for each item: a dict, or the last piece of one that was sent in pieces.

        `rows` is how many requests the batch has, `errors` has those of rows that have no items. Raises NobodyWaits
        once all clients have gone.
        """
        if any(item.value.is_streamed for item in items):
            for item in items:
                kind = "text/plain; charset=utf-8" if item.value.is_streamed else "application/json"
                context.set_response_content_type(item.row, kind)
        groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
        for place, item in enumerate(items):
            groups.setdefault(tuple(sorted(item.value.parameters.items())), []).append(place)
        answers: list[Any] = [None] * len(items)

        def send(pieces: Mapping[int, str]) -> None:
            piece_of = {row: pieces.get(row, errors.get(row, "")) for row in range(rows)}
            send_intermediate_predict_response(list(piece_of.values()), context.request_ids, "", 200, context)

        for places in groups.values():
            chosen = [items[place] for place in places]
            for place, answer in zip(places, self._generate(chosen, context, send), strict=True):
                answers[place] = answer
        return answers

    def _generate(
        self, items: Sequence[Item], context: Context, send: Callable[[Mapping[int, str]], None]
    ) -> list[Any]:
        prompts: list[Prompt] = [item.value for item in items]
        parameters = prompts[0].parameters
        batch = self._padded([prompt.tokens for prompt in prompts])
        texts = [Text(self._decode) for _ in prompts]
        streamer = None
        if any(prompt.is_streamed for prompt in prompts):
            streamed = [(item.row, place) for place, item in enumerate(items) if item.value.is_streamed]
            streamer = PieceStreamer(texts, lambda pieces: send({row: pieces[place] for row, place in streamed}))
        with self._torch.inference_mode():
            found = self._model.generate(
                **batch,
                **parameters,
                pad_token_id=self._tokenizer.pad_token_id,
                stopping_criteria=[self._stops([item.row for item in items], context)],
                **({} if streamer is None else {"streamer": streamer}),
            )
        begin = batch["input_ids"].shape[1] if self._is_prompt_kept else 0
        return [
            text.rest() if prompt.is_streamed else {self._task.answer_key: self._decode(tokens[begin:])}
            for prompt, text, tokens in zip(prompts, texts, found.tolist(), strict=True)
        ]

    def _padded(self, prompts: list[list[int]]) -> Any:
        return self._tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(self._model.device)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _stops(self, rows: Sequence[int], context: Context) -> Any:
        """A criterion of the library: ends the answers whose client has gone, or is past its deadline."""
        deadlines = [context.deadline(row) for row in rows]

        def is_done(tokens: Any, _scores: Any, **_options: Any) -> Any:
            now = time.monotonic()
            done = [
                context.is_cancelled(row) or (deadline is not None and deadline <= now)
                for row, deadline in zip(rows, deadlines, strict=True)
            ]
            beams = len(tokens) // len(rows)
            return self._torch.tensor(done, device=tokens.device).repeat_interleave(beams)

        return is_done
