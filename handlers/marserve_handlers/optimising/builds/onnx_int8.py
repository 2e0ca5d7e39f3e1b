"""The model in ONNX Runtime, quantised to INT8 with scales that are measured once, on the calibration's inputs.

Activations are unsigned and weights signed, one scale a channel: with signed activations it is two to three times
slower on processors with VNNI. Scales that are taken from each batch would make a row's answer depend on its mates.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from marserve_handlers.optimising.builds import Parent, onnx_float
from marserve_handlers.optimising.material import Material


def build(material: Material, folder: Path) -> None:
    """Export the model where it is one of torch, and write its quantised file."""
    # here: a worker that loads the file quantises nothing
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if material.is_session:
            source = Path(material.model._model_path)
        else:
            # here: where the parent is a session there may be no torch
            from marserve_handlers.optimising.onnx_export import SHAPE, write_onnx

            source = write_onnx(material, Path(scratch))
            shutil.copy(Path(scratch) / SHAPE, folder / SHAPE)
        prepared = Path(scratch) / "prepared.onnx"
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        model = onnx.load(str(prepared))
        del model.graph.value_info[:]  # shapes that the exporter wrote with its example's batch confuse the quantiser
        onnx.save(model, str(prepared))
        names = [node.name for node in model.graph.input]
        feeds = [
            feed if material.is_session else dict(zip(names, feed.values(), strict=True)) for feed in material.feeds()
        ]

        class Reader(CalibrationDataReader):  # type: ignore[misc]
            """The calibration's inputs, one after the other."""

            def __init__(self) -> None:
                self._rest = iter(feeds)

            def get_next(self) -> Any:
                """The next one; None at the end."""
                return next(self._rest, None)

        quantize_static(
            str(prepared),
            str(folder / "model.onnx"),
            Reader(),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
        )


def load(parent: Parent, folder: Path, threads: int) -> Any:
    """As the build in float32."""
    return onnx_float.load(parent, folder, threads)
