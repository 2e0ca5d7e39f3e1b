"""A model with fixed sizes is called with these numbers of rows, and answers as it does without."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from marserve_handlers.context import Context  # noqa: E402  # torch first
from marserve_handlers.runtimes.fixed_sizes import allow_graphs, with_fixed_sizes, without_fixed_sizes  # noqa: E402

SIZES = (1, 2, 4, 8)


class Net(torch.nn.Module):  # type: ignore[misc]
    """Notes how many rows it was called with; gives nested outputs, one of them without a batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.name = "net"

    def forward(self, rows: Any, mask: Any = None) -> Any:
        """Twice, and what it was called with."""
        self.seen.append(len(rows))
        return {"twice": rows * 2, "mask": mask, "scalar": torch.tensor(3.0)}


class Scripted(torch.nn.Module):  # type: ignore[misc]
    """As many rows as it was called with are in each row."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """How many rows there are."""
        return torch.zeros_like(rows) + rows.shape[0]


@pytest.mark.parametrize(
    ("rows", "called"), [(1, [1]), (2, [2]), (3, [4]), (5, [8]), (8, [8]), (9, [8, 1]), (19, [8, 8, 4])]
)
def test_batches_are_filled_up_and_their_answers_cut(rows: int, called: list[int]) -> None:
    """More than the largest go in several calls; arguments by name are filled as well."""
    net = Net()
    model = with_fixed_sizes(net, SIZES, None)
    given = torch.arange(rows * 2.0).reshape(rows, 2)

    answer = model(given, mask=given > 3)

    assert model is net
    assert net.seen == called
    assert torch.equal(answer["twice"], given * 2)
    assert torch.equal(answer["mask"], given > 3)


def test_outputs_without_a_batch_axis_stay_as_they_are() -> None:
    """And so do calls whose inputs share none."""
    net = Net()
    model = with_fixed_sizes(net, SIZES, None)

    assert model(torch.zeros(3, 2), mask=torch.ones(3))["scalar"] == 3.0
    assert model(torch.zeros(3, 2), mask=torch.ones(5))["mask"].shape == (5,)
    assert net.seen == [4, 3]


def test_torchscript_is_put_into_a_module_around_it() -> None:
    """Whose attributes are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(Scripted())

    model = with_fixed_sizes(script, SIZES, None)

    assert torch.equal(model(torch.ones(3, 1)), torch.full((3, 1), 4.0))
    assert model.graph is not None
    assert list(model.state_dict()) == []


def test_a_package_and_a_session_are_filled_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session by the names of its inputs, whatever outputs are asked for."""
    package = with_fixed_sizes(lambda rows: rows + len(rows), SIZES, None)
    calls: list[Any] = []
    session = SimpleNamespace(run=lambda names, feed: calls.append(names) or [feed["x"] + len(feed["x"])])
    monkeypatch.setattr("marserve_handlers.runtimes.fixed_sizes.is_session", lambda model: model is session)
    filled = with_fixed_sizes(session, SIZES, None)

    assert torch.equal(package(torch.zeros(3, 1)), torch.full((3, 1), 4.0))
    assert filled is session
    np.testing.assert_array_equal(filled.run(["y"], {"x": np.zeros((3, 1))})[0], np.full((3, 1), 4.0))
    assert calls == [["y"]]


def test_filling_up_stands_in_the_time_line() -> None:
    """A call of an allowed size leaves nothing there."""
    context = Context("m", "/", None, 8, None, "1")
    model = with_fixed_sizes(Net(), SIZES, context)

    model(torch.zeros(4, 1))
    model(torch.zeros(3, 1))

    assert [name for name, _, _ in context.spans] == ["padded 3 to 4"]


def test_inductor_is_told_which_graphs_to_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own setting, which this torch has; no graph is recorded here, for want of a device."""
    config = pytest.importorskip("torch._inductor.config")
    monkeypatch.setattr(config.triton, "cudagraph_capture_sizes", None)

    allow_graphs(SIZES)

    assert config.triton.cudagraph_capture_sizes == SIZES


def test_a_module_is_found_again_as_it_was_before_its_sizes_were_fixed() -> None:
    """Whether its class or the object itself has its `forward`; the fixed one stays as it is."""
    plain, patched = Net(), Net()
    patched.forward = lambda rows: len(rows)
    assert without_fixed_sizes(plain) is plain

    fixed = [with_fixed_sizes(each, SIZES, None) for each in (plain, patched)]

    assert without_fixed_sizes(fixed[0])(torch.zeros(3, 1))["twice"].shape == (3, 1)
    assert fixed[0].seen == [3]
    assert without_fixed_sizes(fixed[1])(torch.zeros(3, 1)) == 3
    assert fixed[1](torch.zeros(3, 1)) is not None
    fixed[0](torch.zeros(3, 1))
    assert fixed[0].seen == [3, 4]
