"""Finds each key's value: which file is read, and which source takes precedence.

`torchserve …` keeps TorchServe's order. Exactly one file is read: `TS_CONFIG_FILE`, else `--ts-config`, else the
newest snapshot (with `config_snapshots`), else `config.properties` in the working directory, else none. Flags take
precedence over the file. If the file itself says `enable_envvars_config=true`, `TS_…` variables take precedence over
both.

`marserve …` takes a flag first, then `MARSERVE_…`, then the file (a file's `enable_envvars_config=true` puts `TS_…`
variables before the file).

Four variables are always read, as by TorchServe: `LOG_LOCATION`, `TEMP`, `TS_OPEN_INFERENCE_PROTOCOL`,
`TS_MODEL_SERVER_HOME`. So are Vertex AI's `AIP_HEALTH_ROUTE` and `AIP_PREDICT_ROUTE`; `AIP_HTTP_PORT` and
`AIP_STORAGE_URI` are read if nothing else names the inference address and the models. `MARSERVE_…` sets keys that
TorchServe does not have under both commands. The file that `MARSERVE_DEFAULTS_FILE` names has the lowest precedence; an
image has its defaults there. With such a file `MARSERVE_…` also sets TorchServe's keys under `torchserve`, before it.

`$$NAME$$` in a file's value is always replaced by that variable.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from marserve.errors import BadSettings
from marserve.files.nearest import did_you_mean, nearest
from marserve.files.regular import read_regular
from marserve.model_options import BY_KEY
from marserve.plugins import SnapshotStore
from marserve.remarks import Place, Remark
from marserve.settings.open_management import keep_management_here
from marserve.settings.rules import check
from marserve.settings.snapshot_files import (
    CONFIG_FILE_BEFORE,
    FACT_NAMES,
    FACTS,
    LARGEST_SNAPSHOT,
    VERSION,
    FolderSnapshots,
    snapshot_folder,
)
from marserve.settings.table import KEYS, Entry, Key, Origin, Settings
from marserve.settings.values import Reading, Wrong
from marserve.settings.vertex import vertex_settings

CONFIG_FILE = "config.properties"

# Variables of marserve that are not settings: which file to read, and the key that commands send.
_DEFAULTS_FILE = "MARSERVE_DEFAULTS_FILE"
_OTHER_VARIABLES = frozenset({"MARSERVE_CONFIG_FILE", "MARSERVE_TOKEN", _DEFAULTS_FILE})

_OF_A_SERVICE = re.compile(
    r"MARSERVE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)

# Flags with another name than their key; the others are `--` and the key with dashes.
_FLAGS = {"load_models": "--models", "disable_token_authorization": "--disable-token-auth"}

# TorchServe's command line can only switch these on.
_ONLY_ON = frozenset({"disable_token_authorization", "enable_model_api"})


def load_settings(
    entry: Entry,
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    working_directory: Path,
    find_store: Callable[[], SnapshotStore | None] = lambda: None,
    *,
    reads_file: bool = True,
) -> Settings:
    """The effective settings for this command, checked. Without `reads_file` no file and no snapshot is read.

    `flags` has the values of the command line under the keys' names, and `ts_config` for the file; None is a flag that
    was not given. Lists become comma-separated. `find_store` returns the store of snapshots, if they are not in the log
    folder; it is called only if one may be read. Raises BadSettings, whose message names the key, the value, its place
    and what would be right.
    """
    sources = _Sources(entry, environment, working_directory)
    file = _choose_file(entry, flags, environment, working_directory) if reads_file else _File(None, is_named=True)
    snapshot = _find_snapshot(entry, flags, sources, find_store) if not file.is_named else None
    if snapshot is not None:
        file = _File(snapshot.path, is_named=False)
        _read_lines(snapshot.text, snapshot.shown, sources)
    elif file.path is not None:
        _read_file(file.path, sources)
    original = _read_secrets_again(sources, snapshot) or (None if snapshot is not None else file.path)
    _read_flags_and_environment(flags, sources)
    _read_defaults(sources)
    values = {name: _effective(key, sources) for name, key in KEYS.items()}
    settings = Settings(
        entry=entry,
        working_directory=working_directory,
        source_file=file.path,
        restored_from=snapshot.shown if snapshot is not None else None,
        original_file=original,
        origins={name: tuple(origins) for name, origins in sources.origins.items()},
        **values,
    )
    settings, closed = keep_management_here(settings)
    warnings, notes = check(settings)
    return replace(
        settings,
        workflow_store=settings.workflow_store or settings.model_store,
        warnings=(*sources.warnings, *warnings),
        notes=(*sources.notes, *notes, *closed),
    )


@dataclass
class _Sources:
    """The texts found so far. `origins` has them by key; a later text takes precedence over an earlier one."""

    entry: Entry
    environment: Mapping[str, str]
    working_directory: Path
    origins: dict[str, list[Origin]] = field(default_factory=lambda: defaultdict(list))
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def says(self, name: str) -> bool:
        """Whether the last text for this boolean key is `true`."""
        return bool(self.origins.get(name)) and self.origins[name][-1].text.strip().lower() == "true"


# ------------------------------------------------------------------------------------------------------- the file


@dataclass(frozen=True)
class _File:
    """The file to read, or None. `is_named`: a flag or variable named it; it is not the default."""

    path: Path | None
    is_named: bool


@dataclass(frozen=True)
class _Snapshot:
    """The snapshot to start from. `path` is None for one that is not a file."""

    shown: str
    text: bytes
    path: Path | None


def _choose_file(
    entry: Entry, flags: Mapping[str, object], environment: Mapping[str, str], working_directory: Path
) -> _File:
    by_flag = str(flags["ts_config"]) if flags.get("ts_config") else None
    named = (
        environment.get("TS_CONFIG_FILE") or by_flag
        if entry == "torchserve"
        else by_flag or environment.get("MARSERVE_CONFIG_FILE") or environment.get("TS_CONFIG_FILE")
    )
    if named:
        if not (working_directory / named).is_file():
            raise BadSettings(f"--ts-config file not found: {named}", key="ts_config")
        return _File(working_directory / named, is_named=True)
    found = working_directory / CONFIG_FILE
    return _File(found if found.is_file() else None, is_named=False)


def _find_snapshot(
    entry: Entry, flags: Mapping[str, object], sources: _Sources, find_store: Callable[[], SnapshotStore | None]
) -> _Snapshot | None:
    """The newest snapshot, if snapshots are on; with a warning that it is used, and how to avoid that."""
    before = _Sources(entry, sources.environment, sources.working_directory)
    found = sources.working_directory / CONFIG_FILE
    if found.is_file():
        # Its other keys count only if there is no snapshot.
        for name, value, line in read_properties(_read_bytes(found, CONFIG_FILE), CONFIG_FILE):
            if name in ("config_snapshots", "log_location", "desired_state"):
                where = Place.in_file(CONFIG_FILE, line)
                text = _replace_variables(value, name, where, sources.environment)
                before.origins[name] = [Origin(where, text)]
    _read_flags_and_environment(flags, before)
    _read_defaults(before)
    if not _effective(KEYS["config_snapshots"], before):
        return None
    if _effective(KEYS["desired_state"], before):
        return None  # the desired state alone names the models: snapshots are written, but not read
    folder = FolderSnapshots(snapshot_folder(_effective(KEYS["log_location"], before), sources.working_directory))
    store = find_store() or folder
    try:
        newest = store.newest()
        strays = folder.strays() if store is folder else []
    except OSError as error:
        raise BadSettings(
            f"the snapshots in {store.where} cannot be read ({error.strerror or error}); mend that, or start with "
            "--ncs (config_snapshots=false) to start without one",
            source=store.where,
        ) from error
    for stray in strays[:3]:
        sources.warnings.append(
            f"{_show(folder.folder / stray, sources)} is not called as snapshots are; it is ignored"
        )
    if newest is None:
        return None
    name, data = newest
    names = {key for key, _, _ in read_properties(data, name)}
    missing = [key for key in (VERSION, "model_snapshot") if key not in names]
    if missing and entry == "marserve":
        raise BadSettings(
            f"the newest snapshot, {name} (in {store.where}), has no {' and no '.join(missing)}: it is "
            "cut or damaged and would restore no models; delete it to start from the one before, or start with --ncs "
            "(config_snapshots=false) to start without one",
            source=name,
        )
    path = folder.folder / name if store is folder else None
    shown = name if path is None else _show(path, sources)
    passed_over = f"; {CONFIG_FILE} is not read" if found.is_file() else ""
    sources.warnings.append(
        f"Settings and models are restored from the newest snapshot, {shown} (in {store.where}){passed_over}. To start "
        "without it use --ncs (config_snapshots=false), or name a file with --ts-config"
    )
    return _Snapshot(shown, data, path)


def _show(path: Path, sources: _Sources) -> str:
    here = sources.working_directory
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _read_secrets_again(sources: _Sources, snapshot: _Snapshot | None) -> Path | None:
    """Read secret keys from the file that a snapshot's settings came from, as a snapshot holds no secrets.

    Returns that file, None if the snapshot names none.
    """
    named = sources.facts.get(CONFIG_FILE_BEFORE)
    if not named:
        return None
    path = sources.working_directory / named
    secrets = {key.name for key in KEYS.values() if key.is_secret and not sources.origins[key.name]}
    if snapshot is None or not secrets or not path.is_file():
        return path
    shown = _show(path, sources)
    for name, text, line in read_properties(_read_bytes(path, shown), shown):
        if name in secrets:
            where = Place.in_file(shown, line)
            sources.origins[name] = [Origin(where, _replace_variables(text, name, where, sources.environment))]
    return path


def _read_file(path: Path, sources: _Sources) -> None:
    shown = _show(path, sources)
    _read_lines(_read_bytes(path, shown), shown, sources)


def _read_bytes(path: Path, shown: str) -> bytes:
    try:
        return read_regular(path, LARGEST_SNAPSHOT)
    except OSError as error:
        raise BadSettings(f"{shown} cannot be read ({error.strerror})", source=shown) from error


def _read_lines(data: bytes, shown: str, sources: _Sources) -> None:
    lines = list(read_properties(data, shown))
    is_snapshot = any(name == "model_snapshot" for name, _, _ in lines)
    if is_snapshot:
        sources.facts = {name: text for name, text, _ in lines if name in FACT_NAMES}
    facts = {*FACT_NAMES, *sources.facts.get(FACTS, "").split(",")} if is_snapshot else set()
    unknown: dict[str, Place] = {}
    for name, raw, line in lines:
        if name in facts:
            continue
        where = Place.in_file(shown, line)
        text = _replace_variables(raw, name, where, sources.environment)
        if name not in KEYS:
            unknown[name] = where
            continue
        if sources.origins[name]:
            sources.warnings.append(Remark(f"{name} stands twice; the later counts", source=where))
            sources.origins[name].clear()
        sources.origins[name].append(Origin(where, text, raw if raw != text else None))
    for name, where in unknown.items():
        sources.warnings.append(Remark(_say_unknown(name, "; it is ignored"), source=where))


def _say_unknown(name: str, end: str = "") -> str:
    """What an unknown key is: a model's, or perhaps a known one with other letters."""
    if option := nearest(name, BY_KEY, least=1.0, is_loose=True):
        what = f"{name} is a key" if name == option else f"{name} is no key of the server, {option} one"
        return f"{what} of a model, for its model-config.yaml{end}"
    return f"{name} is no key that is known{end}{did_you_mean(name, KEYS)}"


