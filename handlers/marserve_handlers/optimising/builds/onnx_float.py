"""The model in ONNX Runtime, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marserve_handlers.optimising.builds import CannotBuild, Parent
from marserve_handlers.optimising.material import Material


def build(material: Material, folder: Path) -> None:
    """Write the ONNX file."""
    if material.is_session:
        raise CannotBuild("it runs in ONNX Runtime already")
    # here: a worker that loads the file need not export
    from marserve_handlers.optimising.onnx_export import write_onnx

    write_onnx(material, folder)


def load(parent: Parent, folder: Path, threads: int) -> Any:
    """A module around the session; for a parent that is a session, the session itself."""
    from marserve_handlers.runtimes.onnx import open_session

    session = open_session(str(folder / "model.onnx"), threads=threads)
    if not (folder / "output.json").exists():
        return session
    # here: where the parent is a session there may be no torch
    from marserve_handlers.optimising.onnx_export import ArrayModule, read_nesting

    names = [node.name for node in session.get_inputs()]
    return ArrayModule(lambda arrays: session.run(None, dict(zip(names, arrays, strict=True))), read_nesting(folder))
