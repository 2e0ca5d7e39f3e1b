"""Parameters and buffers that have several names, as an output layer that shares its weights with an embedding.

Filling a model name by name gives each its own tensor, and ties come apart: half of the names would stay empty where a
checkpoint holds a tensor once. So the names are noted before, filled once, and tied again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


def find_ties(model: torch.nn.Module) -> list[list[str]]:
    """The names of each tensor that has several, in the model's order."""
    names: dict[int, list[str]] = {}
    for find in (model.named_parameters, model.named_buffers):
        for name, tensor in find(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def first_saved(ties: Iterable[list[str]], saved: Mapping[str, object]) -> dict[str, str]:
    """For each tied name that is not to be filled itself, the name that is: the first that the checkpoint holds."""
    leading: dict[str, str] = {}
    for names in ties:
        leader = next((name for name in names if name in saved), names[0])
        leading.update((name, leader) for name in names if name != leader)
    return leading


def tie(model: torch.nn.Module, leading: Mapping[str, str]) -> None:
    """Give each of these names the tensor of its leader."""
    for name, leader in leading.items():
        owner, last = _owner(model, name)
        leaders_owner, leaders_last = _owner(model, leader)
        kind = owner._parameters if last in owner._parameters else owner._buffers
        kind[last] = getattr(leaders_owner, leaders_last)


def _owner(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    above, _, last = name.rpartition(".")
    return model.get_submodule(above), last
