"""Reads the parameters of management calls the way TorchServe's clients send them.

In a query nothing has a type: for TorchServe an integer that does not parse counts as not given, and only the word
`true` is true (contract 2.1). Where a recorded call does so, `integer` takes it so; elsewhere `whole` refuses it. JSON
has types, so there a value of the wrong one is an error. What counts as not given, or is not known, is told in
`warnings`.
"""

from __future__ import annotations

import json
import re
from asyncio import to_thread
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, Final

from starlette.requests import Request

from marserve.api.decoding import SHORT_BYTES
from marserve.errors import BadInput

# No call has parameters that take so much; those of a body over the shorter length are read by a thread.
MOST_BODY_BYTES: Final = 256 * 1024
# How many unknown names a warning lists, and up to which length it suggests a similar name.
MOST_WARNINGS: Final = 20
LONGEST_GUESSED: Final = 40

# TorchServe's integers have 32 bits; a longer one does not parse.
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}", re.ASCII).fullmatch
_LARGEST = 2**31 - 1


class QueryParameters:
    """Parameters from a query string, last one wins. `known` are the names that mean something."""

    def __init__(self, values: Mapping[str, str], known: Collection[str]) -> None:
        self._values = values
        self.warnings = _unknown(values, known)

    @property
    def names(self) -> Collection[str]:
        """Of all that is given, known or not."""
        return self._values.keys()

    def has(self, name: str) -> bool:
        """Whether a value is given."""
        return self._values.get(name) is not None

    def text(self, name: str) -> str | None:
        """The value, None where there is none."""
        return self._values.get(name)

    def integer(self, name: str) -> int | None:
        """The value as a whole number, None where there is none or it does not parse."""
        word = self._values.get(name)
        if word is None:
            return None
        if _INTEGER(word) and -_LARGEST - 1 <= (number := int(word)) <= _LARGEST:
            return number
        self.warnings.append(f"{name} is {_shown(word)}, which is no whole number; it counts as not given")
        return None

    def whole(self, name: str) -> int | None:
        """As `integer`. Raises BadInput for what does not parse: the call would do what nobody asked for."""
        word = self._values.get(name)
        number = None if word is None else self.integer(name)
        if word is not None and number is None:
            raise BadInput(f"{name} is {_shown(word)}; it must be a whole number of at most {_LARGEST}.")
        return number

    def flag(self, name: str, default: bool) -> bool:
        """True for the word `true` in any case, `default` where nothing is given, False for anything else."""
        word = self._values.get(name)
        if word is None:
            return default
        if word.lower() not in ("true", "false"):
            self.warnings.append(f"{name} is {_shown(word)}, which counts as false; say true or false")
        return word.lower() == "true"


class JsonParameters:
    """Parameters from a JSON object. null is not given. Raises BadInput for values of another type."""

    def __init__(self, body: bytes, known: Collection[str]) -> None:
        """Read the object in `body`. Raises BadInput when there is none."""
        try:
            values = json.loads(body) if body.strip() else None
        except (ValueError, RecursionError):
            raise BadInput("The body is not valid JSON.") from None
        if not isinstance(values, dict):
            raise BadInput("The body must be a JSON object that holds the parameters.")
        self._values: dict[str, Any] = values
        self.warnings = _unknown(values, known)

    @property
    def names(self) -> Collection[str]:
        """Of all that is given, known or not."""
        return self._values.keys()

    def has(self, name: str) -> bool:
        """Whether a value is given."""
        return self._values.get(name) is not None

    def text(self, name: str) -> str | None:
        """The value as text; a number counts as its digits."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool | list | dict):
            raise BadInput(f"{name} must be text.")
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise BadInput(f"{name} holds half of a surrogate pair, which is no text.") from None
        return str(value)

    def integer(self, name: str) -> int | None:
        """The value as a whole number; `"3"` and `3.0` are 3."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, str) and _INTEGER(value):
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not -_LARGEST - 1 <= value <= _LARGEST:
            raise BadInput(f"{name} must be a whole number of at most {_LARGEST}.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """The value as true or false; the words `"true"` and `"false"` will do."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise BadInput(f"{name} must be true or false.")
        return value


Parameters = QueryParameters | JsonParameters


async def read_parameters(request: Request, known: Collection[str]) -> Parameters:
    """The parameters of a call: from the body if that is JSON, and then from nowhere else. Raises BadInput."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return QueryParameters(request.query_params, known)
    body = await request.body()
    if len(body) > MOST_BODY_BYTES:
        raise BadInput(f"The body has {len(body)} bytes; parameters may have {MOST_BODY_BYTES}.")
    if len(body) > SHORT_BYTES:
        return await to_thread(JsonParameters, body, known)
    return JsonParameters(body, known)


def _unknown(values: Collection[str], known: Collection[str]) -> list[str]:
    warnings: list[str] = []
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1) if len(name) <= LONGEST_GUESSED else []
            hint = f"; did you mean {near[0]}?" if near else ""
            warnings.append(f"parameter {_shown(name)} is not known and not used{hint}")
            if len(warnings) == MOST_WARNINGS:
                break
    return warnings


def _shown(word: str) -> str:
    return repr(word if len(word) <= 60 else word[:57] + "...")
