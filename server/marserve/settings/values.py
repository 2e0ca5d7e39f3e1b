"""The kinds of values that settings have, and how each is read from a line of text and written back.

A `Kind` reads and writes one sort of value. Reading raises `Wrong` with a sentence that says what would be right; the
caller adds the key and its place. Odd input that TorchServe accepts is accepted too, with a warning.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar

from marserve.option_values import parse_size

T_co = TypeVar("T_co", covariant=True)


class Wrong(Exception):
    """An invalid text. The message says what it is and what would be right."""


@dataclass(frozen=True)
class Reading:
    """What a kind needs for reading: the key's bounds and words, the folder of relative paths, and the warnings.

    With `is_strict` odd input that TorchServe accepts is refused.
    """

    name: str
    working_directory: Path
    warn: Callable[[str], None]
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    is_strict: bool = False

    def let_pass(self, wrong: str, right: str, instead: str) -> None:
        """Warn that a value is wrong and what is taken instead, or raise Wrong."""
        if self.is_strict:
            raise Wrong(f"Invalid configuration: {self.name} is {wrong}; it must be {right}")
        self.warn(f"{self.name} is {wrong}, which {instead}")


@dataclass(frozen=True)
class Kind(Generic[T_co]):
    """One sort of value: its name in the documentation, how it is read, how it is written."""

    name: str
    read: Callable[[str, Reading], T_co]
    write: Callable[[Any], str] = str


@dataclass(frozen=True)
class Address:
    """An address to listen at: `http` or `https` with host and port, or `unix` with the path of a socket."""

    scheme: Literal["http", "https", "unix"]
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.scheme == "unix" or self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_tls(self) -> bool:
        """Whether it is `https`."""
        return self.scheme == "https"

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.path}"
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True)
class ModelToLoad:
    """An entry of `load_models`: the archive's name or URL, and a name for the model, None for its own."""

    url: str
    name: str | None = None

    def __str__(self) -> str:
        return f"{self.name}={self.url}" if self.name else self.url


@dataclass(frozen=True)
class MemoryWish:
    """A model's memory options; None for one that is not given.

    `memory_bytes` is what the model takes with one worker. `load` says when it is loaded: at once, or by the first
    request. A model that `is_pinned` is never unloaded to make room for another one.
    """

    memory_bytes: int | None = None
    load: Literal["start", "on_demand"] | None = None
    is_pinned: bool | None = None

    def over(self, other: MemoryWish) -> MemoryWish:
        """These options, with those of `other` for the ones that are not given."""
        return MemoryWish(
            other.memory_bytes if self.memory_bytes is None else self.memory_bytes,
            other.load if self.load is None else self.load,
            other.is_pinned if self.is_pinned is None else self.is_pinned,
        )

    def document(self) -> dict[str, Any]:
        """The given options, under the names of a model's configuration."""
        said = {"memory": self.memory_bytes, "load": self.load, "pinned": self.is_pinned}
        return {name: value for name, value in said.items() if value is not None}


NO_WISH = MemoryWish()


def read_memory_wish(said: Mapping[str, object]) -> MemoryWish:
    """The options `memory`, `load` and `pinned`, as texts or JSON values; None if not given.

    Raises ValueError that names the invalid option and its valid values.
    """
    memory, load, pinned = (said.get(name) for name in ("memory", "load", "pinned"))
    size: Any = parse_size(memory) if isinstance(memory, str) else memory
    if memory is not None and (isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 1 << 60):
        raise ValueError(f"memory is {memory!r}; it must be a number of bytes above 0, as 500MB or 2GiB")
    if load is not None and (not isinstance(load, str) or load.lower() not in ("start", "on_demand")):
        raise ValueError(f"load is {load!r}; it must be start or on_demand")
    if isinstance(pinned, str) and pinned.lower() in ("true", "false"):
        pinned = pinned.lower() == "true"
    if pinned is not None and not isinstance(pinned, bool):
        raise ValueError(f"pinned is {pinned!r}; it must be true or false")
    when: Any = load.lower() if isinstance(load, str) else None
    return MemoryWish(size, when, pinned)


@dataclass(frozen=True)
class ModelDefaults:
    """The values for one version in the setting `models`; None if not given. Times in seconds."""

    min_workers: int | None = None
    max_workers: int | None = None
    batch_size: int | None = None
    max_batch_delay_s: float | None = None
    response_timeout_s: float | None = None
    startup_timeout_s: float | None = None
    runtime_type: str | None = None
    memory: MemoryWish = NO_WISH


