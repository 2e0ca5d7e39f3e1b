"""The settings of an installation by which its other pieces are judged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from marserve.errors import BadSettings, MarserveError
from marserve.migration.findings import Finding, Spot
from marserve.migration.layout import Layout
from marserve.settings.load import read_properties
from marserve.store.addresses.fetch_guard import AllowedUrls, is_address, parse_target

# The forms in which scripts, Dockerfiles, units and files of variables set a variable.
_SETS = re.compile(r"^\s*(?:export\s+|ENV\s+|Environment=\"?|-\s+)?([A-Z][A-Z0-9_]*)(?:\s*[=:]\s*|\s+)\S", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Overview:
    """The settings of all files together.

    `installs_requirements`: the server installs the requirements of archives. `allowed_urls`: the valid patterns.
    `reads_variables`: `TS_` variables count. `has_store`: a model store is named. `has_tokens`: clients need keys.
    `variables` are those that start scripts set.
    """

    installs_requirements: bool = False
    allowed_urls: tuple[str, ...] = ()
    reads_variables: bool = False
    has_store: bool = False
    has_tokens: bool = True
    variables: frozenset[str] = frozenset()


def read_overview(layout: Layout) -> Overview:
    """Read the settings and start scripts of an installation."""
    said: dict[str, list[str]] = {}
    for file in layout.configs:
        for name, text in _values(file):
            said.setdefault(name, []).append(text.strip())
    patterns = [part.strip() for text in said.get("allowed_urls", ()) for part in text.split(",") if part.strip()]
    return Overview(
        installs_requirements="true" in _lower(said.get("install_py_dep_per_model", [])),
        allowed_urls=tuple(pattern for pattern in patterns if _is_pattern(pattern)),
        reads_variables="true" in _lower(said.get("enable_envvars_config", [])),
        has_store="model_store" in said,
        has_tokens="true" not in _lower(said.get("disable_token_authorization", [])),
        variables=frozenset(name for file in layout.scripts for name in _variables(file)),
    )


def judge_location(
    location: str, by: str, spot: Spot, layout: Layout, allowed_urls: tuple[str, ...]
) -> Iterator[Finding]:
    """Findings about an archive that settings, a flag or a workflow name: whether the store or its address has it."""
    if not location or "$" in location or location.lower() == "all":
        return
    if is_address(location):
        try:
            AllowedUrls(allowed_urls).check(parse_target(location))
        except MarserveError as error:
            yield spot.action(
                f"{by}: {error.message.rstrip('.')}",
                "name it in allowed_urls, which allows nothing by itself, or put the archive into the store",
            )
    elif layout.has_archives and Path(location).name not in layout.archive_names:
        yield spot.action(f"{by}: {location} is in no store here", "bring the archive, or drop it")


def _values(file: Path) -> list[tuple[str, str]]:
    try:
        return [(name, text) for name, text, _ in read_properties(file.read_bytes(), file.name)]
    except (OSError, BadSettings):
        return []


def _variables(file: Path) -> Iterator[str]:
    """Variables that a script seems to set."""
    try:
        text = file.read_text("utf-8", "replace")
    except OSError:
        return
    for found in _SETS.finditer(text):
        yield found[1]


def _lower(texts: list[str]) -> list[str]:
    return [text.lower() for text in texts]


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True
