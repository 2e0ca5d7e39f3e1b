"""The syntax of the lines in which TorchServe writes metrics, and of those that it reads. Pure.

    QueueTime.Milliseconds:0.0|#Level:Host|#hostname:box,timestamp:1717105307                    in the logs
    [METRICS]Seen.Count:1|#ModelName:m,Level:Model|#type:COUNTER|#hostname:box,1717105307,id     what a handler prints

A program named by `system_metrics_cmd` prints the second form without its mark and type.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from marserve.messages import Metric

MARK = "[METRICS]"

_PRINTED = re.compile(
    r"\s*(\w[\w\s]*)\.([\w\s]+):([0-9\-,.eE+]+)\|#([^|]*)(?:\|#type:([^|]+))?\|#hostname:([^,]+),([^,]+)(?:,(.*))?\s*"
)
_MARKED = re.compile(r"(?:INFO > )?\[METRICS\](.*)", re.DOTALL)
_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029|]")


def marked_part(text: str) -> str | None:
    """The text after `[METRICS]` in a line that a handler printed; None for other lines."""
    if MARK not in text[:17]:
        return None
    found = _MARKED.fullmatch(text)
    return None if found is None else found[1]


def parse_line(text: str) -> Metric | None:
    """The metric of a line; None if it has none. `kind` is empty if the line names no type.

    As in TorchServe, dimensions that are no pairs are left out.
    """
    found = _PRINTED.fullmatch(text)
    if found is None:
        return None
    name, unit, number, dimensions, kind, _, _, ids = found.groups()
    try:
        value = float(number)
    except ValueError:
        return None
    pairs = [part.split(":") for part in dimensions.split(",")]
    return Metric(
        name,
        value,
        unit,
        (kind or "").lower(),
        [(pair[0], pair[1]) for pair in pairs if len(pair) == 2],
        clean(ids or ""),
    )


def line_start(name: str, unit: str) -> str:
    """The beginning of a metric's lines."""
    return f"{clean(name)}.{clean(unit)}:"


def line_middle(names: Sequence[str], values: Sequence[str], hostname: str) -> str:
    """The part after the value: dimensions and host. Request ids may follow, then the time."""
    pairs = ",".join([f"{clean(name)}:{clean(value)}" for name, value in zip(names, values, strict=False)])
    return f"|#{pairs}|#hostname:{hostname}"


def clean(text: str) -> str:
    """The text without characters that would end a line or one of its parts."""
    return text if text.isalnum() else _BREAKS.sub("_", text)


def java_doubles(values: Sequence[float]) -> list[str]:
    """Numbers as Java prints doubles."""
    # The sum shows a NaN; `min` and `max` ignore one that is not the first.
    if values and min(values) >= 1e-3 and max(values) < 1e7 and sum(values) < float("inf"):
        return list(map(repr, map(float, values)))
    return list(map(java_double, values))


def java_double(value: float) -> str:
    """A number as Java prints a double: `1.0`, `1.0E-4`, `1.2345678E7`."""
    if 1e-3 <= value < 1e7 or value == 0 or -1e7 < value <= -1e-3:
        return repr(float(value))
    if value != value or value in (float("inf"), float("-inf")):
        return {"inf": "Infinity", "-inf": "-Infinity"}.get(repr(float(value)), "NaN")
    sign, digits, exponent = Decimal(repr(float(value))).as_tuple()
    text = "".join(map(str, digits)).rstrip("0") or "0"
    power = int(exponent) + len(digits) - 1
    return f"{'-' if sign else ''}{text[0]}.{text[1:] or '0'}E{power}"
