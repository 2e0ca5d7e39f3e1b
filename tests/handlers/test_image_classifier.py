"""From scores to labels, and the built-in handler from a request's bytes to its answer; no runtime needed."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from support.model_context import FakeItem, make_context
from support.pictures import draw_picture, encode_picture

np = pytest.importorskip("numpy")

from marserve_handlers.errors import BadPicture, PredictionException  # noqa: E402
from marserve_handlers.image_classifier import ImageClassifier, as_scores, best_classes, softmax  # noqa: E402
from marserve_handlers.support.pictures import PictureTransform  # noqa: E402

CONFIG = {"handler": {"mode": "L", "size": [4, 4], "topk": 2}}


class BrightnessClassifier(ImageClassifier):
    """A classifier without a file: it scores class 1 by brightness and class 2 by darkness."""

    def _find_device(self, gpu_id: int | None) -> Any:
        self.takes_arrays = True
        return super()._find_device(gpu_id)

    def _load_model(self, model_dir: str, model_file: str | None, serialized_file: str | None) -> Any:
        return "a model"

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Three scores a row."""
        brightness = data.mean(axis=(1, 2, 3))
        return np.stack([np.zeros_like(brightness), brightness * 4, -brightness], axis=1)


@pytest.fixture
def classifier() -> BrightnessClassifier:
    """The classifier above, loaded."""
    pytest.importorskip("onnxruntime")
    handler = BrightnessClassifier()
    handler.initialize(make_context(config=CONFIG))
    return handler


WHITE = encode_picture(draw_picture(4, 4, "L").point(lambda _: 255))
BLACK = encode_picture(draw_picture(4, 4, "L").point(lambda _: 0))


@pytest.mark.onnx
def test_a_picture_that_came_as_a_form_is_told_how_to_be_sent(classifier: BrightnessClassifier) -> None:
    """`curl --data-binary` calls every file a form."""
    classifier.context.begin_batch([FakeItem()])

    with pytest.raises(BadPicture, match="curl -T FILE, or with a Content-Type of its own"):
        classifier.preprocess([{"PNG": bytearray(b"")}])


@pytest.mark.onnx
def test_a_batch_of_pictures_is_classified(classifier: BrightnessClassifier) -> None:
    """Each row gets its own labels, best first, `topk` of them; `data` counts before `body`."""
    rows = [{"data": bytearray(WHITE)}, {"body": bytearray(BLACK)}, {"data": base64.b64encode(WHITE).decode()}]

    classifier.context.begin_batch([FakeItem(), FakeItem(), FakeItem()])
    answers = classifier.handle(rows, classifier.context)

    assert [list(answer) for answer in answers] == [["1", "0"], ["0", "1"], ["1", "0"]]
    assert sum(answers[0].values()) < 1
    assert answers[0] == answers[2]
    json.dumps(answers)
    assert [value.name for value in classifier.context.metrics.drain()] == ["HandlerTime"]


@pytest.mark.onnx
def test_nested_lists_are_taken_as_they_are(classifier: BrightnessClassifier) -> None:
    """Numbers in JSON are the model's input, beside pictures of that shape too."""
    numbers = [[[1.0] * 4] * 4]

    answers = classifier.handle([{"body": numbers}, {"body": WHITE}], classifier.context)

    assert answers[0] == answers[1]


@pytest.mark.onnx
@pytest.mark.parametrize(
    "row",
    [
        {},
        {"body": None},
        {"body": bytearray()},
        {"body": bytearray(b"nonsense")},
        {"body": "nonsense!"},
        {"body": {"instances": []}},
        {"body": 5},
        {"body": [[1, 2], [3]]},
        {"body": ["a"]},
        "nonsense!",
    ],
)
def test_what_is_no_picture_fails_with_400(classifier: BrightnessClassifier, row: Any) -> None:
    """A clear sentence and the client's status, whatever was sent."""
    with pytest.raises(BadPicture) as caught:
        classifier.handle([row], classifier.context)

    assert caught.value.error_code == 400


@pytest.mark.onnx
def test_numbers_of_another_shape_fail_beside_pictures(classifier: BrightnessClassifier) -> None:
    """One batch has one shape; the server finds out whose fault it is by running items alone."""
    with pytest.raises(BadPicture, match="size"):
        classifier.handle([{"body": WHITE}, {"body": [[[1.0]]]}], classifier.context)


@pytest.mark.onnx
def test_labels_come_from_the_archive(tmp_path: Path) -> None:
    """`index_to_name.json` beside the model."""
    (tmp_path / "index_to_name.json").write_text('{"0": "grey", "1": ["n1", "bright"]}', "utf-8")
    pytest.importorskip("onnxruntime")
    handler = BrightnessClassifier()
    handler.initialize(make_context(tmp_path, config={"handler": {"mode": "L", "size": 4}}))

    (answer,) = handler.handle([{"body": WHITE}], handler.context)

    assert list(answer) == ["bright", "grey", "2"]


