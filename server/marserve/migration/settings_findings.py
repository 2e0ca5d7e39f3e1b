"""Judges a `config.properties` line by line, by the table of settings and its rules. Starts nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from marserve.errors import BadSettings
from marserve.migration.findings import Finding
from marserve.migration.layout import Layout
from marserve.migration.overview import Overview, judge_location
from marserve.migration.script_findings import FOLDERS
from marserve.migration.snapshot_findings import judge_models
from marserve.settings import KEYS, load_settings
from marserve.settings.load import read_properties
from marserve.settings.values import Reading, Wrong

_LINE = re.compile(r", line (\d+)\)?\.?$")
# What names folders and files of the machine that the server runs on, which need not be this one.
# Names that TorchServe had in former releases.
_FORMERLY = {"metrics_format": "metrics_mode"}
_VARIABLE = re.compile(r"\$\$([A-Za-z_][A-Za-z0-9_]*)\$\$")
_OF_PLATFORMS = ("SAGEMAKER_", "AIP_")
FILES = ("private_key_file", "certificate_file", "keystore", "metrics_config")


def judge_settings(file: Path, layout: Layout, overview: Overview, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Every key of one file, and then the file as a whole."""
    shown = layout.shown(file)
    try:
        data = file.read_bytes()
    except OSError as error:
        yield Finding("action", shown, 0, f"it cannot be read: {error.strerror}", "mend the file")
        return
    found = list(judge_text(data, shown, 0, layout, overview))
    yield from found
    if not any(each.verdict == "action" for each in found):
        yield from _judge_whole(data, layout, shown, environment)


def judge_text(data: bytes, shown: str, before: int, layout: Layout, overview: Overview) -> Iterator[Finding]:
    """Every key of a text of settings that begins after `before` lines of the file."""
    try:
        entries = list(read_properties(data, shown))
    except BadSettings as error:
        yield Finding("action", shown, 0, error.message, "mend the file")
        return
    names = {name for name, _, _ in entries}
    for name, text, line in entries:
        finding = _judge_key(name, text, shown, before + line, layout, names)
        yield finding
        for variable in _VARIABLE.findall(text):
            if variable not in overview.variables and not variable.startswith(_OF_PLATFORMS):
                said = f"{name} needs the variable {variable}; without it the server does not start"
                yield Finding("differs", shown, before + line, said)
        if finding.verdict != "action" and "$$" not in text:
            yield from _judge_models(name, text, shown, before + line, layout, overview)


def _judge_models(name: str, text: str, shown: str, line: int, layout: Layout, overview: Overview) -> Iterator[Finding]:
    """Whether the archives that a key names can be had."""
    if name == "model_snapshot":
        yield from judge_models(text, shown, line, layout)
    elif name == "load_models":
        for entry in text.split(","):
            before, equals, after = entry.strip().partition("=")
            location = after if equals and not set("/:?") & set(before) else entry.strip()
            yield from judge_location(location, name, shown, line, layout, overview.allowed_urls)


def _judge_key(name: str, text: str, shown: str, line: int, layout: Layout, beside: Collection[str]) -> Finding:
    key = KEYS.get(name)
    if name in _FORMERLY:
        now = _FORMERLY[name]
        if now in beside:
            return Finding("differs", shown, line, f"{name} is not read any more; {now} counts")
        return Finding("action", shown, line, f"{name} is not read any more", f"write {now}")
    if key is None:
        near = difflib.get_close_matches(name, KEYS, 1)
        if near:
            return Finding("action", shown, line, f"{name} is no key", f"write {near[0]}, if that is what is meant")
        return Finding("differs", shown, line, f"{name} is no key; it is ignored, and a warning says so")
    if "$$" in text:
        return Finding("works", shown, line, f"{name} takes its value from the environment")
    if name in FOLDERS:
        return _judge_folder(name, text, shown, line, layout)
    if name in FILES and text.strip() and layout.find_file(text.strip()) is None and not Path(text.strip()).exists():
        return Finding(
            *("action", shown, line, f"{name}={text}: there is no such file here"),
            "bring it to where the server runs, or name where it is",
        )
    warnings: list[str] = []
    reading = Reading(name, layout.root, warnings.append, key.minimum, key.maximum, key.choices)
    try:
        value = key.kind.read(text, reading)
    except Wrong as wrong:
        return Finding("action", shown, line, f"{name}={text}: {wrong}", f"mend the value of {name}")
    differs_from_default = value != key.defaults["torchserve"]
    if key.refuses and differs_from_default:
        return Finding("action", shown, line, f"{name}={key.show(value)} {key.refuses}", "do as the sentence says")
    if key.accepts and differs_from_default:
        return Finding("differs", shown, line, f"{name} is accepted; {key.accepts}")
    if warnings:
        return Finding("differs", shown, line, f"{name}: {'; '.join(warnings)}")
    return Finding("works", shown, line, f"{name}={key.show(value)}")


def _judge_folder(name: str, text: str, shown: str, line: int, layout: Layout) -> Finding:
    found = layout.find_folder(text.strip())
    if found is None:
        return Finding(
            *("action", shown, line, f"{name}={text}: there is no such folder here"),
            f"create it where the server runs, or start with --{name.replace('_', '-')}",
        )
    if found != (layout.root / text.strip()).resolve() and found != layout.root / text.strip():
        where = layout.shown(found)
        return Finding("works", shown, line, f"{name}={text}, taken to be {where} here")
    return Finding("works", shown, line, f"{name}={text}")


def _judge_whole(data: bytes, layout: Layout, shown: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    """What the settings must hold together: the server's own rules, on a copy that names folders as they lie here.

    A variable that is not set here stands for the default of its key, or for a port.
    """
    flags: dict[str, object] = {"ts_config": str(layout.root / shown)}
    stand_ins: dict[str, str] = {}
    for name, text, _ in read_properties(data, shown):
        found = layout.find_folder(text.strip()) if name in FOLDERS and text.strip() else None
        if found is not None:
            flags[name] = str(found)
        for variable in _VARIABLE.findall(text):
            is_all = name in KEYS and text.strip() == f"$${variable}$$"
            stand_ins[variable] = KEYS[name].show(KEYS[name].defaults["torchserve"]) if is_all else "8080"
    if "model_store" not in flags:
        stores = sorted({path.parent for path in layout.archives})
        flags["model_store"] = str(stores[0] if stores else layout.root)
    environment = stand_ins | dict(environment)
    try:
        settings = load_settings("torchserve", flags, environment, layout.root)
    except BadSettings as error:
        line = _line_of(error.source)
        yield Finding("action", shown, line, error.message, "mend this before the server is started")
        return
    for sentence in settings.warnings:
        yield Finding("differs", shown, _line_of(sentence), _LINE.sub("", sentence))


def _line_of(text: str | None) -> int:
    found = _LINE.search(text or "")
    return int(found[1]) if found else 0
