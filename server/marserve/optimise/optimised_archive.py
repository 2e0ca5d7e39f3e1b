"""Writes an optimised archive: the parent as it is, the winning build, and what was shown of it.

A server that knows nothing of builds, TorchServe say, serves the parent in it. Only the version in the manifest is
another one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from marserve.archive.contents.manifest import MANIFEST_PATH
from marserve.archive.reading.reader import unpack
from marserve.archive.writing.writer import Packing, output_path, walk, write_packing
from marserve.errors import BadArchive
from marserve.files.digests import State, digest_of, state_of
from marserve.optimise.proof import FOLDER, PROOF_PATH, Proof, optimised_version, write_proof

MOST_MANIFEST = 1 << 20


def place_of(model: str, folder: Path) -> Path:
    """Where the optimised archive of a model of that name goes."""
    return output_path(f"{model}-optimised", folder, "default")


def states_of(archive: Path) -> dict[str, State]:
    """The state of an archive's file, or of each file of a folder, which differs after every change. Raises OSError."""
    files = walk(archive) if archive.is_dir() else [(archive.name, archive)]
    return {name: state_of(path.stat()) for name, path in files}


def refuse_changed(archive: Path, before: dict[str, State]) -> None:
    """Raise BadArchive if the archive is not in these states: what was made of it is not of what lies there now."""
    try:
        is_same = states_of(archive) == before
    except OSError:
        is_same = False
    if not is_same:
        raise BadArchive(
            f"{archive} was changed meanwhile, and what was found is of what it was before: nothing is kept of it. "
            "Run the command again."
        )


@contextmanager
def members_of(archive: Path) -> Iterator[tuple[dict[str, Path], dict[str, Any]]]:
    """The files of an archive by their names in it, without the manifest, and the manifest, while this is open.

    Raises BadArchive for an archive without a manifest, and what unpacking raises.
    """
    with tempfile.TemporaryDirectory(prefix="marserve-parent-") as scratch:
        folder = archive
        if not archive.is_dir():
            folder = Path(scratch, "parent")
            unpack(archive, folder)
        members = dict(walk(folder))
        if MANIFEST_PATH not in members:
            raise BadArchive(f"{archive.name} has no {MANIFEST_PATH}.")
        yield members, json.loads(members.pop(MANIFEST_PATH).read_bytes()[:MOST_MANIFEST])


def manifest_bytes(document: dict[str, Any]) -> bytes:
    """A manifest as archives hold it."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def write_optimised(parent: Path, build: Path, proof: Proof, output: Path, *, force: bool) -> None:
    """Write the archive whole or not at all. `build` is the folder of the build's files.

    Raises CannotArchive, BadArchive for a parent that holds a build already or has no manifest, OSError.
    """
    with members_of(parent) as (members, document):
        if PROOF_PATH in members or any(name.startswith(f"{FOLDER}/") for name in members):
            raise BadArchive(
                f"{parent.name} holds a build already: optimise its parent, whose version has no -optimised."
            )
        model = document["model"]
        model["modelVersion"] = optimised_version(str(model.get("modelVersion") or "1.0"))
        manifest = manifest_bytes(document)
        members |= {f"{FOLDER}/{name}": path for name, path in walk(build)}
        packing = Packing(members, output, MANIFEST_PATH, lambda _: manifest, made={PROOF_PATH: write_proof(proof)})
        write_packing(packing, output, "default", force=force)


def digests_of_build(build: Path) -> dict[str, str]:
    """The digests of a build's files, by their names in the archive."""
    return {f"{FOLDER}/{name}": digest_of(path) for name, path in walk(build)}
