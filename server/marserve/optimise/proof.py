"""`MAR-INF/optimised.json`: what an optimised archive says of the build it holds. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

PROOF_PATH: Final = "MAR-INF/optimised.json"
FOLDER: Final = "optimised"
SAMPLES: Final = f"{FOLDER}/samples.npz"
FORMAT: Final = 1
_MOST_BYTES: Final = 1 << 20


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """What was built, from what, where, and what was shown.

    `parent` is the SHA-256 digest of the parent's archive; `files` those of the build's files, by member. `bounds`,
    `errors`, `agreement` and `ratios` are what the report says of the build. `cpu` and `versions` are of the machine
    that measured. `flops` is what the parent's model takes, None where that was not counted.
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
    agreement: dict[str, Any] | None = None
    flops: dict[str, Any] | None = None
    format: int = FORMAT


def write_proof(proof: Proof) -> bytes:
    """Its JSON, the same bytes for the same proof."""
    return msgspec.json.format(msgspec.json.encode(proof, order="sorted"), indent=2) + b"\n"


def read_proof(text: bytes) -> Proof:
    """The proof. Raises ValueError, in words, for a text that is none, or of a format that is not known here."""
    if len(text) > _MOST_BYTES:
        raise ValueError(f"it has {len(text)} bytes; at most {_MOST_BYTES} are read")
    try:
        proof = msgspec.json.decode(text, type=Proof)
    except msgspec.MsgspecError as error:
        raise ValueError(f"it is no description of a build: {error}") from None
    if proof.format != FORMAT:
        raise ValueError(f"it is of format {proof.format}; this version of marserve reads format {FORMAT}")
    return proof


def optimised_version(version: str) -> str:
    """The version of an optimised archive of a parent of that version."""
    return f"{version}-optimised"
