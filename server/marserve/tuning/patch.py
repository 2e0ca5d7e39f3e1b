"""A `model-config.yaml` with other values of a few keys, and the difference as a patch. Pure.

Lines are changed and nothing else: comments, order and all other keys stay.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Final

from marserve.tuning.settings import Setting

FILE: Final = "model-config.yaml"


def values_of(setting: Setting) -> dict[str, int]:
    """The keys that a setting is written with."""
    return {
        "minWorkers": setting.layout.workers,
        "maxWorkers": setting.layout.workers,
        "batchSize": setting.batch_size,
        "maxBatchDelay": round(1000 * setting.delay_s),
    }


def patched(text: str, values: Mapping[str, int]) -> str:
    """The text with these values: in the place of a key's own, else at the end. Keys inside of others are not meant."""
    lines, left = text.splitlines(), dict(values)
    for number, line in enumerate(lines):
        found = re.match(r"([\"']?)(\w+)\1(\s*:\s*)[^#\s]*(\s*(?:#.*)?)$", line)
        if found is not None and found[2] in left:
            lines[number] = f"{found[1]}{found[2]}{found[1]}{found[3].rstrip()} {left.pop(found[2])}{found[4]}"
    end = 1 if lines and lines[-1].strip() == "..." else 0  # what ends a document of YAML stays at its end
    place = len(lines) - end
    lines[place:place] = [f"{key}: {value}" for key, value in left.items()]
    return "\n".join(lines) + "\n"


def patch(before: str, after: str, name: str = FILE) -> str:
    """The difference, as `patch -p1` takes it; empty where there is none."""
    return "".join(
        difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
    )
