"""Loads exported programs (`.pt2`) and models compiled ahead of time (`.so`)."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.support.devices.device_errors import is_out_of_memory
from marserve_handlers.support.exported_check import check_exported_program

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
    return program.module()


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
