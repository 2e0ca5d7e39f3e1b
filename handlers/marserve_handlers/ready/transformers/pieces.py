"""The text that each new token adds to an answer, for a batch that is generated. Knows no library but by its calls.

A word may be several tokens, and a letter several bytes: text is given out once the next token cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_HALF_A_LETTER = "�"

Decode = Callable[[list[int]], str]


class Text:
    """The growing text of one answer.

    Of the tokens whose text was given out the last ones are decoded again, with the new one: whether a word begins with
    a blank depends on what is before it.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._begin = 0  # where decoding begins
        self._end = 0  # of the tokens whose text was given out

    def add(self, token: int) -> str:
        """The text that is certain with this token; often empty."""
        self._tokens.append(token)
        text = self._new_text()
        if text.endswith(_HALF_A_LETTER):
            return ""
        if text:
            self._begin, self._end = self._end, len(self._tokens)
        return text

    def rest(self) -> str:
        """What was held back."""
        text = self._new_text()
        self._end = len(self._tokens)
        return text

    def _new_text(self) -> str:
        before = self._decode(self._tokens[self._begin : self._end])
        return self._decode(self._tokens[self._begin :])[len(before) :]


class PieceStreamer:
    """Given to `model.generate(streamer=…)`: calls `send` with the new text of each answer after each step."""

    def __init__(self, texts: Sequence[Text], send: Callable[[list[str]], None]) -> None:
        self._texts = texts
        self._send = send
        self._has_prompt_come = False

    def put(self, value: Any) -> None:
        """Take the prompts' tokens first, which are no answer, then one token of each answer, [B]."""
        if not self._has_prompt_come:
            self._has_prompt_come = True
            return
        pieces = [text.add(token) for text, token in zip(self._texts, value.tolist(), strict=True)]
        if any(pieces):
            self._send(pieces)

    def end(self) -> None:
        """Nothing: what was held back is the last piece."""
