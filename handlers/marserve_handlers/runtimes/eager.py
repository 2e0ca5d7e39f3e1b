"""Loads eager models: a class from the archive's model file, and weights for it that are data and nothing else."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import sys
import zipfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.support.classes import list_classes_from_module
from marserve_handlers.support.devices.device_errors import is_out_of_memory


def load_eager(model_dir: str, model_file: str, weights: str | None, device: Any) -> torch.nn.Module:
    """The one model class of `model_file`, built without arguments, with its weights, on `device`, for evaluation.

    `weights` is a path: `.safetensors`, or what `torch.save` wrote of a state dict, read with `weights_only=True`;
    where a `.safetensors` file of the same name lies beside it, that one is read. None leaves the class's own numbers.
    Raises ModelNotLoadable for a missing file, for more or fewer classes than one, for weights that do not fit, and
    for a file that holds more than weights.
    """
    model = build_eager(model_dir, model_file)
    if weights is not None:
        _load_weights(model, preferred_weights(weights))
    model.to(device)  # once: weights that were read onto the device would go to the host and come back
    model.eval()
    return model


def build_eager(model_dir: str, model_file: str) -> torch.nn.Module:
    """The one model class of `model_file`, built without arguments. Raises ModelNotLoadable, or what the class does."""
    path = os.path.join(model_dir, model_file)
    if not os.path.isfile(path):
        raise ModelNotLoadable(f"Missing the {model_file} file")
    module = _import_file(path)
    classes = list_classes_from_module(module)
    if len(classes) != 1:
        names = ", ".join(found.__name__ for found in classes) or "none"
        raise ModelNotLoadable(f"Expected only one class as model definition. {model_file} defines {names}.")
    model = classes[0]()
    if not isinstance(model, torch.nn.Module):
        raise ModelNotLoadable(f"Class {classes[0].__name__} of {model_file} is no torch.nn.Module.")
    return model


def _import_file(path: str) -> ModuleType:
    """The module of that file, under its own name, so that a handler that imports it sees the same classes."""
    name = os.path.splitext(os.path.basename(path))[0]
    known = sys.modules.get(name)
    if known is not None and _is_same_file(getattr(known, "__file__", None), path):
        return known
    if known is not None:
        name = f"archive_model_{name}"  # the name is taken, e.g. by a module of the standard library
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelNotLoadable(f"{os.path.basename(path)} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = os.path.dirname(path)
    is_added = folder not in sys.path
    if is_added:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        if is_added:
            sys.path.remove(folder)
    return module


def _is_same_file(first: str | None, second: str) -> bool:
    return first is not None and os.path.realpath(first) == os.path.realpath(second)


def preferred_weights(weights: str) -> str:
    """The path of the `.safetensors` file beside the weights, if there is one, else their own."""
    beside = os.path.splitext(weights)[0] + ".safetensors"
    return beside if os.path.isfile(beside) else weights


def _load_weights(model: torch.nn.Module, path: str) -> None:
    """Read the weights into the model, which is on the host. The file is mapped where it can be, and not read twice."""
    name = os.path.basename(path)
    with saying_what_is_wrong(path):
        if path.endswith(".safetensors"):
            from safetensors.torch import load_model

            load_model(model, path, device="cpu")
            return
        state = read_state(path)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        raise ModelNotLoadable(f"The weights of {name} do not fit the model: {error}") from error


def read_state(path: str) -> Any:
    """What `torch.save` wrote, on the host; mapped, except what torch wrote before 1.6, which is no zip file."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


@contextlib.contextmanager
def saying_what_is_wrong(path: str) -> Iterator[None]:
    """Raise ModelNotLoadable, with the file's name, for what is wrong with a file of weights while it is read."""
    name = os.path.basename(path)
    if not os.path.exists(path):
        raise ModelNotLoadable(f"The archive's serialized file {name} is missing.")
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ModelNotLoadable(
            f"{name} holds more than weights. Save the state dict, best as .safetensors: nothing else is unpickled."
        ) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelNotLoadable(f"The weights of {name} cannot be loaded: {error}") from error
