"""The request bodies that builds are compared by: a folder of them, or what an archive brings itself.

A folder has one file each, in the order of their names; the ending says the content type. An archive brings a folder
that its `optimise` key names, its `samples`, or a declaration that inputs are drawn from.
"""

from __future__ import annotations

import json
import mimetypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from marserve.errors import MarserveError
from marserve.files.below import real_below
from marserve.option_values import Sample
from marserve.registry.intake.drawn_samples import draw_samples

MOST_INPUTS: Final = 100_000
# What Python's table leaves to each machine, or does not know.
_TYPES: Final = {".npy": "application/x-npy", ".json": "application/json", ".txt": "text/plain", ".jsonl": "text/plain"}


class BadInputs(MarserveError):
    """The folder has no request bodies that can be read."""


@dataclass(frozen=True, slots=True)
class Input:
    """One request body. `content_type` is empty where the ending says nothing."""

    path: Path
    content_type: str


@dataclass(frozen=True, slots=True)
class OwnInputs:
    """What an archive brings. `note` says what they are; `is_drawn`: they show errors, and never that answers agree."""

    inputs: list[Input]
    note: str
    is_drawn: bool = False


def own_inputs(
    model_dir: Path, named: str, samples: Sequence[Sample], drawn: Sequence[Sample], into: Path
) -> OwnInputs:
    """The inputs that an unpacked archive brings: of the folder `named` in it, else its samples, else those drawn.

    Bodies that are no files are written into the folder `into`. Raises BadInputs, also for an archive without any.
    """
    if named:
        folder = real_below(model_dir, named)
        if folder is None or not os.path.isdir(folder):
            raise BadInputs(
                f"optimise.inputs of its model-config.yaml is {named!r}, which is no folder of the archive."
            )
        found = find_inputs(folder)
        return OwnInputs(found, f"the inputs are the {len(found)} of {named} in the archive")
    if samples:
        count = f"{len(samples)} sample{'s' if len(samples) > 1 else ''}"
        note = f"the inputs are the {count} of the archive, which can hold 64: a folder for --inputs shows more"
        return OwnInputs([_written(each, model_dir, into, at) for at, each in enumerate(samples)], note)
    if drawn:
        note = (
            f"the inputs are {len(drawn)} drawn from the signature: they show errors and no agreement, so only "
            "builds in float32 are tried; name a folder of requests with --inputs"
        )
        return OwnInputs([_written(each, model_dir, into, at) for at, each in enumerate(drawn)], note, is_drawn=True)
    raise BadInputs(
        "the archive has no samples, and no signature that inputs can be drawn from: name a folder of requests with "
        "--inputs."
    )


def drawn_of(signature: object) -> tuple[Sample, ...]:
    """Inputs drawn from `signature` of a model's configuration; none from what is no map of tensors.

    The only tensor is a bare array: handlers that know nothing of names take it, and those that do take it, too.
    """
    tensors = signature.get("inputs") if isinstance(signature, Mapping) else None
    if not isinstance(tensors, Mapping) or not all(isinstance(each, Mapping) for each in tensors.values()):
        return ()
    drawn = draw_samples({"kind": "tensors", "inputs": [{**each, "name": str(name)} for name, each in tensors.items()]})
    if len(tensors) > 1:
        return drawn
    return tuple(each._replace(body=json.dumps(*json.loads(each.body).values()).encode()) for each in drawn)


def _written(sample: Sample, model_dir: Path, into: Path, at: int) -> Input:
    if sample.file:
        path = model_dir / sample.file
        if not os.path.isfile(path):
            raise BadInputs(f"the sample {sample.file!r} is no file of the archive.")
    else:
        path = into / f"sample-{at}"
        path.write_bytes(sample.body)
    return Input(path.absolute(), sample.content_type or "")


def find_inputs(folder: Path) -> list[Input]:
    """The request bodies in a folder; hidden files and folders in it are left out. Raises BadInputs."""
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
    except OSError as error:
        raise BadInputs(f"{folder} cannot be read: {error.strerror}.") from error
    if not paths:
        raise BadInputs(f"{folder} holds no files: put one request body a file there.")
    if len(paths) > MOST_INPUTS:
        raise BadInputs(f"{folder} holds {len(paths)} files; at most {MOST_INPUTS} are compared.")
    return [Input(path.absolute(), content_type_of(path)) for path in paths]


def content_type_of(path: Path) -> str:
    """The content type that a file's ending says, empty for none."""
    return _TYPES.get(path.suffix.lower()) or mimetypes.guess_type(path.name)[0] or ""
