"""`MAR-INF/optimised.json`: what an optimised archive says of its build, for the worker that loads it. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

PROOF_PATH: Final = "MAR-INF/optimised.json"
FOLDER: Final = "optimised"
FORMAT: Final = 1


class Proof(msgspec.Struct, frozen=True):
    """What was built, from what, where, and what was shown.

    `goal` is what the build was chosen for, which says how fast it has to be on another machine.
    `parent` is the SHA-256 digest of the parent's archive; `files` those of the build's files, by member. `bounds`,
    `errors`, `agreement` and `ratios` are what the report says of the build. `cpu` and `versions` are of the machine
    that measured. `samples` calls lie beside the build, with what it gave. `flops` is what the parent's model takes,
    None where that was not counted.
    """

    build: str
    parent: str
    parent_version: str
    files: dict[str, str]
    bounds: dict[str, Any]
    errors: list[dict[str, Any]]
    ratios: dict[str, list[float]]
    cpu: list[str]
    versions: dict[str, str]
    threads: int
    samples: int
    goal: str = "latency"
    agreement: dict[str, Any] | None = None
    flops: dict[str, Any] | None = None
    format: int = FORMAT


def write_proof(proof: Proof) -> bytes:
    """Its JSON, the same bytes for the same proof."""
    return msgspec.json.format(msgspec.json.encode(proof, order="sorted"), indent=2) + b"\n"


def optimised_version(version: str) -> str:
    """The version of an optimised archive of a parent of that version."""
    return f"{version}-optimised"
