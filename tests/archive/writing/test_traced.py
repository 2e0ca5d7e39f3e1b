"""A trace beside its class."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from marserve.archive.writing.traced import check_trace
from marserve.errors import CannotArchive
from support.command_line import marserve

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, rows):
        scores = self.linear(rows)
        if BRANCH:
            scores = scores * 3
        return scores

class Other(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two samples, where the command runs."""
    monkeypatch.chdir(tmp_path)
    for name, number in [("a", 1.0), ("b", -1.0)]:
        (tmp_path / f"{name}.json").write_text(json.dumps([[number] * 4] * 2))
    return tmp_path


def trace(folder: Path, branch: str) -> Path:
    """`net.py` with that branch, and its trace by two rows of ones."""
    source = folder / "net.py"
    source.write_text(NET.replace("BRANCH", branch))
    names: dict[str, object] = {"__name__": "net"}
    exec(compile(source.read_text(), str(source), "exec"), names)
    net = names["Net"]().eval()  # type: ignore[operator]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(net, torch.ones(2, 4)).save(str(folder / "net.pt"))
    return folder / "net.pt"


@pytest.mark.system
@pytest.mark.parametrize("branch", ["rows.shape[0] > 4", "rows.sum() > 0"])
def test_a_trace_that_baked_a_branch_is_refused_with_its_line(branch: str, folder: Path) -> None:
    """On the batch size, which two rows do not show; on numbers, which the second sample shows. Nothing is written."""
    trace(folder, branch)

    ran = marserve("archive", "net.pt", "--traced-from", "net.py:Net", "--sample", "a.json", "--sample", "b.json")

    assert ran.status == 2
    assert "net.pt does not answer as net.py:Net in " in ran.err
    assert f"net.py, line 11: if {branch}:" in " ".join(ran.err.split())
    assert not (folder / "net.mar").exists()


@pytest.mark.system
def test_a_trace_that_is_right_where_it_was_looked_at_is_packed_with_a_warning(folder: Path) -> None:
    """A branch on numbers whose other way no sample takes."""
    warnings_of_branch = check_trace(trace(folder, "rows.sum() > 1000"), "net.py:Net", [Path("a.json")])
    assert len(warnings_of_branch) == 1
    assert "net.py, line 11: if rows.sum() > 1000:" in warnings_of_branch[0]


@pytest.mark.parametrize(
    ("traced_from", "sample", "words"),
    [
        ("none.py", "a.json", "There is no Python file none.py."),
        ("net.py:Net", "none.npy", "There is no sample none.npy."),
    ],
)
def test_files_that_are_missing_are_named(traced_from: str, sample: str, words: str, folder: Path) -> None:
    """Before a process starts."""
    trace(folder, "False")

    with pytest.raises(CannotArchive, match=words):
        check_trace(folder / "net.pt", traced_from, [Path(sample)])


@pytest.mark.system
def test_what_cannot_be_compared_is_a_sentence(folder: Path) -> None:
    """Of the process that compares; a process that ends by itself is told as well."""
    trace(folder, "False")

    with pytest.raises(CannotArchive, match=r"net.pt cannot be compared with net.py:Missing: net.py has no 'Missing'."):
        check_trace(folder / "net.pt", "net.py:Missing", [Path("a.json")])
    (folder / "ends.py").write_text("import os; os._exit(7)")
    with pytest.raises(CannotArchive, match="its process ended with status 7"):
        check_trace(folder / "net.pt", "ends.py", [Path("a.json")])


def test_the_words_of_the_command_are_checked_first(folder: Path) -> None:
    """Samples without a class, a class without samples, a class of what is no trace."""
    (folder / "m.onnx").write_bytes(b"x")

    runs = [
        marserve("archive", "m.onnx", "--traced-from", "net.py"),
        marserve("archive", "m.onnx", "--sample", "a.json"),
        marserve("archive", "m.onnx", "--traced-from", "net.py", "--sample", "a.json"),
    ]

    assert [ran.status for ran in runs] == [2, 2, 2]
    assert "--traced-from is for a trace (.pt), and there is m.onnx." in runs[2].err
