"""Builds the digits archives: one set of weights, saved in the four ways that marserve loads."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from digits_net import DigitsNet

from marserve.archive.writing.writer import ArchiveSpec, write_archive

HERE = Path(__file__).resolve().parent
KINDS = ("torchscript", "eager", "exported", "onnx")
MAX_BATCH = 1024


def build_archives(weights: Mapping[str, torch.Tensor], folder: Path, kinds: tuple[str, ...] = KINDS) -> list[Path]:
    """Write an archive of each kind into `folder` and give their paths, in that order; `digits.mar` is TorchScript.

    Files that are there already are replaced. `SOURCE_DATE_EPOCH`, where it is set, becomes the archives' date.
    """
    net = DigitsNet()
    net.load_state_dict(dict(weights))
    net.eval()
    date = os.environ.get("SOURCE_DATE_EPOCH")
    paths = []
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        # torch advises against TorchScript, and its exporters against parts of themselves; all of it works
        warnings.simplefilter("ignore")
        for kind in kinds:
            serialized = _SAVERS[kind](net, Path(scratch))
            spec = ArchiveSpec(
                model_name="digits" if kind == "torchscript" else f"digits_{kind}",
                version="1.0",
                handler="image_classifier",
                serialized_file=serialized,
                model_file=HERE / "digits_net.py" if kind == "eager" else None,
                extra_files=(str(HERE / "index_to_name.json"),),
                config_file=HERE / "model-config.yaml",
            )
            paths.append(write_archive(spec, folder, force=True, source_date_epoch=int(date) if date else None))
    return paths


def _save_torchscript(net: DigitsNet, folder: Path) -> Path:
    path = folder / "digits.pt"
    # Traced, not scripted: torch.jit.script writes constants in the order of a set, another one in each process.
    traced: Any = torch.jit.trace(net, torch.zeros(2, 1, 8, 8))
    traced.save(str(path))
    return path


def _save_eager(net: DigitsNet, folder: Path) -> Path:
    from safetensors.torch import save_model

    path = folder / "digits.safetensors"
    save_model(net, str(path))
    return path


def _save_exported(net: DigitsNet, folder: Path) -> Path:
    path = folder / "digits.pt2"
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    program = torch.export.export(net, (torch.zeros(2, 1, 8, 8),), dynamic_shapes={"pictures": {0: batch}})
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names folders of this machine
    torch.export.save(program, path)
    return path


def _save_onnx(net: DigitsNet, folder: Path) -> Path:
    path = folder / "digits.onnx"
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    exported = torch.onnx.export(
        net,
        (torch.zeros(2, 1, 8, 8),),
        dynamo=True,
        verbose=False,
        input_names=["pictures"],
        output_names=["scores"],
        dynamic_shapes={"pictures": {0: batch}},
    )
    if exported is None:
        raise RuntimeError("torch.onnx.export gave no program")
    for node in exported.model.graph:
        node.metadata_props.clear()  # stack traces, which name folders of this machine
    exported.save(path, external_data=False)
    return path


_SAVERS = {
    "torchscript": _save_torchscript,
    "eager": _save_eager,
    "exported": _save_exported,
    "onnx": _save_onnx,
}
