"""The model in static INT8 by torchao, with scales that are measured once, compiled ahead of time by AOTInductor.

torchao is needed to build it; the package runs with torch alone.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from marserve_handlers.optimising.builds import CannotBuild, Parent, aot_float
from marserve_handlers.optimising.material import Material


def build(material: Material, folder: Path) -> None:
    """Quantise on the calibration's inputs, and compile."""
    if material.is_session:
        raise CannotBuild("an ONNX archive's handler calls a session of ONNX Runtime, and a package is a module")
    # here: a worker that loads the package needs none of it
    import torch

    # here, too
    from marserve_handlers.optimising.native_package import write_package
    from marserve_handlers.optimising.onnx_export import export_again, export_program

    pt2e = import_torchao("quantization.pt2e.quantize_pt2e")
    inductor = import_torchao("quantization.pt2e.quantizer.x86_inductor_quantizer")
    parameters = list(inspect.signature(material.model.forward).parameters)
    program = export_program(material)
    quantizer = inductor.X86InductorQuantizer()
    quantizer.set_global(inductor.get_default_x86_inductor_quantization_config())
    with torch.inference_mode(mode=False), torch.no_grad():
        observed = pt2e.prepare_pt2e(program.module(), quantizer)
        for call in material.calls:
            call = call.replaced({name: leaf.clone() for name, leaf in call.leaves.items()})
            observed(*call.args, **call.kwargs)
        quantised = pt2e.convert_pt2e(observed)
    write_package(material, export_again(material, quantised, parameters), folder)


def load(parent: Parent, folder: Path, threads: int) -> Any:
    """As the package in float32."""
    return aot_float.load(parent, folder, threads)


def import_torchao(name: str) -> Any:
    """A module of torchao. Raises CannotBuild where it is not installed, or is another than was known."""
    from importlib import import_module  # here, as above

    try:
        return import_module(f"torchao.{name}")
    except ImportError as error:
        if error.name == "torchao":
            raise CannotBuild('torchao is not installed: pip install "marserve[optimise]"') from None
        raise CannotBuild(f"torchao is installed, and has no {name}: {error}") from None
