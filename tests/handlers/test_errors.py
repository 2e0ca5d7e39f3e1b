"""How a handler's exception becomes kind, message and status."""

from __future__ import annotations

import pytest

from marserve_handlers.errors import (
    BadPicture,
    BadResponse,
    PredictionException,
    describe_failure,
)


class OutOfMemoryError(RuntimeError):
    """Named as torch's own, which is recognised without torch."""


def test_a_prediction_exception_keeps_its_message_and_code() -> None:
    """The author's words and number reach the client."""
    assert describe_failure(PredictionException("not today", 513)) == ("prediction", "not today", 513)


def test_a_prediction_exception_is_500_by_default_and_reads_as_torchserves() -> None:
    """Code 500 unless given; `str` shows both."""
    error = PredictionException("m")

    assert error.error_code == 500
    assert str(error) == "m : 500"


@pytest.mark.parametrize("code", ["400", None, 7, 1000, 2.5])
def test_a_code_that_is_no_status_becomes_500(code: object) -> None:
    """A wrong code must not break the answer."""
    assert describe_failure(PredictionException("m", code)).code == 500  # type: ignore[arg-type]


def test_a_bad_picture_is_the_clients_fault() -> None:
    """Its code is 400."""
    assert describe_failure(BadPicture("no picture")) == ("prediction", "no picture", 400)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("x"),
        OutOfMemoryError("x"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_running_out_of_memory_is_507(error: BaseException) -> None:
    """By type, and by the allocators' own words where only those are left."""
    assert describe_failure(error) == ("memory", "Out of resources", 507)


def test_a_text_with_cuda_in_it_is_no_lack_of_memory() -> None:
    """An author's error about CUDA is an ordinary failure."""
    assert describe_failure(RuntimeError("CUDA is not what I asked for")).code == 503


def test_anything_else_is_a_failed_prediction() -> None:
    """503 in TorchServe's words, without the exception's text."""
    assert describe_failure(ValueError("/secret/path")) == ("handler", "Prediction failed", 503)


def test_a_bad_response_says_what_was_wrong() -> None:
    """The kind of a header or status that cannot be sent."""
    assert describe_failure(BadResponse("the header")) == ("bad_header", "the header", 503)