def read_properties(data: bytes, shown: str) -> Iterable[tuple[str, str, int]]:
    """Keys, values and the lines they begin in. Raises BadSettings for an invalid escape."""
    import javaproperties  # late: a server without a file need not wait for it

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
            source=Place.in_file(shown, line),
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
    _read_platforms(sources)


def _read_platforms(sources: _Sources) -> None:
    """Read Vertex AI's variables. The operator's texts take precedence; allowed addresses are added to them."""
    given = {name for name, origins in sources.origins.items() if origins}
    for name, (text, variable) in vertex_settings(sources.environment, given).items():
        before = f"{sources.origins[name][-1].text}," if sources.origins[name] else ""
        sources.origins[name].append(Origin(variable, before + text))


def _read_flags(flags: Mapping[str, object], sources: _Sources) -> None:
    for name, value in flags.items():
        if value is None or name == "ts_config":
            continue
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        if name not in KEYS:
            raise BadSettings(_say_unknown(name), key=name, source="command line")
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
                if _is_of_a_service(name, sources.environment[name]):
                    continue
                sources.notes.append(f"{name} is set, and is no setting{did_you_mean(name, known)}")


def _is_of_a_service(name: str, value: str) -> bool:
    """Whether the variable is Kubernetes' own, set in every container for a service named marserve or marserve-…."""
    is_address = name.endswith("_PORT") and re.match(r"(tcp|udp|sctp)://", value) is not None
    return is_address or _OF_A_SERVICE.fullmatch(name) is not None


