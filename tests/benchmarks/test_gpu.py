"""Tests for what `gpu.py` does where there is no GPU, and for the work that it measures, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marserve_handlers.mock_context import MockContext

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.torch


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What was looked at, and how to see that it runs."""
    torch = pytest.importorskip("torch", reason="needs the extra `torch`")
    if torch.cuda.is_available():
        pytest.skip("here is a GPU: `python benchmarks/gpu.py` measures it")

    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # which it would set

    assert import_module("gpu").main() == 1

    said = capsys.readouterr().err
    assert said.startswith("There is no GPU here that torch ")
    assert "--device cpu" in said


@pytest.fixture
def cnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a network that is called `cnn`, and the picture that it is asked with."""
    torch = pytest.importorskip("torch", reason="needs the extra `torch`")
    numpy = pytest.importorskip("numpy")
    image = pytest.importorskip("PIL.Image")
    monkeypatch.syspath_prepend(str(BENCHMARKS / "handlers"))
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 10))
    torch.jit.trace(network.eval(), torch.rand(2, 1, 28, 28)).save(str(tmp_path / "cnn.pt"))
    pixels = numpy.arange(28 * 28, dtype="uint8").reshape(28, 28)
    image.fromarray(pixels).save(tmp_path / "cnn.png")
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_work_answers_alike_however_it_is_cut(cnn: Path) -> None:
    """Overlapped or one after the other: one answer for each body, with the scores of the CPU's own work."""
    from device_work import DeviceWork
    from workload import open_work

    bodies = [(cnn / "cnn.png").read_bytes()] * 5
    work = DeviceWork("cnn", cnn, "cpu")
    answers = work(bodies)

    assert len(answers) == 5
    assert answers == work(bodies, is_overlapped=False)
    for mine, plain in zip(answers, open_work("cnn", cnn)(bodies), strict=True):
        assert mine["classes"] == plain["classes"]
        assert mine["scores"] == pytest.approx(plain["scores"], abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_archives_handler_is_one_that_loads(cnn: Path) -> None:
    """One class in its file, as marserve wants it, and its answers those of the loop's work."""
    import device_handler
    from device_work import DeviceWork

    from marserve.worker.load import _find_class

    handler = _find_class(device_handler)()
    context = MockContext(model_dir=str(cnn), gpu_id=None)
    context.model_yaml_config = {"work": "cnn"}
    handler.initialize(context)
    body = (cnn / "cnn.png").read_bytes()

    assert handler.handle([{"body": body}] * 2, None) == DeviceWork("cnn", cnn, "cpu")([body] * 2)


class Told:
    """What a network or a stream was told, in order; stands for CUDA, which is not here."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.stream = "present"
        self.copies = 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Told:
    """torch with a device `cuda:1`, whose tensors stay where they are, and whose streams only write down."""
    torch = pytest.importorskip("torch", reason="needs the extra `torch`")
    told = Told()
    real_device, real_tensor, real_load = torch.device, torch.tensor, torch.jit.load

    def device(word: str) -> Any:
        assert word == "cuda:1"
        return SimpleNamespace(type="cuda")

    def to(tensor: Any, device: Any, non_blocking: bool = False) -> Any:
        told.copies += 1
        told.events.append(f"copy {len(tensor)} on {told.stream}{' and go on' if non_blocking else ''}")
        return tensor

    def tolist(tensor: Any) -> Any:
        told.events.append("wait")
        return tensor.numpy().tolist()

    def pinned(tensor: Any) -> Any:
        told.events.append(f"pin {len(tensor)}")
        return tensor

    def load(path: str, map_location: Any) -> Any:
        network = real_load(path)

        def compute(pictures: Any) -> Any:
            told.events.append(f"compute {len(pictures)} on {told.stream}")
            return network(pictures)

        return SimpleNamespace(eval=lambda: compute)

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        told.stream = name
        yield
        told.stream = "present"

    @contextmanager
    def as_device(device: Any) -> Iterator[None]:
        yield

    present = SimpleNamespace(wait_stream=lambda other: told.events.append(f"present waits for {other}"))
    monkeypatch.setattr(torch, "device", device)
    monkeypatch.setattr(torch, "tensor", lambda values, dtype, device: real_tensor(values, dtype=dtype))
    monkeypatch.setattr(torch.jit, "load", load)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "copies")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "device", as_device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: present)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, on: told.events.append("keep for present"))
    assert real_device is not device
    return told


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_copies_are_waited_for_by_the_device_and_answers_at_the_end_only(cnn: Path, cuda: Told) -> None:
    """Each half is pinned, copied beside the computing, and computed after its own copy; the host waits once."""
    from device_work import DeviceWork

    work = DeviceWork("cnn", cnn, "cuda:1")
    body = (cnn / "cnn.png").read_bytes()
    cuda.events.clear()

    assert len(work([body] * 6)) == 6
    piece = [
        "pin 3",
        "copy 3 on copies and go on",
        "present waits for copies",
        "keep for present",
        "compute 3 on present",
    ]
    assert cuda.events == [*piece, *piece, *["wait"] * 4]

    cuda.events.clear()
    assert len(work([body] * 6, is_overlapped=False)) == 6
    assert cuda.events == ["copy 6 on present", "compute 6 on present", "wait", "wait"]


class Described:
    """A server whose one worker is, or is not, on a device."""

    path = "/predictions/cnn"

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def manage(self, method: str, target: str) -> tuple[int, bytes]:
        """Describe."""
        assert (method, target) == ("GET", "/models/cnn")
        return 200, json.dumps([{"workers": [{"gpu": self._on_gpu}]}]).encode()


def test_a_server_that_found_no_device_is_not_measured() -> None:
    """Its answers would be those of the CPU, which say nothing of a GPU."""
    from load_generator import CannotMeasure

    from gpu import _see_device

    _see_device(Described(on_gpu=True), "cuda")  # type: ignore[arg-type]
    _see_device(Described(on_gpu=False), "cpu")  # type: ignore[arg-type]
    with pytest.raises(CannotMeasure, match="worker is not on a device, and --device is cuda"):
        _see_device(Described(on_gpu=False), "cuda")  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the load generator uses epoll")
def test_all_works_run_to_their_end_on_the_cpu(tmp_path: Path) -> None:
    """With `--quick`, a figure of each kind for each; nothing of it is left."""
    pytest.importorskip("torch", reason="needs the extra `torch`")
    pytest.importorskip("PIL.Image", reason="needs Pillow")
    told = tmp_path / "figures.json"
    words = ["--device", "cpu", "--quick", "--json", str(told)]

    run = subprocess.run(
        [sys.executable, "gpu.py", *words],
        cwd=BENCHMARKS,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    figures = json.loads(told.read_text())["figures"]
    assert len(figures) == 9
    assert list(tmp_path.iterdir()) == [told]
