"""Samples that the ranks answer otherwise than one rank does are found at the load."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from marserve_handlers.errors import ModelNotLoadable  # noqa: E402
from marserve_handlers.sharding.one_rank import MOST_CALLS, OneRank, error_of  # noqa: E402

pytestmark = pytest.mark.torch


class Model(nn.Module):
    """Gives its input, multiplied; counts its calls."""

    def __init__(self, factor: float = 1.0, fails: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(factor))
        self.fails = fails
        self.calls = 0

    def forward(self, x: Any, cache: list[Any] | None = None) -> Any:
        """With a cache its length counts, and grows."""
        self.calls += 1
        if self.fails:
            raise ValueError("heads of 3")
        if cache is not None:
            cache.append(x)
            return {"x": x * self.weight, "length": torch.tensor(len(cache))}
        return x * self.weight


def compared(divided: Model, whole: Model, answer: Callable[[Model], Any], rank: int = 0) -> tuple[int, str]:
    """How many calls were compared after one sample, and why that was not answered."""
    one = OneRank(divided, lambda: whole, ranks=2, rank=rank)

    def call() -> None:
        with torch.inference_mode():
            answer(divided)

    why = one.run(0, call)
    return one.compare(), why


def once(model: Model) -> Any:
    """One call."""
    return model(torch.tensor([1.0, -4.0]))


def test_equal_answers_pass() -> None:
    """Up to rounding: a sum over ranks is added up in another order."""
    assert compared(Model(), Model(1.0 + 5e-5), once) == (1, "")


def test_other_answers_are_refused_with_the_difference() -> None:
    """And with what to look at."""
    with pytest.raises(ModelNotLoadable) as refused:
        compared(Model(1.5), Model(), once)

    assert str(refused.value).startswith(
        "parallel: sample 0 is off by 0.5 of its largest number on 2 ranks, and 0.0001 is allowed. Look at its plan"
    )


def test_less_precise_numbers_have_a_wider_bound() -> None:
    """bfloat16 has 8 bits."""
    assert compared(Model(1.01), Model().bfloat16(), once) == (1, "")


def test_ranks_that_raise_where_one_answers_are_refused() -> None:
    """As where heads are divided in the middle."""
    with pytest.raises(ModelNotLoadable, match="one rank answers sample 0, and 2 ranks raise ValueError: heads of 3"):
        compared(Model(fails=True), Model(), once)


def test_a_sample_that_one_rank_does_not_answer_either_is_no_fault_of_the_plan() -> None:
    """It is told, and the model is served."""
    assert compared(Model(fails=True), Model(fails=True), once) == (0, "ValueError: heads of 3")


def test_a_call_that_both_refuse_and_the_handler_makes_otherwise_is_no_fault() -> None:
    """As with whole numbers, which are tried as they are first."""

    class Floats(Model):
        def forward(self, x: Any, cache: list[Any] | None = None) -> Any:
            """Refuses whole numbers."""
            if x.dtype == torch.int64:
                raise RuntimeError("mat1 and mat2 must have the same dtype")
            return super().forward(x, cache)

    def twice(model: Model) -> Any:
        with pytest.raises(RuntimeError):
            model(torch.tensor([1, 2]))
        return model(torch.tensor([1.0, 2.0]))

    assert compared(Floats(), Floats(), twice) == (1, "")
    with pytest.raises(ModelNotLoadable, match="2 ranks raise an error, which the handler catches"):
        compared(Floats(), Model(), twice)


def test_a_sample_that_does_not_reach_the_model_compares_nothing() -> None:
    """Its reason goes to describe."""

    def refuse(model: Model) -> None:
        raise ValueError("no picture")

    whole = Model()
    assert compared(Model(), whole, refuse) == (0, "ValueError: no picture")
    assert whole.calls == 0


def test_what_a_call_changes_is_copied_before() -> None:
    """A cache that the ranks have grown would be another input."""

    def twice(model: Model) -> None:
        cache: list[Any] = []
        model(torch.ones(1), cache=cache)
        model(torch.ones(1), cache=cache)

    assert compared(Model(), Model(), twice) == (2, "")


def test_a_generators_calls_are_bounded() -> None:
    """A sample may call the model hundreds of times."""

    def often(model: Model) -> None:
        for _ in range(10):
            once(model)

    whole = Model()
    assert compared(Model(), whole, often) == (MOST_CALLS, "")
    assert whole.calls == MOST_CALLS


def test_random_numbers_go_on_as_on_the_other_ranks() -> None:
    """All of them draw alike, and only rank 0 builds and calls the whole model."""

    class Random(Model):
        def forward(self, x: Any, cache: Any = None) -> Any:
            return super().forward(x) + 0 * (torch.rand(1) + np.random.rand() + random.random())

    def draw() -> list[float]:
        return [float(torch.rand(1)), np.random.rand(), random.random()]

    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    assert compared(Model(), Random(), once) == (1, "")
    after = draw()
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])

    assert draw() == after


def test_other_ranks_answer_and_keep_nothing() -> None:
    """Rank 0 judges for all of them."""
    divided, whole = Model(1.5), Model()

    assert compared(divided, whole, once, rank=1) == (0, "")
    assert (divided.calls, whole.calls) == (1, 0)


def test_outputs_of_other_shapes_and_names_are_refused() -> None:
    """Both are said."""

    class Wide(Model):
        def forward(self, x: Any, cache: Any = None) -> Any:
            return torch.cat([x, x])

    class Named(Model):
        def forward(self, x: Any, cache: Any = None) -> Any:
            return {"logits": x}

    with pytest.raises(ModelNotLoadable, match=r"sample 0 is \[4\] on 2 ranks and \[2\] on one"):
        compared(Wide(), Model(), once)
    with pytest.raises(ModelNotLoadable, match="sample 0 has the outputs logits, on one rank output"):
        compared(Named(), Model(), once)


@pytest.mark.parametrize(
    ("seen", "wanted", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([np.nan, 2.0], [np.nan, 2.0], 0.0),
        ([np.inf, 2.0], [np.inf, 2.0], 0.0),
        ([0.5], [0.0], 0.5),
        ([], [], 0.0),
    ],
)
def test_an_error_is_a_share_of_the_largest_number(seen: list[float], wanted: list[float], error: float) -> None:
    """Numbers that are none must be so in both."""
    assert error_of(np.array(seen), np.array(wanted)) == error


@pytest.mark.parametrize(("seen", "wanted"), [([np.nan], [1.0]), ([1.0], [np.nan]), ([np.inf], [1.0])])
def test_a_number_that_is_none_on_one_side_alone_is_no_small_error(seen: list[float], wanted: list[float]) -> None:
    """It is refused at any bound."""
    assert not error_of(np.array(seen), np.array(wanted)) <= 1e9
