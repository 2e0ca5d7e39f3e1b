"""The built-in detector: pictures of any size in, findings out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.model_context import FakeItem, make_context
from support.pictures import draw_picture, encode_picture

torch = pytest.importorskip("torch")

from marserve_handlers.errors import BadPicture, PredictionException  # noqa: E402
from marserve_handlers.object_detector import ObjectDetector  # noqa: E402

pytestmark = pytest.mark.torch

# Finds two things in each picture, whose boxes tell its size and whose label its brightest value.
MODEL = """
import torch


class Detector(torch.nn.Module):
    def forward(self, pictures):
        return [
            {
                "boxes": torch.tensor([[0.0, 0.0, p.shape[2], p.shape[1]], [1.0, 1.0, 2.0, 2.0]]),
                "labels": torch.tensor([int(p.max()), 7]),
                "scores": torch.tensor([0.9, 0.4]),
            }
            for p in pictures
        ]
"""


def load(tmp_path: Path, **handler: Any) -> ObjectDetector:
    """A detector of the model above."""
    (tmp_path / "detector.py").write_text(MODEL)
    torch.save({}, tmp_path / "detector.pt")
    (tmp_path / "index_to_name.json").write_text(json.dumps({"1": "thing"}))
    detector = ObjectDetector()
    detector.initialize(make_context(tmp_path, "detector.pt", "detector.py", {"handler": handler}))
    detector.context.begin_batch([FakeItem(), FakeItem()])
    return detector


def picture(width: int, height: int) -> bytes:
    """A white picture."""
    return encode_picture(draw_picture(height, width).point(lambda _: 255))


def test_findings_have_labels_boxes_and_scores(tmp_path: Path) -> None:
    """Those that score `threshold`, 0.5, or more; pictures keep their size."""
    detector = load(tmp_path)

    answers = detector.handle([{"body": picture(8, 4)}, {"body": picture(8, 4)}], detector.context)

    assert answers == [[{"thing": [0.0, 0.0, 8.0, 4.0], "score": pytest.approx(0.9)}]] * 2


def test_pictures_of_several_sizes_share_a_batch(tmp_path: Path) -> None:
    """The model is given a list then."""
    detector = load(tmp_path)

    answers = detector.handle([{"body": picture(8, 4)}, {"body": picture(6, 6)}], detector.context)

    assert [answer[0]["thing"][2:] for answer in answers] == [[8.0, 4.0], [6.0, 6.0]]


def test_threshold_and_transform_come_from_the_configuration(tmp_path: Path) -> None:
    """Lower: more findings; a class without a name is called by its number; `resize` is heeded."""
    detector = load(tmp_path, threshold=0.3, resize=16)

    (answer,) = detector.handle([{"body": picture(8, 8)}], detector.context)

    assert [list(finding) for finding in answer] == [["thing", "score"], ["7", "score"]]
    assert answer[0]["thing"] == [0.0, 0.0, 16.0, 16.0]


def test_a_threshold_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """When the model is loaded."""
    with pytest.raises(ValueError, match=r"handler\.threshold .* is 'high'; it must be a number"):
        load(tmp_path, threshold="high")


def test_what_is_no_picture_fails_with_400(tmp_path: Path) -> None:
    """As in the other vision handlers."""
    detector = load(tmp_path)

    with pytest.raises(BadPicture):
        detector.handle([{"body": b"nonsense"}], detector.context)


def test_scripted_detectors_losses_are_left_out(tmp_path: Path) -> None:
    """They give (losses, detections)."""
    detector = load(tmp_path)
    found = detector.model
    detector.model = lambda pictures: ({}, found(pictures))

    assert detector.handle([{"body": picture(4, 4)}], detector.context)[0][0]["score"] == pytest.approx(0.9)


def test_an_output_that_is_none_of_a_detectors_is_named() -> None:
    """For the author, in the log."""
    with pytest.raises(ValueError, match=r"must be a dict with boxes \[N, 4\].* it is a dict with boxes\.$"):
        ObjectDetector().postprocess([{"boxes": []}])
    with pytest.raises(ValueError, match=r"it is a Tensor of shape \[3\]\.$"):
        ObjectDetector().postprocess(torch.zeros(2, 3))


def test_explanations_are_answered_501() -> None:
    """There is no one score to attribute."""
    with pytest.raises(PredictionException) as caught:
        ObjectDetector().get_insights(None, None)

    assert caught.value.error_code == 501
