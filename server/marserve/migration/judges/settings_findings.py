"""Judges a `config.properties` line by line, by the table of settings and its rules. Starts nothing."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from marserve.api.tls import read_keystore, read_pem_files, server_context
from marserve.errors import BadSettings
from marserve.files.nearest import nearest
from marserve.migration.findings import Finding, Spot
from marserve.migration.judges.script_findings import FOLDERS, judge_plugins
from marserve.migration.judges.snapshot_findings import judge_models
from marserve.migration.layout import Layout
from marserve.migration.overview import Overview, judge_location
from marserve.remarks import Place, Remark
from marserve.settings import KEYS, Settings, load_settings
from marserve.settings.load import read_properties
from marserve.settings.values import Reading, Wrong
from marserve.telemetry.metrics.metric_definitions import read_metrics_file

# What names folders and files of the machine that the server runs on, which need not be this one.
# Names that TorchServe had in former releases.
# A star that repeats a slash or the last letter was meant as a glob's.
_GLOB = re.compile(r"([/:]|(?<!\\)[A-Za-z0-9_-](?=\*$))\*")
_FORMERLY = {"metrics_format": "metrics_mode"}
_VARIABLE = re.compile(r"\$\$([A-Za-z_][A-Za-z0-9_]*)\$\$")
_OF_PLATFORMS = ("SAGEMAKER_", "AIP_")
FILES = ("private_key_file", "certificate_file", "keystore", "metrics_config")

StartTrial = Callable[[Settings], list[BadSettings]]
"""Tries a start and leaves nothing behind; returns what would keep the server, or one of its models, from starting."""


def judge_settings(
    file: Path, layout: Layout, overview: Overview, environment: Mapping[str, str], try_start: StartTrial
) -> Iterator[Finding]:
    """Findings about every key of one file, then about the whole file, by a trial of a start."""
    shown = layout.shown(file)
    try:
        data = file.read_bytes()
    except OSError as error:
        yield Spot(shown).action(f"it cannot be read: {error.strerror}", "mend the file")
        return
    found = list(judge_text(data, Spot(shown), layout, overview))
    yield from found
    if not any(each.verdict == "action" for each in found):
        yield from _judge_whole(data, layout, shown, environment, try_start)


def judge_text(data: bytes, before: Spot, layout: Layout, overview: Overview) -> Iterator[Finding]:
    """Findings about every key of a settings text that begins on the line after `before`."""
    try:
        read = read_properties(data, before.file)
        entries = [(name, text, Spot(before.file, before.line + line)) for name, text, line in read]
    except BadSettings as error:
        yield Spot(before.file).action(error.message, "mend the file")
        return
    names = {name for name, _, _ in entries}
    yield from _judge_files({name: (text.strip(), spot.line) for name, text, spot in entries}, before.file, layout)
    for name, text, spot in entries:
        finding = _judge_key(name, text, spot, layout, names)
        yield finding
        for variable in _VARIABLE.findall(text):
            if variable not in overview.variables and not variable.startswith(_OF_PLATFORMS):
                yield spot.differs(f"{name} needs the variable {variable}; without it the server does not start")
        if finding.verdict != "action" and "$$" not in text:
            yield from _judge_models(name, text, spot, layout, overview)


def _judge_models(name: str, text: str, spot: Spot, layout: Layout, overview: Overview) -> Iterator[Finding]:
    """Findings about the archives and plug-ins that a key names."""
    if name == "plugins_path" and text.strip():
        yield from judge_plugins(text.strip(), name, spot, layout)
    elif name == "model_snapshot":
        yield from judge_models(text, spot, layout)
    elif name == "load_models":
        for entry in text.split(","):
            before, equals, after = entry.strip().partition("=")
            location = after if equals and not set("/:?") & set(before) else entry.strip()
            yield from judge_location(location, name, spot, layout, overview.allowed_urls)


def _judge_key(name: str, text: str, spot: Spot, layout: Layout, beside: Collection[str]) -> Finding:
    key = KEYS.get(name)
    if name in _FORMERLY:
        now = _FORMERLY[name]
        if now in beside:
            return spot.differs(f"{name} is not read any more; {now} counts")
        return spot.action(f"{name} is not read any more", f"write {now}")
    if key is None:
        near = nearest(name, KEYS)
        if near is not None:
            return spot.action(f"{name} is no key", f"write {near}, if that is what is meant")
        return spot.differs(f"{name} is no key; it is ignored, and a warning says so")
    if "$$" in text:
        return spot.works(f"{name} takes its value from the environment")
    if name in FOLDERS:
        return _judge_folder(name, text, spot, layout)
    if name in FILES and (volume := layout.docker_volume(text.strip())) is not None:
        return spot.differs(f"{name}={text} is in the volume {volume}, which was not looked into")
    if name in FILES and text.strip() and layout.find_file(text.strip()) is None and not Path(text.strip()).exists():
        return spot.action(
            f"{name}={text}: there is no such file here",
            "bring it to where the server runs, or name where it is",
        )
    warnings: list[str] = []
    reading = Reading(name, layout.root, warnings.append, key.minimum, key.maximum, key.choices)
    try:
        value = key.kind.read(text, reading)
    except Wrong as wrong:
        return spot.action(f"{name}={text}: {wrong}", f"mend the value of {name}")
    differs_from_default = value != key.defaults["torchserve"]
    if key.refuses and differs_from_default:
        return spot.action(f"{name}={key.show(value)} {key.refuses}", "do as the sentence says")
    if key.accepts and differs_from_default:
        return spot.differs(f"{name} is accepted; {key.accepts}")
    if warnings:
        return spot.differs(f"{name}: {'; '.join(warnings)}")
    if (odd := _odd(name, text, value)) is not None:
        return spot.action(f"{name}: {odd[0]}", odd[1])
    return spot.works(f"{name}={key.show(value)}")


def _odd(name: str, text: str, value: Any) -> tuple[str, str] | None:
    """What is wrong with a value that parses but was not meant so, and what to do; None for other values."""
    if name == "allowed_urls":
        for pattern in filter(None, (part.strip() for part in text.split(","))):
            if _GLOB.search(pattern):
                meant = _GLOB.sub(r"\1.*", pattern)
                return f"{pattern!r} is a regular expression, not a glob, and allows no address", f"write {meant}"
    if name == "models":
        for model, versions in value.items():
            for version, each in versions.items():
                least, most = (each.options.get(name) for name in ("min_workers", "max_workers"))
                if least is not None and most is not None and least > most:
                    said = f"{model} {version} has minWorkers {least} above maxWorkers {most}, of which {least} counts"
                    return said, "write both as they are meant"
    return None


def _judge_folder(name: str, text: str, spot: Spot, layout: Layout) -> Finding:
    found = layout.find_folder(text.strip())
    if found is None and (volume := layout.docker_volume(text.strip())) is not None:
        return spot.differs(f"{name}={text} is the volume {volume}, which was not looked into")
    if found is None:
        return spot.action(
            f"{name}={text}: there is no such folder here",
            f"create it where the server runs, or start with --{name.replace('_', '-')}",
        )
    if found != (layout.root / text.strip()).resolve() and found != layout.root / text.strip():
        return spot.works(f"{name}={text}, taken to be {layout.shown(found)} here")
    return spot.works(f"{name}={text}")


def _judge_files(said: Mapping[str, tuple[str, int]], shown: str, layout: Layout) -> Iterator[Finding]:
    """Findings about named files that the server must read: metrics, certificates and keys."""

    def find(name: str) -> Path | None:
        text = said.get(name, ("", 0))[0]
        return (layout.find_file(text) or _here(text)) if text else None

    def value(name: str) -> str:
        key = KEYS[name]
        return said[name][0] if name in said else key.show(key.defaults["torchserve"])

    metrics, keystore = find("metrics_config"), find("keystore")
    certificate, key = find("certificate_file"), find("private_key_file")
    addresses = ("inference_address", "management_address", "metrics_address")
    is_https = any(value(name).lower().startswith("https:") for name in addresses)
    checks: list[Callable[[], object]] = []
    if metrics is not None:
        checks.append(functools.partial(read_metrics_file, metrics))
    if is_https and keystore is not None:
        password, kind = value("keystore_pass"), value("keystore_type")
        checks.append(lambda: server_context(read_keystore(keystore, password, kind)))
    elif certificate is not None and key is not None and (is_https or value("enable_grpc_ssl").lower() == "true"):
        checks.append(lambda: server_context(read_pem_files(certificate, key)))
    for check in checks:
        try:
            check()
        except BadSettings as error:
            named = (error.key or "", "keystore", "private_key_file", "metrics_config")
            line = next((said[name][1] for name in named if name in said), 0)
            yield Spot(shown, line).action(error.message, "bring a file that the server can read")


def _here(text: str) -> Path | None:
    path = Path(text)
    return path if path.is_absolute() and path.is_file() else None


def _judge_whole(
    data: bytes, layout: Layout, shown: str, environment: Mapping[str, str], try_start: StartTrial
) -> Iterator[Finding]:
    """Findings about the settings together, by a trial of a start with the folders and files found here."""
    flags: dict[str, object] = {"ts_config": str(layout.root / shown)}
    for name, text, _ in read_properties(data, shown):
        find = {**dict.fromkeys(FOLDERS, layout.find_folder), **dict.fromkeys(FILES, layout.find_file)}.get(name)
        found = find(text.strip()) if find is not None and text.strip() else None
        if found is not None:
            flags[name] = str(found)
    yield from judge_start(flags, environment, layout, Spot(shown), try_start)


def _stand_ins(file: Path) -> dict[str, str]:
    """Values for unset variables in a settings file: the default of their key, or a port."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError, BadSettings):
        for name, text, _ in read_properties(file.read_bytes(), file.name):
            for variable in _VARIABLE.findall(text):
                is_all = name in KEYS and text.strip() == f"$${variable}$$"
                found[variable] = KEYS[name].show(KEYS[name].defaults["torchserve"]) if is_all else "8080"
    return found


