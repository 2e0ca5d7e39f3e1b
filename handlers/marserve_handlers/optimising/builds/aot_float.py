"""The model compiled ahead of time by AOTInductor, in float32, with its weights frozen into the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marserve_handlers.optimising.builds import CannotBuild, Parent
from marserve_handlers.optimising.material import Material


def build(material: Material, folder: Path) -> None:
    """Export and compile it."""
    if material.is_session:
        raise CannotBuild("an ONNX archive's handler calls a session of ONNX Runtime, and a package is a module")
    # here: a worker that loads the package exports nothing
    from marserve_handlers.optimising.native_package import write_package
    from marserve_handlers.optimising.onnx_export import export_program

    write_package(material, export_program(material), folder)


def load(parent: Parent, folder: Path, threads: int) -> Any:
    """The package as a module; torch's own number of threads holds."""
    from marserve_handlers.optimising.native_package import MODEL, load_package  # here: where it is a session's

    return load_package(folder / MODEL)
