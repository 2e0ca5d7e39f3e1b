"""The model in OpenVINO, quantised to INT8 by NNCF with scales that are measured once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marserve_handlers.optimising.builds import CannotBuild, Parent, openvino_float
from marserve_handlers.optimising.material import Material
from marserve_handlers.optimising.telemetry_off import switch_telemetry_off


def build(material: Material, folder: Path) -> None:
    """Quantise on the calibration's inputs."""
    model = openvino_float.read(material, folder)
    nncf = import_nncf()
    feeds = [list(feed.values()) for feed in material.feeds()]
    kind = {"model_type": nncf.ModelType.TRANSFORMER} if _has_attention(material.model) else {}
    quantised = nncf.quantize(model, nncf.Dataset(feeds), subset_size=len(feeds), **kind)
    openvino_float.save(quantised, folder)


def load(parent: Parent, folder: Path, threads: int) -> Any:
    """As the build in float32: what is quantised is in the file."""
    return openvino_float.load(parent, folder, threads)


def import_nncf() -> Any:
    """NNCF, whose reports to its maker are switched off. Raises CannotBuild where it is not installed."""
    switch_telemetry_off()
    try:
        # here: it may be missing
        import nncf
    except ImportError:
        raise CannotBuild('nncf is not installed: pip install "marserve[optimise]"') from None
    return nncf


def _has_attention(model: Any) -> bool:
    """Whether a module's class, or one of its parts', is called after attention or transformers."""
    names = {type(module).__name__.lower() for module in model.modules()}
    return any("attention" in name or "transformer" in name for name in names)
