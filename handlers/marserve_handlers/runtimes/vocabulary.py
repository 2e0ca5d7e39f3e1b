"""Reads a text model's vocabulary: token to number, as `torch.save` wrote a dict of them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping

import torch

from marserve_handlers.errors import ModelNotLoadable


def load_vocabulary(path: str) -> dict[str, int]:
    """The dict of token to number in that file. Raises ModelNotLoadable; nothing but plain data is unpickled."""
    name = os.path.basename(path)
    if not os.path.isfile(path):
        raise ModelNotLoadable(f"Missing the source_vocab file: {name} is not in the archive.")
    try:
        vocabulary = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelNotLoadable(
            f"{name} holds more than plain data. Save the vocabulary as a dict, torch.save(vocab.get_stoi(), ...) for "
            "torchtext's: nothing else is unpickled."
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        raise ModelNotLoadable(f"The vocabulary {name} cannot be loaded: {error}") from error
    if not isinstance(vocabulary, Mapping):
        raise ModelNotLoadable(
            f"{name} holds a {type(vocabulary).__name__}; a vocabulary is a dict of token to number."
        )
    return {str(token): int(number) for token, number in vocabulary.items()}
