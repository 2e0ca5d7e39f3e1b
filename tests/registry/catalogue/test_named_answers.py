"""Tests for answers that say which version gave them."""

from __future__ import annotations

import pytest

from marserve.errors import HandlerFailed, MarserveError, Thrown
from marserve.messages import Answer
from marserve.registry.catalogue.named_answers import NamedReceiver
from marserve.registry.catalogue.traffic import VERSION_HEADER

HEADER = (VERSION_HEADER, "2.0")


class Told:
    """A receiver that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[Answer | MarserveError] = []

    def on_answer(self, answer: Answer) -> None:
        """The answer."""
        self.told.append(answer)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """A piece."""
        self.told.append(piece)

    def on_error(self, error: MarserveError) -> None:
        """An error."""
        self.told.append(error)


@pytest.mark.parametrize("headers", [[], [("content-type", "text/plain"), ("X-Marserve-Version", "7")]])
def test_an_answer_names_its_version_once_whatever_the_handler_says(headers: list[tuple[str, str]]) -> None:
    """All else of it stays; the handler's own answer is not changed."""
    thrown = Thrown("ValueError", "no", "trace")
    own = Answer(b"body", 201, "Made", list(headers), thrown)
    told = Told()

    NamedReceiver(told, HEADER).on_answer(own)

    assert told.told == [Answer(b"body", 201, "Made", [*headers[:1], HEADER], thrown)]
    assert own.headers == headers


def test_of_a_stream_the_first_piece_names_it() -> None:
    """Headers of later ones do not count."""
    told = Told()
    receiver = NamedReceiver(told, HEADER)

    receiver.on_piece(Answer(b"1"), False)
    receiver.on_piece(Answer(b"2"), True)

    assert told.told == [Answer(b"1", headers=[HEADER]), Answer(b"2")]


def test_an_error_names_it_too() -> None:
    """For the surface to tell."""
    told, error = Told(), HandlerFailed()

    NamedReceiver(told, HEADER).on_error(error)

    assert told.told == [error]
    assert error.version_header == HEADER
