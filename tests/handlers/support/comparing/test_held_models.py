"""Where the models are that a handler holds."""

from __future__ import annotations

import types
from typing import Any

from marserve_handlers.support.comparing.held_models import models_of, place_of


class InferenceSession:
    """Told by its class's name, as the library's own is."""


class Author:
    """A model class whose `predict` somebody else holds."""

    def __init__(self, net: object) -> None:
        self.net = net

    def predict(self) -> None:
        """Nothing."""


class Wrapper:
    """As what serves a declared model: the author's method is its attribute."""

    def __init__(self, predict: Any) -> None:
        self._predict = predict

    def handle(self) -> None:
        """Nothing."""


def test_a_models_place_is_the_attribute_of_whoever_holds_it() -> None:
    """Of the handler's object itself, and of the author's behind a bound method."""
    session = InferenceSession()
    author = Author(session)

    for handle in (author.predict, Wrapper(author.predict).handle):
        held, name = place_of(handle, session)
        assert (held, name) == (author.__dict__, "net")
        assert held is author.__dict__


def test_a_variable_of_the_functions_module_is_a_place_and_a_closure_is_none() -> None:
    """What a closure holds cannot be exchanged."""
    session = InferenceSession()
    names: dict[str, Any] = {"net": session}
    of_module = types.FunctionType((lambda: None).__code__, names)

    def in_closure() -> object:
        return session

    closed = types.FunctionType(in_closure.__code__, {}, closure=in_closure.__closure__)

    assert place_of(of_module, session)[1] == "net"
    assert list(models_of(closed)) == [session]
    assert place_of(closed, session) == ({}, "")
