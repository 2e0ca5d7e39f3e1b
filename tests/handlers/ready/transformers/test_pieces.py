"""Text as tokens add to it, with a tokenizer of bytes and one of words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from marserve_handlers.ready.transformers.pieces import PieceStreamer, Text

WORDS = ("", "a", "b", "c", "d")


def of_bytes(tokens: list[int]) -> str:
    """Each token is a byte of UTF-8."""
    return bytes(tokens).decode("utf-8", "replace")


def of_words(tokens: list[int]) -> str:
    """Each token is a word, 0 a special one that is left out."""
    return " ".join(WORDS[token] for token in tokens if token)


@given(st.text(max_size=8))
def test_pieces_of_bytes_are_whole_letters(answer: str) -> None:
    """Put together they are the answer."""
    text = Text(of_bytes)

    pieces = [text.add(byte) for byte in answer.encode()]

    assert "".join([*pieces, text.rest()]) == answer
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in answer


@given(st.lists(st.integers(0, 4)))
def test_blanks_between_words_are_those_of_the_whole_text(answer: list[int]) -> None:
    """Whatever is left out between them."""
    text = Text(of_words)

    pieces = [text.add(token) for token in answer]

    assert "".join([*pieces, text.rest()]) == of_words(answer)


class Tokens(list[int]):
    """A tensor as far as a streamer looks at it."""

    def tolist(self) -> list[int]:
        """The numbers."""
        return list(self)


def test_the_prompt_is_no_piece_and_steps_without_text_are_not_sent() -> None:
    """Each call has a piece for each answer."""
    sent: list[list[str]] = []
    streamer = PieceStreamer([Text(of_words), Text(of_words)], sent.append)

    for step in ([1, 2], [3, 4], [0, 0], [0, 1], [2, 2]):
        streamer.put(Tokens(step))
    streamer.end()

    assert sent == [["c", "d"], ["", " a"], [" b", " b"]]
