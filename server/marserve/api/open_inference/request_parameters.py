"""What the parameters of an inference request ask of the server: a priority, a time limit, a sequence. Pure.

Triton's extensions "schedule_policy" and "sequence" say what each means. Other parameters are the model's to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from marserve.api.decoding import breathe
from marserve.api.open_inference.shown import shown
from marserve.api.wishes import MAX_TIMEOUT_MS
from marserve.errors import BadInput
from marserve.registry.intake.call_modes import SequenceHeaderNames

LENGTH_HEADER: Final = b"inference-header-content-length"
# Triton's 1 is the most urgent and stands for 0 of ours.
LEAST_URGENT: Final = 10
MAX_TIMEOUT_US: Final = MAX_TIMEOUT_MS * 1000
MAX_SEQUENCE_ID: Final = 256

# JSON up to this length is searched for the parameters on the event loop, up to the second one also read there.
SEARCHED_BYTES: Final = 256 * 1024
QUICK_BYTES: Final = 32 * 1024

# Python's words for numbers that JSON has none for, and what is read in their place: as long, which is quick.
STAND_INS: Final = ((b"NaN", b"0E0"), (b"Infinity", b"0E000000"))

_NAMES: Final = ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end")
_LONGEST_NAME: Final = len('"sequence_start"')
_MENTIONED = re.compile(rb'"(?:priority|timeout|sequence_(?:id|start|end))"').search
_SEQUENCE_ID = re.compile(rf"[!-~](?:[ -~]{{0,{MAX_SEQUENCE_ID - 2}}}[!-~])?").fullmatch


class Asked(NamedTuple):
    """What a request asks for; None for what it does not. `sequence` are headers that name its place in a sequence."""

    timeout_s: float | None = None
    priority: int | None = None
    sequence: tuple[tuple[str, str], ...] = ()

    def deadline(self, began: float, given: float | None) -> float | None:
        """The earlier of the deadline that is `given` elsewhere and the one asked for here, counted from `began`."""
        if self.timeout_s is None:
            return given
        mine = began + self.timeout_s
        return mine if given is None else min(mine, given)

    def headers(self, given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The client's headers, with those of the sequence in the place of its own of these names."""
        if not self.sequence:
            return given
        added = [(name.encode("latin-1", "replace"), value.encode()) for name, value in self.sequence]
        names = {name.lower() for name, _ in added}
        return [*(line for line in given if line[0].lower() not in names), *added]


NOTHING: Final = Asked()


class _Body(msgspec.Struct):
    """The member of a request's JSON that is read here; the others are skipped."""

    parameters: Any = None


_decode = msgspec.json.Decoder(_Body).decode


def read_asked(parameters: Mapping[str, Any], names: SequenceHeaderNames) -> Asked:
    """What the parameters ask for; `names` are the headers of sequences. Raises BadInput that names the parameter."""
    if not any(name in parameters for name in _NAMES):
        return NOTHING
    timeout_us = _whole(parameters, "timeout", MAX_TIMEOUT_US, "microseconds; 0 is no limit")
    priority = _whole(parameters, "priority", LEAST_URGENT, "1 is the most urgent; 0 is the model's own")
    return Asked(
        timeout_us / 1e6 if timeout_us else None,
        priority - 1 if priority else None,
        _sequence(parameters, names),
    )


def json_bytes(headers: Iterable[tuple[bytes, bytes]], length: int) -> int:
    """How many of a body's bytes are JSON, by the header that says so; all of them without it, or if it is wrong.

    A worker refuses a wrong one, and says why.
    """
    for name, value in headers:
        if len(name) == len(LENGTH_HEADER) and name.lower() == LENGTH_HEADER:
            text = value.strip()
            return int(text) if text.isdigit() and len(text) < 20 and int(text) <= length else length
    return length


def may_ask(body: bytes | bytearray, end: int) -> bool:
    """Whether the JSON of a body, its first `end` bytes, has the name of a parameter that is read here."""
    for begin in range(0, end, SEARCHED_BYTES):
        if begin:
            breathe()
        if _MENTIONED(body, begin, min(end, begin + SEARCHED_BYTES + _LONGEST_NAME)):
            return True
    return False


def read_body(body: bytes | bytearray, end: int, names: SequenceHeaderNames) -> Asked:
    """What the JSON of a body asks for; nothing if it cannot be read, which its worker will refuse.

    Raises BadInput as `read_asked` does.
    """
    if not may_ask(body, end):
        return NOTHING
    if end > QUICK_BYTES:
        breathe()
    text = bytes(memoryview(body)[:end])
    try:
        parameters = _decode(text).parameters
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _read_python(text, names)
    return read_asked(parameters, names) if isinstance(parameters, dict) else NOTHING


def _read_python(text: bytes, names: SequenceHeaderNames) -> Asked:
    """As `read_body`, of JSON with Python's words for numbers that JSON has none for.

    They are replaced, as Python's own reader would hold the interpreter for long.
    """
    replaced = text
    for word, number in STAND_INS:
        replaced = replaced.replace(word, number)
        breathe()
    try:
        parameters = _decode(replaced).parameters
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NOTHING
    if not isinstance(parameters, dict):
        return NOTHING
    asked = read_asked(parameters, names)
    if any(value.encode() not in text for _, value in asked.sequence):
        raise BadInput(
            "Parameter sequence_id has NaN or Infinity in it, and the inputs are such numbers; name another."
        )
    return asked


def _whole(parameters: Mapping[str, Any], name: str, most: int, unit: str) -> int:
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value <= most:
        raise BadInput(f"Parameter {name} is {shown(value)}; it must be a whole number from 0 to {most} ({unit}).")
    return value


def _sequence(parameters: Mapping[str, Any], names: SequenceHeaderNames) -> tuple[tuple[str, str], ...]:
    """The headers of a sequence. The numbers 0 and the empty text name none."""
    given = parameters.get("sequence_id", "")
    if type(given) is int and 0 <= given < 1 << 64:
        given = str(given) if given else ""
    if not isinstance(given, str) or (given and not _SEQUENCE_ID(given)):
        raise BadInput(
            f"Parameter sequence_id is {shown(given)}; it must be a whole number of 64 bits, or a text of at most "
            f"{MAX_SEQUENCE_ID} printable ASCII characters."
        )
    headers = [(names.id, given)] if given else []
    for name, header in (("sequence_start", names.start), ("sequence_end", names.end)):
        value = parameters.get(name, False)
        if not isinstance(value, bool):
            raise BadInput(f"Parameter {name} is {shown(value)}; it must be true or false.")
        if value and not given:
            raise BadInput(f"Parameter {name} is true, and sequence_id names no sequence; give both, or neither.")
        if value:
            headers.append((header, "true"))
    return tuple(headers)
