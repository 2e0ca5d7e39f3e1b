"""Packages that an extra of marserve brings: what is wrong where one cannot be used, in one sentence.

A package may be missing, older than marserve needs (another package's pins have replaced it), or broken: importing it
raises whatever it likes. Each closes what needs the package, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

MOST_CHARACTERS = 200

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?")
_FLOOR = re.compile(r">=\s*([0-9.]+)")


def trouble(extra: str, error: BaseException) -> str:
    """Why the packages of an extra cannot be used: those that are missing, else too old, else what was raised.

    `extra` is empty for a package that marserve always needs. The versions wanted are those of marserve's own metadata.
    """
    wanted = list(_wanted(extra))
    missing = [f"{name}{wish}" for name, wish in wanted if _installed(name) is None]
    if missing or (isinstance(error, ModuleNotFoundError) and not wanted):
        return f"{_list(missing or [str(error.name) if isinstance(error, ImportError) else extra])} not installed"
    old = [
        f"{name} {_installed(name)} is installed, and {name}{wish} is needed"
        for name, wish in wanted
        if _is_older(_installed(name), wish)
    ]
    if old:
        return f"{'; '.join(old)} ({reason(error)})"
    found = ", ".join(f"{name} {_installed(name)} ({wish or 'any'} is needed)" for name, wish in wanted)
    return f"{found} cannot be used ({reason(error)})"


def reason(error: BaseException) -> str:
    """An error on one line: its class and its first words."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def is_the_packages(extra: str, error: BaseException) -> bool:
    """Whether an error of an import comes from an extra's packages, and not from a mistake in marserve's own modules.

    It does where one is missing or too old, and where it was raised outside of marserve.
    """
    if any(_installed(name) is None or _is_older(_installed(name), wish) for name, wish in _wanted(extra)):
        return True
    if isinstance(error, ModuleNotFoundError):
        return not str(error.name or "marserve").startswith("marserve")
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or not str(trace.tb_frame.f_globals.get("__name__", "")).startswith("marserve")


def _wanted(extra: str) -> Iterator[tuple[str, str]]:
    """The packages of the extra, each with the versions that will do: `h2`, `>=4.3`."""
    try:
        requirements = metadata.requires("marserve") or []
    except metadata.PackageNotFoundError:  # run from a folder that was never installed
        return
    for requirement in requirements:
        head, _, marker = requirement.partition(";")
        if f"extra == '{extra}'" in marker.replace('"', "'") and (found := _REQUIREMENT.match(head)):
            yield found[1], found[2].strip()


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _is_older(version: str | None, wish: str) -> bool:
    floor = _FLOOR.search(wish)
    return version is not None and floor is not None and _numbers(version) < _numbers(floor[1])


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _list(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
