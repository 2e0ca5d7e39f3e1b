"""The setting `allowed_interpreters`: the interpreters that a model's configuration may name for its workers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from marserve.settings.values import Kind, Reading, Wrong

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")


@dataclass(frozen=True)
class AllowedInterpreter:
    """An interpreter that models may run under: its path, and the name that `environment` has for it, or none."""

    path: Path
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.path}" if self.name else str(self.path)


def _read_interpreters(text: str, reading: Reading) -> tuple[AllowedInterpreter, ...]:
    found = tuple(_read_interpreter(part.strip(), reading) for part in text.split(",") if part.strip())
    names = [each.name for each in found if each.name]
    for name in names:
        if names.count(name) > 1:
            raise Wrong(f"Invalid configuration: {reading.name} has the name {name} twice")
    return found


def _read_interpreter(text: str, reading: Reading) -> AllowedInterpreter:
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        return AllowedInterpreter(reading.working_directory / text)
    name, path = name.strip(), path.strip()
    if not _NAME.fullmatch(name) or not path:
        raise Wrong(
            f"Invalid configuration: {reading.name} has {text[:100]!r}; it must be the path of an interpreter, or "
            "NAME=PATH with a name of up to 64 letters, digits, _, . and -"
        )
    return AllowedInterpreter(reading.working_directory / path, name)


INTERPRETERS: Kind[tuple[AllowedInterpreter, ...]] = Kind(
    "`path` or `name=path`, comma-separated", _read_interpreters, lambda value: ",".join(map(str, value))
)