def _read_torchserves(sources: _Sources, reads_ts: bool, takes_env_urls: bool) -> None:
    not_read = []
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


def _read_defaults(sources: _Sources) -> None:
    """Read the file of defaults, which has the lowest precedence."""
    defaults: dict[str, Origin] = {}
    named = sources.environment.get(_DEFAULTS_FILE)
    if not named:
        return
    path = sources.working_directory / named
    shown = _show(path, sources)
    for name, raw, line in read_properties(_read_bytes(path, shown), shown):
        where = Place.in_file(shown, line)
        if name not in KEYS:
            raise BadSettings(_say_unknown(name), key=name, source=where)
        text = _replace_variables(raw, name, where, sources.environment)
        defaults[name] = Origin(where, text, raw if raw != text else None, is_default=True)
    if sources.entry == "torchserve":
        for key in KEYS.values():
            if key.is_torchserves and key.env in sources.environment:
                defaults[key.name] = Origin(key.env, sources.environment[key.env], is_default=True)
    for name, origin in defaults.items():
        if not sources.origins[name]:
            sources.origins[name].append(origin)


# --------------------------------------------------------------------------------------------------- what counts


def _effective(key: Key, sources: _Sources) -> Any:
    """The value of the last text, or the entry's default."""
    origins = sources.origins.get(key.name)
    if not origins:
        default = key.defaults[sources.entry]
        return sources.working_directory / default if isinstance(default, Path) else default
    origin = origins[-1]
    reading = Reading(
        name=key.name,
        working_directory=sources.working_directory,
        warn=lambda sentence: sources.warnings.append(Remark(sentence, source=origin.where)),
        minimum=key.minimum,
        maximum=key.maximum,
        choices=key.choices,
        is_strict=sources.entry == "marserve" or not key.is_torchserves,
    )
    try:
        return key.kind.read(origin.text, reading)
    except Wrong as wrong:
        raise BadSettings(str(wrong), key=key.name, source=origin.where) from None
