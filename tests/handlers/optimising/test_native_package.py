"""Which batches a package of native code takes, and on which machine it is loaded at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from marserve_handlers.optimising.builds import CannotBuild
from marserve_handlers.optimising.call_arrays import Call
from marserve_handlers.optimising.machine import cpu_flags
from marserve_handlers.optimising.material import Material

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from marserve_handlers.optimising import native_package  # noqa: E402  # imports torch
from marserve_handlers.optimising.onnx_export import export_program  # noqa: E402  # as above


class Package:
    """Doubles batches of so many rows, and refuses others as a package's own checks do."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.seen: list[int] = []

    def __call__(self, rows: Any, *, more: Any = None) -> dict[str, Any]:
        """Its outputs."""
        self.seen.append(len(rows))
        assert rows.is_contiguous()
        if not self.least <= len(rows) <= self.most:
            raise RuntimeError(f"\ninput_handles[0]: dim value is {len(rows)}\n")
        return {"double": rows * 2, "more": (more,)}


ROW = Call((torch.ones(1, 3),), {"more": torch.zeros(1, 2)})


@pytest.mark.parametrize(
    ("least", "most", "wanted", "found"),
    [(1, 64, 64, (1, 64)), (1, 15, 64, (1, 15)), (1, 1, 64, (1, 1)), (2, 64, 8, (2, 8)), (2, 64, 1, (2, 2))],
)
def test_the_batches_that_it_takes_are_tried(least: int, most: int, wanted: int, found: tuple[int, int]) -> None:
    """What it was compiled for is not what it takes."""
    assert native_package.rows_of(Package(least, most), ROW, wanted) == found


def test_one_that_takes_no_row_is_refused_with_its_own_words() -> None:
    """Nor two; and inputs that come several at once cannot be cut."""
    with pytest.raises(CannotBuild, match=r"does not take one row: input_handles\[0\]: dim value is 1"):
        native_package.rows_of(Package(3, 8), ROW, 8)
    with pytest.raises(CannotBuild, match="come 2 rows at once"):
        native_package.rows_of(Package(1, 8), Call((torch.ones(2, 3),), {}), 8)


@pytest.mark.parametrize(
    ("least_rows", "frozen", "facts"),
    [([1], [True], (1, 8)), ([3, 2], [True, False], (2, 8)), ([3, 3], [True, False], None)],
)
def test_weights_are_frozen_where_the_package_then_takes_a_row(
    least_rows: list[int],
    frozen: list[bool],
    facts: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Which takes that no gradients are asked for: else torch freezes nothing, and says nothing."""
    seen: list[bool] = []

    def compile_it(program: Any, *, package_path: str, inductor_configs: dict[str, Any]) -> None:
        assert inductor_configs["freezing"] is not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        seen.append(inductor_configs["freezing"])

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_it)
    monkeypatch.setattr(native_package, "open_package", lambda path: Package(least_rows[len(seen) - 1], 64))
    material = Material(None, [ROW], 8)

    with torch.inference_mode():
        if facts is None:
            with pytest.raises(CannotBuild, match="does not take one row"):
                native_package.write_package(material, None, tmp_path)
        else:
            native_package.write_package(material, None, tmp_path)
            written = json.loads(native_package.facts_of(tmp_path / native_package.MODEL).read_text())
            assert (written["least_rows"], written["most_rows"]) == facts

    assert seen == frozen


@pytest.mark.parametrize(
    ("least", "most", "rows", "seen"), [(1, 8, 5, [5]), (1, 4, 9, [4, 4, 1]), (2, 4, 1, [2]), (2, 4, 5, [4, 2])]
)
def test_other_batches_are_cut_or_filled_and_answered_as_they_are(
    least: int, most: int, rows: int, seen: list[int]
) -> None:
    """Row by row, nested as before."""
    package = Package(least, most)
    given, more = torch.arange(3.0 * rows).reshape(3, rows).T, torch.arange(2.0 * rows).reshape(rows, 2)

    output = native_package.PackageModule(package, least, most)(given, more=more)

    assert package.seen == seen
    assert torch.equal(output["double"], given * 2)
    assert torch.equal(output["more"][0], more)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"cpu": ["x86_64", "avx9"]}, "it was compiled for a processor with avx9, which this one has not"),
        ({"torch": "1.0"}, "it was compiled with torch 1.0, and this is"),
        ({"most_rows": 0}, "model.pt2.json beside its package cannot be read"),
        ({"cpu": "all"}, "model.pt2.json beside its package cannot be read"),
    ],
)
def test_a_package_for_another_machine_is_not_loaded(facts: dict[str, Any], why: str, tmp_path: Path) -> None:
    """An instruction that is not there would end the process."""
    known = {"torch": torch.__version__, "cpu": cpu_flags(), "least_rows": 1, "most_rows": 4}
    package = tmp_path / native_package.MODEL
    native_package.facts_of(package).write_text(json.dumps({**known, **facts}))

    with pytest.raises(CannotBuild, match=why):
        native_package.load_package(package)


@pytest.mark.system
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about torch
def test_a_package_for_two_rows_refuses_three_and_one_for_any_number_takes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is so by itself: torch runs three with the code for two, and refuses a single row."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    monkeypatch.delenv(native_package.CHECKS, raising=False)
    model = torch.nn.Linear(3, 2).eval()
    for folder in ("two", "any"):
        (tmp_path / folder).mkdir()
    program = torch.export.export(model, (torch.randn(2, 3),))
    two = tmp_path / "two" / native_package.MODEL
    torch._inductor.aoti_compile_and_package(program, package_path=str(two), inductor_configs=native_package.CONFIG)

    material = Material(model, [Call((torch.randn(1, 3),), {})] * 2, 4)
    native_package.write_package(material, export_program(material), tmp_path / "any")

    package = native_package.open_package(two)
    assert package(torch.ones(2, 3)).shape == (2, 2)
    with pytest.raises(RuntimeError):
        package(torch.ones(3, 3))
    facts = json.loads(native_package.facts_of(tmp_path / "any" / native_package.MODEL).read_text())
    assert (facts["least_rows"], facts["most_rows"]) == (1, 4)
