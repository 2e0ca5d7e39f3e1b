"""The life of a handler: which loader is called, what a batch goes through. Without any runtime."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from marserve_handlers.base import BaseHandler, value_of
from marserve_handlers.errors import BadInput, ModelNotLoadable, PredictionException
from marserve_handlers.support.devices.devices import Device
from support.model_context import FakeItem, make_context


class RecordingHandler(BaseHandler):
    """Says which loader was called, and answers with what it was given."""

    def _find_device(self, gpu_id: int | None) -> Any:
        return Device("cpu")

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        return ("torchscript", Path(model_pt_path).name)

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        return ("eager", model_file, model_pt_path and Path(model_pt_path).name)

    def _load_exported_program(self, model_pt_path: str) -> Any:
        return ("exported", Path(model_pt_path).name)

    def _load_onnx_model(self, model_pt_path: str) -> Any:
        return ("onnx", Path(model_pt_path).name)

    def _load_torch_export_aot_compile(self, model_so_path: str) -> Any:
        return ("aot", Path(model_so_path).name)

    def preprocess(self, data: list[Any]) -> Any:
        """The values."""
        return [value_of(row) for row in data]

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Twice each."""
        return [value * 2 for value in data]

    def postprocess(self, data: Any) -> list[Any]:
        """As they are."""
        return list(data)


def load(folder: Path, *names: str, **arguments: Any) -> RecordingHandler:
    """A handler that loaded an archive with those files."""
    for name in names:
        (folder / name).write_text("{}", "utf-8")
    handler = RecordingHandler()
    handler.initialize(make_context(folder, **arguments))
    return handler


def test_attributes_before_loading_are_those_of_the_contract() -> None:
    """What authors may rely on after `__init__`."""
    handler = BaseHandler()

    assert (handler.model, handler.mapping, handler.device, handler.context) == (None, None, None, None)
    assert (handler.initialized, handler.explain, handler.target) == (False, False, 0)
    assert (handler.model_pt_path, handler.manifest, handler.map_location) == (None, None, None)
    assert handler.profiler_args == {}


@pytest.mark.parametrize(
    ("serialized_file", "model_file", "config", "model"),
    [
        ("m.pt", None, None, ("torchscript", "m.pt")),
        ("m.pt2", None, None, ("exported", "m.pt2")),
        ("m.onnx", None, None, ("onnx", "m.onnx")),
        ("m.so", None, {"pt2": {"export": {"aot_compile": True}}}, ("aot", "m.so")),
        ("m.pt", "net.py", None, ("eager", "net.py", "m.pt")),
        ("m.safetensors", "net.py", None, ("eager", "net.py", "m.safetensors")),
        (None, "net.py", None, ("eager", "net.py", None)),
    ],
)
def test_the_manifest_decides_how_the_model_is_loaded(
    tmp_path: Path, serialized_file: str | None, model_file: str | None, config: Any, model: Any
) -> None:
    """A model file makes it eager, else the serialized file's ending counts."""
    names = [name for name in (serialized_file, model_file) if name]
    handler = load(tmp_path, *names, serialized_file=serialized_file, model_file=model_file, config=config)

    assert handler.model == model
    assert handler.initialized
    assert (handler.device, handler.map_location) == ("cpu", "cpu")
    assert handler.mapping is None
    assert handler.takes_arrays is (serialized_file == "m.onnx")


def test_a_build_of_the_server_that_is_gone_leaves_the_archives_model(tmp_path: Path) -> None:
    """Its folder comes before a build of the archive; without it the parent serves, and that is said."""
    (tmp_path / "m.pt").write_text("{}", "utf-8")
    context = make_context(tmp_path, serialized_file="m.pt")
    context.build_folder = str(tmp_path / "gone")
    handler = RecordingHandler()

    handler.initialize(context)

    assert handler.model == ("torchscript", "m.pt")
    assert "cannot be loaded, the parent serves: FileNotFoundError" in context.load_warnings[0]
    assert context.refused_build == "unknown"


