"""From a marked class or function to what a worker calls: reads the signature, makes the object, loads it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from marserve_handlers.context import Context
from marserve_handlers.declared.declaration import Declaration
from marserve_handlers.declared.decorator import Definition
from marserve_handlers.declared.items import converter, input_type, output_type
from marserve_handlers.declared.predicting import (
    Predicting,
    check_load,
    check_tensor_parameters,
    item_parameter,
    read_predict,
)
from marserve_handlers.declared.single import ItemModel

DEFAULT_MAX_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Opened:
    """A declared model that is loaded: what a worker calls with rows, and what the model declares.

    `handle_async` is set where `predict` is a coroutine. `instance` is the author's object, None for a function.
    """

    handle: Callable[[list[dict[str, Any]], Context], list[Any]]
    handle_async: Callable[[list[dict[str, Any]], Context], Awaitable[list[Any]]] | None
    declaration: bytes
    instance: Any


def declare(definition: Definition) -> Declaration:
    """What a marked class or function declares. Makes no object and loads nothing. Raises DeclarationError."""
    return _declare(definition, read_predict(definition))


def advise(definition: Definition) -> str:
    """A sentence for the author of a model whose item has no annotation; empty for any other model."""
    if definition.inputs is not None:
        return ""
    predicting = read_predict(definition)
    parameter = item_parameter(predicting)
    if parameter in predicting.hints:
        return ""
    return (
        f"the parameter {parameter} of {predicting.words} has no annotation, so a request is a JSON object "
        f"({parameter}: dict); annotate it as str, bytes, a dataclass, …, or declare tensors with "
        "@model(inputs=…, outputs=…)"
    )


def _declare(definition: Definition, predicting: Predicting) -> Declaration:
    check_load(definition)
    if definition.inputs is not None:
        declaration = Declaration(dict(definition.inputs), dict(definition.outputs or {}), name=definition.name)
        padded = tuple(size for tensor in definition.inputs.values() if tensor.pad is not None for size in tensor.names)
        check_tensor_parameters(predicting, definition, padded)
        return declaration
    parameter = item_parameter(predicting)
    annotation = predicting.hints.get(parameter, Any)
    if annotation is Any:
        annotation = dict
    return Declaration(
        input=input_type(f"The parameter {parameter} of {predicting.words}", annotation, parameter)[0],
        output=output_type(f"What {predicting.words} returns", predicting.returns, is_stream=predicting.is_stream),
        name=definition.name,
        is_async=predicting.is_async,
    )


def open_declared(
    definition: Definition, context: Context, *, most_rows: int, max_rows: int = DEFAULT_MAX_ROWS
) -> Opened:
    """Make the author's object, call its `load(context)` if it has one, and return what answers batches.

    `most_rows` is how many rows one call of `predict` may have, `max_rows` how many one request may have. Raises
    DeclarationError, and whatever the author's code raises.
    """
    predicting = read_predict(definition)
    declaration = _declare(definition, predicting)
    document = declaration.encode()
    instance = definition.target() if isinstance(definition.target, type) else None
    load = getattr(instance, "load", None)
    if callable(load):
        load(context)
    predict = definition.target if instance is None else instance.predict
    served: Any
    if definition.inputs is not None:
        from marserve_handlers.declared.tensors import TensorModel  # here: only models of tensors need numpy

        sizes = context.allowed_batch_sizes if declaration.has_batch_axis else ()
        context.keeps_to_sizes = bool(sizes)
        served = TensorModel(predict, predicting, declaration, most_rows=most_rows, max_rows=max_rows, sizes=sizes)
    else:
        parameter = item_parameter(predicting)
        annotation = predicting.hints.get(parameter, dict)
        decode = input_type(parameter, dict if annotation is Any else annotation, parameter)[1]
        convert = None if predicting.is_stream else converter(predicting.words, predicting.returns)
        serve = ItemModel
        if predicting.is_stream:
            from marserve_handlers.declared.streams import StreamModel  # here: few models stream

            serve = StreamModel
        takes_elements = declaration.takes_elements
        served = serve(predict, predicting, parameter, decode, convert, max_elements=max_rows if takes_elements else 0)
    return Opened(served.handle, served.handle_async if predicting.is_async else None, document, instance)
