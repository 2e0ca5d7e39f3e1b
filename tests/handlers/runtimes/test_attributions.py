"""Attributions of tokens, against models whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("captum.attr", reason="explanations need captum")

from marserve_handlers.runtimes.attributions import attribute_tokens  # noqa: E402

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
