"""What describe, log and dashboard say of a search: which build serves, or why the parent stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from marserve.model_options import ModelOptions
from marserve.optimise.background.standing import parent_stays, sentence_of, serving, why_none, why_not
from marserve.pool.options import PoolOptions, RayOptions, SequenceOptions
from marserve.registry.catalogue.describe import Facts

OPTIONS = PoolOptions(model="m", version="1.0", min_workers=1, max_workers=1)


def row(name: str, *, passed: bool = True, why: str | None = None, faults: tuple[str, ...] = ()) -> dict[str, Any]:
    """A row of a report."""
    return {
        "name": name,
        "passed": passed,
        "whyNot": why,
        "faults": list(faults),
        "outputs": [{"meanError": 0.001}, {"meanError": 0.004}, {"meanError": None}],
        "agreement": {"shown": 0.985},
        "ratios": [{"rows": 1, "threads": 2, "middle": 3.25, "low": 3.0, "high": 3.5}],
    }


@pytest.mark.parametrize(
    ("options", "share", "words"),
    [
        ({}, 0.25, ""),
        ({}, 0.0, "optimise_share is 0"),
        ({"ray": RayOptions()}, 0.25, "workers of one process on this machine's processors"),
        ({"gpu_ids": (0,)}, 0.25, "workers of one process on this machine's processors"),
        ({"parallel_type": "tp", "parallel_level": 2}, 0.25, "workers of one process"),
        ({"python": "/venv/bin/python"}, 0.25, "another interpreter than the server's"),
        ({"program": ("node",)}, 0.25, "another interpreter than the server's"),
        ({"sequences": SequenceOptions(1.0)}, 0.25, "called batch by batch"),
        ({"is_concurrent": True}, 0.25, "called batch by batch"),
        ({"continuous_batching": True}, 0.25, "called batch by batch"),
        ({"on_crash": "fail"}, 0.25, "with onCrash: fail a build that crashes would end the server"),
    ],
)
def test_versions_that_a_build_cannot_serve_are_told_why(options: dict[str, Any], share: float, words: str) -> None:
    """In one sentence."""
    facts = Facts("m.mar", "python", replace(OPTIONS, **options), ModelOptions(), is_at_startup=False)

    why = why_not(facts, share=share)

    assert words in why
    assert bool(why) is bool(words)


def test_a_build_that_serves_is_told_with_ratio_error_and_agreement() -> None:
    """The worst output's error; as describe has it, and as the log says it."""
    standing = serving(row("onnx-int8"), is_cached=True)

    assert (standing.state, standing.build, standing.isCached) == ("serves", "onnx-int8", True)
    assert standing.meanError == 0.004
    assert sentence_of(standing) == (
        "onnx-int8 serves, 3.25 times as fast at 1, mean error 0.004, 98.5 % agreement shown"
    )


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "no build is equal and surely faster"),
        ([row("onnx")], "no build is equal and surely faster: onnx is equal and not surely faster"),
        (
            [row("bf16"), row("onnx"), row("aot", passed=False, why="g++ is not here.")],
            "no build is equal and surely faster: bf16, onnx are equal and not surely faster; aot: g++ is not here",
        ),
        (
            [row("onnx-int8", passed=False, faults=("23 of 24 inputs agree", "more"))],
            "no build is equal and surely faster: onnx-int8: 23 of 24 inputs agree",
        ),
        (
            [row(f"b{at}", passed=False, why="9 more inputs are needed") for at in range(5)],
            "b2: 9 more inputs are needed; 2 more are refused",
        ),
    ],
)
def test_a_parent_that_stays_is_told_with_what_was_equal_and_what_was_refused(
    rows: list[dict[str, Any]], why: str
) -> None:
    """Unequal, slower, too few inputs."""
    assert why_none({"builds": rows}).endswith(why)
    assert sentence_of(parent_stays(why_none({"builds": rows}))).startswith("the parent serves: no build is equal")
