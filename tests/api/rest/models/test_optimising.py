"""Which build of a version serves, over HTTP."""

from __future__ import annotations

from typing import Any, cast

import pytest

from marserve.answers.management import BuildRatio
from marserve.answers.optimising import OptimisingReport
from marserve.api.rest.application import build_app
from marserve.api.rest.models.optimising import optimising_router
from marserve.errors import ModelNotFound
from marserve.optimise.background.background import Background
from support.management_house import client_of

pytestmark = pytest.mark.anyio


class FakeBackground:
    """Knows the model `digits`, of which a build serves."""

    def report(self, model: str, version: str | None) -> OptimisingReport:
        """How far it is."""
        if model != "digits":
            raise ModelNotFound(model)
        ratios = [BuildRatio(1, 2, 3.5, 3.0, 4.0)]
        return OptimisingReport(
            "serves",
            build="onnx",
            ratios=ratios,
            modelName=model,
            modelVersion=version or "1.0",
            report={"builds": []},
        )


async def ask(target: str) -> Any:
    """The answer."""
    app = build_app([optimising_router(cast("Background", FakeBackground()))], title="t")
    async with client_of(app) as client:
        return await client.get(target)


async def test_the_build_that_serves_is_answered_with_the_table() -> None:
    """Of the default version, or of one; what is not known is left out."""
    default, other = await ask("/models/digits/optimise"), await ask("/models/digits/2.0/optimise")

    assert default.json() == {
        "state": "serves",
        "build": "onnx",
        "ratios": [{"rows": 1, "threads": 2, "ratio": 3.5, "low": 3.0, "high": 4.0}],
        "modelName": "digits",
        "modelVersion": "1.0",
        "report": {"builds": []},
    }
    assert other.json()["modelVersion"] == "2.0"


@pytest.mark.parametrize(
    ("target", "status", "said"),
    [
        ("/models/none/optimise", 404, "Model not found: none"),
        ("/models/digits/optimise?all=true", 400, "all"),
    ],
)
async def test_what_is_not_there_is_refused(target: str, status: int, said: str) -> None:
    """An unknown model; parameters, of which there are none."""
    answer = await ask(target)

    assert answer.status_code == status
    assert said in answer.json()["message"]
