"""A profile as a server answers it."""

from __future__ import annotations

from typing import Any

from marserve.answers.profiles import (
    ModelProfile,
    ProfileOperator,
    ProfilePart,
    ProfileRank,
    ProfileShapes,
    ProfileStack,
    ProfileWorker,
)

HOSTILE = "<script>alert(1)</script>"


def a_profile(**fields: Any) -> ModelProfile:
    """Fifty requests of a model whose worker slept half of the time."""
    given: dict[str, Any] = {
        "modelName": "digits",
        "modelVersion": "1.0",
        "worker": "W-9000-digits_1.0",
        "began": "2026-01-02T03:04:05Z",
        "ms": 1000.0,
        "requests": 50,
        "askedRequests": 50,
        "batches": 50,
        "parts": [ProfilePart("operators", 500.0, 0.5), ProfilePart("blocked", 500.0, 0.5)],
        "recordedBatches": 25,
        "operators": [ProfileOperator("aten::mm", 500, 300.0, 300.0, [ProfileShapes("[4, 4] [4, 4]", 500, 300.0)])],
        "operatorStacks": [ProfileStack(["aten::matmul", "aten::mm"], 300.0)],
        "pythonStacks": [ProfileStack(["handle (handler.py:3)"], 90)],
        "workers": [ProfileWorker("W-9000-digits_1.0", 50, 20.0)],
        "remarks": ["Operators were recorded in 25 of 50 batches."],
        "hasTrace": True,
    }
    return ModelProfile(**(given | fields))


def a_hostile_profile() -> ModelProfile:
    """One whose every text is markup."""
    shapes = [ProfileShapes(HOSTILE, 1, 1.0)]
    stacks = [ProfileStack([HOSTILE], 1.0)]
    return a_profile(
        modelName=HOSTILE,
        modelVersion=HOSTILE,
        worker=HOSTILE,
        began=HOSTILE,
        operators=[ProfileOperator(HOSTILE, 1, 1.0, 1.0, shapes)],
        noOperators=HOSTILE,
        operatorStacks=stacks,
        pythonStacks=stacks,
        noPython=HOSTILE,
        ranks=[ProfileRank(0, 1.0, 1.0, 1.0, 1.0, 0.0, {HOSTILE: 1})],
        workers=[ProfileWorker(HOSTILE, 1, 1.0)],
        remarks=[HOSTILE],
    )
