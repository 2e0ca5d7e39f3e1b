"""The stand-in that users' unit tests of handlers are built on."""

from __future__ import annotations

from pathlib import Path

from marserve_handlers.mock_context import MockContext


def test_it_looks_like_the_context_of_one_request() -> None:
    """Manifest, properties, metrics that take every call."""
    context = MockContext(model_pt_file="m.pt", model_dir="somewhere", model_file="net.py", gpu_id="1")
    context.metrics.add_time("T", 1)

    assert context.manifest == {"model": {"modelName": "mnist", "serializedFile": "m.pt", "modelFile": "net.py"}}
    assert context.system_properties == {"model_dir": "somewhere", "gpu_id": 1}
    assert context.model_yaml_config == {}
    assert context.get_request_header(0, "explain") is False
    context.explain = True
    assert context.get_request_header(0, "explain") == "True"
    assert context.get_request_header(0, "describe") is False


def test_files_may_be_left_out() -> None:
    """None leaves them out of the manifest; no gpu id stays none."""
    context = MockContext(model_pt_file=None, model_file=None, gpu_id=None)

    assert context.manifest == {"model": {"modelName": "mnist"}}
    assert context.system_properties["gpu_id"] is None


def test_a_configuration_is_read(tmp_path: Path) -> None:
    """From the model's folder."""
    (tmp_path / "c.yaml").write_text("handler: {topk: 3}", "utf-8")

    assert MockContext(model_dir=str(tmp_path), model_yaml_config_file="c.yaml").model_yaml_config == {
        "handler": {"topk": 3}
    }
