"""Tests for models of named tensors: what requests may hold, how batches are stacked, what may come back."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from marserve_handlers import BadInput, Tensor, model
from marserve_handlers.declared.declaration import DeclarationError
from support.declared_models import Opening
from support.model_context import FakeItem

NPY = [(b"accept", b"application/x-npy")]


@model(inputs={"x": Tensor("float32", ["batch", 2])}, outputs={"sums": Tensor("float32", ["batch"])})
class Sums:
    """Adds the two numbers of each row, and keeps the sizes of its calls."""

    calls: list[int]

    def load(self, context: Any) -> None:
        """Nothing was called."""
        self.calls = []

    def predict(self, x: Any) -> Any:
        """13 is a bad number."""
        self.calls.append(len(x))
        if (x == 13).any():
            raise RuntimeError("13")
        return {"sums": x.sum(axis=1)}


def opened(target: Any = Sums, **numbers: int) -> Opening:
    """The model as a worker has it."""
    return Opening(target, **numbers)


def npy(array: Any) -> bytes:
    """A `.npy` file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


# ------------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"x": [1, 2, 3]}, "x: expected float32 [2], got [3]"),
        ({"x": [[1, 2, 3]]}, "x: expected float32 [batch, 2], got [1, 3]"),
        ({"x": 1}, "x: expected float32 [2], got []"),
        ({"x": [[1], [1, 2]]}, "x: expected float32 [2], got lists of unequal lengths"),
        ({"x": ["1", 2]}, "x: expected float32 [2], got '1'"),
        ({"x": [1, None]}, "x: expected float32 [2], got null"),
        ({"x": [True, False]}, "x: expected float32 [2], got bool [2]"),
        ({"x": [1, {}]}, "x: expected float32 [2], got an object"),
        ({"x": None}, "x: is missing, expected float32 [2]"),
        ({}, "x: is missing, expected float32 [2]"),
        ({"x": [1, 2], "y": 3}, "y: there is no such input; expected x: float32 [2]"),
        ("text", "x: expected float32 [2], got 'text'"),
        (b"", "expected JSON, got an empty body"),
        (b'{"x": [1,\n 2', "the body is not JSON: Expecting ',' delimiter at line 2, column 3"),
        (b"\xff", "the body is not JSON: byte 0 is not UTF-8"),
        (b'{"\\ud800": 1}', "the body is not JSON that can be read: it holds half of a surrogate pair"),
        (npy(np.zeros(3)), "x: expected float32 [2], got [3]"),
        (npy(np.array(["a"])), "x: expected float32 [2], got .npy of <U1"),
        (npy(np.zeros(2))[:-1], "x: expected float32 [2], got .npy of 15 bytes, and its shape [2] needs 16"),
        (b"\x93NUMPY\x01\x00\xff", "x: expected float32 [2], got .npy that cannot be read"),
        ({"a": bytearray(b"1")}, "expected x: float32 [2], got a form with a"),
        ({'{"x": [1, 2]}': bytearray()}, "got a form, which is what curl -d sends"),
        ([[1, 2]] * 17, "the request has 17 rows, more than maxRows, 16"),
    ],
)
def test_what_does_not_fit_is_the_clients_fault(body: Any, message: str) -> None:
    """400 with the field, what is expected, and what was seen."""
    with pytest.raises(BadInput) as caught:
        opened().only(body)

    assert message in caught.value.message
    assert caught.value.error_code == 400


@pytest.mark.parametrize(
    "body",
    [
        {"x" * 100_000: 1},
        {"x" * 100_000: bytearray(b"1"), "y": bytearray(b"1")},
        {str(number): bytearray(b"1") for number in range(1000)},
        {"x": ["1" * 100_000, 2]},
    ],
)
def test_what_a_client_wrote_is_cut_in_its_message(body: Any) -> None:
    """Names, too: an error is no echo."""
    with pytest.raises(BadInput) as caught:
        opened().only(body)

    assert "expected x: float32 [2]" in caught.value.message or "x: expected float32 [2]" in caught.value.message
    assert len(caught.value.message) < 400


def opened_as(dtype: str) -> Opening:
    """A model of two numbers of this dtype, which gives them back."""

    @model(inputs={"x": Tensor(dtype, ["batch", 2])}, outputs={"x": Tensor(dtype, ["batch", 2])})
    class Same:
        def predict(self, x: Any) -> Any:
            return x

    return Opening(Same)


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        ("uint64", [1, 2**64 - 1]),
        ("int64", [-(2**63), 2**63 - 1]),
        ("float64", [1, 2**100]),
        ("float64", [-1, 2**63]),
    ],
)
def test_large_whole_numbers_are_taken_where_they_fit(dtype: str, numbers: list[int]) -> None:
    """numpy has no integer that holds them, or both of them."""
    assert opened_as(dtype).only({"x": numbers}) == {"x": numbers}


