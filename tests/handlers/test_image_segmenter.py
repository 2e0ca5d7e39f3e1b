"""The built-in segmenter: from scores to classes of pixels, and from a request to its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.model_context import FakeItem, make_context
from support.pictures import draw_picture, encode_picture

np = pytest.importorskip("numpy")

from marserve_handlers.image_segmenter import ImageSegmenter  # noqa: E402


def test_each_pixel_gets_its_class_and_probability() -> None:
    """The class as a float; scores may lie under `out`."""
    scores = np.zeros((1, 3, 1, 2), dtype=np.float32)
    scores[0, 2, 0, 1] = np.log(2)

    for data in (scores, {"out": scores, "aux": None}):
        ((row,),) = ImageSegmenter().postprocess(data)
        assert row[0] == pytest.approx([0.0, 1 / 3])
        assert row[1] == pytest.approx([2.0, 0.5])


def test_another_shape_is_the_models_fault() -> None:
    """The message says what came and what is right."""
    with pytest.raises(ValueError, match=r"shape \(2, 3\); a segmenter gives"):
        ImageSegmenter().postprocess(np.zeros((2, 3)))


@pytest.mark.torch
def test_a_picture_is_segmented(tmp_path: Path) -> None:
    """The default transform, an eager model with a dict of outputs, nested lists out."""
    torch = pytest.importorskip("torch")
    (tmp_path / "segments.py").write_text(
        "import torch\n\n\nclass Segments(torch.nn.Module):\n"
        "    def forward(self, x):\n        return {'out': torch.cat([x[:, :1], -x[:, :1]], dim=1)}\n"
    )
    torch.save({}, tmp_path / "segments.pt")
    handler = ImageSegmenter()
    handler.initialize(make_context(tmp_path, "segments.pt", "segments.py"))
    handler.context.begin_batch([FakeItem(), FakeItem()])
    white = encode_picture(draw_picture(8, 8).point(lambda _: 255))

    answers: list[Any] = handler.handle([{"body": bytearray(white)}, {"data": white}], handler.context)

    assert [len(answers), len(answers[0]), len(answers[0][0]), len(answers[0][0][0])] == [2, 224, 224, 2]
    assert answers[0] == answers[1]
    assert answers[0][5][5][0] == 0.0
    assert answers[0][5][5][1] > 0.9
