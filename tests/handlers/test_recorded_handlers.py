"""Handlers as third parties write them, unmodified, and answers that TorchServe gave; data from beside the checkout."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.model_context import FakeItem, make_context

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent.parent
CONTRACT = ROOT.parent / "shared" / "contract"
DATA = ROOT.parent / "shared" / "data"

pytestmark = [
    pytest.mark.torch,
    pytest.mark.shared,
    pytest.mark.skipif(not CONTRACT.is_dir(), reason="the contract's fixtures do not lie beside this checkout"),
]


@pytest.fixture(autouse=True)
def _as_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TorchServe's names and the fixtures' handlers on the path, both forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "handlers" / "marserve_handlers" / "ts_compat"))
    monkeypatch.syspath_prepend(str(CONTRACT / "fixtures" / "handlers"))
    monkeypatch.syspath_prepend(str(CONTRACT / "fixtures"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name in set(sys.modules) - before:
        if name == "ts" or name.startswith("ts.") or str(CONTRACT) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def recorded(recording: str, case: str) -> Any:
    """The JSON body that TorchServe answered with."""
    cases = json.loads((CONTRACT / "recorded" / f"{recording}.json").read_text("utf-8"))["cases"]
    return next(entry for entry in cases if entry["id"] == case)["expect"]["body"]["json"]


def save_script(model: Any, path: Path) -> None:
    """The model as TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(model.eval()).save(str(path))


def tiny_linear() -> Any:
    """The fixtures' linear layer with its numbers."""
    model = importlib.import_module("linear_model").TinyLinear()
    with torch.no_grad():
        model.layer.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.25]]))
        model.layer.bias.copy_(torch.tensor([0.5, -0.5]))
    return model


@pytest.mark.parametrize("kind", ["eager", "script"])
def test_a_base_handler_subclass_answers_as_recorded(tmp_path: Path, kind: str) -> None:
    """`base_linear.py` around an eager model and around TorchScript."""
    model = tiny_linear()
    if kind == "eager":
        source = (CONTRACT / "fixtures" / "handlers" / "linear_model.py").read_text("utf-8")
        (tmp_path / "linear_model.py").write_text(source, "utf-8")
        torch.save(model.state_dict(), tmp_path / "linear.pt")
        del sys.modules["linear_model"]
    else:
        save_script(model, tmp_path / "linear.pt")
    handler = importlib.import_module("base_linear").LinearHandler()
    handler.initialize(make_context(tmp_path, "linear.pt", "linear_model.py" if kind == "eager" else None))
    handler.context.begin_batch([FakeItem(), FakeItem()])

    answers = handler.handle([{"body": {"x": [1, 2, 3]}}, {"body": bytearray(b"[0, 0, 1]")}], handler.context)

    assert answers == [recorded("tensor_models", "linear-eager"), recorded("tensor_models", "linear-script")]


def test_the_built_in_classifier_answers_as_recorded(tmp_path: Path) -> None:
    """The default transform on a real picture, softmax, top 5, labels."""
    from marserve_handlers.image_classifier import ImageClassifier

    big = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 10))
    with torch.no_grad():
        big[2].weight.copy_(torch.arange(30, dtype=torch.float32).reshape(10, 3) / 30.0)
        big[2].bias.copy_(torch.arange(10, dtype=torch.float32) / 10.0)
    save_script(big, tmp_path / "pool.pt")
    names = {str(digit): [f"n{digit:08d}", f"digit_{digit}"] for digit in range(10)}
    (tmp_path / "index_to_name.json").write_text(json.dumps(names), "utf-8")
    handler = ImageClassifier()
    handler.initialize(make_context(tmp_path, "pool.pt"))
    handler.context.begin_batch([FakeItem()])

    body = bytearray((DATA / "pictures" / "gradient.png").read_bytes())
    (answer,) = handler.handle([{"body": body}], handler.context)

    expected = recorded("tensor_models", "stock-image-classifier")
    assert list(answer) == list(expected)
    assert answer == pytest.approx(expected, abs=1e-6)


