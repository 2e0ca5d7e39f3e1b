"""The most floating-point operations a second that this machine was seen to do, by dtype, threads and device.

    python -m marserve_handlers.flops.peak --dtype float32 --threads 2 --device cpu

The best of a matrix product, a convolution and, on processors, ONNX Runtime: each library is far from the peak in one
of them (a product in torch reached 0.4 on an AMD processor). A file of the user's keeps the best of the first three
times that it was asked for: other work on the machine can only make it look slower.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from marserve_handlers.flops.cost import NotCounted
from marserve_handlers.optimising.machine import cpu_flags, versions

SECONDS = 0.4  # for each of the three
TIMES = 3
MEASURE_LIMIT_S = 120.0
_SIDE, _CHANNELS, _PICTURE, _BATCH = 1024, 128, 28, 8


def cached_peak(dtype: str, threads: int, device: str, folder: Path | None = None) -> float:
    """FLOPs a second; measured in a process of its own where that was not done yet. Raises NotCounted."""
    if device == "other":
        raise NotCounted("its device is not torch's, so that the peak cannot be measured: give peakFlops a number")
    command = [sys.executable, "-m", "marserve_handlers.flops.peak", "--dtype", dtype, "--device", device]
    command += ["--threads", str(threads), *(["--folder", str(folder)] if folder is not None else [])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=MEASURE_LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
        said = json.loads(done.stdout)["flops"] if done.returncode == 0 else 0.0
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError):
        said = 0.0
    if not said > 0:
        raise NotCounted(f"the peak of {dtype} on {device} cannot be measured: give peakFlops a number")
    return float(said)


def peak_of(dtype: str, threads: int, device: str, folder: Path, measure: Callable[[str, int, str], float]) -> float:
    """The best that `measure` ever said, which a file of the folder keeps. One process at a time measures."""
    key = " ".join([*cpu_flags(), *(f"{name}={of}" for name, of in versions().items()), dtype, str(threads), device])
    with _locked(folder) as file:
        try:
            known = json.loads(file.read_text())
        except (OSError, ValueError):
            known = {}
        known = known if isinstance(known, dict) else {}
        best, times = known[key] if _is_entry(known.get(key)) else (0.0, 0)
        if times < TIMES:
            best = max(best, measure(dtype, threads, device))
            known[key] = [best, times + 1]
            with contextlib.suppress(OSError):  # a full disk: it is measured again next time
                beside = file.with_suffix(".new")
                beside.write_text(json.dumps(known))
                beside.replace(file)
        return best


def _is_entry(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and all(type(each) in (int, float) and each > 0 for each in value)
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder / "peaks.json"


def measure(dtype: str, threads: int, device: str) -> float:
    """The best of the three, in FLOPs a second. Raises ValueError for a dtype that torch does not have."""
    best = 0.0
    with contextlib.suppress(ImportError):
        best = _by_torch(dtype, threads, device)
    if device == "cpu" and dtype == "float32":
        with contextlib.suppress(ImportError):
            best = max(best, _by_onnxruntime(threads))
    return best


def _by_torch(dtype: str, threads: int, device: str) -> float:
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"torch has no dtype {dtype}")
    if threads:
        torch.set_num_threads(threads)
    left = torch.rand(_SIDE, _SIDE).to(device, kind)
    pictures = torch.rand(_BATCH, _CHANNELS, _PICTURE, _PICTURE).to(device, kind)
    filters = torch.rand(_CHANNELS, _CHANNELS, 3, 3).to(device, kind)
    wait: Callable[[], None] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None

    def product() -> None:
        torch.mm(left, left)
        wait()

    def convolution() -> None:
        torch.nn.functional.conv2d(pictures, filters, padding=1)
        wait()

    with torch.inference_mode():
        by_product = 2 * _SIDE**3 / _quickest_s(product)
        of_convolution = 2 * _BATCH * _CHANNELS * _PICTURE * _PICTURE * _CHANNELS * 9
        return max(by_product, of_convolution / _quickest_s(convolution))


def _by_onnxruntime(threads: int) -> float:
    import numpy as np
    import onnx  # here: it may not be installed
    import onnxruntime  # likewise

    shape = [_SIDE, _SIDE]
    sides = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in ("a", "b", "c")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["a", "b"], ["c"])], "g", sides[:2], sides[2:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    left = np.random.default_rng(0).random((_SIDE, _SIDE), np.float32)
    return 2 * _SIDE**3 / _quickest_s(lambda: session.run(None, {"a": left, "b": left}))


def _quickest_s(run: Callable[[], object]) -> float:
    """The shortest of the runs that fit the time, in seconds: others on the machine can only lengthen one."""
    run()
    quickest, until = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        run()
        quickest = min(quickest, time.perf_counter() - began)
    if quickest == float("inf"):
        began = time.perf_counter()
        run()
        quickest = time.perf_counter() - began
    return quickest


def main() -> None:
    """Print the peak as `{"flops": …}`."""
    parser = argparse.ArgumentParser(description="Measure the most FLOPs a second that this machine does.")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / f"marserve-peaks-{os.getuid()}")
    words = parser.parse_args()
    with contextlib.suppress(OSError, AttributeError):
        os.nice(10)
    flops = peak_of(words.dtype, words.threads, words.device, words.folder, measure)
    sys.stdout.write(json.dumps({"flops": flops}) + "\n")


if __name__ == "__main__":
    main()
