"""What values an option of a model can have: how each sort is read from YAML or JSON, and written back. Pure.

Read times are seconds, read sizes bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_LENGTH_RULE = re.compile(r"body_bytes|handler|header:[!#$%&'*+.^_`|~0-9A-Za-z-]+|json:[^.\s]+(?:\.[^.\s]+)*")
# More processes than any machine has devices for; rank 0 holds descriptors for each of the others.
MOST_RANKS = 64
MOST_PATTERNS, MOST_PATTERN_LETTERS = 1024, 512
MESH_DIMENSIONS = ("data", "tp")
PARALLEL_STYLES = ("colwise", "rowwise", "colwise_rep", "rowwise_rep", "replicate")
"""As `marserve_handlers.sharding.plan.STYLES`."""
_PARALLEL = "a map of mesh and plan, as {mesh: {tp: 2}, plan: {layers.*.up: colwise, layers.*.down: rowwise}}"
_AMOUNTS = "a map of resources to numbers of 0 or more, as {cpus: 2, gpus: 1, memory: 4GiB}"


class Unusable(ValueError):
    """A value cannot be used. The text says what it must be."""


class AuthorsOwn(Unusable):
    """The value is none of ours: handlers written for TorchServe may have a key of this name for themselves."""


class Sample(NamedTuple):
    """One sample input of a model: a file of its archive (a path inside it), or, if that is empty, a body."""

    content_type: str | None = None
    file: str = ""
    body: bytes = b""


class Tolerance(NamedTuple):
    """How far numbers of two answers may differ and still count as alike; paths in `ignore` are not compared.

    As `marserve_handlers.batch_check.Tolerance`, which says what a path is. `is_given`: the numbers were configured;
    else checks of batches derive them from the precision that the model computes in.
    """

    relative: float = 1e-3
    absolute: float = 1e-5
    ignore: tuple[str, ...] = ()
    is_given: bool = False


# The builds that can be made of a model, in the order in which they are tried.
BUILDS: Final = (
    "channels-last",
    "bf16",
    "onnx",
    "onnx-int8",
    "openvino",
    "openvino-int8",
    "compile",
    "aot",
    "aot-int8",
    "int8-rows",
)


class Optimising(NamedTuple):
    """Which builds are tried of an archive's model: `candidates`, none for all that suit, and a folder of `inputs`.

    `inputs` is a path inside the archive, empty for the samples. `is_asked`: the archive has the key, so that a server
    looks for a faster build by itself.
    """

    candidates: tuple[str, ...] = ()
    inputs: str = ""
    is_asked: bool = False


class ParallelPlan(NamedTuple):
    """How a model is divided over the ranks of a worker: the sizes of the mesh's dimensions, and the styles of modules.

    `plan` has a style for each pattern of modules' names: a pattern has one part for each part of a name, and `*`
    stands for any text inside of a part.
    """

    mesh: Mapping[str, int]
    plan: Mapping[str, str]

    @property
    def ranks(self) -> int:
        """The product of the mesh: the processes of one worker."""
        return prod(self.mesh.values())


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of value. `read` raises Unusable; `schema` is JSON Schema; `write` gives what a document holds."""

    read: Callable[[object], Any]
    schema: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[Any], Any] = lambda value: value


