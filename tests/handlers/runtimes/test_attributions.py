"""Attributions of tokens, against models whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("captum.attr", reason="explanations need captum")

from marserve_handlers.errors import PredictionException  # noqa: E402
from marserve_handlers.runtimes.attributions import attribute_pixels, attribute_tokens  # noqa: E402

pytestmark = pytest.mark.torch


class Scores(torch.nn.Module):
    """Scores are the embedding's numbers, added up."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding = embedding
        with torch.no_grad():
            embedding.weight.copy_(torch.tensor([[0.0, 0], [3, 0], [0, 6]]))

    def forward(self, numbers: Any, offsets: Any) -> Any:
        """Scores [1, 2]."""
        if isinstance(self.embedding, torch.nn.EmbeddingBag):
            return self.embedding(numbers, offsets)
        return self.embedding(numbers).sum(dim=0, keepdim=True)


@pytest.mark.parametrize(
    ("embedding", "share"),
    [
        (torch.nn.EmbeddingBag(3, 2, mode="sum"), 1.0),
        (torch.nn.EmbeddingBag(3, 2, mode="mean"), 0.5),
        (torch.nn.Embedding(3, 2), 1.0),
    ],
)
def test_each_token_has_its_part_of_the_score(embedding: Any, share: float) -> None:
    """The parts add up to the score of the class."""
    model = Scores(embedding)

    attributions, delta = attribute_tokens(model, embedding, torch.tensor([1, 2]), torch.tensor([0]), 1)

    assert attributions.sum(dim=2).tolist() == [pytest.approx([0.0, 6.0 * share])]
    assert delta.tolist() == pytest.approx([0.0], abs=1e-5)
    assert not embedding._forward_hooks


def test_another_kind_of_layer_is_refused() -> None:
    """Only torch's own can be looked into."""
    with pytest.raises(TypeError, match="is a Linear"):
        attribute_tokens(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), torch.tensor([1]), torch.tensor([0]), 0)


def test_a_class_that_a_model_does_not_have_is_refused() -> None:
    """Before captum counts with it: of texts, of pictures, of pixels."""
    embedding = torch.nn.Embedding(3, 2)

    for ask in (
        lambda: attribute_tokens(Scores(embedding), embedding, torch.tensor([1]), torch.tensor([0]), 2),
        lambda: attribute_pixels(lambda x: x.mean(dim=(2, 3)), torch.ones(1, 3, 2, 2), 3),
        lambda: attribute_pixels(lambda x: {"out": x}, torch.ones(1, 3, 2, 2), 3),
    ):
        with pytest.raises(PredictionException, match="must be the number of a class, from 0 to") as caught:
            ask()
        assert caught.value.error_code == 400


def test_of_a_segmenter_the_pixels_of_the_class_are_counted() -> None:
    """Those whose likeliest class it is, of each picture its own."""
    pictures = torch.tensor([[[[3.0, 1.0]], [[1.0, 2.0]]], [[[1.0, 5.0]], [[4.0, 1.0]]]])

    attributions = attribute_pixels(lambda x: {"out": x}, pictures, 1)

    assert attributions.shape == pictures.shape
    assert attributions[:, 0].abs().sum() == 0
    assert attributions[0, 1].tolist() == [pytest.approx([0.0, 2.0], abs=1e-4)]
    assert attributions[1, 1].tolist() == [pytest.approx([4.0, 0.0], abs=1e-4)]


@pytest.mark.parametrize("output", [torch.ones(2), [torch.ones(1, 2)], {"boxes": 1}])
def test_an_output_without_scores_of_classes_cannot_be_explained(output: Any) -> None:
    """Of `VisionHandler` that is 501."""
    with pytest.raises(TypeError, match="no score for each class"):
        attribute_pixels(lambda _: output, torch.ones(1, 3, 2, 2), 0)
