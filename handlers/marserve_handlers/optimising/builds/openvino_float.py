"""The model in OpenVINO, in float32: its own default on processors with AVX-512 BF16 would be bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from marserve_handlers.optimising.builds import CannotBuild, Parent
from marserve_handlers.optimising.material import Material
from marserve_handlers.optimising.telemetry_off import switch_telemetry_off

MODEL = "model.xml"


def build(material: Material, folder: Path) -> None:
    """Write OpenVINO's own files of the model."""
    save(read(material, folder), folder)


def read(material: Material, folder: Path) -> Any:
    """The model as OpenVINO has it, by way of its ONNX file; how it is nested is left in `folder`."""
    openvino = import_openvino()
    if material.is_session:
        raise CannotBuild("an ONNX archive's handler calls a session of ONNX Runtime, and OpenVINO has none")
    # here: a worker that loads the files need not export
    from marserve_handlers.optimising.onnx_export import write_onnx

    path = write_onnx(material, folder)
    model = openvino.Core().read_model(str(path))
    path.unlink()
    return model


def save(model: Any, folder: Path) -> None:
    """Write it, weights as they are."""
    import_openvino().save_model(model, str(folder / MODEL), compress_to_fp16=False)


def load(parent: Parent, folder: Path, threads: int) -> Any:
    """A module around the compiled model."""
    # here, as above
    from marserve_handlers.optimising.onnx_export import ArrayModule, read_nesting

    return ArrayModule(runner(str(folder / MODEL), threads), read_nesting(folder))


def runner(model: Any, threads: int) -> Callable[[list[Any]], list[Any]]:
    """What runs a model, or that of a path, on arrays in order; in float32 where it is not quantised."""
    options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    if threads:
        options["INFERENCE_NUM_THREADS"] = threads
    compiled = import_openvino().Core().compile_model(model, "CPU", options)

    def run(arrays: list[Any]) -> list[Any]:
        given = compiled(arrays)
        return [given[output].copy() for output in compiled.outputs]

    return run


def import_openvino() -> Any:
    """OpenVINO, whose reports to its maker are switched off. Raises CannotBuild where it is not installed."""
    switch_telemetry_off()
    try:
        # here: it may be missing
        import openvino
    except ImportError:
        raise CannotBuild('openvino is not installed: pip install "marserve[optimise]"') from None
    return openvino
