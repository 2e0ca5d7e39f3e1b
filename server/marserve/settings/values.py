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

from marserve.model_options import BY_KEY, NOTHING, Said, written
from marserve.option_values import Unusable, parse_size

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
class ModelDefaults:
    """The values for one version in the setting `models`: its options, and the runtime; None if not given."""

    options: Said = NOTHING
    runtime_type: str | None = None


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


def _read_share(text: str, reading: Reading) -> float | Literal["auto"]:
    if text.strip().lower() == "auto":
        return "auto"
    try:
        return _read_float(text, reading)
    except Wrong:
        raise Wrong(
            f"Invalid configuration: {reading.name} is {text!r}; it must be auto, or a number{_bounds(reading)}"
        ) from None


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
    reading.let_pass(repr(text.strip()), f"one of {choices}", f"is not one of {choices}; log is taken")
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
    said: dict[str, Any] = {}
    runtime_type: str | None = None
    for name, value in keys.items():
        option = BY_KEY.get(name)
        if name in _SNAPSHOT_KEYS:
            continue
        if name == "runtimeType" and isinstance(value, str):
            runtime_type = value
        elif option is None or "models" not in option.order:
            reading.warn(f"{reading.name}: {name} of {which} is no key that is read here; it is ignored")
        else:
            try:
                said[option.attribute] = option.kind_in("models").read(value)
            except Unusable as error:
                reading.warn(
                    f"{reading.name}: {name} of {which} is {json.dumps(value)}, which counts as not given; "
                    f"it must be {error}"
                )
    return ModelDefaults(Said(said), runtime_type)


def _write_models(value: Models) -> str:
    document: dict[str, Any] = {}
    for model, versions in value.items():
        for version, defaults in versions.items():
            runtime = {} if defaults.runtime_type is None else {"runtimeType": defaults.runtime_type}
            document.setdefault(model, {})[version] = {**written(defaults.options), **runtime}
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
SHARE: Kind[float | Literal["auto"]] = Kind(
    "`auto`, or a number", _read_share, lambda value: value if isinstance(value, str) else f"{value:g}"
)
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