@pytest.mark.parametrize(
    ("dtype", "numbers", "seen"),
    [
        ("int64", [1, 2**63], "a number outside of -9223372036854775808 to 9223372036854775807"),
        ("int64", [1, 10**30], "a number outside of -9223372036854775808 to 9223372036854775807"),
        ("uint64", [-1, 2**63], "a number outside of 0 to 18446744073709551615"),
        ("uint8", [1, 10**30], "a number outside of 0 to 255"),
        ("int64", [1, 1.5], "numbers with a fraction"),
        ("int64", [1.5, 10**30], "1.5"),
        ("float32", [1, 10**400], "a number that is too large"),
        ("float32", [None, 10**30], "null"),
        ("bool", [1, 10**30], "1"),
    ],
)
def test_numbers_that_do_not_fit_the_dtype_are_said(dtype: str, numbers: list[Any], seen: str) -> None:
    """By what is wrong with them."""
    with pytest.raises(BadInput, match=re.escape(f"x: expected {dtype} [2], got {seen}")):
        opened_as(dtype).only({"x": numbers})


def test_a_body_of_no_rows_is_refused() -> None:
    """A batch axis of length 0."""
    with pytest.raises(BadInput, match="the request has no rows"):
        opened().only(npy(np.zeros((0, 2))))


def test_a_huge_npy_header_takes_no_memory() -> None:
    """Its shape is compared with the bytes that came."""
    body = npy(np.zeros(2)).replace(b"(2,)", b"(2000000000000,)")

    with pytest.raises(BadInput, match="needs 16000000000000"):
        opened().only(body[: body.index(b"\n") + 1])


def test_mates_of_what_does_not_fit_are_answered() -> None:
    """The error stands in the place of its answer."""
    good, bad, other = opened().answer([1, 2], [1], [3, 4])

    assert (good, other) == ({"sums": 3.0}, {"sums": 7.0})
    assert isinstance(bad, BadInput)


# ------------------------------------------------------------------------------------------- what fits


@pytest.mark.parametrize(
    "body",
    [
        {"x": [1, 2]},
        [1, 2],
        b"\xef\xbb\xbf[1, 2]",
        npy(np.array([1, 2], np.float64)),
        npy(np.array([1, 2], ">i4")),
        npy(np.asfortranarray(np.array([1, 2], np.float32))),
        {"x": bytearray(b"[1, 2]")},
        {"x": bytearray(npy(np.array([1, 2])))},
        {"data": bytearray(b"[1, 2]")},
    ],
)
def test_an_item_comes_in_several_forms(body: Any) -> None:
    """JSON with or without the name, `.npy`, a form's field."""
    assert opened().only(body) == {"sums": 3.0}


def test_rows_with_the_batch_axis_are_answered_with_it() -> None:
    """In their order, also when there is only one."""
    served = opened()

    assert served.only([[1, 2], [3, 4]]) == {"sums": [3.0, 7.0]}
    assert served.only([[1, 2]]) == {"sums": [3.0]}


def test_nan_and_infinity_pass() -> None:
    """Both ways, as Python writes them."""
    answer = opened().only(b"[[NaN, 1], [Infinity, 1]]")

    assert np.isnan(answer["sums"][0])
    assert answer["sums"][1] == float("inf")


def test_an_answer_to_npy_is_npy_where_that_is_accepted() -> None:
    """Else JSON."""
    served = opened()
    served.context.begin_batch([])

    answer = served.answer(npy(np.ones((2, 2))), items=[FakeItem(headers=NPY)])[0]

    assert np.load(io.BytesIO(answer)).tolist() == [2.0, 2.0]
    assert served.context.get_response_content_type(0) == "application/x-npy"


# ------------------------------------------------------------------------------------------- batches


def test_requests_are_stacked_into_one_call() -> None:
    """Those with the batch axis, too."""
    served = opened()

    answers = served.answer([1, 2], [[3, 4], [5, 6]], [7, 8])

    assert answers == [{"sums": 3.0}, {"sums": [7.0, 11.0]}, {"sums": 15.0}]
    assert served.opened.instance.calls == [4]


