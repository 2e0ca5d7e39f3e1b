"""The model in OpenVINO, quantised to INT8 by NNCF with scales that are measured once.

There are several ways to quantise, and none is the best for all models: SmoothQuant, which NNCF does by itself to
attention, put encoders that average over their tokens off by a fifth to a third of the mean output; without it they are
off by half a hundredth. So they are tried in order, and judged by the inputs that calibrate, never by those that are
compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marserve_handlers.optimising.builds import CannotBuild, Parent, openvino_float
from marserve_handlers.optimising.material import Material
from marserve_handlers.optimising.telemetry_off import switch_telemetry_off

# As a share of the mean output: a way that is no further off is taken, and the ways after it are not tried.
GOOD_ENOUGH = 0.01

Arrays = Sequence[np.ndarray[Any, Any]]


def build(material: Material, folder: Path) -> None:
    """Quantise on the calibration's inputs, in the first way that is good enough there, else in the best one."""
    model = openvino_float.read(material, folder)
    nncf = import_nncf()
    feeds = [list(feed.values()) for feed in material.feeds()]
    wanted = material.outputs()
    errors: list[tuple[float, Any]] = []
    for way in _ways(nncf, has_attention=_has_attention(material.model)):
        quantised = nncf.quantize(model.clone(), nncf.Dataset(feeds), subset_size=len(feeds), **way)
        run = openvino_float.runner(quantised, 1)
        errors.append((mean_error([run(feed) for feed in feeds], wanted), quantised))
        if errors[-1][0] <= GOOD_ENOUGH:
            break
    openvino_float.save(min(errors, key=lambda each: each[0])[1], folder)


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


def mean_error(seen: Sequence[Arrays], wanted: Sequence[Arrays]) -> float:
    """The mean error as a share of the mean output, both by magnitude, of the worst output; infinite for no number."""
    shares = []
    for ours, theirs in zip(zip(*seen, strict=True), zip(*wanted, strict=True), strict=True):
        error = sum(float(np.abs(one.astype(float) - other).sum()) for one, other in zip(ours, theirs, strict=True))
        whole = sum(float(np.abs(other.astype(float)).sum()) for other in theirs)
        shares.append(error / whole if whole else error)
    worst = max(shares, default=0.0)
    return worst if np.isfinite(worst) else np.inf


def _ways(library: Any, *, has_attention: bool) -> Iterator[Mapping[str, Any]]:
    """What NNCF is told beside the inputs: the way that is best most often first."""
    if has_attention:
        kind = library.ModelType.TRANSFORMER
        unsmoothed = library.AdvancedSmoothQuantParameters(convolution=-1, matmul=-1)
        yield {
            "model_type": kind,
            "advanced_parameters": library.AdvancedQuantizationParameters(smooth_quant_alphas=unsmoothed),
        }
        yield {"model_type": kind}
    yield {}


def _has_attention(model: Any) -> bool:
    """Whether a module's class, or one of its parts', is called after attention or transformers."""
    names = {type(module).__name__.lower() for module in model.modules()}
    return any("attention" in name or "transformer" in name for name in names)
