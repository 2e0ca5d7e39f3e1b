"""Judges one archive: unpacked into a folder of its own under the server's bounds, read, parsed, and never run."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from marserve.archive.manifest import Manifest, read_manifest
from marserve.archive.model_config import read_model_config
from marserve.archive.pickle_check import check_folder
from marserve.archive.reader import Limits, unpack
from marserve.archive.requirements import read_requirements
from marserve.errors import BadArchive, DependencyFailed, MarserveError, UnsafeArchive
from marserve.migration.findings import Finding
from marserve.migration.imports import TS, is_there, missing_in_ts, read_imports
from marserve.registry.handler_check import find_defect
from marserve.workflows.intake import WorkflowIntake

WORKFLOW_ENDING = ".war"
MAX_SOURCE_BYTES = 4_000_000
_IN_LINE = re.compile(r" in line (\d+)$")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._\-]*)")
_REQUIREMENTS_LINE = re.compile(r"(.+?), line (\d+): (.*)", re.DOTALL)
# Distributions whose modules have another name; for the rest the two are alike but for dashes.
_MODULES = {"opencv-python": "cv2", "opencv-python-headless": "cv2", "pillow": "PIL", "pyyaml": "yaml"} | {
    "scikit-learn": "sklearn",
    "scikit-image": "skimage",
    "protobuf": "google",
    "beautifulsoup4": "bs4",
}


def judge_archive(
    file: Path, shown: str, *, installs_requirements: bool, allowed_urls: Sequence[str] = ()
) -> Iterator[Finding]:
    """Everything about one archive. `installs_requirements`: the server is set to install what archives ask for, and
    to let them name addresses that a pattern of `allowed_urls` matches.
    """
    folder = Path(tempfile.mkdtemp(prefix="marserve-migrate-"))
    try:
        if file.suffix.lower() == WORKFLOW_ENDING:
            yield from _judge_workflow(file, folder, shown)
            return
        target = folder / "archive"
        try:
            unpack(file, target)
        except UnsafeArchive as error:
            yield Finding("action", shown, 0, error.message, "make the archive again without that member")
            return
        except (BadArchive, OSError) as error:
            yield Finding("action", shown, 0, str(error), "make the archive again with torch-model-archiver")
            return
        inner = _inner(target)
        yield from _judge_unpacked(inner, shown, installs_requirements=installs_requirements, allowed_urls=allowed_urls)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _judge_workflow(file: Path, scratch: Path, shown: str) -> Iterator[Finding]:
    """A workflow's archive: taken in as the server does, its functions' source parsed."""
    try:
        unpacked = WorkflowIntake(file.parent, scratch, Limits()).take_in(file.name)
    except MarserveError as error:
        yield Finding("action", shown, 0, error.message, "mend the workflow's archive")
        return
    found = [Finding("differs", shown, 0, warning) for warning in unpacked.warnings]
    for path in sorted(unpacked.folder.rglob("*.py")):
        found += _judge_source(path, unpacked.folder, shown, {})
    yield from found
    if not any(each.verdict == "action" for each in found):
        yield Finding("works", shown, 0, f"workflow {unpacked.manifest.workflow_name or file.stem}")


def _inner(folder: Path) -> Path:
    """Archives of the tgz form hold one folder."""
    entries = list(folder.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() and entries[0].name != "MAR-INF" else folder


def _judge_unpacked(
    folder: Path, shown: str, *, installs_requirements: bool, allowed_urls: Sequence[str]
) -> Iterator[Finding]:
    found: list[Finding] = []
    try:
        check_folder(folder)
    except (UnsafeArchive, BadArchive) as error:
        found.append(
            Finding(
                *("action", shown, 0, error.message),
                "save it in a safe form, or name the archive in trusted_models if you trust where it comes from",
            )
        )
    try:
        manifest = read_manifest(folder)
        found += _judge_config(folder, manifest, shown)
    except BadArchive as error:
        found.append(Finding("action", shown, 0, error.message, "mend the archive's manifest or configuration"))
        yield from found
        return
    found += [Finding("differs", f"{shown}!MAR-INF/MANIFEST.json", 0, warning) for warning in manifest.warnings]
    found += _judge_handler(folder, manifest, shown, installs_requirements=installs_requirements)
    if installs_requirements and manifest.requirements_file is not None:
        found += _judge_requirements(folder, manifest.requirements_file, shown, allowed_urls)
    yield from found
    if not any(each.verdict == "action" for each in found):
        name = manifest.model_name or Path(shown).stem
        yield Finding("works", shown, 0, f"model {name} {manifest.model_version or ''}".rstrip())


def _judge_config(folder: Path, manifest: Manifest, shown: str) -> Iterator[Finding]:
    config = read_model_config(folder, manifest)
    name = manifest.config_file or ""
    lines = _lines(folder / name) if name else []
    for warning in config.warnings:
        key = warning.partition(" ")[0]
        said = _IN_LINE.search(warning)
        line = int(said[1]) if said else 0
        if not line:
            line = next((at for at, text in enumerate(lines, 1) if text.strip().strip("\"'").startswith(key)), 0)
        is_value = "must be" in warning or "no YAML" in warning or "did you mean" in warning
        yield Finding(
            *("action" if is_value else "differs", f"{shown}!{name}", line, warning),
            "mend the line; until then the default counts" if is_value else "",
        )


def _judge_handler(folder: Path, manifest: Manifest, shown: str, *, installs_requirements: bool) -> Iterator[Finding]:
    asked = _requirements(folder, manifest)
    is_installed_for_it = installs_requirements and bool(asked)
    defect = find_defect(manifest.handler, folder, installs_requirements=is_installed_for_it)
    if defect is not None:
        yield Finding("action", shown, 0, defect, "put the handler into the archive, or name another in its manifest")
    for what in ("serialized_file", "model_file"):
        name = getattr(manifest, what)
        for each in (name or "").split(","):
            if each.strip() and not (folder / each.strip()).exists():
                yield Finding(
                    *(
                        "action",
                        f"{shown}!MAR-INF/MANIFEST.json",
                        0,
                        f"the archive has no {each.strip()}, which its manifest names",
                    ),
                    "make the archive again with it",
                )
    if asked and not installs_requirements:
        lacking = sorted(name for name in asked if not is_there(module_of(name), folder))
        if lacking:
            yield Finding(
                *(
                    "action",
                    f"{shown}!{manifest.requirements_file}",
                    asked[lacking[0]],
                    f"asks for {', '.join(lacking)}, which is not installed",
                ),
                "install it beside marserve, or set install_py_dep_per_model=true",
            )
    for path in sorted(folder.rglob("*.py")):
        yield from _judge_source(path, folder, shown, asked if installs_requirements else {})


def _judge_source(path: Path, folder: Path, shown: str, asked: dict[str, int]) -> Iterator[Finding]:
    place = f"{shown}!{path.relative_to(folder).as_posix()}"
    if path.stat().st_size > MAX_SOURCE_BYTES:
        return
    try:
        imports = read_imports(path.read_bytes())
    except SyntaxError as error:
        yield Finding(
            "action", place, error.lineno or 0, f"it is no Python that runs here: {error.msg}", "mend the source"
        )
        return
    except ValueError as error:
        yield Finding("action", place, 0, f"it is no Python that runs here: {error}", "mend the source")
        return
    brought = {module_of(name) for name in asked}
    for wanted in imports:
        top = wanted.module.partition(".")[0]
        if top == TS and not (folder / "ts.py").exists() and not (folder / "ts").is_dir():
            for name in missing_in_ts(wanted):
                yield Finding(
                    *("action", place, wanted.line, f"imports {name}, which is not there under TorchServe's names"),
                    "see docs/migrating.md for what takes its place",
                )
        elif top not in brought and top != TS and not is_there(wanted.module, folder):
            yield Finding(
                *("action", place, wanted.line, f"imports {wanted.module}, which is not installed here"),
                f"install what brings {top}, or name it in the archive's requirements file",
            )


def _judge_requirements(folder: Path, file: str, shown: str, allowed_urls: Sequence[str]) -> Iterator[Finding]:
    """Whether pip would be given the archive's requirements."""
    try:
        read_requirements(folder, file, allowed_urls)
    except DependencyFailed as error:
        said = _REQUIREMENTS_LINE.match(error.message)
        place, line, why = (said[1], int(said[2]), said[3]) if said else (file, 0, error.message)
        yield Finding("action", f"{shown}!{place}", line, why, "see docs/requirements.md for what a file may say")


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


def module_of(distribution: str) -> str:
    """The module that a distribution most likely brings."""
    return _MODULES.get(distribution.lower(), distribution.replace("-", "_"))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
