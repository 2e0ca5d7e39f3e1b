"""Keeps roll-outs on disk: of each model the present one, for a restart, and the evidence of earlier ones.

There is one JSON file a model, replaced atomically, so that it is always complete. All calls block.
"""

from __future__ import annotations

import json
import logging
import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

from marserve.files.atomic import replace_file, sweep
from marserve.files.regular import read_regular

log = logging.getLogger("marserve.rollout")

FORMAT = 1
KEPT_ENDED = 10
LARGEST_RECORD = 64 << 20
_SAFE = re.compile(r"[^A-Za-z0-9._-]")


class Records:
    """The files of one folder, which is made when the first one is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> dict[str, list[dict[str, Any]]]:
        """The roll-outs of each model, the latest last. A file that cannot be read is logged and left out."""
        found: dict[str, list[dict[str, Any]]] = {}
        sweep(self._folder)
        try:
            files = sorted(self._folder.glob("*.json"))
        except OSError:
            return found
        for file in files:
            try:
                document = json.loads(read_regular(file, LARGEST_RECORD), parse_constant=_refuse_constant)
                if document["format"] != FORMAT:
                    raise ValueError(f"its format is {document['format']!r}, not {FORMAT}")
                model, rollouts = document["model"], document["rollouts"]
                if not isinstance(model, str) or not all(isinstance(each, dict) for each in rollouts):
                    raise ValueError("it holds no roll-outs")
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                log.error("The record of a roll-out, %s, cannot be read and is left out: %s", file.name, error)
                continue
            found[model] = list(rollouts)
        return found

    def write(self, model: str, rollouts: list[dict[str, Any]]) -> None:
        """Replace the record of a model by these; only the latest are kept. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        document = {"format": FORMAT, "model": model, "rollouts": rollouts[-KEPT_ENDED - 1 :]}
        data = json.dumps(document, indent=1).encode()
        replace_file(self._folder / file_name(model), data, mode=0o600, is_durable=True)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number")


def file_name(model: str) -> str:
    """A name for a model's file that no other model has, whatever its letters."""
    digest = blake2b(model.encode(), digest_size=6).hexdigest()
    return f"{_SAFE.sub('_', model)[:80]}-{digest}.json"
