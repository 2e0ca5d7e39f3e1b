"""A `model-config.yaml` with other values of a few keys, and the difference as a patch; or a document's lines. Pure.

Lines are changed and nothing else: comments, order, all other keys and the ends of lines stay.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Final

import yaml

from marserve.tuning.settings import FOUND, KEPT, Setting

FILE: Final = "model-config.yaml"
# A key in the first column: its quote, its name, the colon, its value, and what is behind it.
_KEY = re.compile(r"([\"']?)(\w+)\1(\s*:\s*)(\{[^}]*\}|[^#\s]*)(\s*(?:#.*)?)$").match
# What `patch` takes for lines: fewer things end one than in Python, or in YAML.
_LINES = re.compile(r"[^\n]*\n|[^\n]+").findall


Value = float | Mapping[str, int]


def values_of(setting: Setting, threads: Mapping[str, int] | None = None) -> dict[str, Value]:
    """The keys that a setting is written with. `threads` is what the key has now, of which a part may stay."""
    values: dict[str, Value] = {
        "minWorkers": setting.layout.workers,
        "maxWorkers": setting.layout.workers,
        "batchSize": setting.batch_size,
    }
    if setting.delay_s != FOUND:
        values["maxBatchDelay"] = round(1000 * setting.delay_s)
    if setting.layout.padding != KEPT:
        values["paddingBudget"] = setting.layout.padding
    if setting.layout.threads:
        values["threads"] = {**(threads or {}), "intra": setting.layout.threads}
    return values


def patched(text: str, values: Mapping[str, Value]) -> str:
    """The text with these values: in the place of a key's own, else at the end. Keys inside of others are not meant."""
    lines, left = text.splitlines(keepends=True), dict(values)
    new_end = next(filter(None, map(_end_of, lines)), "\n")
    changed: list[str] = []
    skips = False
    for whole in lines:
        line = whole.removesuffix(end := _end_of(whole))
        if skips and (not line.strip() or line[0] in " \t"):
            continue  # the lines of a map whose key got another value
        skips = False
        found = _KEY(line)
        if found is not None and found[2] in left:
            value = left.pop(found[2])
            skips = not found[4] and not isinstance(value, int | float)
            behind = f" {found[5]}" if found[5].startswith("#") else found[5]
            line = f"{found[1]}{found[2]}{found[1]}{found[3].rstrip()} {_written(value)}{behind}"
        changed.append(line + end)
    is_ended = 1 if changed and changed[-1].strip() == "..." else 0  # what ends a document of YAML stays at its end
    place = len(changed) - is_ended
    if left and place and not _end_of(changed[place - 1]):
        changed[place - 1] += new_end
    changed[place:place] = [f"{key}: {_written(value)}{new_end}" for key, value in left.items()]
    return "".join(changed)


def _end_of(line: str) -> str:
    return line.removeprefix(line.splitlines()[0])


def declaration(model: str, version: str, values: Mapping[str, Value], default: str | None = None) -> str:
    """These values of a version as a document of a desired state has them; `default` is to be the default version."""
    name = model if re.fullmatch("[A-Za-z][\\w-]*", model) and yaml.safe_load(model) == model else json.dumps(model)
    lines = ["models:", f"  {name}:", "    versions:", f"      {json.dumps(version)}:"]
    lines += [f"        {key}: {_written(value)}" for key, value in values.items()]
    return "\n".join([*lines, *([f"    default: {json.dumps(default)}"] if default else [])])


def _written(value: Value) -> str:
    if isinstance(value, int | float):
        return f"{value:g}"
    return f"{{{', '.join(f'{name}: {each}' for name, each in value.items())}}}"


def patch(before: str, after: str, name: str = FILE) -> str:
    """The difference, as `patch -p1` takes it; empty where there is none."""
    lines = difflib.unified_diff(_LINES(before), _LINES(after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
