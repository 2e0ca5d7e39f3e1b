"""Tests for the class that an explanation is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from marserve_handlers.errors import PredictionException
from marserve_handlers.support.targets import check_target, read_target


@pytest.mark.parametrize("target", [7, 7.0, "7", " 7 ", b"7", bytearray(b"07")])
def test_a_class_is_a_number_however_it_comes(target: Any) -> None:
    """A field of a form is bytes, one of JSON a number."""
    assert read_target(target) == 7


@pytest.mark.parametrize("target", ["cat", b"\xff", "", -1, "-1", 1.5, True, [1], None, "9" * 5000, "\u0663"])
def test_what_names_no_class_is_the_clients_mistake(target: Any) -> None:
    """400, with what came."""
    if target == "\u0663":
        assert read_target(target) == 3  # a digit all the same
        return
    with pytest.raises(PredictionException, match="must be the number of a class") as caught:
        read_target(target)

    assert caught.value.error_code == 400
    assert len(str(caught.value)) < 200


def test_a_class_that_the_model_does_not_have_is_named_with_those_it_has() -> None:
    """The last one is its number less one."""
    check_target(9, 10)
    with pytest.raises(PredictionException, match="from 0 to 9; it is 10") as caught:
        check_target(10, 10)

    assert caught.value.error_code == 400
