"""The settings `watches` and `event_secrets`: the watched places, and what is done with new archives there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from marserve.settings.shown_address import hide_query, hide_quoted
from marserve.settings.stores import Secret
from marserve.settings.values import Kind, Reading, Wrong

NewVersionPolicy = Literal["ignore", "load", "load-and-default", "canary"]
RemovedPolicy = Literal["ignore", "unload"]
NameRule = Literal["auto", "manifest", "path"]

MODEL_STORE = "model_store"
SHORTEST_INTERVAL_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")


@dataclass(frozen=True)
class WatchedPlace:
    """A watched place: `place` is `model_store`, a folder's path, or an address of a store with a prefix.

    `policy` says what is done with new versions, `removed` with versions whose archive is removed. `names` says what
    names a version first: the archive's manifest, its path, or (`auto`) the path if it is `model/version/…`. `keep` is
    the number of the watch's versions that stay loaded, None: by the policy. `interval_s` is the pause between looks in
    seconds, None: that of the setting. `canary` has members of a roll-out, such as steps and hold. `prefix` is the
    required beginning of names in a folder; the setting cannot give it.
    """

    name: str
    place: str
    policy: NewVersionPolicy
    removed: RemovedPolicy = "ignore"
    names: NameRule = "auto"
    keep: int | None = None
    interval_s: float | None = None
    canary: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    prefix: str = ""

    @property
    def is_address(self) -> bool:
        """Whether it is in an object store, not a folder."""
        return "://" in self.place

    def document(self) -> dict[str, Any]:
        """Its members in the setting."""
        members: dict[str, Any] = {"name": self.name, "place": self.place, "policy": self.policy}
        if self.removed != "ignore":
            members["removed"] = self.removed
        if self.names != "auto":
            members["names"] = self.names
        if self.keep is not None:
            members["keep"] = self.keep
        if self.interval_s is not None:
            members["interval"] = self.interval_s
        if self.canary:
            members["canary"] = dict(self.canary)
        return members


def read_policy(word: str) -> NewVersionPolicy | None:
    """The policy of this name, with hyphens or underscores; None for an unknown name."""
    word = word.strip().lower().replace("_", "-")
    return word if word in get_args(NewVersionPolicy) else None  # type: ignore[return-value]


def _read_store_policy(text: str, reading: Reading) -> NewVersionPolicy | None:
    if text.strip().lower() in ("", "off", "false", "none"):
        return None
    policy = read_policy(text)
    if policy is None:
        raise Wrong(
            f"Invalid configuration: {reading.name} is {text!r}; it must be off or one of "
            f"{', '.join(get_args(NewVersionPolicy))}"
        )
    return policy


def _read_watches(text: str, reading: Reading) -> tuple[WatchedPlace, ...]:
    if not text.strip():
        return ()
    right = 'it must be JSON such as [{"place": "s3://bucket/models/", "policy": "load"}]'
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"Invalid configuration: {reading.name} is no JSON ({error}); {right}") from None
    if not isinstance(document, list) or not all(isinstance(each, dict) for each in document):
        raise Wrong(f"Invalid configuration: {reading.name} is no list of objects; {right}")
    watches = tuple(_read_watch(each, number, reading) for number, each in enumerate(document, 1))
    for what, values in (("name", [each.name for each in watches]), ("place", [each.place for each in watches])):
        for value in values:
            if values.count(value) > 1:
                raise Wrong(f"Invalid configuration: {reading.name} has two watches of the {what} {value!r}")
    return watches


def _read_watch(document: dict[str, Any], number: int, reading: Reading) -> WatchedPlace:
    def wrong(key: str, right: str) -> Wrong:
        shown = hide_quoted(json.dumps(document.get(key)))[:80]
        return Wrong(f"Invalid configuration: {reading.name}: {key} of watch {number} is {shown}; it must be {right}")

    known = ("name", "place", "policy", "removed", "names", "keep", "interval", "canary")
    for key in document:
        if key not in known:
            raise Wrong(
                f"Invalid configuration: {reading.name}: watch {number} has {key!r}; known are {', '.join(known)}"
            )
    place = document.get("place")
    if not isinstance(place, str) or not place.strip():
        raise wrong("place", "model_store, a folder, or an address such as s3://bucket/models/")
    place = place.strip()
    if "?" in place or "#" in place or ("://" in place and hide_query(place) != place):
        raise wrong("place", "an address without ? and #, and without a user")
    name = document.get("name", _name_of(place))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong("name", "up to 64 letters, digits, _, . and -")
    policy = read_policy(document["policy"]) if isinstance(document.get("policy"), str) else None
    if policy is None:
        raise wrong("policy", f"one of {', '.join(get_args(NewVersionPolicy))}")
    removed, names = document.get("removed", "ignore"), document.get("names", "auto")
    if removed not in get_args(RemovedPolicy):
        raise wrong("removed", f"one of {', '.join(get_args(RemovedPolicy))}")
    if names not in get_args(NameRule):
        raise wrong("names", f"one of {', '.join(get_args(NameRule))}")
    keep, interval = document.get("keep"), document.get("interval")
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 0):
        raise wrong("keep", "a whole number of 0 or more; 0 keeps all")
    if interval is not None and (
        not isinstance(interval, int | float) or isinstance(interval, bool) or not interval >= SHORTEST_INTERVAL_S
    ):
        raise wrong("interval", f"a number of seconds of {SHORTEST_INTERVAL_S:g} or more")
    canary = document.get("canary", {})
    if not isinstance(canary, dict) or (canary and policy != "canary"):
        raise wrong("canary", 'an object such as {"steps": [5, 50, 100]}, with the policy canary')
    if place != MODEL_STORE and "://" not in place:
        place = str(reading.working_directory / place)
    return WatchedPlace(
        name,
        place,
        policy,
        removed,
        names,
        keep,
        None if interval is None else float(interval),
        MappingProxyType(canary),
    )


def _name_of(place: str) -> str:
    """The name of a watch without one: the last part of its place, or all of it."""
    last = re.sub(r"[^A-Za-z0-9_.\-]", "-", place.rstrip("/").rpartition("/")[2]).strip("-.")
    return last[:64] or "watch"


def _write_watches(value: tuple[WatchedPlace, ...]) -> str:
    return json.dumps([each.document() for each in value]) if value else ""


def _read_event_secrets(text: str, reading: Reading) -> Mapping[str, Secret]:
    """Secrets by source. A secret is its value itself, or {"env": …} or {"file": …}."""
    if not text.strip():
        return NO_SECRETS
    right = 'it must be JSON such as {"minio": {"env": "MINIO_EVENT_SECRET"}}'
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise Wrong(f"Invalid configuration: {reading.name} is no JSON; {right}") from None
    if not isinstance(document, dict):
        raise Wrong(f"Invalid configuration: {reading.name} is no object; {right}")
    secrets: dict[str, Secret] = {}
    for source, value in document.items():
        if not _NAME.fullmatch(source):
            raise Wrong(
                f"Invalid configuration: {reading.name} has a source {source[:80]!r}; its name must be up to 64 "
                "letters, digits, _, . and -"
            )
        if isinstance(value, str) and len(value) >= SHORTEST_SECRET:
            secrets[source] = Secret(value)
        elif isinstance(value, dict) and len(value) == 1 and isinstance(value.get("env"), str):
            secrets[source] = Secret(env=value["env"])
        elif isinstance(value, dict) and len(value) == 1 and isinstance(value.get("file"), str):
            secrets[source] = Secret(file=reading.working_directory / value["file"])
        else:
            raise Wrong(
                f"Invalid configuration: {reading.name}: the secret of {source} must be a text of {SHORTEST_SECRET} "
                'characters or more, {"env": "VARIABLE"} or {"file": "path"}'
            )
    return MappingProxyType(secrets)


SHORTEST_SECRET = 16
NO_SECRETS: Mapping[str, Secret] = MappingProxyType({})

WATCHES: Kind[tuple[WatchedPlace, ...]] = Kind("JSON", _read_watches, _write_watches)
STORE_POLICY: Kind[NewVersionPolicy | None] = Kind(
    "`off`, `ignore`, `load`, `load-and-default` or `canary`", _read_store_policy, lambda value: value or "off"
)
EVENT_SECRETS: Kind[Mapping[str, Secret]] = Kind("JSON", _read_event_secrets, lambda value: "***" if value else "")