def parse_size(text: str) -> int | None:
    """Bytes in a text as `1500000`, `500MB`, `1.5GiB` (`G` is 1000³, `Gi` 1024³); None for another text."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    number, letter, binary = found.groups()
    if binary and not letter:
        return None
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(letter.lower() or " "))


def write_seconds(seconds: float | None) -> int | float:
    """Whole seconds as a whole number, as clients expect it; None is 0."""
    seconds = seconds or 0
    return int(seconds) if seconds == int(seconds) else seconds


def write_milliseconds(seconds: float | None) -> int:
    """Seconds as whole milliseconds; None is 0."""
    return round((seconds or 0) * 1000)


# ------------------------------------------------------------------------------------------------- numbers


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 31:
        raise Unusable("a whole number")
    return value


def raised_to(least: int) -> Kind:
    """A whole number; a smaller one becomes `least`."""
    return Kind(lambda value: max(least, _integer(value)), {"type": "integer"})


def at_least(least: int) -> Kind:
    """A whole number; a smaller one cannot be used."""

    def read(value: object) -> int:
        number = _integer(value)
        if number < least:
            raise Unusable(f"a whole number of {least} or more")
        return number

    return Kind(read, {"type": "integer", "minimum": least})


def between(least: int, most: int) -> Kind:
    """A whole number between the two, both included."""

    def read(value: object) -> int:
        number = _integer(value)
        if not least <= number <= most:
            raise Unusable(f"a whole number from {least} to {most}")
        return number

    return Kind(read, {"type": "integer", "minimum": least, "maximum": most})


def seconds(kind: Kind) -> Kind:
    """The whole number of the kind as seconds."""
    return Kind(lambda value: float(kind.read(value)), kind.schema, write_seconds)


def milliseconds(kind: Kind) -> Kind:
    """The whole number of the kind as milliseconds."""
    return Kind(lambda value: kind.read(value) / 1000, kind.schema, write_milliseconds)


def _read_duration(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise Unusable("a number of seconds above 0")
    return float(value)


def _number(most: float, *, is_within: bool, right: str) -> Callable[[object], float]:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise Unusable(right)
        if value == most and not is_within:
            raise Unusable(right)
        return float(value)

    return read


def _integer_of_any_size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62 else None


def _read_size(value: object) -> int:
    size = parse_size(value) if isinstance(value, str) else _integer_of_any_size(value)
    if size is None or size < 0:
        raise Unusable("a number of bytes of 0 or more, as 500MB or 2GiB")
    return size


def _read_positive_size(value: object) -> int:
    size = parse_size(value) if isinstance(value, str) else _integer_of_any_size(value)
    if size is None or size <= 0:
        raise Unusable("a number of bytes above 0, as 500MB or 2GiB")
    return size


# ------------------------------------------------------------------------------------------------- words, lists, maps


def words(*choices: str) -> Kind:
    """One of the words, in any case."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in choices:
            raise Unusable(f"one of {', '.join(choices)}")
        return value.lower()

    return Kind(read, {"enum": list(choices)})


def _read_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise Unusable("true or false")
    return value


def _read_flag_or_word(value: object) -> bool:
    is_word = isinstance(value, str) and value.lower() in ("true", "false")
    return str(value).lower() == "true" if is_word else _read_flag(value)


def _read_length_rule(value: object) -> str:
    if not isinstance(value, str) or _LENGTH_RULE.fullmatch(value) is None:
        raise Unusable("body_bytes, header:NAME, json:PATH or handler")
    return value


def _read_device_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise Unusable("a list of device numbers of 0 or more")
    return tuple(value)


def _read_exit_codes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= 255 for item in value):
        raise Unusable("a list of exit statuses from 0 to 255")
    return tuple(value)


def _read_map(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unusable("a map")
    return value


def _read_threads(value: object) -> dict[str, int]:
    """`{intra: 4, inter: 1}`, one of them at least."""
    right = "a map of intra, inter, or both, to whole numbers from 1 to 1024, as {intra: 4, inter: 1}"
    if not isinstance(value, dict):
        raise AuthorsOwn(right)
    if not value or not value.keys() <= {"intra", "inter"}:
        raise Unusable(right)
    if not all(type(each) is int and 1 <= each <= 1024 for each in value.values()):
        raise Unusable(right)
    return {name: value[name] for name in ("intra", "inter") if name in value}


def _read_sizes(value: object) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or not 1 <= len(value) <= 64
        or not all(type(each) is int and 1 <= each <= 65_536 for each in value)
        or value != sorted(set(value))
    ):
        raise Unusable("a list of 1 to 64 growing whole numbers from 1 to 65536, as [1, 2, 4, 8]")
    return tuple(value)


def _read_program(value: object) -> tuple[str, ...]:
    right = "a list of words, a program's name and a file of the archive first, as [node, worker.mjs]"
    if not isinstance(value, list) or not 2 <= len(value) <= 16:
        raise Unusable(right)
    if not all(isinstance(word, str) and word and "\0" not in word and is_encodable(word) for word in value):
        raise Unusable(right)
    if "/" in value[0]:
        raise Unusable(right)
    return tuple(value)


