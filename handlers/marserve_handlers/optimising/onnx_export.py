"""A model of torch as an ONNX file, with a batch of any size.

A module is exported by `torch.export` first, strictly and with declared dimensions, and the program then becomes ONNX:
exporting a module straight away was seen to bake a branch on the batch size without a word, and to be wrong beyond it.
TorchScript is refused by `torch.export`, and goes by way of the former exporter. Whether the file is right at all
batch sizes is for the comparison to say.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from marserve_handlers.optimising.builds import CannotBuild
from marserve_handlers.optimising.call_arrays import Call, as_numpy, join, leaves_of
from marserve_handlers.optimising.material import (
    Material,
    dynamic_axes_of,
    shape_of_value,
    structure_with,
    value_of_shape,
)
from marserve_handlers.optimising.traps import Traps, watching

MODEL, SHAPE = "model.onnx", "output.json"
_OPSET = 17


def write_onnx(material: Material, folder: Path) -> Path:
    """Write the model's file, and beside it how its output is nested; the path of the file.

    Raises CannotBuild where the model cannot be exported.
    """
    call = material.calls[0]
    try:
        output = material.output
        shape = shape_of_value(output)
    except TypeError as error:
        raise CannotBuild(str(error)) from None
    path = folder / MODEL
    names = input_names(material)
    if material.is_script:
        two, varying = _example_of(material)
        with _exporting(material):
            _export_script(material, two, names, list(leaves_of(output)), varying, path)
    else:
        program = export_program(material)
        with _exporting(material):
            torch.onnx.export(
                program, (), str(path), input_names=names, dynamo=True, verbose=False, external_data=False
            )
    (folder / SHAPE).write_text(json.dumps({"output": shape, "inputs": list(call.leaves)}))
    return path


def input_names(material: Material) -> list[str]:
    """A name for each leaf of what the model is called with: its own parameters' names, where they are known."""
    call = material.calls[0]
    if material.is_script:
        parameters: list[str] = []
    else:
        parameters = list(inspect.signature(material.model.forward).parameters)
    names = []
    for at, leaf in enumerate(call.leaves):
        place, _, rest = leaf.partition(".")
        known = parameters[int(place)] if place.isdigit() and int(place) < len(parameters) else f"input_{at}"
        names.append("_".join([known if place.isdigit() else place, *([rest.replace(".", "_")] if rest else [])]))
    return names


def _example_of(material: Material) -> tuple[Call, Mapping[str, set[int]]]:
    """A call with two rows, since exporters take a size of one as a constant; and which other axes vary."""
    call = material.calls[0]
    if not call.rows:
        raise CannotBuild("its inputs share no batch axis")
    try:
        return (join([call, call]) if call.rows == 1 else call), dynamic_axes_of(material.calls)
    except TypeError as error:
        raise CannotBuild(str(error)) from None


@contextlib.contextmanager
def _exporting(material: Material) -> Iterator[Traps]:
    """As exporters like it; what they bake becomes notes of the material, also where they fail."""
    with torch.inference_mode(mode=False), torch.no_grad(), _without_fast_path():
        traps = Traps()
        try:
            with watching(material.model) as traps:
                yield traps
        finally:
            material.notes.extend(note for note in traps.notes() if note not in material.notes)


def export_program(material: Material) -> Any:
    """The module as torch's exported program, strictly, for batches of any size up to the largest it will get.

    Raises CannotBuild with what torch refuses, and the author's line where it names one.
    """
    if material.is_script:
        raise CannotBuild("torch.export refuses TorchScript: export the module that it was made of")
    call, varying = _example_of(material)
    with _exporting(material) as traps:
        return _export_module(material, call, varying, traps)


def export_again(material: Material, model: Any, parameters: list[str]) -> Any:
    """A graph made of an exported program, exported as that was; `parameters` are those of the module's forward."""
    call, varying = _example_of(material)
    with _exporting(material) as traps:
        return _export(model, material.most_rows, call, varying, parameters, traps, strict=False)


def _export_module(material: Material, call: Call, varying: Mapping[str, set[int]], traps: Traps) -> Any:
    parameters = list(inspect.signature(material.model.forward).parameters)
    return _export(material.model, material.most_rows, call, varying, parameters, traps, strict=True)


def _export(
    model: Any,
    most_rows: int,
    call: Call,
    varying: Mapping[str, set[int]],
    parameters: list[str],
    traps: Traps,
    *,
    strict: bool,
) -> Any:
    batch = torch.export.Dim("batch", min=1, max=max(most_rows, call.rows))
    sizes = {name: {0: batch, **dict.fromkeys(sorted(varying[name]), torch.export.Dim.DYNAMIC)} for name in call.leaves}
    args, kwargs = structure_with(call, sizes)
    if len(args) > len(parameters):
        raise CannotBuild("its forward takes any number of arguments, which cannot be named")
    dynamic = {**dict(zip(parameters, args, strict=False)), **kwargs}
    cloned = call.replaced({name: leaf.clone() for name, leaf in call.leaves.items()})
    try:
        return torch.export.export(model, cloned.args, dict(cloned.kwargs), dynamic_shapes=dynamic, strict=strict)
    except Exception as error:
        raise CannotBuild(f"torch.export refuses it: {traps.refusal(error)}") from None


def _export_script(
    material: Material, call: Call, names: list[str], outputs: list[str], varying: Mapping[str, set[int]], path: Path
) -> None:
    if call.kwargs:
        raise CannotBuild("its model is called with arguments by name, which is not exported yet")
    output_names = [f"output_{at}" for at in range(len(outputs))]
    axes = {
        name: {0: "batch", **{at: f"{name}_{at}" for at in varying[leaf]}}
        for name, leaf in zip(names, call.leaves, strict=True)
    }
    args = tuple(leaf.clone() for leaf in call.args)
    torch.onnx.export(
        material.model,
        args,
        str(path),
        input_names=names,
        output_names=output_names,
        dynamic_axes={**axes, **{name: {0: "batch"} for name in output_names}},
        opset_version=_OPSET,
        dynamo=False,
    )


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Attention as its parts: ONNX knows nothing of torch's own kernel for whole encoder layers."""
    is_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_enabled)


class ArrayModule(torch.nn.Module):
    """A module around what takes arrays in order and gives arrays in order: tensors in, tensors out."""

    def __init__(self, run: Any, nesting: Mapping[str, Any]) -> None:
        super().__init__()
        self._run = run
        self._inputs: list[str] = nesting["inputs"]
        self._output = nesting["output"]
        self._names = list(_names(self._output))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the parent's."""
        leaves = Call(args, kwargs).leaves
        given = self._run([as_numpy(leaves[name]) for name in self._inputs])
        tensors = {name: torch.from_numpy(array) for name, array in zip(self._names, given, strict=True)}
        return value_of_shape(self._output, tensors)


def read_nesting(folder: Path) -> dict[str, Any]:
    """How inputs and output of the file in this folder are nested."""
    nesting: dict[str, Any] = json.loads((folder / SHAPE).read_text())
    return nesting


def _names(shape: Any) -> list[str]:
    if "leaf" in shape:
        return [shape["leaf"]]
    if "value" in shape:
        return []
    below = shape["dict"].values() if "dict" in shape else shape.get("list", shape.get("tuple"))
    return [name for each in below for name in _names(each)]
