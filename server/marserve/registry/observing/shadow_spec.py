"""What a shadow mirrors, and how answers are compared: the values, read from documents. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from marserve.errors import BadInput
from marserve.option_values import Tolerance

DEFAULT_SHARE = 0.1
DEFAULT_IN_FLIGHT = 8
MOST_IN_FLIGHT = 256

Compare = Literal["exact", "handler", "scores"] | Tolerance


@dataclass(frozen=True, slots=True)
class ShadowSpec:
    """What is mirrored: a `share` (0 to 1) of the requests that other versions answer, to `version`.

    `in_flight` bounds the copies at a time, from the sending of each to the end of its comparison.
    """

    version: str
    share: float = DEFAULT_SHARE
    compare: Compare = "exact"
    in_flight: int = DEFAULT_IN_FLIGHT

    def document(self) -> dict[str, Any]:
        """In the shape that `read_shadow` takes."""
        compare: Any = self.compare
        if isinstance(self.compare, Tolerance):
            compare = {"relative": self.compare.relative, "absolute": self.compare.absolute}
            if self.compare.ignore:
                compare["ignore"] = list(self.compare.ignore)
        return {"version": self.version, "share": self.share, "compare": compare, "in_flight": self.in_flight}


_KEYS = ("version", "share", "compare", "in_flight")


def read_shadow(document: object) -> ShadowSpec:
    """The spec in a document. Raises BadInput that names the member and its valid values."""
    if not isinstance(document, Mapping):
        raise BadInput('A shadow is an object such as {"version": "2.0", "share": 0.1}.')
    for key in document:
        if key not in _KEYS:
            raise BadInput(f"A shadow has no member {str(key)[:100]!r}; it has {', '.join(_KEYS)}.")
    version = document.get("version")
    if not isinstance(version, str) or not version:
        raise BadInput("version of a shadow must be the name of a version, a text that is not empty.")
    share = document.get("share", DEFAULT_SHARE)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise BadInput(f"share of a shadow is {_shown(share)}; it must be a number above 0, up to 1.")
    in_flight = document.get("in_flight", DEFAULT_IN_FLIGHT)
    if isinstance(in_flight, bool) or not isinstance(in_flight, int) or not 1 <= in_flight <= MOST_IN_FLIGHT:
        raise BadInput(f"in_flight of a shadow is {_shown(in_flight)}; it must be from 1 to {MOST_IN_FLIGHT}.")
    return ShadowSpec(version, float(share), read_compare(document.get("compare", "exact")), in_flight)


def read_compare(compare: object) -> Compare:
    """How answers are compared. Raises BadInput."""
    if compare == "exact":
        return "exact"
    if compare in ("handler", "scores"):
        return cast("Compare", compare)
    if not isinstance(compare, Mapping) or not compare.keys() <= {"relative", "absolute", "ignore"}:
        raise BadInput(
            f'compare is {_shown(compare)}; it must be "exact", "handler", "scores", or an object with relative, '
            "absolute and ignore."
        )
    plain = Tolerance()
    numbers = []
    for name, default in (("relative", plain.relative), ("absolute", plain.absolute)):
        number = compare.get(name, default)
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < float("inf"):
            raise BadInput(f"{name} of compare is {_shown(number)}; it must be a number from 0 on.")
        numbers.append(float(number))
    ignore = compare.get("ignore", [])
    if not isinstance(ignore, list | tuple) or not all(isinstance(path, str) for path in ignore):
        raise BadInput("ignore of compare must be a list of paths, such as boxes[*].id.")
    return Tolerance(numbers[0], numbers[1], tuple(ignore))


def _shown(value: object) -> str:
    return repr(value)[:100]