@pytest.mark.parametrize(
    ("names", "serialized_file", "words"),
    [
        ([], None, "names no serializedFile"),
        ([], "gone.pt", "gone.pt is not in the archive"),
        (["m.pth"], "m.pth", "m.pth is neither"),
        (["m.so"], "m.so", "m.so is neither"),
        (["m.safetensors"], "m.safetensors", "need a modelFile"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(
    tmp_path: Path, names: list[str], serialized_file: str | None, words: str
) -> None:
    """A RuntimeError with TorchServe's words and more."""
    with pytest.raises(ModelNotLoadable, match=words) as caught:
        load(tmp_path, *names, serialized_file=serialized_file)

    assert "No model weights could be loaded" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


def test_an_archive_without_a_manifest_has_no_model(tmp_path: Path) -> None:
    """`context.manifest` may be None, and the configuration too."""
    context = make_context(tmp_path)
    context.manifest = None
    context.model_yaml_config = None

    with pytest.raises(ModelNotLoadable):
        RecordingHandler().initialize(context)


def test_labels_are_read_at_load(tmp_path: Path) -> None:
    """`index_to_name.json` becomes `mapping`."""
    (tmp_path / "index_to_name.json").write_text('{"0": "cat"}', "utf-8")

    assert load(tmp_path, "m.pt", serialized_file="m.pt").mapping == {"0": "cat"}


def test_missing_labels_are_told_to_handlers_that_name_classes_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose answers are the model's numbers has no use for them."""
    load(tmp_path, "m.pt", serialized_file="m.pt")
    assert "index_to_name.json" not in caplog.text

    naming = type("Naming", (RecordingHandler,), {"names_classes": True})()
    naming.initialize(make_context(tmp_path, "m.pt"))
    assert caplog.text.count("index_to_name.json is missing") == 1


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("image_classifier", "ImageClassifier"),
        ("object_detector", "ObjectDetector"),
        ("text_classifier", "TextClassifier"),
    ],
)
def test_classifiers_and_detectors_name_classes(module: str, name: str) -> None:
    """Segmenters and `base_handler` answer numbers."""
    pytest.importorskip("torch")
    pytest.importorskip("PIL.Image")

    assert getattr(importlib.import_module(f"marserve_handlers.{module}"), name).names_classes
    assert not BaseHandler.names_classes


def test_a_batch_goes_through_the_three_steps(tmp_path: Path) -> None:
    """Preprocess, inference, postprocess; its time is a metric."""
    handler = load(tmp_path, "m.pt", serialized_file="m.pt")
    context = handler.context
    context.begin_batch([FakeItem("a"), FakeItem("b")])

    assert handler.handle([{"body": 1}, {"data": 2}], context) == [2, 4]

    (value,) = context.metrics.drain()
    assert (value.name, value.unit, value.kind, value.request_ids) == ("HandlerTime", "Milliseconds", "gauge", "a,b")


def test_a_describe_request_is_answered_by_the_handlers_description(tmp_path: Path) -> None:
    """As many answers as requests."""

    class Describing(RecordingHandler):
        def describe_handle(self) -> Any:
            return {"inputs": ["pixels"]}

    (tmp_path / "m.pt").touch()
    handler = Describing()
    handler.initialize(make_context(tmp_path, "m.pt"))
    handler.context.begin_batch([FakeItem(server_headers=[("describe", "True")])])

    assert handler.handle([{"body": 1}], handler.context) == [{"inputs": ["pixels"]}]
    assert BaseHandler().describe_handle() is None


def test_an_explain_request_goes_to_the_insights(tmp_path: Path) -> None:
    """With what was prepared, the first row's value, and its target."""

    class Explaining(RecordingHandler):
        def get_insights(self, tensor_data: Any, raw_data: Any, target: Any = 0) -> Any:
            return [(tensor_data, raw_data, target)]

    (tmp_path / "m.pt").touch()
    handler = Explaining()
    handler.initialize(make_context(tmp_path, "m.pt"))
    handler.context.begin_batch([FakeItem(server_headers=[("explain", "True")])])

    assert handler.handle([{"body": 3, "target": 4}], handler.context) == [([3], 3, 4)]
    assert handler.explain is True
    assert handler.handle([{"data": 3}], handler.context) == [([3], 3, 0)]
    assert handler.explain_handle([7], ["raw"]) == [([7], "raw", 0)]


def test_without_insights_an_explain_request_is_501(tmp_path: Path) -> None:
    """A clear answer instead of an attribute error."""
    handler = load(tmp_path, "m.pt", serialized_file="m.pt")
    handler.context.begin_batch([FakeItem(server_headers=[("explain", "True")])])

    with pytest.raises(PredictionException, match="no explanations") as caught:
        handler.handle([{"body": 3}], handler.context)
    assert caught.value.error_code == 501


def test_a_context_without_metrics_is_enough(tmp_path: Path) -> None:
    """Unit tests may leave metrics out."""
    handler = load(tmp_path, "m.pt", serialized_file="m.pt")
    handler.context.metrics = None

    assert handler.handle([{"body": 1}], handler.context) == [2]


def test_a_subclass_may_leave_our_init_out() -> None:
    """Handlers in the wild do; the steps still work."""

    class Careless(RecordingHandler):
        def __init__(self) -> None:
            self.mine = 1

    assert Careless().takes_arrays is False
    assert Careless().context is None


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ({"data": b"x", "body": b"y"}, b"x"),
        ({"data": b"", "body": b"y"}, b"y"),
        ({"data": 0, "body": 1}, 0),
        ({"body": b""}, b""),
        ({"data": []}, []),
        ({}, None),
        (b"raw", b"raw"),
        ([1, 2], [1, 2]),
    ],
)
def test_a_rows_value_is_its_data_or_its_body(row: Any, value: Any) -> None:
    """`data` unless it is empty or absent; a row that is no dict is the value."""
    assert value_of(row) == value


