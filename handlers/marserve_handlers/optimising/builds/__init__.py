"""The ways in which a model is built anew: one file each, with `build` and `load`.

    build(material, folder)         writes what the build needs into an empty folder
    load(parent, folder, threads)   the model to call in the place of the parent, a module or a session as the parent is

`parent` is a function that loads the model of the archive; builds that bring their own do not call it. Nothing here is
imported until a build is made or loaded, so that a worker imports only what its own needs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from marserve_handlers.optimising.material import Material

BUILDS = {
    "channels-last": "channels_last",
    "bf16": "bf16",
    "onnx": "onnx_float",
    "onnx-int8": "onnx_int8",
    "openvino": "openvino_float",
    "openvino-int8": "openvino_int8",
    "compile": "compiled",
    "aot": "aot_float",
    "aot-int8": "aot_int8",
    "int8-rows": "int8_rows",
}
"""Name to module."""

NATIVE = frozenset({"aot", "aot-int8"})
"""Builds that hold native code, which runs as soon as it is loaded, even where the load then fails."""

OF_PARENT = frozenset({"channels-last", "bf16", "compile", "int8-rows"})
"""Builds that bring no weights: they hold the parent's, in another layout or another type."""

Parent = Callable[[], Any]


class CannotBuild(Exception):
    """A build cannot be made of this model: the message says why, in words for a row of the report."""


class BuildModule(Protocol):
    """What a file of this room has."""

    def build(self, material: Material, folder: Path) -> None:
        """Write what the build needs into `folder`. Raises CannotBuild, and whatever libraries raise."""

    def load(self, parent: Parent, folder: Path, threads: int) -> Any:
        """The model to call. `threads` 0: as many as the library likes."""


def find_build(name: str) -> BuildModule:
    """The build of that name. Raises CannotBuild for a name that is none."""
    if name not in BUILDS:
        raise CannotBuild(f"there is no build {name!r}; there are {', '.join(BUILDS)}")
    found: Any = import_module(f"{__name__}.{BUILDS[name]}")
    return found  # type: ignore[no-any-return]