def test_a_request_of_many_rows_is_cut_and_joined_in_order() -> None:
    """No call has more rows than a batch may have."""
    served = opened()

    answer = served.only([[row, 0] for row in range(10)])

    assert answer == {"sums": [float(row) for row in range(10)]}
    assert served.opened.instance.calls == [4, 4, 2]


def test_a_request_that_fits_a_call_is_not_cut() -> None:
    """Rows count, not requests."""
    served = opened()

    answers = served.answer([[1, 0], [2, 0], [3, 0]], [[4, 0], [5, 0]], [6, 0])

    assert answers == [{"sums": [1.0, 2.0, 3.0]}, {"sums": [4.0, 5.0]}, {"sums": 6.0}]
    assert served.opened.instance.calls == [3, 3]


def test_a_bad_row_fails_its_request_alone() -> None:
    """When a call had rows of that request only; nothing more of it runs."""
    served = opened()

    guilty, other = served.answer([[13, 0]] * 10, [[1, 0]] * 4)

    assert str(guilty) == "13"
    assert other == {"sums": [1.0] * 4}
    assert served.opened.instance.calls == [4, 4]


class Sent(bytearray):
    """A body that can be watched."""


@model(inputs={"x": Tensor("float32", ["batch", 2])}, outputs={"sums": Tensor("float32", ["batch"])})
class Raising:
    """Has a defect that large numbers show."""

    def predict(self, x: Any) -> Any:
        """Sums, of small numbers."""
        if x.max() > 100:
            raise ArithmeticError("too large")
        return {"sums": x.sum(axis=1)}


@model(inputs={"x": Tensor("float32", ["batch", 2])}, outputs={"sums": Tensor("float32", ["batch"])})
class AwaitedRaising(Raising):
    """The same as a coroutine."""

    async def predict(self, x: Any) -> Any:
        """Sums, of small numbers."""
        return super().predict(x)


@pytest.mark.parametrize("target", [Raising, AwaitedRaising])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("text", [b'{"x": [1, 2]', b'{"x": [1, 2, 3]}', b'{"x": [1000, 1]}'])
def test_the_body_of_a_request_that_fails_is_kept_by_nothing(text: bytes, count: int, target: Any) -> None:
    """Nor by a cycle of its exception and a frame: clients choose how large it is, and how many come."""
    opened = Opening(target)
    watched: list[weakref.ref[Sent]] = []

    def fail() -> None:
        bodies = [Sent(text) for _ in range(count)]
        watched.extend(weakref.ref(each) for each in bodies)
        with contextlib.suppress(BadInput, ArithmeticError):
            opened.answer(*({"body": each} for each in bodies))

    gc.collect()
    gc.disable()
    try:
        fail()
        assert [each() for each in watched] == [None] * count
    finally:
        gc.enable()


def test_a_call_of_several_requests_that_raises_is_the_batchs() -> None:
    """The server then runs halves of the batch."""
    with pytest.raises(RuntimeError, match="13"):
        opened().answer([13, 0], [1, 0])


PADDED = {"ids": Tensor("int64", ["batch", "n"], pad=-1)}


@model(inputs=PADDED, outputs={"same": Tensor("int64", ["batch", "n"]), "count": Tensor("int64", ["batch"])})
def pads(ids: Any, n_lengths: Any) -> Any:
    """Gives back what came, and the lengths."""
    return {"same": ids, "count": n_lengths}


@model(
    inputs={"ids": Tensor("int64", ["batch", "n"]), "more": Tensor("float32", ["batch"], optional=True)},
    outputs={"same": Tensor("int64", ["batch", "n"])},
)
class Equal:
    """Takes only equal shapes."""

    def load(self, context: Any) -> None:
        """Nothing was called."""
        self.shapes: list[tuple[Any, bool]] = []

    def predict(self, ids: Any, more: Any) -> Any:
        """Gives back what came."""
        self.shapes.append((ids.shape, more is not None))
        return ids


def test_unequal_sizes_are_padded_and_cut_back() -> None:
    """The model gets the true lengths, and each client its own part of the result."""
    answers = opened(pads).answer({"ids": [1, 2, 3]}, {"ids": [4]}, {"ids": [[5, 6], [7, 8]]})

    assert answers == [
        {"same": [1, 2, 3], "count": 3},
        {"same": [4], "count": 1},
        {"same": [[5, 6], [7, 8]], "count": [2, 2]},
    ]


