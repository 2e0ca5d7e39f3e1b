"""The model in static INT8 by torchao, with scales that are measured once, compiled ahead of time by AOTInductor.

torchao is needed to build it; the package runs with torch alone.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marserve_handlers.optimising.builds import CannotBuild, Parent, aot_float
from marserve_handlers.optimising.material import Material

# What warns while torchao is imported: of its kernels for graphics cards, which no build here uses and a processor's
# torch cannot load, and of how it registers a type with torch. A worker's log would show it at each load.
_NOISY = ("torchao", "torch.utils._pytree")


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
        module = program.module()
        mark_layers(module)
        observed = pt2e.prepare_pt2e(module, quantizer)
        for call in material.calls:
            call = call.replaced({name: leaf.clone() for name, leaf in call.leaves.items()})
            observed(*call.args, **call.kwargs)
        quantised = pt2e.convert_pt2e(observed)
    write_package(material, export_again(material, quantised, parameters), folder)


def mark_layers(module: Any) -> None:
    """Say which layers of an exported program torchao is to quantise: it asks what module or function a node came of.

    Linear layers of `MultiheadAttention`, a third of what an encoder's layers compute, say that they came of attention,
    and would stay float32. They are given their rows one after the other, too: torchao 0.18 fails at transposed ones
    with batches of any size. Convolutions of one channel stay float32: torch 2.13 lays out their answers in one way and
    expects another one, so that no batch would be taken.
    """
    # here: as above
    import torch

    linear = torch.nn.functional.linear
    for node in module.graph.nodes:
        sources = node.meta.get("source_fn_stack", [])
        if node.target in (torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default):
            if node.args[0].meta["val"].shape[1] == 1:
                for each in (node, *node.all_input_nodes[1:]):  # weights came of the layer, too
                    each.meta["source_fn_stack"] = [(node.name, torch.nn.Identity)]
        elif node.target is torch.ops.aten.linear.default:
            if sources and sources[-1][1] in (torch.nn.Linear, linear):
                continue
            node.meta["source_fn_stack"] = [*sources, (node.name, linear)]
            with module.graph.inserting_before(node):
                rows = module.graph.call_function(torch.ops.aten.contiguous.default, (node.args[0],))
            rows.meta = dict(node.args[0].meta)
            node.replace_input_with(node.args[0], rows)
    module.recompile()


def load(parent: Parent, folder: Path, threads: int) -> Any:
    """As the package in float32."""
    return aot_float.load(parent, folder, threads)


def import_torchao(name: str) -> Any:
    """A module of torchao. Raises CannotBuild where it is not installed, or is another than was known."""
    from importlib import import_module  # here, as above

    try:
        with _without_warnings():
            return import_module(f"torchao.{name}")
    except ImportError as error:
        if error.name == "torchao":
            raise CannotBuild('torchao is not installed: pip install "marserve[optimise]"') from None
        raise CannotBuild(f"torchao is installed, and has no {name}: {error}") from None


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Only errors of these loggers are logged meanwhile."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
