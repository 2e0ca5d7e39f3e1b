"""`@model`: marks a class or function as a model that declares what it takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, overload

from marserve_handlers.declared.declaration import DeclarationError, Tensor, check_tensors

Marked = TypeVar("Marked", bound=Callable[..., Any])

_MARK: Final = "__marserve_model__"


@dataclass(frozen=True, slots=True)
class Definition:
    """What the decorator was given. `target` is the class or function that it marks."""

    target: Any
    inputs: Mapping[str, Tensor] | None = None
    outputs: Mapping[str, Tensor] | None = None
    name: str | None = None


@overload
def model(target: Marked, /) -> Marked: ...


@overload
def model(
    *,
    inputs: Mapping[str, Tensor] | None = None,
    outputs: Mapping[str, Tensor] | None = None,
    name: str | None = None,
) -> Callable[[Marked], Marked]: ...


def model(
    target: Any = None,
    /,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    outputs: Mapping[str, Tensor] | None = None,
    name: str | None = None,
) -> Any:
    """Mark a class, or a function where nothing is loaded, as a model.

    With `inputs` and `outputs` its `predict(self, **arrays)` gets stacked batches. Without them `predict(self, item)`
    gets one input, of the type that it is annotated with. `name` is the model's name for `marserve run` and
    `marserve archive`. Raises DeclarationError for tensors that cannot be served.
    """
    if inputs is None and outputs is not None:
        raise DeclarationError("outputs is given without inputs: name the tensors that come in, too.")
    if inputs is not None:
        check_tensors(inputs, outputs or {})
    if name is not None and (not isinstance(name, str) or not name):
        raise DeclarationError(f"The name {name!r} is no text: write name='digits'.")

    def mark(marked: Any) -> Any:
        if isinstance(marked, type):
            if not callable(getattr(marked, "predict", None)):
                raise DeclarationError(f"The class {marked.__name__} has no method predict.")
        elif not callable(marked) or not hasattr(marked, "__code__"):
            raise DeclarationError(f"@model marks a class or a function, not {type(marked).__name__}.")
        setattr(marked, _MARK, Definition(marked, inputs, outputs, name))
        return marked

    return mark if target is None else mark(target)


def definition_of(found: object) -> Definition | None:
    """What marks this class or function; None for an unmarked one, also if it inherits from a marked class."""
    definition = getattr(found, _MARK, None)
    return definition if isinstance(definition, Definition) and definition.target is found else None


def only_definition(module: object) -> Definition | None:
    """The only model that a module defines; None without one. Raises DeclarationError if there are several."""
    name = getattr(module, "__name__", "")
    found = [
        definition
        for member in list(vars(module).values())
        if (definition := definition_of(member)) is not None and getattr(member, "__module__", None) == name
    ]
    found = list({id(each): each for each in found}.values())
    if len(found) > 1:
        names = " and ".join(each.target.__name__ for each in found)
        raise DeclarationError(f"{name}.py defines several models, {names}: name one, as {name}.py:{names.split()[0]}.")
    return found[0] if found else None