@model(
    inputs={"x": Tensor("float32", ["batch", "h", "w"], pad=0)},
    outputs={"y": Tensor("float32", ["batch"])},
)
class Shapes:
    """Keeps the shapes of its calls."""

    shapes: list[tuple[int, ...]]

    def load(self, context: Any) -> None:
        """Nothing was called."""
        self.shapes = []

    def predict(self, x: Any) -> Any:
        """How much each item holds."""
        self.shapes.append(x.shape)
        return {"y": x.sum(axis=(1, 2))}


@pytest.mark.parametrize("tall", [np.ones((5000, 1), np.float32), np.ones((1, 5000, 0), np.float32)])
def test_short_requests_are_not_filled_up_to_gigabytes(tall: Any) -> None:
    """Two requests whose sizes make a large array only together run in calls of their own, and so does what follows."""
    wide = np.ones((1, 5000), np.float32)
    served = opened(Shapes)

    answers = served.answer(npy(tall), npy(wide), npy(wide[:, :4999]))

    assert [answer["y"] for answer in answers] == [5000 if tall.size else [0], 5000, 4999]
    assert [len(shape) for shape in served.opened.instance.shapes] == [3, 3]
    assert max(map(np.prod, served.opened.instance.shapes)) == 10000


def test_large_requests_share_a_call_if_little_is_filled_up() -> None:
    """What came bounds what is filled up, so large inputs of like sizes stay together."""
    served = opened(Shapes)

    served.answer(npy(np.ones((3000, 3000), np.float32)), npy(np.ones((2999, 3000), np.float32)))

    assert served.opened.instance.shapes == [(2, 3000, 3000)]


def test_without_a_pad_only_equal_shapes_share_a_call() -> None:
    """Optional inputs that came do not share one with those that did not."""
    served = opened(Equal)

    answers = served.answer({"ids": [1, 2]}, {"ids": [3]}, {"ids": [4, 5]}, {"ids": [6, 7], "more": 1})

    assert [answer["same"] for answer in answers] == [[1, 2], [3], [4, 5], [6, 7]]
    assert served.opened.instance.shapes == [((2, 2), False), ((1, 1), False), ((1, 2), True)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"a": [1, 2], "b": [[1, 2]]}, "a: came without the batch axis, and b with one"),
        ({"a": [[1], [2]], "b": [[1]]}, "b: has 1 rows, and a has 2"),
        ({"a": [1, 2], "b": [1]}, "b: has 1 n, and another input has 2"),
        ({"a": [1, 2]}, "b: is missing, expected int64 [n]"),
        ({"a": [1, 300], "b": [1, 2]}, "a: expected uint8 [n], got a number outside of 0 to 255"),
        ({"a": [1.5], "b": [1]}, "a: expected uint8 [n], got numbers with a fraction, [1]"),
        ([1, 2], "expected a JSON object with a: uint8 [n], b: int64 [n], got a list"),
    ],
)
def test_inputs_must_agree(body: Any, message: str) -> None:
    """In rows, in named sizes, in the batch axis."""

    @model(
        inputs={"a": Tensor("uint8", ["batch", "n"]), "b": Tensor("int64", ["batch", "n"])},
        outputs={"y": Tensor("int64", ["batch", "n"])},
    )
    def add(a: Any, b: Any) -> Any:
        return a + b

    with pytest.raises(BadInput) as caught:
        opened(add).only(body)

    assert caught.value.message == message


# ------------------------------------------------------------------------------------------- what comes back


def returning(value: Any) -> Any:
    """A model that returns this whatever comes."""

    @model(inputs={"x": Tensor("float32", ["batch"])}, outputs={"y": Tensor("int32", ["batch", 2])})
    def predict(x: Any) -> Any:
        return value

    return predict


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"z": 1}, "returned the keys z; declared are y"),
        ({}, "returned the keys none; declared are y"),
        ({"y": np.zeros((3, 2), int)}, r"returned y of shape \[3, 2\] for 2 rows"),
        ({"y": np.zeros((2, 3), int)}, r"returned y of shape \[2, 3\], and \[batch, 2\] is declared"),
        ({"y": np.zeros((2, 2))}, "returned y of float64, and int32 is declared"),
        ({"y": 5}, r"returned y of shape \[\] for 2 rows"),
        (None, r"returned y of shape \[\] for 2 rows"),
    ],
)
def test_a_wrong_result_is_the_models_fault(value: Any, words: str) -> None:
    """One sentence says what was returned and what is declared."""
    with pytest.raises((TypeError, ValueError), match=words):
        opened(returning(value)).answer(1, 2)


