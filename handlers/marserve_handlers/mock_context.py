"""A stand-in for `Context` in unit tests of handlers: one request, no headers, whatever the test sets."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import MagicMock

from marserve_handlers.support.torchserve.yaml_config import get_yaml_config


class MockContext:
    """Has `manifest`, `system_properties`, `explain`, `metrics`, `model_yaml_config` and `get_request_header`.

    A test sets `explain` to True for an explain request. `metrics` takes every call and counts nothing.
    """

    def __init__(
        self,
        model_pt_file: str | None = "model.pt",
        model_dir: str = "ts/torch_handler/unit_tests/models/tmp",
        model_file: str | None = "model.py",
        gpu_id: int | str | None = "0",
        model_name: str = "mnist",
        model_yaml_config_file: str | None = None,
    ) -> None:
        self.manifest: dict[str, Any] = {"model": {"modelName": model_name}}
        if model_pt_file:
            self.manifest["model"]["serializedFile"] = model_pt_file
        if model_file:
            self.manifest["model"]["modelFile"] = model_file
        self.system_properties = {"model_dir": model_dir, "gpu_id": None if gpu_id is None else int(gpu_id)}
        self.explain = False
        self.metrics = MagicMock()
        self.model_yaml_config: dict[str, Any] = {}
        if model_yaml_config_file:
            self.model_yaml_config = get_yaml_config(os.path.join(model_dir, model_yaml_config_file)) or {}

    def get_request_header(self, idx: int, exp: str) -> str | bool:
        """`True` as text for `explain` of an explain request, else False."""
        return "True" if exp == "explain" and self.explain else False
