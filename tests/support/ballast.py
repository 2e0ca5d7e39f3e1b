"""Small models that hold as much memory as a test asks for, and what a trace of requests to them came to."""

from __future__ import annotations

from pathlib import Path

from support.server import make_archive

MIB = 1024 * 1024

# Memory that was written to, page by page, is held; what was only asked for is not.
SOURCE = """
import os
import time

HELD = {}


class Ballast:
    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        config = context.model_yaml_config or {}
        time.sleep(config.get("loadSeconds", 0))
        HELD["peak"] = bytearray(config.get("peakMib", 0) * 1024 * 1024)
        for begin in range(0, len(HELD["peak"]), 4096):
            HELD["peak"][begin] = 1
        del HELD["peak"]
        HELD["ballast"] = bytearray(config.get("heldMib", 1) * 1024 * 1024)
        for begin in range(0, len(HELD["ballast"]), 4096):
            HELD["ballast"][begin] = 1

    def handle(self, rows, context):
        answers = []
        for row in rows:
            word = bytes(row.get("body") or b"").decode()
            if word.startswith("sleep "):
                time.sleep(float(word.split()[1]))
            if word.startswith("grow "):
                more = HELD["more"] = bytearray(int(word.split()[1]) * 1024 * 1024)
                for begin in range(0, len(more), 4096):
                    more[begin] = 1
            answers.append(str(os.getpid()))
        return answers
"""


def make_ballast(
    path: Path,
    *,
    held_mib: int = 1,
    peak_mib: int = 0,
    load_s: float = 0.0,
    start: str = "fresh",
    **config: object,
) -> Path:
    """An archive whose model holds so much besides its interpreter, and `peak_mib` for a moment while it is loaded.

    Its requests may say `sleep SECONDS` and `grow MIB`; every answer is the worker's process id.
    """
    keys = {
        "workerStart": start,
        "heldMib": held_mib,
        "peakMib": peak_mib,
        "loadSeconds": load_s,
        **{name: str(value).lower() if isinstance(value, bool) else value for name, value in config.items()},
    }
    yaml = "".join(f"{name}: {value}\n" for name, value in keys.items())
    return make_archive(path, SOURCE, config=yaml)
