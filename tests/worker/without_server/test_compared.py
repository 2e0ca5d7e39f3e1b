"""What the process that compares says of its model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve.messages import Load
from marserve.worker.load import LoadedModel, make_context
from marserve.worker.without_server.compared import Compared
from marserve.worker.without_server.in_process import in_process

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Handler:
    """Has a model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def handle(self, data: Any, context: Any) -> Any:
        """The scores."""
        with torch.inference_mode():
            return self.model(torch.tensor([row["body"] for row in data])).tolist()


@pytest.fixture
def compared(tmp_path: Path) -> Iterator[Compared]:
    """A process's model, in this one: a layer of 100,000 weights."""
    load = Load("m", "1.0", str(tmp_path), "h", None, None, 4)
    context = make_context(load)
    context.loaded_model = torch.nn.Linear(1000, 100).eval()
    model = LoadedModel(Handler(context.loaded_model).handle, context, load)
    with in_process(model) as process:
        yield Compared(model, process)


def test_the_facts_say_why_a_build_that_was_to_serve_does_not(compared: Compared) -> None:
    """What the load said of it, among all that it said; nothing where none was to serve."""
    context = compared._model.context
    context.load_warnings[:] = ["the device is busy", "the build bf16 of the archive is not used: it is slow"]

    before = compared.facts()["why_parent"]
    context.refused_build = "bf16"

    assert before == ""
    assert compared.facts()["why_parent"] == "the build bf16 of the archive is not used: it is slow"


def test_a_build_is_as_large_as_the_weights_that_it_serves_with(compared: Compared, tmp_path: Path) -> None:
    """It has no files of its own."""
    (tmp_path / "build").mkdir()
    (tmp_path / "in.json").write_text(json.dumps([0.5] * 1000))
    inputs = [{"path": str(tmp_path / "in.json"), "content_type": "application/json"}]

    built = compared.build("bf16", tmp_path / "build", inputs, 4)

    assert compared.facts()["weight_bytes"] == built["bytes"] == 2 * (1000 * 100 + 100)
    assert list((tmp_path / "build").iterdir()) == []
