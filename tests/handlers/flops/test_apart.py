"""A model is counted in a process of its own, whose end ends no worker (`flops/apart.py`)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marserve_handlers.context import Context
from marserve_handlers.flops import apart
from marserve_handlers.flops.apart import count_apart, pack
from marserve_handlers.flops.cost import Cost, NotCounted
from marserve_handlers.flops.counting import Counted, Seen
from marserve_handlers.flops.watch import Watch
from marserve_handlers.optimising.call_arrays import Call

np = pytest.importorskip("numpy")
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

OF_AUTHORS = """
import os, signal
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(x)

class Crashes(Net):
    def forward(self, x):
        if x.is_meta:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().forward(x)
"""
ROW = 2.0 * 8 * 4


@pytest.fixture(autouse=True)
def _usual_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have a time limit, and the machine other work."""
    monkeypatch.setattr(apart, "NICENESS", 0)


@pytest.fixture
def of_authors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of an author's, in a folder that is first on the path, beside files named as the library's."""
    (tmp_path / "net_of_authors.py").write_text(OF_AUTHORS)
    for name in ("json", "signal", "pickle"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the author's own')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "net_of_authors", raising=False)
    import net_of_authors  # type: ignore[import-not-found,unused-ignore]

    return net_of_authors


def seen_of(torch: Any, model: Any) -> bytes:
    """The model packed, with a batch of two rows of eight numbers."""
    return pack(model, "", [Seen(2, [Call((torch.empty(2, 8, device="meta"),), {})])])


@pytest.mark.torch
@pytest.mark.system
def test_an_authors_class_is_found_by_the_workers_path(of_authors: Any) -> None:
    """The process begins without it, so that files named as Python's own are not taken for these."""
    torch = pytest.importorskip("torch")

    assert count_apart(seen_of(torch, of_authors.Net())) == Counted(
        Cost(0.0, ROW), "float32", "argument 1 float32 [n, 8]", []
    )


@pytest.mark.torch
@pytest.mark.system
def test_an_operator_that_crashes_ends_the_process_alone(of_authors: Any) -> None:
    """It could not bear tensors without numbers; the reason is said."""
    torch = pytest.importorskip("torch")

    with pytest.raises(NotCounted, match="the process that counts was ended by SIGSEGV"):
        count_apart(seen_of(torch, of_authors.Crashes()))


@pytest.mark.torch
@pytest.mark.system
def test_script_is_read_from_its_file_by_the_process(tmp_path: Path) -> None:
    """It is not packed."""
    torch = pytest.importorskip("torch")
    script = torch.jit.trace(torch.nn.Linear(8, 4), torch.rand(2, 8))
    script.save(str(tmp_path / "model.pt"))
    packed = pack(script, str(tmp_path / "model.pt"), [Seen(2, [Call((torch.empty(2, 8, device="meta"),), {})])])

    assert count_apart(packed).cost == Cost(0.0, ROW)


@pytest.mark.torch
def test_weights_that_are_computed_at_each_call_can_be_packed() -> None:
    """Their classes are made at run time, and have no module."""
    torch = pytest.importorskip("torch")
    model = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 4))

    counted = apart.counted(seen_of(torch, model))

    assert counted.cost == Cost(0.0, ROW)
    assert model.parametrizations


@pytest.mark.torch
def test_the_watchs_hook_is_left_out_and_the_authors_is_packed() -> None:
    """What is watched goes on being watched."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(8, 4)
    with Watch(model, Context("m", "/m", {}, 4, None, "1"), "", {}, "cpu"):
        packed = seen_of(torch, model)

        assert len(model._forward_pre_hooks) == 1
    assert apart.counted(packed).cost == Cost(0.0, ROW)


@pytest.mark.torch
def test_a_model_that_cannot_be_packed_says_what_of_it() -> None:
    """A class inside a function has no name by which another process finds it."""
    torch = pytest.importorskip("torch")

    class Inside(torch.nn.Linear):  # type: ignore[misc,name-defined,unused-ignore]
        pass

    with pytest.raises(NotCounted, match=r"cannot be given to the process that counts \(.*Inside"):
        seen_of(torch, Inside(8, 4))


class InferenceSession:
    """A session of ONNX Runtime, as far as it is looked at."""


def packed_graph(path: str) -> bytes:
    """A graph, and a batch of an array of 40 GB."""
    array = np.broadcast_to(np.empty((), np.float32), (10, 1_000_000_000))
    return pack(InferenceSession(), path, [Seen(10, [Call((), {"x": array})])])


def test_arrays_travel_as_their_shape() -> None:
    """However large they were."""
    assert len(packed_graph("")) < 20_000


def test_why_it_is_not_counted_comes_back(tmp_path: Path) -> None:
    """As from a graph that cannot be read."""
    (tmp_path / "model.onnx").write_bytes(b"none")

    with pytest.raises(NotCounted, match=r"the ONNX file cannot be read|the package onnx is not installed"):
        count_apart(packed_graph(str(tmp_path / "model.onnx")))


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "said"),
    [
        (1, b"", b"Traceback\nImportError: no x\n", "the process that counts failed: ImportError: no x"),
        (0, b"words of an author's module\n", b"", "the process that counts failed: status 0"),
        (0, b'{"perBatch": -1}\n', b"", "the process that counts failed: status 0"),
        (-24, b"", b"", "was ended by its limit of 120 s of a processor"),
        (-9, b"", b"", "was ended by SIGKILL"),
    ],
)
def test_a_process_that_ends_without_a_figure_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, code: int, stdout: bytes, stderr: bytes, said: str
) -> None:
    """Whatever it printed."""
    done = SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr)
    monkeypatch.setattr(apart.subprocess, "run", lambda *_, **__: done)

    with pytest.raises(NotCounted, match=said):
        count_apart(b"")


def test_a_process_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker waits for it no longer than that."""
    monkeypatch.setattr(apart, "LIMIT_S", 0.2)
    monkeypatch.setattr(apart, "_PROGRAM", "import time; time.sleep(60)")

    with pytest.raises(NotCounted, match=r"not counted within 0 s"):
        count_apart(b"")
