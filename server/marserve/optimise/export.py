"""An archive's model in another format, in an archive of its own: exported, loaded as a worker would, and compared."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from marserve.archive.contents.manifest import MANIFEST_PATH
from marserve.archive.writing.writer import Packing, output_path, refuse_existing, write_packing
from marserve.files.digests import digest_of
from marserve.optimise.compare import Report, Wish, compare
from marserve.optimise.comparison import MAX_ERROR_FLOAT32, Bounds, Verdict
from marserve.optimise.inputs import Input
from marserve.optimise.optimised_archive import manifest_bytes, members_of, refuse_changed, states_of
from marserve.optimise.proof import FOLDER, PROOF_PATH
from marserve.optimise.subject import Subject, SubjectFailed

Format = Literal["onnx", "pt2", "aoti"]
FORMATS: Final[tuple[Format, ...]] = ("onnx", "pt2", "aoti")
# Inputs of other shapes show which axes vary; more of them show no more.
MOST_EXAMPLES: Final = 64


class CannotExport(SubjectFailed):
    """The model cannot be had in that format, or does not answer alike there; the message says why."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The archive that was written, its version, and how it compares with its parent.

    `trust` is its digest where a server is to be told that it may load what is in it, else empty.
    """

    archive: Path
    version: str
    report: Report
    trust: str = ""


def export(
    archive: Path,
    inputs: Sequence[Input],
    to: Format,
    folder: Path,
    *,
    batch_size: int = 0,
    threads: int = 1,
    within_s: float = 600.0,
    is_trusted: bool = False,
    force: bool = False,
    on_step: Callable[[str], None] = lambda step: None,
) -> Exported:
    """Export the archive's model, and write its archive into `folder` if it answers as its parent does.

    Raises CannotExport, SubjectFailed, BadArchive, CannotArchive. Nothing is left of an archive that is not equal.
    """
    trusted = [archive.name] if is_trusted else []
    before = states_of(archive)
    with tempfile.TemporaryDirectory(prefix="marserve-export-") as scratch:
        file = Path(scratch, "model.onnx" if to == "onnx" else "model.pt2")
        with Subject(archive, threads=threads, trusted=trusted) as parent:
            on_step(f"loading {parent.name}")
            parent.loaded()
            size = batch_size or parent.batch_size
            model, version = parent.load.model, f"{parent.load.version}-{to}"
            output = output_path(f"{model}-{to}", folder, "default")
            refuse_existing(output, force=force)
            on_step(f"exporting {parent.name}")
            made = parent.export(to, file, inputs[:MOST_EXAMPLES], max(size, 2), within_s)
            if made.refused:
                faults = "; ".join([made.refused, *made.notes])
                raise CannotExport(f"{parent.name} cannot be exported as {to}: {faults}.")
        ready = Path(scratch, output.name)
        _write(archive, file, version, ready)
        # What was compiled here may run here.
        trusted_both = [*trusted, ready.name] if is_trusted or to == "aoti" else []
        with (
            Subject(archive, threads=threads, trusted=trusted) as parent,
            Subject(ready, threads=threads, trusted=trusted_both) as other,
        ):
            wish = Wish(Bounds(MAX_ERROR_FLOAT32), size, within_s=within_s, same_answers=True)
            report = compare(parent, other, inputs, wish, on_step)
        if not report.verdict.has_passed:
            faults = "; ".join([*report.verdict.faults[:3], *made.notes])
            raise CannotExport(f"{model} does not answer as {to} as it does now: {faults}.")
        report.verdict = Verdict(report.verdict.faults, (*made.notes, *report.verdict.notes))
        refuse_changed(archive, before)
        _write(archive, file, version, output, force=force)
    return Exported(output, version, report, digest_of(output) if to == "aoti" else "")


def _write(parent: Path, file: Path, version: str, output: Path, *, force: bool = False) -> None:
    """The parent's archive with the exported file in the place of its weights and its model file."""
    with members_of(parent) as (members, document):
        manifest = _manifest(document, file.name, version)
        members = {
            name: path
            for name, path in members.items()
            if name != PROOF_PATH and not name.startswith(f"{FOLDER}/") and name not in _replaced(document)
        }
        # A package of native code has a file beside it, which says what it runs on.
        members |= {each.name: each for each in (file, file.with_name(file.name + ".json")) if each.exists()}
        write_packing(Packing(members, output, MANIFEST_PATH, lambda _: manifest), output, "default", force=force)


def _replaced(document: dict[str, Any]) -> set[str]:
    """The members that the exported file takes the place of."""
    model = document["model"]
    serialized = str(model.get("serializedFile") or "")
    stem = serialized.rpartition(".")[0]
    return {serialized, str(model.get("modelFile") or ""), f"{stem}.safetensors"} - {""}


def _manifest(document: dict[str, Any], file: str, version: str) -> bytes:
    model = {key: value for key, value in document["model"].items() if key != "modelFile"}
    model |= {"serializedFile": file, "modelVersion": version}
    return manifest_bytes({**document, "model": model})
