"""Text as a language model of `transformers` generates it, for a batch of prompts. Needs no transformers itself."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any


class TextIteratorStreamerBatch:
    """Given to `model.generate(streamer=…)` in one thread, iterated over in another: at each step one text a prompt.

    A text is what has become certain since the last step, often empty: words are held back until they are complete.
    `timeout` is in seconds; a step that takes longer raises queue.Empty. `decode_kwargs` go to the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        batch_size: int,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.skip_prompt = skip_prompt
        self.timeout = timeout
        self.decode_kwargs = decode_kwargs
        self.text_queue: queue.Queue[list[str] | None] = queue.Queue()
        self._tokens: list[list[int]] = [[] for _ in range(batch_size)]
        self._said: list[int] = [0] * batch_size
        self._has_prompt_come = False

    def put(self, value: Any) -> None:
        """Take the prompts' tokens [B, T] first, then the next token of each prompt, [B]."""
        rows = value.tolist()
        if len(rows) != self.batch_size:
            raise ValueError(f"The streamer is for {self.batch_size} prompts, and was given tokens of {len(rows)}.")
        is_prompt, self._has_prompt_come = not self._has_prompt_come, True
        if is_prompt and self.skip_prompt:
            return
        self.text_queue.put([self._next_text(idx, tokens) for idx, tokens in enumerate(rows)])

    def end(self) -> None:
        """Say what was held back, and that nothing follows."""
        texts = []
        for idx, tokens in enumerate(self._tokens):
            texts.append(self._decode(tokens)[self._said[idx] :])
            self._tokens[idx], self._said[idx] = [], 0
        self._has_prompt_come = False
        self.text_queue.put(texts)
        self.text_queue.put(None)

    def __iter__(self) -> Iterator[list[str]]:
        return self

    def __next__(self) -> list[str]:
        texts = self.text_queue.get(timeout=self.timeout)
        if texts is None:
            raise StopIteration
        return texts

    def _next_text(self, idx: int, tokens: int | list[int]) -> str:
        held = self._tokens[idx]
        held += tokens if isinstance(tokens, list) else [tokens]
        text = self._decode(held)
        start = self._said[idx]
        if text.endswith("\n"):
            self._tokens[idx], self._said[idx] = [], 0
            return text[start:]
        if text and _is_ideograph(text[-1]):
            end = len(text)
        else:
            # What follows the last blank may still grow; a lone replacement character is half a letter.
            end = max(start, text.rfind(" ") + 1)
        self._said[idx] = end
        return text[start:end]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, **self.decode_kwargs)
        return text


def _is_ideograph(character: str) -> bool:
    """Whether a character is a word by itself: the blocks of Chinese, Japanese and Korean ideographs."""
    return any(
        first <= ord(character) <= last
        for first, last in ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2FA1F))
    )
