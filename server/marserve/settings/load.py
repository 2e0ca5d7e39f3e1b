"""Finds each key's value: which file is read, and what goes before what.

`torchserve …` keeps TorchServe's order. Exactly one file is read: `TS_CONFIG_FILE`, else `--ts-config`, else
`config.properties` in the working directory, else none. Flags go before the file; where the file itself says
`enable_envvars_config=true`, `TS_…` variables go before both. `marserve …` puts a flag before `MARSERVE_…` before the
file (a file's `enable_envvars_config=true` lets `TS_…` variables in between). Four variables are always read, as by
TorchServe: `LOG_LOCATION`, `TEMP`, `TS_OPEN_INFERENCE_PROTOCOL`, `TS_MODEL_SERVER_HOME`. So are Vertex AI's
`AIP_HEALTH_ROUTE` and `AIP_PREDICT_ROUTE`, and `AIP_HTTP_PORT` where nothing else names the inference address. Keys
that TorchServe does not have are set by `MARSERVE_…` under both.

`$$NAME$$` in a file's value is replaced by that variable in any case.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import javaproperties

from marserve.errors import BadSettings
from marserve.settings.rules import check
from marserve.settings.table import KEYS, Entry, Key, Origin, Settings
from marserve.settings.values import Reading, Wrong

CONFIG_FILE = "config.properties"

# Variables of ours that are no settings: which file, and the key that the commands send.
_OTHER_VARIABLES = frozenset({"MARSERVE_CONFIG_FILE", "MARSERVE_TOKEN"})

# Flags that are not called after their key; the rest are `--` and the key with dashes.
_FLAGS = {"load_models": "--models", "disable_token_authorization": "--disable-token-auth"}

# TorchServe's command line can only switch these on.
_ONLY_ON = frozenset({"disable_token_authorization", "enable_model_api"})


def load_settings(
    entry: Entry, flags: Mapping[str, object], environment: Mapping[str, str], working_directory: Path
) -> Settings:
    """The effective settings for this command, checked.

    `flags` are what the command line gave, under the keys' names, and `ts_config` for the file; None is a flag that was
    not given. Lists become comma-separated. Raises BadSettings, whose message names the key, the value, where it stands
    and what would be right.
    """
    sources = _Sources(entry, environment, working_directory)
    file = _choose_file(entry, flags, environment, working_directory)
    if file is not None:
        _read_file(file, sources)
    _read_flags_and_environment(flags, sources)
    values = {name: _effective(key, sources) for name, key in KEYS.items()}
    settings = Settings(
        entry=entry,
        working_directory=working_directory,
        source_file=file,
        origins={name: tuple(origins) for name, origins in sources.origins.items()},
        **values,
    )
    warnings, notes = check(settings)
    return replace(
        settings,
        workflow_store=settings.workflow_store or settings.model_store,
        warnings=(*sources.warnings, *warnings),
        notes=(*sources.notes, *notes),
    )


@dataclass
class _Sources:
    """What was found so far. `origins` has for each key the texts given, the later going before the earlier."""

    entry: Entry
    environment: Mapping[str, str]
    working_directory: Path
    origins: dict[str, list[Origin]] = field(default_factory=lambda: defaultdict(list))
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def says(self, name: str) -> bool:
        """Whether the last text for this key of true and false is `true`."""
        return bool(self.origins.get(name)) and self.origins[name][-1].text.strip().lower() == "true"


# ------------------------------------------------------------------------------------------------------- the file


def _choose_file(
    entry: Entry, flags: Mapping[str, object], environment: Mapping[str, str], working_directory: Path
) -> Path | None:
    by_flag = str(flags["ts_config"]) if flags.get("ts_config") else None
    named = (
        environment.get("TS_CONFIG_FILE") or by_flag
        if entry == "torchserve"
        else by_flag or environment.get("MARSERVE_CONFIG_FILE") or environment.get("TS_CONFIG_FILE")
    )
    if named:
        if not (working_directory / named).is_file():
            raise BadSettings(f"--ts-config file not found: {named}", key="ts_config")
        return working_directory / named
    found = working_directory / CONFIG_FILE
    return found if found.is_file() else None


def _read_file(path: Path, sources: _Sources) -> None:
    shown = path.relative_to(sources.working_directory) if path.is_relative_to(sources.working_directory) else path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadSettings(f"{shown} cannot be read ({error.strerror})", source=str(shown)) from error
    unknown: dict[str, str] = {}
    for name, text, line in read_properties(data, str(shown)):
        where = f"{shown}, line {line}"
        text = _replace_variables(text, name, where, sources.environment)
        if name not in KEYS:
            unknown[name] = where
            continue
        if sources.origins[name]:
            sources.warnings.append(f"{name} stands twice; the later counts ({where})")
            sources.origins[name].clear()
        sources.origins[name].append(Origin(where, text))
    for name, where in unknown.items():
        sources.warnings.append(f"{name} is no key that is known; it is ignored{_nearest(name)} ({where})")


def read_properties(data: bytes, shown: str) -> Iterable[tuple[str, str, int]]:
    """Keys, values and the lines they begin in. Raises BadSettings for an escape that is none."""
    line = 1
    try:
        for element in javaproperties.parse(data):
            if isinstance(element, javaproperties.KeyValue):
                yield element.key, element.value, line
            line += len(re.findall(r"\r\n|\r|\n", element.source))
    except javaproperties.InvalidUEscapeError as error:
        raise BadSettings(
            f"{error.escape!r} is no character; it must be \\u and four hexadecimal digits, "
            "and a backslash that means itself is written twice",
            source=f"{shown}, line {line}",
        ) from None


def _replace_variables(text: str, name: str, where: str, environment: Mapping[str, str]) -> str:
    def value_of(found: re.Match[str]) -> str:
        variable = found[1]
        if variable not in environment:
            raise BadSettings(
                f"Invalid Environment Variable {variable}: {name} needs it; set it, or write the value itself",
                key=name,
                source=where,
            )
        return environment[variable]

    return re.sub(r"\$\$([A-Za-z_][A-Za-z0-9_]*)\$\$", value_of, text)


# ------------------------------------------------------------------------------------------ flags and environment


def _read_flags_and_environment(flags: Mapping[str, object], sources: _Sources) -> None:
    reads_ts = sources.says("enable_envvars_config")
    takes_env_urls = sources.says("use_env_allowed_urls")
    if sources.entry == "torchserve":
        _read_flags(flags, sources)
        _read_ours(sources, (key for key in KEYS.values() if not key.is_torchserves))
        _read_torchserves(sources, reads_ts, takes_env_urls)
    else:
        _read_torchserves(sources, reads_ts, takes_env_urls)
        _read_ours(sources, KEYS.values())
        _read_flags(flags, sources)


def _read_flags(flags: Mapping[str, object], sources: _Sources) -> None:
    for name, value in flags.items():
        if value is None or name == "ts_config":
            continue
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        if name not in KEYS:
            raise BadSettings(f"{name} is no key that is known{_nearest(name)}", key=name, source="command line")
        if sources.entry == "torchserve" and name in _ONLY_ON and not value:
            continue
        sources.origins[name].append(Origin(flag, _as_text(value)))


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def _read_ours(sources: _Sources, keys: Iterable[Key]) -> None:
    for key in keys:
        if key.env in sources.environment:
            sources.origins[key.name].append(Origin(key.env, sources.environment[key.env]))
    if sources.entry == "marserve":
        known = {key.env: key for key in KEYS.values()}
        for name in sources.environment:
            if name.startswith("MARSERVE_") and name not in known and name not in _OTHER_VARIABLES:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                sources.notes.append(f"{name} is set, and is no setting{hint}")


def _read_torchserves(sources: _Sources, reads_ts: bool, takes_env_urls: bool) -> None:
    not_read = []
    port = sources.environment.get("AIP_HTTP_PORT")
    if port and not sources.origins["inference_address"]:
        # The platform's word for where it will call; whatever the operator says goes before it.
        sources.origins["inference_address"].append(Origin("AIP_HTTP_PORT", f"http://0.0.0.0:{port}"))
    for key in KEYS.values():
        if key.always_env and sources.environment.get(key.always_env):
            text = sources.environment[key.always_env]
            if key.name == "ts_open_inference_protocol":
                text = "true" if text.lower() == "oip" else "false"
            sources.origins[key.name].append(Origin(key.always_env, text))
        if not key.ts_env or key.ts_env not in sources.environment:
            continue
        if reads_ts and (key.name != "allowed_urls" or takes_env_urls):
            sources.origins[key.name].append(Origin(key.ts_env, sources.environment[key.ts_env]))
        else:
            not_read.append(key.ts_env)
    if not_read:
        sources.notes.append(
            f"{', '.join(not_read)} {'is' if len(not_read) == 1 else 'are'} set and not read: "
            f"that needs {'enable_envvars_config=true' if not reads_ts else 'use_env_allowed_urls=true'} in the file"
        )


# --------------------------------------------------------------------------------------------------- what counts


def _effective(key: Key, sources: _Sources) -> Any:
    """The value of the last text that was given, or the entry's default."""
    origins = sources.origins.get(key.name)
    if not origins:
        default = key.defaults[sources.entry]
        return sources.working_directory / default if isinstance(default, Path) else default
    origin = origins[-1]
    reading = Reading(
        name=key.name,
        working_directory=sources.working_directory,
        warn=lambda sentence: sources.warnings.append(f"{sentence} ({origin.where})"),
        minimum=key.minimum,
        maximum=key.maximum,
        choices=key.choices,
    )
    try:
        return key.kind.read(origin.text, reading)
    except Wrong as wrong:
        raise BadSettings(str(wrong), key=key.name, source=origin.where) from None


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, KEYS, 1)
    return f"; did you mean {near[0]}?" if near else ""
