"""What an exporter bakes or refuses is told with the author's file and line."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from handlers.optimising import trapped  # noqa: E402  # torch first
from marserve_handlers.optimising import traps as traps_module  # noqa: E402
from marserve_handlers.optimising.builds import CannotBuild  # noqa: E402
from marserve_handlers.optimising.call_arrays import Call  # noqa: E402
from marserve_handlers.optimising.material import Material  # noqa: E402
from marserve_handlers.optimising.onnx_export import export_program  # noqa: E402
from marserve_handlers.optimising.traps import lines_of_state, watching  # noqa: E402


def line_of(code: str) -> str:
    """Where `trapped.py` says this, as sentences name it."""
    lines = inspect.getsource(trapped).splitlines()
    number = 1 + next(at for at, line in enumerate(lines) if line.strip() == code)
    return f"trapped.py, line {number}: {code}"


def material_of(model: Any) -> Material:
    """With calls of one row, for batches of up to eight."""
    return Material(model.eval(), [Call((torch.ones(1, 4),), {}) for _ in range(2)], 8)


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        (trapped.OnSize, "if rows.shape[0] > 4:", "a branch depends on a size, it would hold for batch = Dim"),
        (trapped.Around, "if rows.shape[0] > 4:", "a branch depends on a size, it would hold for batch = Dim"),
        (trapped.OnData, "if rows.sum() > 0:", "Data-dependent branching"),
        (trapped.Fixed, "return rows.reshape(2, -1)", "Constraints violated"),
    ],
)
def test_a_refusal_names_the_authors_line(model: Any, code: str, words: str) -> None:
    """Of branches on sizes, which torch names without a line; of those on data; of a size that is fixed."""
    with pytest.raises(CannotBuild) as refused:
        export_program(material_of(model()))

    assert str(refused.value).startswith(f"torch.export refuses it: {words}")
    assert line_of(code) in str(refused.value)


def test_state_that_forward_changes_is_a_note_with_every_line() -> None:
    """The export goes on: whether it matters is for the comparison to say."""
    material = material_of(trapped.Counts())

    export_program(material)

    (note,) = material.notes
    assert note.startswith("forward changes state, which runs once, at the export, and never again: ")
    for code in ("self.n += 1", "self.seen.append(1)", "COUNT = COUNT + 1"):
        assert line_of(code) in note


def test_what_changes_names_of_its_own_is_no_trap() -> None:
    """A list that forward made itself."""
    material = material_of(trapped.Clean())

    export_program(material)

    assert material.notes == []
    assert lines_of_state(trapped.Clean()) == []


def test_a_trace_tells_the_line_that_it_bakes() -> None:
    """By torch's TracerWarning, which is not shown beside."""
    with warnings.catch_warnings(record=True) as shown, watching(trapped.OnData()) as traps:
        torch.jit.trace(trapped.OnData(), torch.ones(2, 4))

    assert any(line_of("if rows.sum() > 0:") in note for note in traps.notes())
    assert not any(issubclass(each.category, torch.jit.TracerWarning) for each in shown)


def test_without_torchs_private_name_only_lines_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The export is still refused, with what torch says."""
    monkeypatch.setattr(traps_module, "_stack", lambda: 1 / 0)

    with pytest.raises(
        CannotBuild, match=r"torch.export refuses it: Constraints violated \(batch\)!.*Dim\('batch', max=4\)"
    ):
        export_program(material_of(trapped.OnSize()))
