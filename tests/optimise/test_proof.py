"""What an optimised archive says of its build."""

from __future__ import annotations

import json

import msgspec
import pytest

from marserve.optimise.proof import Proof, optimised_version, read_proof, write_proof

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


def test_a_proof_is_read_as_it_was_written_and_written_the_same_each_time() -> None:
    """Members that a later version adds are left alone."""
    text = write_proof(PROOF)

    assert read_proof(text) == PROOF
    assert write_proof(read_proof(text)) == text
    assert read_proof(json.dumps({**json.loads(text), "more": 1}).encode()) == PROOF


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "it is no description of a build"),
        (b"[]", "it is no description of a build"),
        (b'{"build": 3}', "it is no description of a build"),
        (b" " * (1 << 20) + b"{}", "at most 1048576 are read"),
        (
            write_proof(msgspec.structs.replace(PROOF, format=2)),
            "it is of format 2; this version of marserve reads format 1",
        ),
    ],
)
def test_a_text_that_is_no_proof_is_refused_in_words(text: bytes, words: str) -> None:
    """Also one of a later format."""
    with pytest.raises(ValueError, match=words):
        read_proof(text)


def test_an_optimised_archive_has_a_version_of_its_own() -> None:
    """It tells whose it is."""
    assert optimised_version("1.0") == "1.0-optimised"
