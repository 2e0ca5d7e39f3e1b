"""A trace beside its class: what is off, which line was baked, and what cannot be compared."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from handlers.optimising import trapped  # noqa: E402  # torch first
from marserve_handlers.optimising.tracing import CannotCompare, Compared, compare_trace  # noqa: E402


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The modules as a file of the author's, and three samples."""
    monkeypatch.setattr("sys.path", ["", *sys.path])
    for name, rows in [("plus", [[1.0] * 4] * 2), ("minus", [[-1.0] * 4] * 2), ("narrow", [[1.0]])]:
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    (tmp_path / "word.json").write_text('"word"')
    return Path(shutil.copy(trapped.__file__, tmp_path / "mine.py"))


def compared(source: Path, model: Any, name: str, *samples: str) -> Compared:
    """A trace by two rows of ones, beside the class of that name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(model, torch.ones(2, 4)).save(str(source.parent / "net.pt"))
    return compare_trace(source.parent / "net.pt", source, name, [source.parent / sample for sample in samples])


def test_a_branch_on_the_batch_size_shows_by_one_sample(source: Path) -> None:
    """At every size beyond it, and the line is that of the author's file."""
    found = compared(source, trapped.OnSize(), "OnSize", "plus.json")

    assert [fault.partition(":")[0] for fault in found.faults] == [
        f"plus.json as a batch of {size}" for size in (5, 8, 16, 32)
    ]
    assert found.lines[0].startswith("mine.py, line ")
    assert "if rows.shape[0] > 4:" in found.lines[0]


def test_a_branch_on_numbers_shows_by_a_sample_that_goes_the_other_way(source: Path) -> None:
    """And only by it: else the line alone tells."""
    one, both = (
        compared(source, trapped.OnData(), "OnData", *samples)
        for samples in [["plus.json"], ["plus.json", "minus.json"]]
    )

    assert one.faults == []
    assert "if rows.sum() > 0:" in one.lines[0]
    assert both.faults[0].startswith("minus.json as it is: output is off by ")


def test_a_trace_that_is_right_has_neither_faults_nor_lines(source: Path) -> None:
    """Its weights are those of the trace, not of a class that is made anew."""
    found = compared(source, trapped.Weighs(), "Weighs", "plus.json", "minus.json")

    assert (found.faults, found.lines) == ([], [])
    assert found.runs > 10


@pytest.mark.parametrize(
    ("name", "sample", "words"),
    [
        ("Missing", "plus.json", "mine.py has no 'Missing'"),
        ("", "plus.json", "mine.py has the classes OnSize, Around, OnData, "),
        ("Sized", "plus.json", "Sized of mine.py cannot be made without arguments (TypeError: "),
        ("Around", "plus.json", "the weights of net.pt are not those of the class"),
        ("COUNT", "plus.json", "COUNT of mine.py cannot be made without arguments"),
        ("Weighs", "mine.py", "mine.py ends in none of .npy, .npz, .json, .pt"),
        ("Weighs", "word.json", "word.json is no sample: "),
        ("Weighs", "narrow.json", "narrow.json as it is: the class fails with RuntimeError: "),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_a_sentence(name: str, sample: str, words: str, source: Path) -> None:
    """With what was seen."""
    with pytest.raises(CannotCompare) as refused:
        compared(source, trapped.Weighs(), name, sample)

    assert words in str(refused.value)


def test_what_is_no_torchscript_is_told_so(source: Path) -> None:
    """With torch's words."""
    with pytest.raises(CannotCompare, match=r"mine\.py is no TorchScript: "):
        compare_trace(source, source, "OnSize", [source.parent / "plus.json"])


def test_what_is_not_finite_on_both_sides_is_alike(source: Path) -> None:
    """Masks of minus infinity, and what comes of them."""
    found = compared(source, trapped.Masks(), "Masks", "plus.json")

    assert found.faults == []
