"""Samples of a model's calls come back from their file as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marserve_handlers.optimising import sample_calls
from marserve_handlers.optimising.call_arrays import Call
from marserve_handlers.optimising.machine import cpu_flags, versions
from marserve_handlers.optimising.sample_calls import read_samples, write_samples

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Scales(torch.nn.Module):  # type: ignore[misc]
    """Takes a nested argument, and one that is no tensor."""

    def forward(self, rows: Any, pair: Any = None, twice: bool = False) -> Any:
        """Two outputs."""
        return {"a": rows * (2 if twice else 1), "b": [pair["x"] + 1]}


def calls(count: int) -> list[Call]:
    """Calls with all of that."""
    return [
        Call((torch.full((1, 2), float(at)),), {"pair": {"x": torch.ones(1)}, "twice": True}) for at in range(count)
    ]


def test_calls_and_outputs_come_back_as_they_were(tmp_path: Path) -> None:
    """By position, by name, nested, and what is no tensor."""
    assert write_samples(tmp_path / "s.npz", Scales(), calls(3)) == 3

    read = list(read_samples(tmp_path / "s.npz", Scales()))

    assert len(read) == 3
    call, outputs = read[2]
    assert call.args[0].tolist() == [[2.0, 2.0]]
    assert call.kwargs["twice"] is True
    assert call.kwargs["pair"]["x"].tolist() == [1.0]
    assert outputs["a"].tolist() == [[4.0, 4.0]]
    assert outputs["b.0"].tolist() == [2.0]


def test_no_more_are_kept_than_fit_and_one_always_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their number and by their bytes."""
    assert (
        write_samples(tmp_path / "s.npz", Scales(), calls(sample_calls.MOST_SAMPLES + 5)) == sample_calls.MOST_SAMPLES
    )
    monkeypatch.setattr(sample_calls, "MOST_BYTES", 1)
    assert write_samples(tmp_path / "s.npz", Scales(), calls(3)) == 1


def test_a_file_with_pickles_is_not_read(tmp_path: Path) -> None:
    """It could run anything."""
    np.savez(tmp_path / "s.npz", shapes=np.array([{"a": 1}], dtype=object))

    with pytest.raises(ValueError, match="allow_pickle"):
        list(read_samples(tmp_path / "s.npz", Scales()))


def test_the_processors_flags_are_those_that_kernels_are_chosen_by(tmp_path: Path) -> None:
    """In a fixed order, the kind of processor first; a machine that does not say is that alone."""
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx512f sse avx2\n\nflags : other\n")

    assert cpu_flags(tmp_path / "cpuinfo")[1:] == ["avx2", "avx512f"]
    assert len(cpu_flags(tmp_path / "none")) == 1
    assert versions()["torch"].startswith(torch.__version__.partition("+")[0])
