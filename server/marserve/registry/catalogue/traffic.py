"""Which version of a model answers a request. Pure: knows names, weights and headers; no pools, no clock, no I/O.

A version that the client names answers or nobody does. Else weights decide, where a model has some: requests with a
sticky key by a hash of it, the others in turn; without weights the default version answers.

Keys are spread by weighted rendezvous hashing: every version has a score for a key, the highest wins. Raising a weight
moves keys to that version alone, a version that cannot answer gives its own keys away and no others, and every server
comes to the same choice. Requests without a key follow the multiples of the golden ratio, which fall into any share of
the unit interval as often as its length says, and in no pattern that a client could meet: of a thousand requests in a
row, or fewer, each version gets its share give or take four, wherever the multiples begin, while all can answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, TypeVar

from marserve.errors import BadInput, VersionNotFound
from marserve.files.nearest import nearest

Version = TypeVar("Version")
Headers = Iterable[tuple[bytes, bytes]]
# Why a version was chosen: the path (or gRPC's field) named it, the header did, a sticky key, its weight, or nothing.
Reason = Literal["path", "override", "sticky", "weight", "default"]

VERSION_HEADER = "x-marserve-version"
LARGEST_WEIGHT = 1_000_000
LONGEST_SALT = 128
_KEYS = ("weights", "sticky")
# What `GET` adds to what was put; it may be put again, and says nothing then.
_TOLD = ("pending", "isDefault")
_STICKY_KEYS = ("header", "cookie", "salt")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}").fullmatch
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,62}").fullmatch
# The golden ratio's fraction in units of 2**-64.
_STEP = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Sticky:
    """Where a request has its key: in a header, or in a cookie. `salt` makes another draw of the same keys."""

    header: str | None = None
    cookie: str | None = None
    salt: str = ""

    def document(self) -> dict[str, str]:
        """As it was put."""
        told = {"header": self.header, "cookie": self.cookie, "salt": self.salt or None}
        return {name: value for name, value in told.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Traffic:
    """How requests that name no version are shared out. `weights` are shares of their sum; some are above 0."""

    weights: Mapping[str, float]
    sticky: Sticky | None = None

    def document(self) -> dict[str, Any]:
        """As it was put."""
        told: dict[str, Any] = {"weights": dict(self.weights)}
        if self.sticky is not None:
            told["sticky"] = self.sticky.document()
        return told

    def without(self, version: str) -> Traffic | None:
        """The same for the other versions; None where none of them has a weight."""
        weights = {name: weight for name, weight in self.weights.items() if name != version}
        return Traffic(weights, self.sticky) if any(weights.values()) else None

    def renamed(self, old: str, new: str) -> Traffic:
        """The same with `new` in the place of `old`."""
        return Traffic({new if name == old else name: weight for name, weight in self.weights.items()}, self.sticky)


@dataclass(frozen=True, slots=True)
class Role:
    """What one version has of its model's traffic, for a snapshot: its weight, None without one, and its labels."""

    weight: float | None = None
    sticky: Sticky | None = None
    labels: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As a snapshot has it; empty for a version that has nothing."""
        told: dict[str, Any] = {}
        if self.weight is not None:
            told["weight"] = self.weight
            if self.sticky is not None:
                told["sticky"] = self.sticky.document()
        if self.labels:
            told["labels"] = list(self.labels)
        return told


NO_ROLE = Role()


# ---------------------------------------------------------------------------------------------- reading


def read_traffic(document: object) -> Traffic:
    """What `PUT /models/{model}/traffic` takes. Raises BadInput, with a sentence, for what cannot be meant."""
    if not isinstance(document, Mapping):
        raise BadInput(
            f"The traffic of a model is {_shown(document)}; it must be an object such as "
            '{"weights": {"1.0": 80, "2.0": 20}}.'
        )
    _refuse_unknown(document, _KEYS, _TOLD, "the traffic of a model")
    weights = document.get("weights")
    if not isinstance(weights, Mapping) or not weights:
        raise BadInput(f'weights is {_shown(weights)}; it must name versions, such as {{"1.0": 80, "2.0": 20}}.')
    read = {str(name): _read_weight(str(name), weight) for name, weight in weights.items()}
    if not any(read.values()):
        raise BadInput("The weights are all 0; one must be above it. To have the default version answer, delete them.")
    sticky = document.get("sticky")
    return Traffic(read, None if sticky is None else _read_sticky(sticky))


def _read_weight(name: str, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= LARGEST_WEIGHT:
        raise BadInput(
            f"The weight of version {name[:80]} is {_shown(weight)}; it must be a number from 0 to {LARGEST_WEIGHT}."
        )
    return weight


def _read_sticky(document: object) -> Sticky:
    if not isinstance(document, Mapping):
        raise BadInput(f'sticky is {_shown(document)}; it must be such as {{"header": "X-User"}}.')
    _refuse_unknown(document, _STICKY_KEYS, (), "sticky")
    header, cookie, salt = (document.get(name) for name in _STICKY_KEYS)
    if (header is None) == (cookie is None):
        raise BadInput('sticky must name either a header or a cookie, such as {"header": "X-User"}.')
    for name, value in (("header", header), ("cookie", cookie)):
        if value is not None and (not isinstance(value, str) or not _TOKEN(value)):
            raise BadInput(f"sticky.{name} is {_shown(value)}; it must be a name of letters, digits and hyphens.")
    if salt is not None and (not isinstance(salt, str) or len(salt) > LONGEST_SALT):
        raise BadInput(f"sticky.salt is {_shown(salt)}; it must be a text of at most {LONGEST_SALT} characters.")
    return Sticky(header, cookie, salt or "")


def _refuse_unknown(document: Mapping[Any, Any], known: Sequence[str], told: Sequence[str], where: str) -> None:
    for name in document:
        if name not in known and name not in told:
            near = nearest(str(name), known)
            hint = f"Did you mean {near}?" if near else f"Known are {', '.join(known)}."
            raise BadInput(f"{_shown(name)} is no key of {where}. {hint}")


def read_role(document: object) -> Role:
    """What a snapshot has of a version's traffic. Raises BadInput."""
    if not isinstance(document, Mapping):
        raise BadInput(f"it is {_shown(document)} and must be an object")
    weight, sticky, labels = document.get("weight"), document.get("sticky"), document.get("labels", [])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise BadInput(f"labels is {_shown(labels)} and must be a list of names")
    for label in labels:
        check_label(label)
    return Role(
        None if weight is None else _read_weight("it", weight),
        None if sticky is None else _read_sticky(sticky),
        tuple(labels),
    )


