"""Text of a batch of prompts, step by step, with a tokenizer of letters."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from marserve_handlers.batch_streamer import TextIteratorStreamerBatch


class Letters:
    """A tokenizer: a token is a letter's number."""

    def decode(self, tokens: list[int], **options: Any) -> str:
        """The letters; 0 is left out where special tokens are."""
        return "".join(chr(token) for token in tokens if token or not options.get("skip_special_tokens"))


class Rows:
    """What a tensor is to the streamer."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def tolist(self) -> list[Any]:
        """The rows."""
        return self._rows


def test_words_come_when_they_are_complete() -> None:
    """For each prompt its own; what is left comes at the end."""
    streamer = TextIteratorStreamerBatch(Letters(), 2, skip_prompt=True)
    streamer.put(Rows([[1, 2], [3, 4]]))
    for first, second in zip("a bc", "x\nyz", strict=True):
        streamer.put(Rows([ord(first), ord(second)]))
    streamer.end()

    steps = list(streamer)

    assert steps[1] == ["a ", "x\n"]
    assert ["".join(texts) for texts in zip(*steps, strict=True)] == ["a bc", "x\nyz"]


def test_prompts_may_be_said_too() -> None:
    """Without `skip_prompt`; decoding options go to the tokenizer."""
    streamer = TextIteratorStreamerBatch(Letters(), 1, skip_special_tokens=True)
    streamer.put(Rows([[ord("a"), 0, ord(" ")]]))
    streamer.put(Rows([ord("\N{CJK UNIFIED IDEOGRAPH-4F60}")]))

    assert next(streamer) == ["a "]
    assert next(streamer) == ["\N{CJK UNIFIED IDEOGRAPH-4F60}"]


def test_it_waits_no_longer_than_told() -> None:
    """`timeout`, and a batch of another size is refused."""
    streamer = TextIteratorStreamerBatch(Letters(), 2, timeout=0.01)

    with pytest.raises(queue.Empty):
        next(streamer)
    with pytest.raises(ValueError, match="for 2 prompts, and was given tokens of 1"):
        streamer.put(Rows([1]))