def judge_start(
    flags: dict[str, object],
    environment: Mapping[str, str],
    layout: Layout,
    spot: Spot,
    try_start: StartTrial,
) -> Iterator[Finding]:
    """Findings of a trial of a start with these flags, which stand at `spot`.

    A variable that is not set here becomes the default of its key, or a port.
    """
    if "model_store" not in flags:
        stores = sorted({path.parent for path in layout.archives})
        flags = {**flags, "model_store": str(stores[0] if stores else layout.root)}
    file = Path(str(flags.get("ts_config") or layout.root / "config.properties"))
    try:
        settings = load_settings("torchserve", flags, _stand_ins(file) | dict(environment), layout.root)
    except BadSettings as error:
        yield (_named_by(error.source, spot) or spot).action(error.message, "mend this before the server is started")
        return
    for warning in settings.warnings:
        if isinstance(warning, Remark) and (named := _named_by(warning.source, spot)):
            yield named.differs(warning.sentence)
        else:
            yield spot.differs(warning)
    problems = try_start(settings)
    for problem in problems:
        said = f"a start was tried and failed: {problem.message}"
        yield (_named_by(problem.source, spot) or spot).action(said, "mend this before the server is started")
    if not problems:
        yield spot.works("a start was tried with these settings, without workers")


def _named_by(source: str | None, spot: Spot) -> Spot | None:
    """The line of the spot's file that a source names; None without one."""
    return Spot(spot.file, source.line) if isinstance(source, Place) and source.line else None
