"""Which tokens spoke for a class: integrated gradients over a text model's embedding, with captum."""

from __future__ import annotations

import importlib
from typing import Any

import torch

STEPS = 50
"""How many points of the way from nothing to the text are looked at."""


def attribute_tokens(
    model: torch.nn.Module, embedding: Any, numbers: torch.Tensor, offsets: torch.Tensor, target: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attributions [1, tokens, width] for class `target`, and by how much their sum misses the change in score, [1].

    `model(numbers, offsets)` scores one text; `embedding` is its layer, an EmbeddingBag or an Embedding. The baseline
    is the embedding of nothing, all zeros. Raises ImportError without captum, and TypeError for another kind of layer.
    """
    captum = importlib.import_module("captum.attr")
    if not isinstance(embedding, (torch.nn.EmbeddingBag, torch.nn.Embedding)):
        raise TypeError(f"The model's layer `embedding` is a {type(embedding).__name__}, not of torch.nn.")
    with torch.no_grad():
        shape = embedding(numbers, offsets).shape if _is_bag(embedding) else embedding(numbers).shape

    def score(embedded: torch.Tensor) -> torch.Tensor:
        return torch.cat([_score_with(model, embedding, row, shape, numbers, offsets) for row in embedded])

    vectors = embedding.weight.detach()[numbers].unsqueeze(0)
    attributions, delta = captum.IntegratedGradients(score).attribute(
        vectors, baselines=torch.zeros_like(vectors), target=target, n_steps=STEPS, return_convergence_delta=True
    )
    return attributions.detach(), delta.detach()


def _score_with(
    model: torch.nn.Module,
    embedding: Any,
    vectors: torch.Tensor,
    shape: torch.Size,
    numbers: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """The model's scores [1, classes] as though the tokens' vectors were these."""
    if _is_bag(embedding):
        modes: dict[str, Any] = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}
        output = modes[embedding.mode](vectors, dim=0, keepdim=True)
    else:
        output = vectors.reshape(shape)
    hook = embedding.register_forward_hook(lambda *_: output)
    try:
        scores: torch.Tensor = model(numbers, offsets)
    finally:
        hook.remove()
    return scores


def _is_bag(embedding: Any) -> bool:
    return isinstance(embedding, torch.nn.EmbeddingBag)