def _read_parallel(value: object) -> ParallelPlan:
    """`{mesh: {tp: 2}, plan: {layers.*.up: colwise}}`; a map with neither word is none of ours."""
    if not isinstance(value, dict) or value.keys().isdisjoint(("mesh", "plan")):
        raise AuthorsOwn(_PARALLEL)
    if value.keys() != {"mesh", "plan"}:
        raise Unusable(f"{_PARALLEL}, with both and nothing else")
    return ParallelPlan(_read_mesh(value["mesh"]), _read_plan(value["plan"]))


def _read_mesh(mesh: object) -> dict[str, int]:
    if not isinstance(mesh, dict) or "tp" not in mesh:
        raise Unusable(f"a map whose mesh says how many ranks share a layer, as {{tp: 2}}, and not {_shown(mesh)}")
    for name, size in mesh.items():
        if name not in MESH_DIMENSIONS:
            raise Unusable(f"a map whose mesh has the dimensions {', '.join(MESH_DIMENSIONS)}, and not {_shown(name)}")
        if type(size) is not int or size < 1:
            raise Unusable(f"a map whose mesh.{name} is a whole number of 1 or more, and not {_shown(size)}")
    if mesh.get("data", 1) != 1:
        raise Unusable(
            f"a map whose mesh.data is 1 or left out, and not {mesh['data']}: several copies of a model are several "
            f"workers (minWorkers: {mesh['data']}), each of {mesh['tp']} ranks"
        )
    if mesh["tp"] > MOST_RANKS:
        raise Unusable(f"a map whose mesh.tp is {MOST_RANKS} or less, and not {mesh['tp']}")
    return {name: mesh[name] for name in MESH_DIMENSIONS if name in mesh}


def _read_plan(plan: object) -> dict[str, str]:
    if not isinstance(plan, dict) or not plan or len(plan) > MOST_PATTERNS:
        raise Unusable(
            f"a map whose plan is a map of 1 to {MOST_PATTERNS} patterns of modules' names to styles, as "
            f"{{layers.*.up: colwise}}, and not {_shown(plan)}"
        )
    for pattern, style in plan.items():
        if not isinstance(pattern, str) or not all(pattern.split(".")) or len(pattern) > MOST_PATTERN_LETTERS:
            raise Unusable(
                f"a map whose plan has names of modules or patterns of them, as layers.*.up, and not {_shown(pattern)}"
            )
        if "**" in pattern:
            raise Unusable(
                f"a map whose plan has a * for one part of a name, and not {_shown(pattern)}: torch knows no **, so "
                "write a * for each part, as layers.*.mlp.up"
            )
        if style not in PARALLEL_STYLES:
            raise Unusable(
                f"a map whose plan has the styles {', '.join(PARALLEL_STYLES)}, and not {_shown(style)} for {pattern}"
            )
    return dict(plan)


def _write_parallel(value: ParallelPlan) -> dict[str, Any]:
    return {"mesh": dict(value.mesh), "plan": dict(value.plan)}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _read_amounts(value: object) -> dict[str, float]:
    """Resources of a cluster by name: `memory` is a size, the others are numbers of 0 or more."""
    if not isinstance(value, dict) or not all(isinstance(name, str) and name for name in value):
        raise Unusable(_AMOUNTS)
    amounts: dict[str, float] = {}
    for name, much in value.items():
        if name == "memory":
            amounts[name] = _read_size(much)
        elif isinstance(much, bool) or not isinstance(much, int | float) or not 0 <= much < 1e6:
            raise Unusable(_AMOUNTS)
        else:
            amounts[name] = float(much)
    return amounts


def _read_peaks(value: object) -> dict[str, float]:
    """FLOPs a second by dtype, under the empty name those of every other; nothing for `auto`."""
    if value == "auto":
        return {}
    named: dict[Any, Any] = value if isinstance(value, dict) else {"": value}
    peaks: dict[str, float] = {}
    for name, much in named.items():
        try:
            peaks[name] = float(much)  # YAML reads 1.5e12 as a number, and 2e12 as text
        except (TypeError, ValueError):
            peaks[name] = 0.0
        if not isinstance(name, str) or isinstance(much, bool) or not 0 < peaks[name] < 1e24:
            raise Unusable("auto, a number of FLOPs a second, or a map of dtypes to such numbers, as {float32: 1.5e12}")
    if not peaks:
        raise Unusable("auto, a number of FLOPs a second, or a map of dtypes to such numbers, as {float32: 1.5e12}")
    return peaks


