"""Runs an interpreter once, to see whether workers can run under it. Its time and its output are bounded.

The program that it runs is read by any Python, also by those that are too old to run a worker.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import msgspec

from marserve.errors import without_stop
from marserve.machine.vendors.tools import ToolOutput, Tools
from marserve.names import escaped

PROBE_S = 30.0
OLDEST, NEWEST = (3, 10), (3, 13)
LEAST_MSGSPEC = (0, 21)
_MARK = "marserve-interpreter "
_PROGRAM = """\
import sys
found = {
    "version": ".".join(map(str, sys.version_info[:3])),
    "implementation": getattr(getattr(sys, "implementation", None), "name", "unknown"),
    "prefix": sys.prefix,
    "executable": sys.executable or "",
    "msgspec": "",
    "why": "",
}
try:
    import msgspec
    found["msgspec"] = str(msgspec.__version__)
except BaseException:
    error = sys.exc_info()[1]
    found["why"] = ("%s: %s" % (type(error).__name__, error))[:300]
import json
sys.stdout.write("\\n" + "MARK" + json.dumps(found) + "\\n")
"""
_SHOWN_CHARACTERS = 300
_VERSION = re.compile(r"[0-9]{1,3}(\.[0-9]{1,5}){2}")
# Longer, or with a null character, nothing is a path.
_MOST_PATH = 4096


class Probed(msgspec.Struct, frozen=True):
    """What an interpreter says of itself. `why` is the error of importing msgspec, or empty."""

    version: str
    implementation: str
    prefix: str
    executable: str
    msgspec: str
    why: str = ""


def probe(path: str, environment: Mapping[str, str] | None = None, limit_s: float = PROBE_S) -> Probed | str:
    """What the interpreter says of itself; or a sentence about why workers cannot run under it. Blocks."""
    if not os.path.exists(path):
        return f"its interpreter {path} is not there."
    if not os.access(path, os.X_OK) or os.path.isdir(path):
        return f"its interpreter {path} cannot be run: it is no program that this server may execute."
    run = Tools(limit_s, environment, ends_groups=True)
    # -I: neither variables nor the working directory lead it to modules.
    return judge(path, run([path, "-I", "-c", _PROGRAM.replace("MARK", _MARK)]))


def judge(path: str, output: ToolOutput) -> Probed | str:
    """Read what an interpreter printed: what it says, or a sentence about why workers cannot run under it."""
    last = output.text.rpartition(_MARK)[2].partition("\n")[0] if _MARK in output.text else ""
    if output.status != 0 or not last:
        why = output.complaint or f"it printed {_short(output.text)!r} where it was to say what it is"
        return f"its interpreter {path} cannot be used: {without_stop(why)}."
    try:
        found = msgspec.json.decode(last, type=Probed)
    except (msgspec.DecodeError, UnicodeError):
        found = None
    if found is None or not _is_plausible(found):
        return f"its interpreter {path} cannot be used: it printed {_short(last)!r} where it was to say what it is."
    version = _numbers(found.version)
    if found.implementation != "cpython" or not OLDEST <= version[:2] <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        return (
            f"its interpreter {path} is {found.implementation} {found.version}; workers run under CPython {oldest} to "
            f"{newest}."
        )
    command = f'{path} -m pip install "msgspec>={".".join(map(str, LEAST_MSGSPEC))}"'
    if not found.msgspec:
        return f"its interpreter {path} cannot import msgspec ({found.why}), which workers need. Install it: {command}"
    if _numbers(found.msgspec) < LEAST_MSGSPEC:
        return f"its interpreter {path} has msgspec {found.msgspec}, which is too old. Install a newer one: {command}"
    return found


def _is_plausible(found: Probed) -> bool:
    """Whether an interpreter may say this. It is shown and logged, and its paths are looked at."""
    paths = (found.prefix, found.executable)
    words = (found.implementation, found.msgspec, found.why)
    return (
        _VERSION.fullmatch(found.version) is not None
        and all(len(path) <= _MOST_PATH and "\0" not in path for path in paths)
        and all(len(word) <= _SHOWN_CHARACTERS for word in words)
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version)[:3])


def _short(text: str) -> str:
    return escaped(" ".join(text.split())[:_SHOWN_CHARACTERS])
