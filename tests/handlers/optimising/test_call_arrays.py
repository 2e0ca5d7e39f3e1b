"""Nested values as named arrays, and calls that become one."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from marserve_handlers.optimising.call_arrays import Call, as_numpy, join, leaves_of, louder, with_leaves

ONE = np.ones((1, 3), "f4")
Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True, slots=True)
class Out:
    """What some models give."""

    scores: Any
    names: str = "text"
    hidden: Any = field(default=None, init=False)


def test_leaves_are_named_by_their_path_and_a_value_that_is_one_is_the_output() -> None:
    """Lists, tuples with and without names, and maps; text and numbers are none."""
    value = {"logits": ONE, "hidden": [ONE, (ONE, 3)], "pair": Pair(ONE, "text")}

    assert list(leaves_of(value)) == ["logits", "hidden.0", "hidden.1.0", "pair.first"]
    assert list(leaves_of(ONE)) == ["output"]
    assert leaves_of("text") == {}


def test_a_value_is_rebuilt_with_other_leaves_and_keeps_its_kinds() -> None:
    """A library's own map stays one."""
    value = OrderedDict(a=[ONE, "text"], b=Pair(ONE, 3))
    two = np.full((1, 3), 2.0)

    rebuilt = with_leaves(value, dict.fromkeys(leaves_of(value), two))

    assert type(rebuilt) is OrderedDict
    assert type(rebuilt["b"]) is Pair
    assert rebuilt["a"][1] == "text"
    assert rebuilt["b"].first is two


def test_a_dataclass_is_looked_into_as_a_named_tuple_is_and_rebuilt_without_its_init() -> None:
    """One that cannot be changed, too; its class is no value."""
    value = [Out(ONE), Out]
    two = np.full((1, 3), 2.0)

    rebuilt = with_leaves(value, {"0.scores": two})

    assert list(leaves_of(value)) == ["0.scores"]
    assert (rebuilt[0].scores is two, rebuilt[0].names, rebuilt[1]) == (True, "text", Out)
    assert value[0].scores is ONE


def test_a_value_that_holds_itself_ends() -> None:
    """Its leaves are those that are not too deep."""
    value: list[object] = [ONE]
    value.append(value)

    assert "0" in leaves_of(value)


def test_rows_are_the_length_that_all_inputs_share() -> None:
    """Without one there is no batch axis."""
    assert Call((ONE,), {"mask": np.ones((1, 7))}).rows == 1
    assert Call((ONE,), {"mask": np.ones((2, 7))}).rows == 0
    assert Call((ONE,), {"scale": np.array(2.0)}).rows == 0
    assert Call((), {}).rows == 0


def test_joined_calls_have_all_rows_in_order_and_keep_the_rest_of_the_first() -> None:
    """By position and by name."""
    calls = [
        Call((np.full((rows, 2), rows, "f4"),), {"ids": np.full((rows, 4), rows), "flag": True}) for rows in (1, 2)
    ]

    joined = join(calls)

    assert joined.args[0][:, 0].tolist() == [1.0, 2.0, 2.0]
    assert joined.kwargs["ids"].shape == (3, 4)
    assert joined.kwargs["flag"] is True


def test_a_louder_call_has_larger_floating_numbers_and_the_same_whole_ones() -> None:
    """Ids of words cannot be louder."""
    loud = louder(Call((ONE,), {"ids": np.ones((1, 2), "i8")}), 30.0)

    assert loud is not None
    assert loud.args[0].max() == 30.0
    assert loud.kwargs["ids"].max() == 1
    assert louder(Call((np.ones((1, 2), "i8"),), {}), 30.0) is None


def test_arrays_of_texts_hold_no_python_objects_and_those_of_other_objects_are_refused() -> None:
    """ONNX Runtime gives texts as objects, which no file is to hold."""
    texts = as_numpy(np.array([["cat", "doggy"]], object))

    assert (texts.dtype.kind, texts.tolist()) == ("U", [["cat", "doggy"]])
    with pytest.raises(TypeError, match="an array holds values of the types NoneType, dict, which cannot be compared"):
        as_numpy(np.array([{}, None, "text"], object))


@pytest.mark.torch
def test_tensors_are_leaves_too_and_become_arrays_of_their_own() -> None:
    """bfloat16 becomes float32; what the model does to its tensor later is not seen."""
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)

    array = as_numpy(tensor)
    tensor.zero_()

    assert array.dtype == np.float32
    assert array.sum() == 6.0
    assert join([Call((tensor,), {}), Call((tensor,), {})]).rows == 4