@pytest.mark.parametrize("takes_arrays", [False, True], ids=["torch", "onnx"])
@pytest.mark.parametrize(
    ("value", "came"),
    [
        ({}, "an object"),
        ("seven", "'seven'"),
        (b"seven", "b'seven'"),
        (bytearray(b"seven"), "b'seven'"),
        (bytearray(b"[1.0, 2.0"), "b'\\[1.0, 2.0'"),
        ({"[1.0, 2.0]": ""}, "a form, which is what curl -d sends: add -H 'Content-Type: application/json'"),
        (None, "None"),
        ([[1.0, "x"]], "'x'"),
        ([[1.0], [1.0, 2.0]], "lists of unequal lengths"),
    ],
)
def test_what_is_no_tensor_is_the_clients_mistake(value: Any, came: str, takes_arrays: bool) -> None:
    """With what came; numbers are taken."""
    if not takes_arrays:
        pytest.importorskip("torch")
    handler = BaseHandler()
    handler.takes_arrays, handler.device = takes_arrays, "cpu"

    with pytest.raises(
        BadInput, match=f"expected (numbers as JSON, alone or in )?nested lists of one shape, got {came}"
    ):
        handler.preprocess([{"body": value}])
    assert handler.preprocess([{"body": [1, 2]}]).tolist() == [[1, 2]]


@pytest.mark.parametrize("takes_arrays", [False, True], ids=["torch", "onnx"])
@pytest.mark.parametrize("row", [{"body": bytearray(b"[1.5, 2]")}, {"data": b"[1.5, 2]"}, {"body": [1.5, 2]}])
def test_json_without_a_content_type_holds_the_numbers_it_says(row: Any, takes_arrays: bool) -> None:
    """And is no row of numbers by itself, one a byte, as `curl -T row.json` would have it else."""
    if not takes_arrays:
        pytest.importorskip("torch")
    handler = BaseHandler()
    handler.takes_arrays, handler.device = takes_arrays, "cpu"

    assert handler.preprocess([row, {"body": [3, 4]}]).tolist() == [[1.5, 2], [3, 4]]