def _write_peaks(peaks: Mapping[str, float]) -> object:
    if not peaks:
        return "auto"
    return peaks[""] if list(peaks) == [""] else dict(peaks)


_LONGEST_PLACE = 2000


def is_encodable(text: str) -> bool:
    """Whether a file can have that name: YAML and JSON can hold half a character, a surrogate, alone."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _read_checkpoint(value: object) -> str:
    place = value.strip() if isinstance(value, str) else ""
    if not place or len(place) > _LONGEST_PLACE or ("://" in place and not place.endswith("/")):
        raise Unusable("a folder of the archive or of the model store, or an address that ends in /")
    if not is_encodable(place):
        raise Unusable("a folder's name without half a character in it")
    return place


def _read_text(value: object) -> str:
    """A text; a number, as YAML reads `3.10`, is one too, so that it is refused where it names nothing."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise Unusable("a text")
    return str(value).strip()


_SHARE_SCHEMA = {"type": "number", "minimum": 0, "maximum": 1}
_SIZE_SCHEMA = {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9.]+ *[A-Za-z]*$"}]}

FLAG = Kind(_read_flag, {"type": "boolean"})
FLAG_OR_WORD = Kind(_read_flag_or_word, FLAG.schema)
DURATION = Kind(_read_duration, {"type": "number", "exclusiveMinimum": 0}, write_seconds)
SHARE = Kind(_number(1, is_within=True, right="a number from 0 to 1"), _SHARE_SCHEMA)
PART = Kind(_number(1, is_within=False, right="a number from 0 to below 1"), _SHARE_SCHEMA)
SIZE = Kind(_read_size, _SIZE_SCHEMA)
POSITIVE_SIZE = Kind(_read_positive_size, _SIZE_SCHEMA)
LENGTH_RULE = Kind(_read_length_rule, {"type": "string", "minLength": 1})
TEXT = Kind(_read_text, {"type": "string", "minLength": 1})
CHECKPOINT = Kind(_read_checkpoint, {"type": "string", "minLength": 1, "maxLength": _LONGEST_PLACE})
DEVICE_IDS = Kind(_read_device_ids, {"type": "array", "items": {"type": "integer", "minimum": 0}}, list)
EXIT_CODES = Kind(_read_exit_codes, {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}}, list)
_COUNT_SCHEMA = {"type": "integer", "minimum": 1, "maximum": 1024}
THREADS = Kind(
    _read_threads,
    {
        "type": "object",
        "properties": {"intra": _COUNT_SCHEMA, "inter": _COUNT_SCHEMA},
        "additionalProperties": False,
        "minProperties": 1,
    },
)
BATCH_SIZES = Kind(
    _read_sizes,
    {"type": "array", "minItems": 1, "maxItems": 64, "items": {"type": "integer", "minimum": 1, "maximum": 65_536}},
    list,
)
PEAKS = Kind(
    _read_peaks,
    {"oneOf": [{"const": "auto"}, {"type": "number", "exclusiveMinimum": 0}, {"type": "object"}]},
    _write_peaks,
)
PROGRAM = Kind(
    _read_program,
    {"type": "array", "minItems": 2, "maxItems": 16, "items": {"type": "string", "minLength": 1}},
    list,
)
PARALLEL = Kind(
    _read_parallel,
    {
        "type": "object",
        "properties": {
            "mesh": {
                "type": "object",
                "properties": {"data": {"const": 1}, "tp": {"type": "integer", "minimum": 1, "maximum": MOST_RANKS}},
                "required": ["tp"],
                "additionalProperties": False,
            },
            "plan": {
                "type": "object",
                "minProperties": 1,
                "maxProperties": MOST_PATTERNS,
                "additionalProperties": {"enum": list(PARALLEL_STYLES)},
            },
        },
        "required": ["mesh", "plan"],
        "additionalProperties": False,
    },
    _write_parallel,
)
MAP = Kind(_read_map, {"type": "object"})
AMOUNTS = Kind(_read_amounts, {"type": "object"})
