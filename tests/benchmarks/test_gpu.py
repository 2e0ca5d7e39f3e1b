"""Tests for what `gpu.py` does where there is no GPU, and for the work that it measures, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.torch


def test_without_a_gpu_it_says_so() -> None:
    """What was looked at, and how to see that it runs."""
    torch = pytest.importorskip("torch", reason="needs the extra `torch`")
    if torch.cuda.is_available():
        pytest.skip("here is a GPU: `python benchmarks/gpu.py` measures it")

    run = subprocess.run([sys.executable, "gpu.py"], cwd=BENCHMARKS, capture_output=True, text=True, check=False)

    assert run.returncode == 1
    assert run.stderr.startswith("There is no GPU here that torch ")
    assert "--device cpu" in run.stderr


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_work_answers_alike_however_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapped or one after the other: one answer for each body, with the scores of the CPU's own work."""
    torch = pytest.importorskip("torch", reason="needs the extra `torch`")
    numpy = pytest.importorskip("numpy")
    image = pytest.importorskip("PIL.Image")
    monkeypatch.syspath_prepend(str(BENCHMARKS / "handlers"))
    from device_work import DeviceWork
    from workload import open_work

    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 10))
    torch.jit.trace(network.eval(), torch.rand(2, 1, 28, 28)).save(str(tmp_path / "cnn.pt"))
    pixels = numpy.arange(28 * 28, dtype="uint8").reshape(28, 28)
    image.fromarray(pixels).save(tmp_path / "cnn.png")
    bodies = [(tmp_path / "cnn.png").read_bytes()] * 5
    threads = torch.get_num_threads()
    try:
        work = DeviceWork("cnn", tmp_path, "cpu")
        answers = work(bodies)

        assert len(answers) == 5
        assert answers == work(bodies, is_overlapped=False)
        for mine, plain in zip(answers, open_work("cnn", tmp_path)(bodies), strict=True):
            assert mine["classes"] == plain["classes"]
            assert mine["scores"] == pytest.approx(plain["scores"], abs=1e-5)
    finally:
        torch.set_num_threads(threads)
