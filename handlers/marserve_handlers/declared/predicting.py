"""What the signature of `predict` says: which parameters it takes, what one item is annotated with, how it answers."""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from marserve_handlers.declared.declaration import DeclarationError
from marserve_handlers.declared.decorator import Definition

CONTEXT: Final = "context"
_STREAMS: Final = (AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable, Iterator)


@dataclass(frozen=True, slots=True)
class Predicting:
    """How `predict` is called. `parameters` leaves out `self` and `context`; `hints` are annotations by name.

    `returns` is the annotation of one answer, of a stream's pieces; `typing.Any` without one.
    """

    words: str
    parameters: dict[str, inspect.Parameter]
    hints: dict[str, Any]
    returns: Any
    takes_context: bool
    takes_any: bool
    is_async: bool
    is_stream: bool


def read_predict(definition: Definition) -> Predicting:
    """Read the signature of a model's `predict`, or of the function that is the model. Raises DeclarationError."""
    target = definition.target
    is_class = isinstance(target, type)
    function = inspect.unwrap(getattr(target, "predict") if is_class else target)  # noqa: B009 - not known to mypy
    words = f"{target.__name__}.predict" if is_class else target.__name__
    parameters = dict(inspect.signature(function).parameters)
    if is_class and parameters and not isinstance(inspect.getattr_static(target, "predict"), staticmethod):
        parameters.pop(next(iter(parameters)))
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # a name that the module does not have
        if definition.inputs is None:
            raise DeclarationError(f"An annotation of {words} cannot be resolved: {str(error).rstrip('.')}.") from None
        hints = dict(function.__annotations__)  # of tensors only the words count: a type checker alone may import torch
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    named = {
        name: each
        for name, each in parameters.items()
        if each.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    }
    takes_context = CONTEXT in named and CONTEXT not in (definition.inputs or {})
    if takes_context:
        named.pop(CONTEXT)
    returns = hints.get("return", Any)
    is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    is_annotated_stream = typing.get_origin(returns) in _STREAMS or returns in _STREAMS
    if is_annotated_stream and not is_generator:
        raise DeclarationError(f"{words} is annotated as a stream, and has no yield.")
    if is_annotated_stream:
        pieces = typing.get_args(returns)
        returns = pieces[0] if pieces else Any
    elif is_generator:
        returns = Any
    return Predicting(words, named, hints, returns, takes_context, takes_any, is_async, is_generator)


def check_load(definition: Definition) -> None:
    """Raise DeclarationError if a class has a `load` that cannot be called with the context alone."""
    target = definition.target
    load = getattr(target, "load", None)
    if not isinstance(target, type) or not callable(load):
        return
    static = inspect.getattr_static(target, "load")
    if isinstance(static, (staticmethod, classmethod)):
        given: tuple[None, ...] = (None,)
    elif inspect.isfunction(static):
        given = (None, None)
    else:  # an object that is callable: its class says what it takes
        return
    signature = inspect.signature(load)
    try:
        signature.bind(*given)
        return
    except TypeError:
        pass
    needed = [
        name
        for name, each in list(signature.parameters.items())[len(given) :]
        if each.default is inspect.Parameter.empty
        and each.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    if needed:
        raise DeclarationError(f"{target.__name__}.load gets the context alone, and needs {', '.join(needed)}, too.")
    raise DeclarationError(f"{target.__name__}.load needs a parameter for the context: def load(self, context).")


def check_tensor_parameters(predicting: Predicting, definition: Definition, padded: tuple[str, ...]) -> None:
    """Raise DeclarationError if `predict` does not take the declared inputs, or asks for something else."""
    inputs = definition.inputs or {}
    for name in inputs:
        if name not in predicting.parameters and not predicting.takes_any:
            raise DeclarationError(f"{predicting.words} has no parameter {name}, which is a declared input.")
    given = {*inputs, *(f"{size}_lengths" for size in padded)}
    for name, parameter in predicting.parameters.items():
        if name not in given and parameter.default is inspect.Parameter.empty:
            raise DeclarationError(f"{predicting.words} has the parameter {name}, which is no declared input.")
    if predicting.is_stream:
        raise DeclarationError(f"{predicting.words} takes stacked batches and yields: streams need one item.")


def item_parameter(predicting: Predicting) -> str:
    """The name of the parameter that takes the item. Raises DeclarationError if there is not exactly one."""
    needed = [name for name, each in predicting.parameters.items() if each.default is inspect.Parameter.empty] or list(
        predicting.parameters
    )[:1]
    if len(needed) != 1:
        names = ", ".join(needed) or "none"
        raise DeclarationError(
            f"{predicting.words} must take one input, beside context, and takes {names}: several tensors are declared "
            "as @model(inputs=…, outputs=…)."
        )
    return needed[0]
