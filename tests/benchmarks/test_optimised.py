"""What the benchmark of builds may call the speed of a build."""

from __future__ import annotations

from typing import Any

import pytest


class Described:
    """A server whose describe is given."""

    def __init__(self, on: list[str], warnings: list[str]) -> None:
        self._described = {"workers": [{"computesOn": each} for each in on], "warnings": warnings}

    def describe(self) -> dict[str, Any]:
        """As the management API."""
        return self._described


def test_a_server_on_which_the_parent_serves_is_not_measured_as_the_build() -> None:
    """With what describe says of it."""
    import optimised  # the folder is on the path for this file alone
    from load_generator import CannotMeasure

    server: Any = Described(["onnx-int8", "cpu"], ["the build cannot be loaded"])

    with pytest.raises(CannotMeasure, match="on cpu, onnx-int8 and not on onnx-int8: the build cannot be loaded"):
        optimised._must_serve(server, "onnx-int8")


def test_a_server_on_which_the_build_serves_is_measured() -> None:
    """On all of its workers."""
    import optimised  # as above

    server: Any = Described(["onnx-int8", "onnx-int8"], [])

    optimised._must_serve(server, "onnx-int8")
