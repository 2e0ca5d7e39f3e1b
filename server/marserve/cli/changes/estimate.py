"""`marserve plan --estimate`: the memory that a model's weights take on each rank, by their headers. Asks no server."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.table import Table

from marserve.archive.checkpoints.checkpoint import read_checkpoint
from marserve.archive.checkpoints.contents import Saved, folder_inside
from marserve.archive.checkpoints.estimate import Estimate, estimate, shares_of
from marserve.archive.checkpoints.hollow import hollow_copy
from marserve.archive.checkpoints.safetensors_index import read_header
from marserve.archive.contents.manifest import read_manifest
from marserve.archive.contents.model_config import read_model_config
from marserve.archive.contents.weight_size import weigh
from marserve.cli.output import CommandFailed, WrongArguments, table
from marserve.errors import BadArchive, without_stop
from marserve.files.regular import open_regular
from marserve.option_values import ParallelPlan

_CONFIGS = ("MAR-INF", "model-config.yaml")


@dataclass(frozen=True, slots=True)
class _Weights:
    """The tensors by name, None where no header says; their bytes; whether workers map them; and the plan."""

    tensors: Mapping[str, Saved] | None
    size: int
    is_mapped: bool = False
    parallel: ParallelPlan | None = None


def estimate_memory(source: Path) -> dict[str, Any]:
    """The answer of the command for an archive, or for the folder of one or of a checkpoint.

    Raises WrongArguments for a source that cannot be read, CommandFailed for one that is neither.
    """
    try:
        weights = _weigh(source)
    except OSError as error:
        raise WrongArguments(f"{source} cannot be read ({error.strerror}).") from error
    except BadArchive as error:
        raise CommandFailed(f"{source}: {error.message}") from error
    found = _on_ranks(weights)
    return {
        "source": str(source),
        "tensors": None if weights.tensors is None else len(weights.tensors),
        "weightBytes": found.total,
        "ranks": found.ranks,
        "bytesOfARank": found.a_rank,
        "dividedBytesOfARank": found.divided,
        "wholeBytesOfARank": found.whole,
        "isMapped": weights.is_mapped and found.ranks == 1,
        "problems": list(found.problems),
    }


def estimate_lines(document: Mapping[str, Any]) -> list[str | Table]:
    """The estimate for a person."""
    one = [document[f"{kind}BytesOfARank"] for kind in ("divided", "whole")]
    ranks = document["ranks"]
    rows = [[str(rank), *map(decimal, one), decimal(sum(one))] for rank in range(ranks)]
    count = "tensors of which no header says" if document["tensors"] is None else f"{document['tensors']} tensors"
    lines: list[str | Table] = [
        table(["rank", "its share", "same on every rank", "together"], rows),
        f"{count}, {decimal(document['weightBytes'])} together. Activations, and what torch itself takes, come on top.",
    ]
    if document["isMapped"]:
        lines.append("They are mapped: workers share the pages of the files, and have no memory of their own for them.")
    return [*lines, *(f"Problem: {without_stop(problem)}." for problem in document["problems"])]


def _on_ranks(weights: _Weights) -> Estimate:
    if weights.tensors is None:
        return Estimate(1, 0, weights.size, weights.size)
    if weights.parallel is None:
        return estimate(weights.tensors, {})
    ranks = weights.parallel.ranks
    shares, problems = shares_of(weights.tensors, weights.parallel.plan, weights.parallel.mesh.get("tp", ranks))
    found = estimate(weights.tensors, shares, ranks)
    return Estimate(ranks, found.divided, found.whole, found.total, problems)


def _weigh(source: Path) -> _Weights:
    """Raises BadArchive, OSError."""
    if source.is_dir():
        if any((source / name).exists() for name in _CONFIGS):
            return _weigh_archive(source, weigh(source).weights, is_unpacked_by_server=False)
        read = read_checkpoint(source)
        return _Weights(read.tensors, read.bytes)
    with tempfile.TemporaryDirectory() as folder:
        hollow_copy(source, Path(folder))
        return _weigh_archive(Path(folder), weigh(source).weights, is_unpacked_by_server=True)


def _weigh_archive(folder: Path, size: int, *, is_unpacked_by_server: bool) -> _Weights:
    manifest = read_manifest(folder)
    options = read_model_config(folder, manifest).options
    if options.checkpoint is not None:
        inside = folder_inside(folder, options.checkpoint)
        if inside is None:
            raise BadArchive(
                f"its checkpoint {options.checkpoint} lies apart from it; name that folder, or a copy of it, instead."
            )
        read = read_checkpoint(inside)
        is_mapped = is_unpacked_by_server and read.kind == "safetensors"
        return _Weights(read.tensors, read.bytes, is_mapped, options.parallel)
    name = manifest.serialized_file
    if name is None or not name.endswith(".safetensors"):
        return _Weights(None, size)
    with open_regular(folder / name) as file:
        tensors, _ = read_header(file, (folder / name).stat().st_size, name)
    return _Weights(tensors, size, parallel=options.parallel)
