"""Calls of a handler's model are kept, whatever its runtime, and the handler notices nothing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marserve_handlers.optimising.capture import Capture, find_model, run_model

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Doubles(torch.nn.Module):  # type: ignore[misc]
    """Twice its input; it changes what it was given."""

    def forward(self, pixels: Any, scale: Any = None) -> Any:
        """Twice."""
        given = pixels * 2
        pixels.zero_()
        return {"scores": given if scale is None else given * scale}


class Handler:
    """Holds a model."""

    def __init__(self, model: Any = None) -> None:
        self.model = model

    def handle(self, data: Any, context: Any) -> Any:
        """Whatever comes."""
        return self.model(data)


def test_calls_are_kept_as_they_were_and_the_model_can_be_run_with_them_again() -> None:
    """By position and by name, though the model changes its input."""
    handler = Handler(Doubles())
    found = find_model(handler.handle)

    with Capture(found.model) as capture:
        handler.handle(torch.ones(1, 2), None)
        first = capture.take()
        handler.model(torch.ones(1, 2), scale=torch.full((1, 1), 3.0))
        second = capture.take()
    handler.handle(torch.ones(1, 2), None)

    assert (found.kind, found.why_not) == ("torch", "")
    assert first[0].args[0].tolist() == [[1.0, 1.0]]
    assert second[0].kwargs["scale"].tolist() == [[3.0]]
    assert run_model(found.model, second[0])["scores"].tolist() == [[6.0, 6.0]]
    assert capture.calls == []  # what came after is not seen


def test_torchscript_which_takes_no_hooks_is_seen_too_and_left_as_it_was() -> None:
    """Another model of its class is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced, other = (torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)) for _ in range(2))

    with Capture(traced) as capture:
        traced(torch.ones(1, 2))
        other(torch.ones(1, 2))

    traced(torch.ones(1, 2))
    assert [call.args[0].tolist() for call in capture.calls] == [[[1.0, 1.0]]]


@pytest.mark.onnx
def test_a_session_is_seen_by_the_names_of_its_inputs(tmp_path: Path) -> None:
    """And runs again by them."""
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", 2])],
        [helper.make_tensor_value_info("y", kind, ["n", 2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(tmp_path / "m.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    found = find_model(Handler(session).handle)

    with Capture(session) as capture:
        session.run(None, {"x": np.ones((1, 2), "f4")})
        session.run(["y"], {"x": np.ones((3, 2), "f4")})
    session.run(None, {"x": np.ones((1, 2), "f4")})

    assert found.kind == "onnx"
    assert [call.rows for call in capture.calls] == [1, 3]
    assert run_model(session, capture.calls[1])["y"].tolist() == [[2.0, 2.0]] * 3


def test_the_handlers_model_is_preferred_and_two_others_are_none() -> None:
    """It says why."""
    linear = torch.nn.Linear(1, 1)
    handler = Handler(linear)
    handler.other = torch.nn.Linear(1, 1)  # type: ignore[attr-defined]
    assert find_model(handler.handle).model is linear

    handler.model = None
    handler.third = torch.nn.Linear(1, 1)  # type: ignore[attr-defined]
    found = find_model(handler.handle)

    assert found.model is None
    assert "holds 2 models" in found.why_not


def test_a_handler_without_a_model_says_so() -> None:
    """Also one whose objects cannot be looked at."""

    class Odd:
        def __init__(self) -> None:
            self.inner = self

        @property
        def model(self) -> Any:
            raise ValueError("not yet")

        def handle(self, data: Any, context: Any) -> Any:
            return data

    assert find_model(Handler().handle).why_not.startswith("the handler holds no module of torch")
    assert find_model(Odd().handle).why_not == "the handler's objects cannot be looked at (ValueError: not yet)"