LoadModels = Literal["all"] | tuple[ModelToLoad, ...]
Models = Mapping[str, Mapping[str, ModelDefaults]]
NO_MODELS: Models = MappingProxyType({})

_ADDRESS = re.compile(r"(https?)://(\[[^\]]+\]|[^:/\[\]]+)(?::([0-9]{1,18}))?/?", re.IGNORECASE)
_UNIX_ADDRESS = re.compile(r"unix:(/.+)", re.IGNORECASE)


def address_kind(http_port: int, https_port: int) -> Kind[Address]:
    """Addresses of a listener; these are its ports if none is given."""

    def read(text: str, reading: Reading) -> Address:
        text = text.strip()
        if unix := _UNIX_ADDRESS.fullmatch(text):
            return Address("unix", path=unix[1])
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise Wrong(
                f"Invalid binding address: {text}; {reading.name} is http://host:port, https://host:port or unix:/path"
            )
        scheme: Literal["http", "https"] = "https" if found[1].lower() == "https" else "http"
        port = int(found[3]) if found[3] else (https_port if scheme == "https" else http_port)
        if port >= 65535:
            raise Wrong(f"Invalid port number: {text}; the port of {reading.name} must be under 65535")
        return Address(scheme, found[2].strip("[]"), port)

    return Kind("address", read)


def _read_text(text: str, reading: Reading) -> str:
    return text.strip()


def _read_optional_text(text: str, reading: Reading) -> str | None:
    return text.strip() or None


def _read_path(text: str, reading: Reading) -> Path | None:
    return reading.working_directory / text.strip() if text.strip() else None


def _read_file(text: str, reading: Reading) -> Path:
    if not text.strip():
        raise Wrong(f"Invalid configuration: {reading.name} is empty; it must be a file's name")
    return reading.working_directory / text.strip()


_ROUTE = re.compile(r"(?:/[A-Za-z0-9._~:@!$&'()*+,;=-]+)+")


def _read_route(text: str, reading: Reading) -> str | None:
    text = text.strip()
    if text and not _ROUTE.fullmatch(text):
        raise Wrong(f"Invalid configuration: {reading.name} is {text!r}; it must be a path such as /v1/health")
    return text or None


def _read_bool(text: str, reading: Reading) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false", ""):
        reading.let_pass(repr(text.strip()), "true or false", "counts as false; write true or false")
    return word == "true"


def _read_int(text: str, reading: Reading) -> int:
    try:
        # int() also accepts underscores and digits of other scripts, which would be mistakes here.
        value = int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text) else None
    except ValueError:
        value = None
    if value is None or not _is_within(value, reading):
        raise Wrong(f"Invalid configuration: {reading.name} is {text!r}; it must be a whole number{_bounds(reading)}")
    return value


def _read_optional_int(text: str, reading: Reading) -> int | None:
    return _read_int(text, reading) if text.strip() else None


def _read_float(text: str, reading: Reading) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not _is_within(value, reading):
        raise Wrong(f"Invalid configuration: {reading.name} is {text!r}; it must be a number{_bounds(reading)}")
    return value


def _read_minutes(text: str, reading: Reading) -> float:
    try:
        return _read_float(text, reading)
    except Wrong:
        reading.let_pass(repr(text.strip()), "a number of 0 or more", "is no number of minutes; 60 is taken")
        return 60.0


def _is_within(value: float, reading: Reading) -> bool:
    low, high = reading.minimum, reading.maximum
    return (low is None or value >= low) and (high is None or value <= high)


def _bounds(reading: Reading) -> str:
    low, high = reading.minimum, reading.maximum
    if low is None:
        return ""
    return f" of {low:g} or more" if high is None else f" from {low:g} to {high:g}"


def _read_size(text: str, reading: Reading) -> int:
    value = parse_size(text)
    if value is None or not _is_within(value, reading):
        raise Wrong(
            f"Invalid configuration: {reading.name} is {text!r}; it must be a number of bytes, as 500MB or 2GiB"
            f"{_bounds(reading)}"
        )
    return value


def _read_model_memory(text: str, reading: Reading) -> int | Literal["auto"]:
    return "auto" if text.strip().lower() == "auto" else _read_size(text, reading)


