"""Which version of a model answers a request. Pure: knows names, weights and headers; no pools, no clock, no I/O.

If the client names a version, that one answers, or the request fails. Else the model's weights decide: requests with a
sticky key by a hash of it, the others in turn. Without weights the default version answers.

Keys are spread by weighted rendezvous hashing: every version has a score for a key, and the highest wins. Raising a
weight moves keys to that version alone. A version that cannot answer loses only its own keys. Every server makes the
same choice. Requests without a key follow the multiples of the golden ratio: these fall into any share of the unit
interval as often as its length says, without a pattern that could match a client's. Of up to a thousand requests in a
row each version gets its share give or take four, wherever the multiples begin, while all can answer.
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
# Why a version was chosen: by the path (or gRPC's field), the header, a sticky key, its weight, or as the default.
Reason = Literal["path", "override", "sticky", "weight", "default"]

VERSION_HEADER = "x-marserve-version"
LARGEST_WEIGHT = 1_000_000
LONGEST_SALT = 128
_KEYS = ("weights", "sticky")
# Members that `GET` adds; `PUT` accepts and ignores them.
_ADDED = ("pending", "isDefault")
_STICKY_KEYS = ("header", "cookie", "salt")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}").fullmatch
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,62}").fullmatch
# The golden ratio's fraction in units of 2**-64.
_STEP = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Sticky:
    """Where a request has its key: in a header or a cookie. Another `salt` spreads the same keys anew."""

    header: str | None = None
    cookie: str | None = None
    salt: str = ""

    def document(self) -> dict[str, str]:
        """In the shape of `PUT`."""
        members = {"header": self.header, "cookie": self.cookie, "salt": self.salt or None}
        return {name: value for name, value in members.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Traffic:
    """How requests that name no version are shared out. `weights` are shares of their sum; one at least is above 0."""

    weights: Mapping[str, float]
    sticky: Sticky | None = None

    def document(self) -> dict[str, Any]:
        """In the shape of `PUT`."""
        members: dict[str, Any] = {"weights": dict(self.weights)}
        if self.sticky is not None:
            members["sticky"] = self.sticky.document()
        return members

    def without(self, version: str) -> Traffic | None:
        """The same for the other versions; None if none of them has a weight above 0."""
        weights = {name: weight for name, weight in self.weights.items() if name != version}
        return Traffic(weights, self.sticky) if any(weights.values()) else None

    def renamed(self, old: str, new: str) -> Traffic:
        """The same with `new` in the place of `old`."""
        return Traffic({new if name == old else name: weight for name, weight in self.weights.items()}, self.sticky)


@dataclass(frozen=True, slots=True)
class Role:
    """The part of one version in its model's traffic, for a snapshot: its weight, None without one, and its labels."""

    weight: float | None = None
    sticky: Sticky | None = None
    labels: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """In the shape of a snapshot; empty for a version without weight and labels."""
        members: dict[str, Any] = {}
        if self.weight is not None:
            members["weight"] = self.weight
            if self.sticky is not None:
                members["sticky"] = self.sticky.document()
        if self.labels:
            members["labels"] = list(self.labels)
        return members


NO_ROLE = Role()


# ---------------------------------------------------------------------------------------------- reading


def read_traffic(document: object) -> Traffic:
    """The body of `PUT /models/{model}/traffic`. Raises BadInput that says what is wrong."""
    if not isinstance(document, Mapping):
        raise BadInput(
            f"The traffic of a model is {_shown(document)}; it must be an object such as "
            '{"weights": {"1.0": 80, "2.0": 20}}.'
        )
    _refuse_unknown(document, _KEYS, _ADDED, "the traffic of a model")
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


def _refuse_unknown(document: Mapping[Any, Any], known: Sequence[str], added: Sequence[str], where: str) -> None:
    for name in document:
        if name not in known and name not in added:
            near = nearest(str(name), known)
            hint = f"Did you mean {near}?" if near else f"Known are {', '.join(known)}."
            raise BadInput(f"{_shown(name)} is no key of {where}. {hint}")


def read_role(document: object) -> Role:
    """The part in its model's traffic that a snapshot has of a version. Raises BadInput."""
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
    """Raise BadInput for a name that a label cannot have."""
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

    `default` is always a key of `versions`. Raises VersionNotFound for an unknown name; no other version is chosen in
    place of a named one.
    """
    try:
        return versions[default if named is None else named]
    except KeyError:
        raise VersionNotFound(model, str(named), known=tuple(versions)) from None


class _Arm:
    """One version, its weight, and the hash that makes its score for a key."""

    __slots__ = ("_hash", "name", "weight")

    def __init__(self, model: str, salt: str, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        identity = b"\0".join((model.encode("utf-8", "surrogatepass"), salt.encode("utf-8", "surrogatepass")))
        arm = blake2b(identity + b"\0" + name.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        self._hash = blake2b(digest_size=8, key=arm)

    def score(self, key: bytes) -> float:
        """The key's score. The chance that this arm's score is the highest is its share of the weights."""
        hasher = self._hash.copy()
        hasher.update(key)
        # 52 bits and a half: never 0 or 1, because the logarithm is a divisor.
        point = ((int.from_bytes(hasher.digest()) >> 12) + 0.5) / 2**52
        return -self.weight / math.log(point)


class Rule:
    """The weights of one model in force. `position` is its begin among the golden ratio's multiples."""

    __slots__ = ("_arms", "_cookie", "_header", "_position", "_sequence_header", "_total", "traffic")

    def __init__(self, model: str, traffic: Traffic, position: int, sequence_header: str | None = None) -> None:
        """`sequence_header` is the header that names a request's sequence, if one of the versions has sequences. The
        sequence is the key of a request without another key, so that a sequence stays with its version.
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
        """The current place among the golden ratio's multiples."""
        return self._position

    def choose(self, headers: Headers, can_answer: Callable[[str], bool]) -> tuple[str, Reason] | None:
        """The version for a request with these headers, and why; None if no version with a weight can answer."""
        key = self._key(headers)
        if key is not None:
            arm = self._by_key(key, can_answer)
            return None if arm is None else (arm.name, "sticky")
        self._position = (self._position + _STEP) & _MASK
        arm = self._by_weight(self._position / 2**64, can_answer)
        return None if arm is None else (arm.name, "weight")

    def shares(self, can_answer: Callable[[str], bool]) -> dict[str, float]:
        """The share of the requests that each version gets now, 0 to 1; empty if none can answer."""
        ready = [arm for arm in self._arms if can_answer(arm.name)]
        total = sum(arm.weight for arm in ready)
        return {arm.name: arm.weight / total for arm in ready}

    def pending(self, can_answer: Callable[[str], bool]) -> list[str]:
        """The versions that have a weight and cannot answer now."""
        return [arm.name for arm in self._arms if not can_answer(arm.name)]

    def _key(self, headers: Headers) -> bytes | None:
        """The request's sticky key; None for an empty one."""
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
        """The arm in whose part of the unit interval the point lies.

        If it cannot answer, the point's place in that part chooses among the other arms in the same way.
        """
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
