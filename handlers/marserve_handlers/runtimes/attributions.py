"""Which pixels or tokens spoke for a class: integrated gradients with captum, of tokens over the model's embedding."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from marserve_handlers.support.targets import check_target

STEPS = 50
"""How many points of the way from nothing to the text are looked at."""
PICTURE_STEPS = 15
"""The same of the way to a picture."""


class NoScores(TypeError):
    """The model's output has no score for each class."""


def attribute_pixels(model: Callable[[torch.Tensor], Any], pictures: torch.Tensor, target: int) -> torch.Tensor:
    """Attributions of the shape of `pictures` [B, …] for class `target`.

    The model scores classes, [B, classes], or those of each pixel, [B, classes, H, W], alone or under `out` of a dict.
    A class's score is then the sum over the pixels whose likeliest class it is. Raises ImportError without captum,
    NoScores for a model whose output is neither, and PredictionException (400) for a class that it does not have.
    """
    captum = importlib.import_module("captum.attr")
    with torch.no_grad():
        scores = _scores_of(model(pictures))
    check_target(target, scores.shape[1])
    best = torch.zeros_like(scores).scatter_(1, scores.argmax(dim=1, keepdim=True), 1) if scores.ndim == 4 else None

    def score(rows: torch.Tensor) -> torch.Tensor:
        found = _scores_of(model(rows))
        if best is None:
            return found
        # Captum asks for several points of the way at once, all pictures of one point after those of the one before.
        counted = best.repeat(found.shape[0] // best.shape[0], 1, 1, 1)
        return (found * counted).sum(dim=(2, 3))

    attributions: torch.Tensor = captum.IntegratedGradients(score).attribute(
        pictures, target=target, n_steps=PICTURE_STEPS
    )
    return attributions.detach()


def _scores_of(output: Any) -> torch.Tensor:
    found = output.get("out") if isinstance(output, Mapping) else output
    if not isinstance(found, torch.Tensor) or found.ndim not in (2, 4):
        shown = f"has the shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(output).__name__
        raise NoScores(f"The model's output {shown}: it is no score for each class.")
    return found


def attribute_tokens(
    model: torch.nn.Module, embedding: Any, numbers: torch.Tensor, offsets: torch.Tensor, target: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attributions [1, tokens, width] for class `target`, and by how much their sum misses the change in score, [1].

    `model(numbers, offsets)` scores one text; `embedding` is its layer, an EmbeddingBag or an Embedding. The baseline
    is the embedding of nothing, all zeros. Raises ImportError without captum, TypeError for another kind of layer, and
    PredictionException (400) for a class that the model does not have.
    """
    captum = importlib.import_module("captum.attr")
    if not isinstance(embedding, (torch.nn.EmbeddingBag, torch.nn.Embedding)):
        raise TypeError(f"The model's layer `embedding` is a {type(embedding).__name__}, not of torch.nn.")
    with torch.no_grad():
        shape = embedding(numbers, offsets).shape if _is_bag(embedding) else embedding(numbers).shape
        check_target(target, model(numbers, offsets).shape[-1])

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