def _read_choice(text: str, reading: Reading) -> str:
    word = text.strip().lower()
    for choice in reading.choices:
        if choice.lower() == word:
            return choice
    choices = ", ".join(reading.choices)
    raise Wrong(f"Invalid configuration: {reading.name} is {text!r}; it must be one of {choices}")


def _read_lenient_choice(text: str, reading: Reading) -> str:
    word = text.strip().lower()
    if word in reading.choices:
        return word
    choices = ", ".join(reading.choices)
    reading.let_pass(repr(text.strip()), f"one of {choices}", f"is none of {choices}; log is taken")
    return "log"


def _read_regex(text: str, reading: Reading) -> re.Pattern[str] | None:
    return _compile(text, reading) if text.strip() else None


def _read_regexes(text: str, reading: Reading) -> tuple[str, ...]:
    patterns = tuple(part.strip() for part in text.split(",") if part.strip())
    for pattern in patterns:
        _compile(pattern, reading)
    return patterns


def _compile(pattern: str, reading: Reading) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning of syntax that may change in Python; Java's rules differ anyway
            return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise Wrong(
            f"Invalid configuration: {reading.name} has {pattern!r}, which is no regular expression ({error})"
        ) from None


def _read_words(text: str, reading: Reading) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_HOST_NAME = re.compile(r"(?:\*\.)?[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?)*")


def _read_hosts(text: str, reading: Reading) -> tuple[str, ...]:
    return tuple(_read_host(part.strip(), reading) for part in text.split(",") if part.strip())


def _read_host(text: str, reading: Reading) -> str:
    host = text.lower().removesuffix(".")
    if host == "*" or _HOST_NAME.fullmatch(host):
        return host
    try:
        is_bracketed = host.startswith("[") and host.endswith("]")
        return ipaddress.IPv6Address(host[1:-1] if is_bracketed else host).compressed
    except ValueError:
        raise Wrong(
            f"Invalid configuration: {reading.name} has {text[:100]!r}; a host is a name or an address without scheme, "
            "port and path, as in models.example.com, *.example.com or 10.0.0.7"
        ) from None


def _read_folders(text: str, reading: Reading) -> tuple[Path, ...]:
    return tuple(reading.working_directory / part.strip() for part in text.split(",") if part.strip())


def _read_load_models(text: str, reading: Reading) -> LoadModels:
    if text.strip().lower() == "all":
        return "all"
    return tuple(_read_model_to_load(part.strip()) for part in text.split(",") if part.strip())


def _read_model_to_load(text: str) -> ModelToLoad:
    name, equals, url = text.partition("=")
    # A URL may have equals signs of its own (`https://host/m.mar?key=x`, `m.mar#sha256=x`); a name has none of these.
    if not equals or any(sign in name for sign in "/:?#"):
        return ModelToLoad(text)
    return ModelToLoad(url.strip(), name.strip() or None)


def _write_load_models(value: LoadModels) -> str:
    return value if isinstance(value, str) else ",".join(map(str, value))


# Keys that a snapshot writes beside those below; they are ignored here.
_SNAPSHOT_KEYS = frozenset({"marName", "defaultVersion", "parallelLevel"})
_MODEL_NUMBERS = {
    "minWorkers": ("min_workers", 1, 1),
    "maxWorkers": ("max_workers", 1, 1),
    "batchSize": ("batch_size", 1, 1),
    "maxBatchDelay": ("max_batch_delay_s", 0, 0.001),
    "responseTimeout": ("response_timeout_s", 1, 1.0),
    "startupTimeout": ("startup_timeout_s", 1, 1.0),
}


def _read_models(text: str, reading: Reading) -> Models:
    if not text.strip():
        return NO_MODELS
    right = 'it must be {"name": {"version": {"minWorkers": 1, …}}}'
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Wrong(f"Invalid configuration: {reading.name} is no JSON ({error}); {right}") from None
    models: dict[str, Mapping[str, ModelDefaults]] = {}
    for model, versions in _object(document, reading, right).items():
        models[model] = MappingProxyType(
            {
                version: _read_model_defaults(_object(keys, reading, right), f"{model} {version}", reading)
                for version, keys in _object(versions, reading, right).items()
            }
        )
    return MappingProxyType(models)


