"""What an optimised archive says of its build."""

from __future__ import annotations

import json

import msgspec

from marserve.optimise.proof import FOLDER, PROOF_PATH, Proof, optimised_version, write_proof
from marserve_handlers.runtimes import optimised

PROOF = Proof(
    build="onnx-int8",
    parent="ab" * 32,
    parent_version="1.0",
    files={"optimised/model.onnx": "cd" * 32},
    bounds={"maxError": 0.03, "minAgreement": 0.98},
    errors=[{"run": "alone", "output": "scores", "meanError": 0.01}],
    ratios={"1": [4.0, 3.9, 4.1]},
    cpu=["x86_64", "avx2"],
    versions={"torch": "2.13.0"},
    threads=1,
    samples=64,
)


def test_a_proof_is_written_the_same_each_time_with_the_format_that_workers_read() -> None:
    """Also what it says of nothing."""
    said = json.loads(write_proof(PROOF))

    assert write_proof(PROOF) == write_proof(msgspec.convert(said, Proof))
    assert said["format"] == optimised.FORMAT == 1
    assert said["samples"] == 64
    assert said["flops"] is None


def test_workers_look_where_it_lies() -> None:
    """The names stand on both sides, for handlers need no server."""
    assert (PROOF_PATH, FOLDER) == (optimised.PROOF, optimised.FOLDER)


def test_an_optimised_archive_has_a_version_of_its_own() -> None:
    """It tells whose it is."""
    assert optimised_version("1.0") == "1.0-optimised"