@pytest.mark.parametrize("value", [np.array([[1, 2], [3, 4]]), {"y": [[1, 2], [3, 4]]}])
def test_the_only_output_may_stand_alone(value: Any) -> None:
    """As an array, or as lists."""
    assert opened(returning(value)).answer(1, 2) == [{"y": [1, 2]}, {"y": [3, 4]}]


def test_an_exception_in_a_rows_place_is_that_requests() -> None:
    """Its mates are answered."""
    values: Sequence[Any] = [np.array([1, 2]), BadInput("too dark", "x"), np.array([5, 6])]

    first, bad, last = opened(returning({"y": values})).answer(1, 2, 3)

    assert (first, last) == ({"y": [1, 2]}, {"y": [5, 6]})
    assert str(bad.message) == "x: too dark"


def test_a_coroutine_is_awaited() -> None:
    """`async def predict` takes the same tensors."""

    @model(inputs={"x": Tensor("float32", ["batch"])}, outputs={"y": Tensor("float32", ["batch"])})
    async def twice(x: Any) -> Any:
        return {"y": 2 * x}

    assert opened(twice).answer(1, 2) == [{"y": 2.0}, {"y": 4.0}]


def test_torch_is_given_where_it_is_annotated() -> None:
    """Tensors in, tensors out, bfloat16 included."""
    torch = pytest.importorskip("torch")

    @model(inputs={"x": Tensor("bfloat16", ["batch"])}, outputs={"y": Tensor("bfloat16", ["batch"])})
    def twice(x: torch.Tensor) -> Any:
        assert x.dtype is torch.bfloat16
        return {"y": x * 2}

    assert opened(twice).answer(1, [2, 3]) == [{"y": 2.0}, {"y": [4.0, 6.0]}]


def test_an_array_where_torch_wants_a_tensor_is_explained() -> None:
    """With the annotation that is missing; other errors are the author's own words alone."""
    torch = pytest.importorskip("torch")

    @model(inputs={"x": Tensor("float32", ["batch", 4])}, outputs={"y": Tensor("float32", ["batch", 2])})
    class Net:
        def load(self, context: Any) -> None:
            self.net = torch.nn.Linear(4, 2)

        def predict(self, x: Any) -> Any:
            if x[0, 0] == 13:
                raise TypeError("unlucky")
            return self.net(x)

    served = opened(Net)
    with pytest.raises(TypeError, match=r"not numpy\.ndarray") as caught:
        served.only([1, 2, 3, 4])
    with pytest.raises(TypeError, match="unlucky") as other:
        served.only([13, 2, 3, 4])

    assert caught.value.__notes__ == ["predict gets numpy arrays; annotate x: torch.Tensor to get tensors"]
    assert not hasattr(other.value, "__notes__")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda y: y, "has no parameter x, which is a declared input"),
        (lambda x, scale: x, "has the parameter scale, which is no declared input"),
    ],
)
def test_predict_must_take_the_declared_inputs(function: Any, words: str) -> None:
    """Seen at load, not at the first request."""
    mark = model(inputs={"x": Tensor("float32", ["batch"])}, outputs={"y": Tensor("float32", ["batch"])})

    with pytest.raises(DeclarationError, match=words):
        opened(mark(function))


def test_the_model_may_ask_for_its_context() -> None:
    """A parameter `context` that is no input."""

    @model(inputs={"x": Tensor("float32", ["batch"])}, outputs={"y": Tensor("float32", ["batch"])})
    def named(x: Any, context: Any) -> Any:
        assert context.model_name == "m"
        return x

    assert opened(named).only(1) == {"y": 1.0}
    assert json.loads(opened(named).opened.declaration)["kind"] == "tensors"


def test_each_further_call_begins_anew() -> None:
    """So that each has the whole response limit."""
    served = opened()
    begun: list[int] = []
    served.context.begin_call = lambda: begun.append(len(served.opened.instance.calls))

    served.only([[row, 0] for row in range(10)])

    assert begun == [1, 2]


def test_rows_of_clients_that_have_gone_are_not_run() -> None:
    """Once the first call has ended, for cancels and for deadlines."""
    served = opened()
    served.context.ask_cancelled = lambda place: place == 0
    items = [FakeItem("a"), FakeItem("b"), FakeItem("c", deadline=0.0)]

    answers = served.answer([[1, 0]] * 8, [[2, 0]] * 4, [[3, 0]] * 4, items=items)

    assert answers[1] == {"sums": [2.0] * 4}
    assert served.opened.instance.calls == [4, 4]
