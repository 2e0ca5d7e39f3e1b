"""The built-in handler of saved tensors."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from support.model_context import make_context

torch = pytest.importorskip("torch")

from marserve_handlers.densenet import DenseNetHandler  # noqa: E402
from marserve_handlers.errors import ModelNotLoadable, PredictionException  # noqa: E402

pytestmark = pytest.mark.torch


def load(tmp_path: Path) -> DenseNetHandler:
    """A handler of a model that adds one."""
    (tmp_path / "plus_one.py").write_text(
        "import torch\n\n\nclass PlusOne(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n"
    )
    torch.save({}, tmp_path / "plus_one.pt")
    handler = DenseNetHandler()
    try:
        handler.initialize(make_context(tmp_path, "plus_one.pt", "plus_one.py"))
    finally:
        sys.modules.pop("plus_one", None)
    return handler


def saved(value: Any) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_each_row_is_answered_with_the_raw_output(tmp_path: Path) -> None:
    """Tensors of any shapes in one batch."""
    handler = load(tmp_path)

    answers = handler.handle(
        [{"data": saved(torch.zeros(2))}, {"body": bytearray(saved(torch.ones(1, 3)))}], handler.context
    )

    assert [answer.tolist() for answer in answers] == [[1.0, 1.0], [[2.0, 2.0, 2.0]]]


@pytest.mark.parametrize("value", ["text", b"nonsense", b"", None, saved(Path("x"))])
def test_what_is_no_saved_tensor_fails_with_400(tmp_path: Path, value: Any) -> None:
    """Nothing but tensors and plain data is unpickled."""
    handler = load(tmp_path)

    with pytest.raises(PredictionException, match="holds no tensor") as caught:
        handler.handle([{"body": value}], handler.context)
    assert caught.value.error_code == 400


def test_without_a_file_nothing_is_loaded(tmp_path: Path) -> None:
    """A sentence instead."""
    with pytest.raises(ModelNotLoadable, match="names no serializedFile"):
        DenseNetHandler().initialize(make_context(tmp_path))