def test_the_real_digits_are_read_ten_of_ten(tmp_path: Path) -> None:
    """An eager handler of the built-in classifier, weights loaded as weights only."""
    from marserve_handlers.image_classifier import ImageClassifier

    source = (CONTRACT / "fixtures" / "digits_model.py").read_text("utf-8")
    (tmp_path / "digits_model.py").write_text(source, "utf-8")
    (tmp_path / "mnist_cnn.pt").write_bytes((DATA / "mnist" / "mnist_cnn.pt").read_bytes())
    config = {"handler": {"mode": "L", "size": [28, 28], "mean": [0.1307], "std": [0.3081], "topk": 1}}
    handler = ImageClassifier()
    handler.initialize(make_context(tmp_path, "mnist_cnn.pt", "digits_model.py", config))
    handler.context.begin_batch([FakeItem() for _ in range(10)])

    rows = [{"data": bytearray((DATA / "mnist" / f"{digit}.png").read_bytes())} for digit in range(10)]
    answers = handler.handle(rows, handler.context)

    assert [int(next(iter(answer))) for answer in answers] == list(range(10))


def test_a_handler_with_its_own_onnx_calls_works(tmp_path: Path) -> None:
    """`digit_onnx_handler.py` runs the session that the base handler opened."""
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    picture = helper.make_tensor_value_info("image", kind, ["n", 1, 28, 28])
    scores = helper.make_tensor_value_info("scores", kind, ["n", 784])
    graph = helper.make_graph([helper.make_node("Flatten", ["image"], ["scores"])], "g", [picture], [scores])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10),
        str(tmp_path / "mnist.onnx"),
    )
    handler = importlib.import_module("digit_onnx_handler").DigitOnnxHandler()
    handler.initialize(make_context(tmp_path, "mnist.onnx"))
    handler.context.begin_batch([FakeItem()])

    body = bytearray((DATA / "mnist" / "4.png").read_bytes())
    (answer,) = handler.handle([{"body": body}], handler.context)

    assert 0 <= answer < 784


def test_custom_metrics_are_collected() -> None:
    """`metric_maker.py` while loading and in a batch."""
    context = make_context()
    handler = importlib.import_module("metric_maker").MetricMaker()
    handler.initialize(context)
    assert [value.name for value in context.metrics.drain()] == ["InitsDone"]

    context.metrics.add_metric_to_cache("ConfiguredCounter", "unit", ["ModelName", "Level"])
    context.begin_batch([FakeItem("a")])
    assert handler.handle([{"body": {"value": 3, "cached": 2}}], context) == ["measured"]

    values = {value.name: value for value in context.metrics.drain()}
    assert list(values) == [
        "JobsSeen",
        "ThinkTime",
        "PayloadSize",
        "Fullness",
        "Trouble",
        "Direct",
        "Chosen",
        "ConfiguredCounter",
    ]
    assert values["Direct"].dimensions == [("Colour", "blue"), ("ModelName", "m"), ("Level", "Model")]
    assert values["ConfiguredCounter"].dimensions == [("ModelName", "metricmaker"), ("Level", "Model")]


def test_a_streaming_handler_sends_its_pieces() -> None:
    """`streamer.py`, with headers and status before the first piece."""
    context = make_context()
    pieces: list[Any] = []
    context.send_pieces = lambda ret: pieces.append((ret, context.response_of(0)))
    handler = importlib.import_module("streamer").Streamer()
    handler.initialize(context)
    context.begin_batch([FakeItem()])

    last = handler.handle([{"body": {"chunks": 2, "headers": {"X-A": "b"}, "status": 202}}], context)

    head = (202, "", [("X-A", "b"), ("ts_stream_next", "true")])
    assert pieces == [(["part 0; "], head), (["part 1; "], head)]
    assert last == ["end"]
    assert context.end_stream()


def test_responses_are_shaped_as_asked() -> None:
    """`shaper.py` sets headers, content type, status and phrase."""
    context = make_context()
    handler = importlib.import_module("shaper").Shaper()
    context.begin_batch([FakeItem("a"), FakeItem("b")])
    wish = {"headers": {"X-A": "b"}, "content_type": "text/css", "status": 404, "phrase": "gone", "answer": "x"}

    assert handler.handle([{"body": wish}, {"body": {}}], context) == ["x", "shaped"]
    assert context.response_of(0) == (404, "gone", [("X-A", "b"), ("content-type", "text/css")])
    assert context.response_of(1) is None
