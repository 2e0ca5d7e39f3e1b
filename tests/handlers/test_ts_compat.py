"""TorchServe's import names lead to our classes, and importing them brings in nothing heavy."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "handlers" / "marserve_handlers" / "ts_compat"

# Module, a name in it, and where that name is defined.
NAMES = [
    ("ts", "__version__", None),
    ("ts.context", "Context", "marserve_handlers.context"),
    ("ts.context", "RequestProcessor", "marserve_handlers.context"),
    ("ts.service", "PredictionException", "marserve_handlers.errors"),
    ("ts.service", "emit_metrics", "marserve_handlers.support.torchserve.metrics_store"),
    ("ts.service", "PREDICTION_METRIC", None),
    ("ts.utils.util", "PredictionException", "marserve_handlers.errors"),
    ("ts.utils.util", "list_classes_from_module", "marserve_handlers.support.classes"),
    ("ts.utils.util", "load_label_mapping", "marserve_handlers.support.labels"),
    ("ts.utils.util", "map_class_to_label", "marserve_handlers.support.labels"),
    ("ts.utils.util", "check_valid_pt2_backend", "marserve_handlers.support.devices.compilation"),
    ("ts.utils.util", "get_yaml_config", "marserve_handlers.support.torchserve.yaml_config"),
    ("ts.utils.util", "PT2Backend", "marserve_handlers.support.devices.compilation"),
    ("ts.utils.util", "CLEANUP_REGEX", None),
    ("ts.utils.util", "deprecated", "marserve_handlers.support.torchserve.deprecation"),
    ("ts.handler_utils.utils", "send_intermediate_predict_response", "marserve_handlers.context"),
    ("ts.handler_utils.utils", "import_class", "marserve_handlers.support.classes"),
    ("ts.handler_utils.timer", "timed", "marserve_handlers.support.timing"),
    ("ts.protocol.otf_message_handler", "send_intermediate_predict_response", "marserve_handlers.context"),
    ("ts.metrics.dimension", "Dimension", "marserve_handlers.metrics"),
    ("ts.metrics.metric", "Metric", "marserve_handlers.support.torchserve.metrics_store"),
    ("ts.metrics.metric_type_enum", "MetricTypes", "marserve_handlers.support.metric_types"),
    ("ts.metrics.unit", "Units", "marserve_handlers.metrics"),
    ("ts.metrics.caching_metric", "CachingMetric", "marserve_handlers.metrics"),
    ("ts.metrics.metric_abstract", "MetricAbstract", "marserve_handlers.metrics"),
    ("ts.metrics.metric_cache_abstract", "MetricCacheAbstract", "marserve_handlers.metrics"),
    ("ts.metrics.metric_cache_yaml_impl", "MetricsCacheYamlImpl", "marserve_handlers.metrics"),
    ("ts.metrics.metric_cache_errors", "MetricsCacheKeyError", "marserve_handlers.support.metric_types"),
    ("ts.metrics.metric_cache_errors", "MetricsCachePyYamlError", "marserve_handlers.support.metrics_file"),
    ("ts.metrics.metric_encoder", "MetricEncoder", "marserve_handlers.support.torchserve.metrics_store"),
    ("ts.metrics.metrics_store", "MetricsStore", "marserve_handlers.support.torchserve.metrics_store"),
    ("ts.torch_handler.base_handler", "BaseHandler", "marserve_handlers.base"),
    ("ts.torch_handler.base_handler", "ONNX_AVAILABLE", None),
    ("ts.torch_handler.vision_handler", "VisionHandler", "marserve_handlers.vision"),
    ("ts.torch_handler.image_classifier", "ImageClassifier", "marserve_handlers.image_classifier"),
    ("ts.torch_handler.unit_tests.test_utils.mock_context", "MockContext", "marserve_handlers.mock_context"),
]


@pytest.fixture(autouse=True)
def _ts_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a worker sets it up."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [name for name in sys.modules if name == "ts" or name.startswith("ts.")]:
        del sys.modules[name]


@pytest.mark.parametrize(("module", "name", "home"), NAMES, ids=lambda value: str(value))
def test_a_name_of_torchserve_is_ours(module: str, name: str, home: str | None) -> None:
    """It can be imported, is public there, and is defined in marserve_handlers."""
    if "vision" in module or "image" in module:
        pytest.importorskip("PIL.Image")
    loaded = importlib.import_module(module)

    assert name in loaded.__all__
    if home is not None:
        assert getattr(loaded, name).__module__ == home


# What stands in a file beside imports and `__all__`: the check of `ts` itself, and a module that is run as a program.
ALLOWED = {"refuse_beside_torchserve(__path__)", "if __name__ == '__main__':\n    main()"}


# Tests of tools that convert models replace names of these modules, so their functions have to look them up there.
DEFINE = {FOLDER / "outside" / "model_archiver" / name for name in ("arg_parser.py", "model_packaging.py")}


def test_the_folder_defines_nothing() -> None:
    """All files but two are imports and `__all__`: the code that a handler's traceback shows is in one place."""
    for file in set(FOLDER.rglob("*.py")) - DEFINE:
        tree = ast.parse(file.read_text("utf-8"))
        for node in tree.body[1:]:
            is_all = isinstance(node, (ast.Assign, ast.AnnAssign)) and "__all__" in ast.unparse(node)
            is_fine = isinstance(node, ast.ImportFrom) or is_all or ast.unparse(node) in ALLOWED
            assert is_fine, f"{file.name}, line {node.lineno}"


def test_all_names_of_the_folder_can_be_imported() -> None:
    """No file names something that is gone."""
    pytest.importorskip("PIL.Image")
    pytest.importorskip("torch")  # some names are values of the runtimes
    for file in (FOLDER / "ts").rglob("*.py"):
        parts = file.relative_to(FOLDER).with_suffix("").parts
        module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
        for name in getattr(module, "__all__", []):
            assert hasattr(module, name)


def test_a_plain_handlers_imports_stay_light() -> None:
    """A worker whose handler wants a base class, streaming and metrics loads neither torch nor numpy for it."""
    statement = (
        "from ts.torch_handler.base_handler import BaseHandler\n"
        "from ts.handler_utils.utils import send_intermediate_predict_response\n"
        "from ts.metrics.dimension import Dimension\n"
        "from ts.utils.util import PredictionException\n"
        "import sys; print(sorted({'torch', 'numpy', 'onnxruntime', 'PIL', 'yaml', 'unittest'} & set(sys.modules)))"
    )
    script = f"import sys; sys.path[:0] = {[str(FOLDER), str(FOLDER.parent.parent)]!r}\n{statement}"
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)

    assert run.stdout == "[]\n", run.stderr