@pytest.mark.onnx
def test_the_configuration_is_checked_at_load() -> None:
    """A wrong `topk` or transform fails loading, by its key."""
    pytest.importorskip("onnxruntime")
    for section, words in (({"topk": 0}, "topk"), ({"topk": "5"}, "topk"), ({"size": -1}, "size")):
        with pytest.raises(ValueError, match=words):
            BrightnessClassifier().initialize(make_context(config={"handler": section}))


@pytest.mark.onnx
def test_without_a_configuration_it_is_torchserves() -> None:
    """Top 5, 256, 224, ImageNet; other keys of `handler` are the author's."""
    pytest.importorskip("onnxruntime")
    handler = BrightnessClassifier()
    handler.initialize(make_context(config={"handler": {"mine": 1}}))

    assert handler.get_max_result_classes() == 5
    assert handler.image_processing == PictureTransform()
    assert handler.preprocess([{"body": WHITE}]).shape == (1, 3, 224, 224)


@pytest.mark.onnx
def test_the_limit_on_pixels_can_be_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `limit_max_image_pixels` off Pillow's bound is gone; with it on it stays."""
    pytest.importorskip("onnxruntime")
    from PIL import Image

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 7)
    handler = BrightnessClassifier()
    handler.initialize(make_context(config=CONFIG))
    with pytest.raises(BadPicture, match="too many pixels"):
        handler.preprocess([{"body": WHITE}])

    handler.initialize(make_context(config=CONFIG, limit_max_image_pixels=False))

    assert handler.preprocess([{"body": WHITE}]).shape == (1, 1, 4, 4)


@pytest.mark.onnx
def test_a_transform_of_the_authors_is_used(classifier: BrightnessClassifier) -> None:
    """A subclass's `image_processing` gets the Pillow image as it is in the file."""
    seen = []

    def transform(image: Any) -> Any:
        seen.append((image.mode, image.size))
        return np.ones((1, 4, 4), dtype=np.float32)

    classifier.image_processing = transform
    batch = classifier.preprocess([{"body": WHITE}, {"body": [[[2.0] * 4] * 4]}])

    assert seen == [("L", (4, 4))]
    assert batch.shape == (2, 1, 4, 4)


@pytest.mark.onnx
def test_explaining_without_captum_says_what_is_missing(
    classifier: BrightnessClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """501 and the package's name."""
    monkeypatch.setitem(__import__("sys").modules, "captum.attr", None)

    with pytest.raises(PredictionException, match="captum") as caught:
        classifier.get_insights(None, None)
    assert caught.value.error_code == 501


@pytest.mark.torch
def test_pixels_that_spoke_for_a_class_are_named(tmp_path: Path) -> None:
    """Integrated gradients of the input's shape; the field `target` says for which class."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("captum.attr", reason="explanations need captum")
    (tmp_path / "channels.py").write_text(
        "import torch\n\n\nclass Channels(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x.mean(dim=(2, 3))\n"
    )
    torch.save({}, tmp_path / "channels.pt")
    handler = ImageClassifier()
    handler.initialize(
        make_context(tmp_path, "channels.pt", "channels.py", {"handler": {"size": 2, "mean": 0, "std": 1}})
    )
    handler.context.begin_batch([FakeItem(server_headers=[("explain", "True")])])

    (answer,) = handler.handle([{"body": bytearray(encode_picture(draw_picture(2, 2))), "target": 2}], handler.context)

    attributions = np.asarray(answer)
    assert attributions.shape == (3, 2, 2)
    assert not attributions[:2].any()
    assert attributions[2].any()


def test_softmax_survives_large_scores() -> None:
    """Rows sum up to 1, however large the scores."""
    probabilities = softmax(np.array([[1000.0, 1001.0], [-1000.0, 0.0]], dtype=np.float32))

    assert probabilities.sum(axis=1) == pytest.approx([1, 1])
    assert probabilities[0] == pytest.approx([0.26894142, 0.73105858])


def test_the_best_classes_come_first() -> None:
    """For few classes and for many, and no more than there are."""
    few = np.array([[0.1, 0.6, 0.3]], dtype=np.float32)
    assert best_classes(few, 2).tolist() == [[1, 2]]
    assert best_classes(few, 5).tolist() == [[1, 2, 0]]

    many = np.random.default_rng(0).random((3, 1000), dtype=np.float32)
    assert best_classes(many, 5).tolist() == np.argsort(-many, axis=1)[:, :5].tolist()


@pytest.mark.parametrize("data", [[1.0, 2.0], [[[1.0]]], 3.0])
def test_an_output_that_is_no_table_of_scores_is_refused(data: Any) -> None:
    """One row of scores for each picture."""
    with pytest.raises(ValueError, match="shape"):
        as_scores(data)