def check_label(label: str) -> None:
    """Raise BadInput for a name that no label can have."""
    if not _LABEL(label) or label == "all":
        raise BadInput(
            f"{_shown(label)} cannot be a label; a label begins with a letter or an underscore and has at most 63 "
            "letters, digits, hyphens, dots and underscores, and is not `all`."
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---------------------------------------------------------------------------------------------- choosing


def choose_version(model: str, versions: Mapping[str, Version], default: str, named: str | None) -> Version:
    """The version that takes the request: the one it names, else the default.

    `default` is always a key of `versions`. Raises VersionNotFound for a name that is not there; a version is never
    chosen in place of the one that was asked for.
    """
    try:
        return versions[default if named is None else named]
    except KeyError:
        raise VersionNotFound(model, str(named)) from None


class _Arm:
    """One version and its weight, with what makes its score of a key."""

    __slots__ = ("_hash", "name", "weight")

    def __init__(self, model: str, salt: str, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        identity = b"\0".join((model.encode("utf-8", "surrogatepass"), salt.encode("utf-8", "surrogatepass")))
        arm = blake2b(identity + b"\0" + name.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        self._hash = blake2b(digest_size=8, key=arm)

    def score(self, key: bytes) -> float:
        """The key's score: the arms' highest one is this arm's with a chance of its share of the weights."""
        hasher = self._hash.copy()
        hasher.update(key)
        # 52 bits and a half: neither 0 nor 1, whose logarithms would not do.
        point = ((int.from_bytes(hasher.digest()) >> 12) + 0.5) / 2**52
        return -self.weight / math.log(point)


class Rule:
    """The weights of one model in force. `position` says where among the golden ratio's multiples it begins."""

    __slots__ = ("_arms", "_cookie", "_header", "_position", "_sequence_header", "_total", "traffic")

    def __init__(self, model: str, traffic: Traffic, position: int, sequence_header: str | None = None) -> None:
        """`sequence_header` names the sequence that a request belongs to, where one of the versions has sequences: a
        request without another key has that for its key, so that a sequence stays where it is.
        """
        self.traffic = traffic
        sticky = traffic.sticky or Sticky()
        self._arms = [_Arm(model, sticky.salt, name, weight) for name, weight in traffic.weights.items() if weight > 0]
        self._total = sum(arm.weight for arm in self._arms)
        self._header = sticky.header.lower().encode() if sticky.header is not None else None
        self._cookie = sticky.cookie.encode() if sticky.cookie is not None else None
        self._sequence_header = None if sequence_header is None else sequence_header.lower().encode()
        self._position = position & _MASK

    @property
    def position(self) -> int:
        """Where among the golden ratio's multiples it is."""
        return self._position

    def choose(self, headers: Headers, can_answer: Callable[[str], bool]) -> tuple[str, Reason] | None:
        """The version for a request with these headers, and why; None where none that has a weight can answer."""
        key = self._key(headers)
        if key is not None:
            arm = self._by_key(key, can_answer)
            return None if arm is None else (arm.name, "sticky")
        self._position = (self._position + _STEP) & _MASK
        arm = self._by_weight(self._position / 2**64, can_answer)
        return None if arm is None else (arm.name, "weight")

    def shares(self, can_answer: Callable[[str], bool]) -> dict[str, float]:
        """What share of the requests each version gets now, 0 to 1; empty where none of them can answer."""
        ready = [arm for arm in self._arms if can_answer(arm.name)]
        total = sum(arm.weight for arm in ready)
        return {arm.name: arm.weight / total for arm in ready}

    def pending(self, can_answer: Callable[[str], bool]) -> list[str]:
        """The versions that have a weight and cannot answer now."""
        return [arm.name for arm in self._arms if not can_answer(arm.name)]

    def _key(self, headers: Headers) -> bytes | None:
        """The request's sticky key; an empty one is none."""
        if self._header is not None:
            key = _first(headers, self._header)
        elif self._cookie is not None:
            key = _cookie(headers, self._cookie)
        else:
            key = None
        if not key and self._sequence_header is not None:
            key = _first(headers, self._sequence_header)
        return key or None

    def _by_key(self, key: bytes, can_answer: Callable[[str], bool]) -> _Arm | None:
        by_score = sorted(self._arms, key=lambda arm: arm.score(key), reverse=True)
        return next((arm for arm in by_score if can_answer(arm.name)), None)

    def _by_weight(self, point: float, can_answer: Callable[[str], bool]) -> _Arm | None:
        """The arm in whose part of the unit interval the point lies; where that cannot answer, likewise among the rest:
        the point's place in that part is as good a point as the first."""
        arms, total = self._arms, self._total
        while True:
            begin, reach = 0.0, point * total
            for arm in arms:
                if reach < begin + arm.weight or arm is arms[-1]:
                    break
                begin += arm.weight
            if can_answer(arm.name):
                return arm
            point = min(max((reach - begin) / arm.weight, 0.0), 1.0)
            arms = [one for one in arms if one is not arm]
            if not arms:
                return None
            total = sum(one.weight for one in arms)


def _first(headers: Headers, name: bytes) -> bytes | None:
    """The value of the first header of that name, which is in lower case."""
    for line, value in headers:
        if len(line) == len(name) and line.lower() == name:
            return value.strip()
    return None


def _cookie(headers: Headers, name: bytes) -> bytes | None:
    """The value of the first cookie of that name."""
    for line, value in headers:
        if len(line) == 6 and line.lower() == b"cookie":
            for pair in value.split(b";"):
                word, _, said = pair.partition(b"=")
                if word.strip() == name:
                    return said.strip()
    return None
