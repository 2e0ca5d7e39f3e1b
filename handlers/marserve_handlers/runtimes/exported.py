"""Loads exported programs (`.pt2`) and models compiled ahead of time (`.so`, and packages of AOTInductor in `.pt2`)."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from marserve_handlers.declared.declaration import DTYPES, Declaration
from marserve_handlers.declared.named import Spec, declare_specs
from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.support.devices.device_errors import is_out_of_memory
from marserve_handlers.support.exported_check import check_exported_program, is_native_package

logger = logging.getLogger(__name__)

_FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_environment_lock = threading.Lock()


def load_exported(path: str, device: Any) -> torch.nn.Module:
    """The exported program of `path` as a callable module on `device`.

    Nothing of the file is run: it is looked through first (`exported_check`), and torch unpickles tensors only.
    Raises ModelNotLoadable when it is no exported program, or one that would do more than compute.
    """
    name = os.path.basename(path)
    if not os.path.isfile(path):
        raise ModelNotLoadable(f"The archive's serialized file {name} is missing.")
    # One open file for the look and for the load: what was looked at is what is loaded.
    with open(path, "rb") as file:
        check_exported_program(file)
        file.seek(0)
        try:
            with _weights_only(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.load(file)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ModelNotLoadable(f"{name} is no exported program that this torch can load: {error}") from error
    target = torch.device(str(device))
    if target.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, target)
    module = program.module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.marserve_declaration = _declare(program)  # type: ignore[assignment]  # an attribute beside its own
    return module


def load_native(path: str, device: Any, context: Any) -> torch.nn.Module | None:
    """The package of native code of `path` as a module; None where the file is none.

    Loading runs its code, so the archive must be trusted. Raises ModelNotLoadable where it is not, and for a package
    that was compiled for another processor, device or torch.
    """
    if not is_native_package(path):
        return None
    # here: few models are packages
    from marserve_handlers.optimising.builds import CannotBuild
    from marserve_handlers.optimising.native_package import load_package

    name = os.path.basename(path)
    if getattr(context, "is_trusted", False) is not True:
        raise ModelNotLoadable(
            f"{name} is a package of native code, which runs as soon as it is loaded, and its archive is not among "
            "trusted_models. Add the archive's name or SHA-256 there if you trust where it comes from."
        )
    if torch.device(str(device)).type != "cpu":
        raise ModelNotLoadable(f"{name} is a package of native code for a CPU, and the model is to be on {device}.")
    try:
        return load_package(Path(path))
    except CannotBuild as error:
        raise ModelNotLoadable(f"{name} cannot be run here ({error}).") from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelNotLoadable(f"{name} is no package that this torch can load: {error}") from error


def _declare(program: Any) -> Declaration | None:
    """What the program's own inputs and outputs declare; None if it takes other things than tensors."""
    try:
        arguments, keywords = program.call_spec.in_spec.children_specs
        outputs = program.call_spec.out_spec
        flat = [*arguments.children_specs, *outputs.children_specs]
        if keywords.children_specs or not all(each.is_leaf() for each in flat):
            return None
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        signature = program.graph_signature
        names = list(signature.user_outputs)
        ours = ["output"] if len(names) == 1 else [f"output_{number}" for number in range(len(names))]
        inputs = [_spec(name, values[name]) for name in signature.user_inputs]
        batch = {sizes[0] for _, _, sizes in inputs if sizes}
        # A size that varies is the batch's if it is the first of all inputs, and no other one.
        may_batch = batch == {1} or (len(batch) == 1 and not any(batch & set(sizes[1:]) for _, _, sizes in inputs))
        given = [_spec(our, values[name]) for our, name in zip(ours, names, strict=True)]
        return declare_specs(inputs, given, may_batch=may_batch)
    except Exception as error:  # torch's private forms change: a program without a declaration is served all the same
        logger.debug("the exported program declares nothing: %s", error)
        return None


def _spec(name: str, value: Any) -> Spec:
    if not isinstance(value, torch.Tensor):
        return name, None, []
    dtype = str(value.dtype).removeprefix("torch.")
    sizes = [size if isinstance(size, int) else str(size) for size in value.shape]
    return name, dtype if dtype in DTYPES else None, sizes


def load_aot_compiled(path: str, device: Any) -> Callable[..., Any]:
    """The model that AOTInductor compiled into the shared library of `path`, as a callable.

    A library is native code: it runs as the archive's own handler does. Raises ModelNotLoadable when the file is
    missing, or was compiled for another device, machine or torch.
    """
    name = os.path.basename(path)
    if not os.path.isfile(path):
        raise ModelNotLoadable(f"The archive's serialized file {name} is missing.")
    try:
        from torch._export import aot_load

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: Callable[..., Any] = aot_load(path, str(device))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelNotLoadable(
            f"{name} cannot be run on {device}: it must be compiled by AOTInductor of torch {torch.__version__} "
            f"for this kind of machine and device ({error})."
        ) from error
    return model


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    """Makes every `torch.load` inside torch's loader refuse what is no tensor, also where it asks for more."""
    with _environment_lock:
        before = os.environ.get(_FORCE_WEIGHTS_ONLY)
        os.environ[_FORCE_WEIGHTS_ONLY] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_FORCE_WEIGHTS_ONLY]
            else:
                os.environ[_FORCE_WEIGHTS_ONLY] = before