def _object(value: object, reading: Reading, right: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Wrong(
            f"Invalid configuration: {reading.name} has {json.dumps(value)[:60]} where an object belongs; {right}"
        )
    return value


def _read_model_defaults(keys: dict[str, Any], which: str, reading: Reading) -> ModelDefaults:
    found: dict[str, Any] = {"memory": NO_WISH}
    for name, value in keys.items():
        if name in _SNAPSHOT_KEYS:
            continue
        if name in ("memory", "load", "pinned"):
            try:
                found["memory"] = read_memory_wish({name: value}).over(found["memory"])
            except ValueError as error:
                reading.warn(f"{reading.name}: of {which} {error}; it counts as not given")
            continue
        if name == "runtimeType" and isinstance(value, str):
            found["runtime_type"] = value
        elif name in _MODEL_NUMBERS:
            attribute, minimum, factor = _MODEL_NUMBERS[name]
            if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
                found[attribute] = value * factor
            else:
                reading.warn(
                    f"{reading.name}: {name} of {which} is {json.dumps(value)}, which counts as not given; "
                    f"it must be a whole number of {minimum} or more"
                )
        else:
            reading.warn(f"{reading.name}: {name} of {which} is no key that is read here; it is ignored")
    return ModelDefaults(**found)


def _write_models(value: Models) -> str:
    names = {attribute: (name, factor) for name, (attribute, _, factor) in _MODEL_NUMBERS.items()}
    document: dict[str, Any] = {}
    for model, versions in value.items():
        for version, defaults in versions.items():
            keys = document.setdefault(model, {}).setdefault(version, {})
            for attribute, (name, factor) in names.items():
                if getattr(defaults, attribute) is not None:
                    keys[name] = round(getattr(defaults, attribute) / factor)
            if defaults.runtime_type is not None:
                keys["runtimeType"] = defaults.runtime_type
            keys.update(defaults.memory.document())
    return json.dumps(document) if document else ""


def _write_number(value: float | None) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _write_pattern(value: re.Pattern[str] | None) -> str:
    return "" if value is None else value.pattern


def _write_optional(value: object) -> str:
    return "" if value is None else str(value)


TEXT: Kind[str] = Kind("text", _read_text)
OPTIONAL_TEXT: Kind[str | None] = Kind("text", _read_optional_text, _write_optional)
PATH: Kind[Path | None] = Kind("path", _read_path, _write_optional)
ROUTE: Kind[str | None] = Kind("path of a URL", _read_route, _write_optional)
FILE: Kind[Path] = Kind("path", _read_file)
BOOL: Kind[bool] = Kind("true or false", _read_bool, lambda value: "true" if value else "false")
INT: Kind[int] = Kind("whole number", _read_int, _write_number)
OPTIONAL_INT: Kind[int | None] = Kind("whole number", _read_optional_int, _write_number)
FLOAT: Kind[float] = Kind("number", _read_float, _write_number)
SIZE: Kind[int] = Kind("bytes, as `500MB` or `2GiB`", _read_size, str)
MODEL_MEMORY: Kind[int | Literal["auto"]] = Kind("`auto`, or bytes, as `500MB` or `2GiB`", _read_model_memory, str)
MINUTES: Kind[float] = Kind("number", _read_minutes, _write_number)
CHOICE: Kind[Any] = Kind("word", _read_choice)
LENIENT_CHOICE: Kind[Any] = Kind("word", _read_lenient_choice)
INT_CHOICE: Kind[Any] = Kind("number", lambda text, reading: int(_read_choice(text, reading)), str)
REGEX: Kind[re.Pattern[str] | None] = Kind("regular expression", _read_regex, _write_pattern)
REGEXES: Kind[tuple[str, ...]] = Kind("regular expressions, comma-separated", _read_regexes, ",".join)
WORDS: Kind[tuple[str, ...]] = Kind("words, comma-separated", _read_words, ",".join)
HOSTS: Kind[tuple[str, ...]] = Kind("hosts, comma-separated", _read_hosts, ",".join)
FOLDERS: Kind[tuple[Path, ...]] = Kind(
    "folders, comma-separated", _read_folders, lambda value: ",".join(map(str, value))
)
LOAD_MODELS: Kind[LoadModels] = Kind(
    "`all`, or comma-separated `url` or `name=url`", _read_load_models, _write_load_models
)
MODELS: Kind[Models] = Kind("JSON", _read_models, _write_models)
