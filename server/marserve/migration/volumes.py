"""Volumes of compose files and of `docker run`: the folders and files of this machine that a container has, and where.

It reads files that `layout.py` found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from marserve.migration.findings import Finding, Spot
from marserve.migration.judges.script_findings import logical_lines
from marserve.migration.layout import Layout, Volume

MAX_BYTES = 1_000_000
_NAMES_THE_SERVER = ("torchserve", "marserve")
# `docker run -v SOURCE:TARGET[:ro]`, `--volume=…`, `--mount type=bind,source=…,target=…`.
_RUN_VOLUME = re.compile(r"(?:^|\s)(?:-v|--volume)[\s=]+(\"[^\"]+\"|'[^']+'|\S+)")
_RUN_MOUNT = re.compile(r"(?:^|\s)--mount[\s=]+(\"[^\"]+\"|'[^']+'|\S+)")
# The working directory in a script, and a variable of compose with its default.
_HERE = re.compile(r"^(?:\$\(pwd\)|`pwd`|\$\{?PWD\}?|%cd%)(?=/|$)", re.IGNORECASE)
_DEFAULT = re.compile(r"\$\{\w+:?-([^}]*)\}")


def read_volumes(layout: Layout) -> list[Volume]:
    """The volumes of every container that runs the server, in the order of the files."""
    found: list[Volume] = []
    for file in layout.deployments:
        found += _of_compose(file, layout)
    for file in layout.scripts:
        found += _of_script(file, layout)
    return found


def judge_volumes(layout: Layout) -> Iterator[Finding]:
    """Findings about volumes whose folder is missing: Docker would make an empty one."""
    for volume in layout.volumes:
        spot = Spot(volume.shown, volume.line)
        if volume.outside is None:
            yield spot.differs(f"{volume.inside} is the volume {volume.source} of Docker's, which was not looked into")
        elif not volume.outside.exists():
            yield spot.action(
                f"volume {volume.source}: there is no such folder or file here",
                "bring it: Docker makes an empty folder in its place",
            )
        else:
            yield spot.works(f"{volume.inside} is {layout.shown(volume.outside)} here")


def _of_compose(file: Path, layout: Layout) -> Iterator[Volume]:
    text = _text(file)
    if "volumes" not in text or not any(word in text for word in _NAMES_THE_SERVER):
        return
    try:
        document = yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return
    for _, service in _members(_member(document, "services")):
        if not any(word in _all_text(service) for word in _NAMES_THE_SERVER):
            continue
        volumes = _member(service, "volumes")
        for each in volumes.value if isinstance(volumes, yaml.SequenceNode) else ():
            volume = _read_entry(each, file, layout)
            if volume is not None:
                yield volume


def _read_entry(node: yaml.Node, file: Path, layout: Layout) -> Volume | None:
    """The volume of an entry, in either form: `SOURCE:TARGET:MODE`, or a mapping with source and target."""
    line = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode):
        source, target = _split(_with_defaults(node.value))
    else:
        source, target = _value_of(node, "source"), _value_of(node, "target")
    return _volume(source, target, file, line, layout)


def _of_script(file: Path, layout: Layout) -> Iterator[Volume]:
    text = _text(file)
    if "docker" not in text and "podman" not in text:
        return
    for line, words in logical_lines(text):
        if " run " not in words or not any(word in words for word in _NAMES_THE_SERVER):
            continue
        for found in _RUN_VOLUME.finditer(words):
            source, target = _split(_HERE.sub(".", str(found[1]).strip("\"'")))
            if (volume := _volume(source, target, file, line, layout)) is not None:
                yield volume
        for found in _RUN_MOUNT.finditer(words):
            named = (part.partition("=") for part in str(found[1]).strip("\"'").split(","))
            parts: dict[str, str] = {name: value for name, _, value in named}
            source = _HERE.sub(".", parts.get("source", parts.get("src", "")))
            target = parts.get("target", parts.get("dst", parts.get("destination", "")))
            if (volume := _volume(source, target, file, line, layout)) is not None:
                yield volume


def _volume(source: str, target: str, file: Path, line: int, layout: Layout) -> Volume | None:
    """A volume; None without a source, as it is empty, and for a source that a variable names."""
    if not source or not target.startswith("/") or "$" in source or "$" in target:
        return None
    is_path = source.startswith((".", "/", "~"))
    outside = (file.parent / Path(source).expanduser()).resolve() if is_path else None
    return Volume(target.rstrip("/") or "/", source, outside, layout.shown(file), line)


def _split(text: str) -> tuple[str, str]:
    source, colon, rest = text.partition(":")
    return (source, rest.partition(":")[0]) if colon else ("", source)


def _members(node: yaml.Node | None) -> list[tuple[str, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        return []
    return [(key.value, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]


def _member(node: yaml.Node | None, name: str) -> yaml.Node | None:
    return dict(_members(node)).get(name)


def _value_of(node: yaml.Node, name: str) -> str:
    value = _member(node, name)
    return _with_defaults(value.value) if isinstance(value, yaml.ScalarNode) else ""


def _with_defaults(text: str) -> str:
    """The text with compose's variables replaced by their defaults."""
    return _DEFAULT.sub(lambda found: str(found[1]), text)


def _all_text(node: yaml.Node) -> str:
    """Image and command of a service."""
    said = [_member(node, name) for name in ("image", "command", "entrypoint")]
    return " ".join(str(each.value if isinstance(each, yaml.ScalarNode) else _scalars(each)) for each in said if each)


def _scalars(node: yaml.Node) -> str:
    parts = node.value if isinstance(node, yaml.SequenceNode) else []
    return " ".join(str(part.value) for part in parts if isinstance(part, yaml.ScalarNode))


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace") if file.stat().st_size <= MAX_BYTES else ""
    except OSError:
        return ""
