"""Judges one archive: unpacks it into a folder of its own, within the server's bounds, and reads it; runs nothing."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from marserve.archive.checkpoints.checked_files import check_archive
from marserve.archive.contents.manifest import MANIFEST_PATH, RUNTIMES, Manifest, read_manifest
from marserve.archive.contents.model_config import read_model_config
from marserve.archive.reading.reader import unpack
from marserve.environments.requirements import read_requirements
from marserve.errors import BadArchive, RequirementsRefused, UnsafeArchive
from marserve.migration.findings import Finding, Spot
from marserve.migration.judges.imports import is_there, names_of
from marserve.migration.judges.source_findings import judge_source, module_of
from marserve.migration.judges.workflow_findings import judge_workflow
from marserve.migration.layout import Layout
from marserve.migration.overview import Overview
from marserve.registry.intake.handler_check import find_defect, folder_of
from marserve.registry.intake.handler_check import module_of as handler_module

WORKFLOW_ENDING = ".war"
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._\-]*)")


def judge_archive(file: Path, shown: str, overview: Overview, layout: Layout) -> Iterator[Finding]:
    """All findings about one archive; the settings in `overview` decide what it may require."""
    folder = Path(tempfile.mkdtemp(prefix="marserve-migrate-"))
    try:
        if file.suffix.lower() == WORKFLOW_ENDING:
            yield from judge_workflow(file, folder, shown, overview, layout)
            return
        target = folder / "archive"
        try:
            unpack(file, target)
        except UnsafeArchive as error:
            yield Spot(shown).action(error.message, "make the archive again without that member")
            return
        except (BadArchive, OSError) as error:
            yield Spot(shown).action(str(error), "make the archive again with torch-model-archiver")
            return
        yield from _judge_unpacked(_inner(target), shown, overview)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judge_model_folder(folder: Path, shown: str, overview: Overview) -> Iterator[Finding]:
    """All findings about an unpacked model in the store."""
    for found in _judge_unpacked(folder, shown, overview):
        yield replace(found, file=found.file.replace(f"{shown}!", f"{shown}/", 1))


def _inner(folder: Path) -> Path:
    """Archives of the tgz form hold one folder."""
    entries = list(folder.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() and entries[0].name != "MAR-INF" else folder


def _judge_unpacked(folder: Path, shown: str, overview: Overview) -> Iterator[Finding]:
    found: list[Finding] = []
    try:
        check_archive(folder)
    except (UnsafeArchive, BadArchive) as error:
        advice = "save it in a safe form, or name the archive in trusted_models if you trust where it comes from"
        found.append(Spot(shown).action(error.message, advice))
    try:
        manifest = read_manifest(folder)
        found += _judge_config(folder, manifest, shown)
    except BadArchive as error:
        found.append(Spot(shown).action(error.message, "mend the archive's manifest or configuration"))
        yield from found
        return
    found += [Spot(f"{shown}!{MANIFEST_PATH}").differs(warning) for warning in manifest.warnings]
    found += _judge_manifest(manifest, shown)
    found += _judge_handler(folder, manifest, shown, installs_requirements=overview.installs_requirements)
    if overview.installs_requirements and manifest.requirements_file is not None:
        found += _judge_requirements(folder, manifest.requirements_file, shown, overview.allowed_urls)
    yield from found
    if not any(each.verdict == "action" for each in found):
        name = manifest.model_name or Path(shown).stem
        yield Spot(shown).works(f"model {name} {manifest.model_version or ''}".rstrip())


def _judge_manifest(manifest: Manifest, shown: str) -> Iterator[Finding]:
    """What a registration would need, or would refuse."""
    spot = Spot(f"{shown}!{MANIFEST_PATH}")
    if manifest.runtime is not None and manifest.runtime not in RUNTIMES:
        said = f"runtime is {manifest.runtime!r}, which must be one of {', '.join(RUNTIMES)}"
        yield spot.action(said, "make the archive again with --runtime python")
    elif manifest.runtime == "LSP":
        yield spot.action("runtime LSP: there is no C++ backend here", "serve it with a Python handler")
    if manifest.model_name is None:
        yield spot.differs("it names no model: it can be registered under a name alone")


def _judge_config(folder: Path, manifest: Manifest, shown: str) -> Iterator[Finding]:
    config = read_model_config(folder, manifest)
    name = manifest.config_file or ""
    lines = _lines(folder / name) if name else []
    least, most = (config.said.get(name) for name in ("min_workers", "max_workers"))
    if least and most and least > most:
        line = next((at for at, text in enumerate(lines, 1) if "minWorkers" in text), 0)
        yield Spot(f"{shown}!{name}", line).action(
            f"minWorkers {least} is above maxWorkers {most}: neither is used",
            "write both as they are meant",
        )
    for warning in config.warnings:
        line, key = warning.line, warning.key
        if key and not line:
            line = next((at for at, text in enumerate(lines, 1) if text.strip().strip("\"'").startswith(key)), 0)
        spot = Spot(f"{shown}!{name}", line)
        advice = "mend the line; until then the default counts"
        yield spot.action(warning, advice) if warning.is_wrong else spot.differs(warning)


def _judge_handler(folder: Path, manifest: Manifest, shown: str, *, installs_requirements: bool) -> Iterator[Finding]:
    asked = _requirements(folder, manifest)
    is_installed_for_it = installs_requirements and bool(asked)
    defect = find_defect(manifest.handler, folder, installs_requirements=is_installed_for_it)
    if defect is not None:
        yield Spot(shown).action(defect, "put the handler into the archive, or name another in its manifest")
    else:
        yield from _judge_function(manifest.handler or "", folder, shown)
    for what in ("serialized_file", "model_file"):
        name = getattr(manifest, what)
        for each in (name or "").split(","):
            if each.strip() and not (folder / each.strip()).exists():
                yield Spot(f"{shown}!{MANIFEST_PATH}").action(
                    f"the archive has no {each.strip()}, which its manifest names",
                    "make the archive again with it",
                )
    if asked and not installs_requirements:
        lacking = sorted(name for name in asked if not is_there(module_of(name), folder))
        if lacking:
            yield Spot(f"{shown}!{manifest.requirements_file}", asked[lacking[0]]).action(
                f"asks for {', '.join(lacking)}, which is not installed",
                "install it beside marserve, or set install_py_dep_per_model=true",
            )
    for path in sorted(folder.rglob("*.py")):
        yield from judge_source(path, folder, shown, asked if installs_requirements else {})


def _judge_function(handler: str, folder: Path, shown: str) -> Iterator[Finding]:
    """Whether the module of a handler `h:f` has its f."""
    function = handler.partition(":")[2].strip()
    beside = folder_of(handler, folder) or folder
    file = next((each for each in (beside, folder) if (each / f"{handler_module(handler)}.py").is_file()), None)
    if not function or file is None:
        return
    path = file / f"{handler_module(handler)}.py"
    with contextlib.suppress(SyntaxError, ValueError, OSError):  # reported with the sources
        names = names_of(path)
        if function not in names and "*" not in names:
            place = f"{shown}!{path.relative_to(folder).as_posix()}"
            said = f"has no {function}, which the manifest names as handler ({handler})"
            yield Spot(place).action(said, "name one that is there, or add it")


def _judge_requirements(folder: Path, file: str, shown: str, allowed_urls: Sequence[str]) -> Iterator[Finding]:
    """Whether the server would install the archive's requirements."""
    try:
        read_requirements(folder, file, allowed_urls)
    except RequirementsRefused as error:
        advice = "see docs/requirements.md for what a file may say"
        yield Spot(f"{shown}!{error.file or file}", error.line).action(error.sentence, advice)


def _requirements(folder: Path, manifest: Manifest) -> dict[str, int]:
    """The names in the archive's requirements file, and their lines."""
    if manifest.requirements_file is None:
        return {}
    found: dict[str, int] = {}
    for at, text in enumerate(_lines(folder / manifest.requirements_file), 1):
        match = _REQUIREMENT.match(text)
        if match and not text.lstrip().startswith(("#", "-")):
            found.setdefault(match[1].lower(), at)
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
