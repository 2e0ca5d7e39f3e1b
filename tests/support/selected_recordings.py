"""Which recordings `make test` plays: those with the most kinds of answers for their length.

A kind is a route with its method and listener, a status with its type of error, a layout of a body, a call or a status
of gRPC, a command, or another step of a recording. `make test-contract` plays all recordings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Kind = tuple[object, ...]

# Parts of a path that are a route's own; any other part is a name.
_WORDS = frozenset(
    re.findall(
        "[^ ]+",
        "all api-description describe explain explanations health infer invocations live metrics models ping predict "
        "predictions ready set-default token v1 v2 wfpredict workflows",
    )
)
# What a server's start is counted as, in seconds of a recording.
_START_S = 5


def kinds(recording: Mapping[str, Any]) -> set[Kind]:
    """The kinds of answers that a recording has."""
    found: set[Kind] = set()
    for case in recording["cases"]:
        expected = case["expect"]
        if "path" in case and "do" not in case:
            body = expected.get("body") or {}
            document = body.get("json")
            error = document.get("type") if isinstance(document, dict) else None
            found |= {
                ("route", case["to"], case["method"], _route(case["path"])),
                ("status", expected.get("status"), error),
                ("body", min(body, default=""), body.get("layout")),
            }
        elif "service" in case:
            found |= {("call", case["service"], case["method"]), ("code", expected.get("code"))}
        else:
            found.add(("step", case.get("do"), (case.get("argv") or [""])[0]))
    return found


def select(recordings: Mapping[str, Mapping[str, Any]], most: int | None = None) -> set[str]:
    """Again and again the recording with the most new kinds for its length: at most so many, else all kinds."""
    missing = {name: kinds(recording) for name, recording in recordings.items()}
    chosen: set[str] = set()
    while any(missing.values()) and len(chosen) != most:
        best = max(missing, key=lambda name: (len(missing[name]) / (_START_S + recordings[name]["seconds"]), name))
        chosen.add(best)
        seen = missing.pop(best)
        missing = {name: left - seen for name, left in missing.items()}
    return chosen


def _route(path: str) -> str:
    parts = path.partition("?")[0].split("/")
    return "/".join(part if part in _WORDS else "{}" for part in parts if part)
