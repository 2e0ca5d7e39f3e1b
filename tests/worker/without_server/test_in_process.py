"""Tests for the kit that authors test handlers with: `marserve_handlers.testing.serve`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marserve_handlers import BadInput, Event, Tensor, model
from marserve_handlers.testing import Request, serve


@model(inputs={"x": Tensor("float32", ["batch", 2])}, outputs={"y": Tensor("float32", ["batch"])})
class Sums:
    """Adds, and keeps the sizes of its calls."""

    def load(self, context: Any) -> None:
        """Nothing was called."""
        self.context = context
        self.calls: list[int] = []

    def predict(self, x: Any) -> Any:
        """13 is a bad number."""
        self.calls.append(len(x))
        if (x == 13).any():
            raise RuntimeError("13")
        return {"y": x.sum(axis=1)}


@model
def count(item: str) -> Iterator[Event]:
    """Counts to a number."""
    for each in range(int(item)):
        yield Event(str(each))


class Old:
    """A handler in TorchServe's shape."""

    def initialize(self, context: Any) -> None:
        """Looks where it is."""
        self.folder = context.system_properties["model_dir"]

    def handle(self, data: list[Any], context: Any) -> list[Any]:
        """Gives back what came, with its folder."""
        context.set_response_header(0, "x-folder", self.folder)
        return [row["body"] for row in data]


def test_a_failing_load_is_the_tests() -> None:
    """The handler's own exception."""

    @model
    class Broken:
        def load(self, context: Any) -> None:
            raise ValueError("no weights")

        def predict(self, item: str) -> str:
            return item

    with pytest.raises(ValueError, match="no weights"), serve(Broken):
        pass


def test_a_batch_has_any_make_up() -> None:
    """Good, bad, expired and cancelled requests, each with its own end."""
    with serve(Sums) as served:
        good, bad, late, gone, rows = served.batch(
            {"x": [1, 2]},
            b"no json",
            Request([1, 2], deadline_s=-1),
            Request([1, 2], is_cancelled=True),
            np.ones((2, 2), np.float32),
        )

    assert (good.status, good.json()) == (200, {"y": 3.0})
    assert (bad.status, bad.message) == (400, "the body is not JSON: Expecting value at line 1, column 1")
    assert (late.status, gone.status) == (504, 499)
    assert rows.json() == {"y": [2.0, 2.0]}
    assert good.headers == {"content-type": "application/json"}


def test_a_batch_that_raises_is_run_in_halves() -> None:
    """As the server does: the guilty request alone fails, with its traceback."""
    with serve(Sums) as served:
        answers = served.batch(*([each, 0] for each in (1, 2, 13, 4)))

    assert [answer.status for answer in answers] == [200, 200, 500, 200]
    assert answers[2].message == "Prediction failed"
    assert "RuntimeError: 13" in answers[2].traceback


def test_streams_come_in_pieces() -> None:
    """Up to where a client leaves."""
    accept = {"Accept": "text/event-stream"}
    with serve(count) as served:
        whole, part = served.batch(Request("2", headers=accept), Request("9", headers=accept, leaves_after=1))
        early = served("x", headers=accept)

    assert whole.pieces == [b"data: 0\n\n", b"data: 1\n\n", b"event: end\ndata: {}\n\n"]
    assert part.pieces == [b"data: 0\n\n"]
    assert early.status == 500


def test_torchserves_shape_is_served_too(tmp_path: Path) -> None:
    """With the decoding that the server's default is, and a folder."""
    with serve(Old, model_dir=tmp_path) as served:
        answer = served({"a": 1})

    assert answer.json() == {"a": 1}
    assert answer.headers["x-folder"] == str(tmp_path)
    assert served.declaration is None


def test_functions_of_torchserves_shape_are_loaded_without_data() -> None:
    """Once, with None."""

    def handle(data: Any, context: Any) -> Any:
        return None if data is None else [str(row["field"].decode()) for row in data]

    with serve(handle) as served:
        assert served(Request(form={"field": b"value"})).text == "value"


def test_the_declaration_and_the_bounds_are_the_models() -> None:
    """`batch_size` bounds a call, `max_rows` a request."""
    with serve(Sums, batch_size=2, max_rows=4) as served:
        fits, too_many = served([[1, 1]] * 4), served([[1, 1]] * 5)

    assert served.declaration is not None
    assert served.declaration["kind"] == "tensors"
    assert fits.json() == {"y": [2.0] * 4}
    assert too_many.message == "the request has 5 rows, more than maxRows, 4"


def test_errors_of_single_items_are_theirs() -> None:
    """As `BadInput` of one item's predict."""

    @model
    def picky(item: str) -> str:
        if item == "no":
            raise BadInput("no", "item")
        return item

    with serve(picky) as served:
        yes, no = served.batch("yes", "no")

    assert (yes.text, no.status, no.message) == ("yes", 400, "item: no")
