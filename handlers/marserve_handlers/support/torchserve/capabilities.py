"""What is installed for handlers to use, as flags. It looks for packages, and imports none."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

PT2_AVAILABLE = find_spec("torch") is not None
"""Whether models can be compiled; torch 2.10 is the oldest that marserve runs with."""

PT230_AVAILABLE = PT2_AVAILABLE
PROFILER_AVAILABLE = PT2_AVAILABLE
XLA_AVAILABLE = find_spec("torch_xla") is not None
IPEX_AVAILABLE = find_spec("intel_extension_for_pytorch") is not None
ONNX_AVAILABLE = find_spec("onnxruntime") is not None


def setup_ort_session(model_pt_path: str, map_location: Any) -> Any:
    """A session of ONNX Runtime for the model of that path, on `map_location` (`cuda` or `cpu`)."""
    from marserve_handlers.runtimes.onnx import open_session

    return open_session(model_pt_path, str(map_location))
