"""Judges a `config.properties` line by line, by the table of settings and its rules. Starts nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from marserve.errors import BadSettings
from marserve.migration.findings import Finding
from marserve.migration.layout import Layout
from marserve.settings import KEYS, load_settings
from marserve.settings.load import read_properties
from marserve.settings.values import Reading, Wrong

_LINE = re.compile(r", line (\d+)\)?\.?$")
# What names folders and files of the machine that the server runs on, which need not be this one.
FOLDERS = ("model_store", "workflow_store")
FILES = ("private_key_file", "certificate_file", "keystore", "metrics_config", "plugins_path")


def judge_settings(file: Path, layout: Layout, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Every key of one file, and then the file as a whole."""
    shown = layout.shown(file)
    try:
        entries = list(read_properties(file.read_bytes(), shown))
    except (OSError, BadSettings) as error:
        message = error.message if isinstance(error, BadSettings) else f"it cannot be read: {error.strerror}"
        yield Finding("action", shown, 0, message, "mend the file")
        return
    texts: dict[str, str] = {}
    broken = False
    for name, text, line in entries:
        finding = _judge_key(name, text, shown, line, layout)
        broken = broken or finding.verdict == "action"
        texts[name] = text
        yield finding
    if not broken:
        yield from _judge_whole(texts, layout, shown, environment)


def _judge_key(name: str, text: str, shown: str, line: int, layout: Layout) -> Finding:
    key = KEYS.get(name)
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


def _judge_whole(
    texts: Mapping[str, str], layout: Layout, shown: str, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """What the settings must hold together: the server's own rules, on a copy that names folders as they lie here."""
    flags: dict[str, object] = {"ts_config": str(layout.root / shown)}
    for name in FOLDERS:
        found = layout.find_folder(texts.get(name, "").strip()) if texts.get(name, "").strip() else None
        if found is not None:
            flags[name] = str(found)
    if "model_store" not in flags:
        stores = sorted({path.parent for path in layout.archives})
        flags["model_store"] = str(stores[0] if stores else layout.root)
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
