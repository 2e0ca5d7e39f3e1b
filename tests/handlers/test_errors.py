"""How a handler's exception becomes kind, message and status."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import traceback

import pytest

from marserve_handlers.errors import (
    BadInput,
    BadPicture,
    BadResponse,
    PredictionException,
    add_note,
    describe_failure,
)
from marserve_handlers.support.shown import first_line, first_line_with_kind


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


def test_a_bad_input_names_its_field_and_is_400() -> None:
    """The message begins with the field; otherwise it is like any answer of the author."""
    error = BadInput("expected float32 [1, 28, 28], got [1, 28, 27]", field="pixels")

    assert describe_failure(error) == ("bad_input", "pixels: expected float32 [1, 28, 28], got [1, 28, 27]", 400)
    assert error.field == "pixels"


def test_a_bad_input_without_a_field_is_its_message() -> None:
    """There is no colon where no field is named."""
    assert describe_failure(BadInput("two rows were expected")) == ("bad_input", "two rows were expected", 400)


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_of_a_bad_input_is_the_same(again: object) -> None:
    """Pools of processes in a handler send their exceptions pickled."""
    error = BadInput("too long", "text")

    same = again(error)  # type: ignore[operator]

    assert (same.message, same.field, same.error_code) == ("text: too long", "text", 400)


def test_the_package_has_its_exceptions_and_imports_them_when_they_are_asked_for() -> None:
    """`from marserve_handlers import BadInput` works, and `import marserve_handlers` alone imports nothing else."""
    program = (
        "import sys, marserve_handlers as m; names = [n for n in sys.modules if n.startswith('marserve_handlers.')]\n"
        "assert not names, names\n"
        "assert 'BadInput' in dir(m) and not hasattr(m, 'BadInputs')\n"
        "from marserve_handlers import BadInput, PredictionException\n"
        "from marserve_handlers.errors import BadInput as same\n"
        "assert BadInput is same and issubclass(BadInput, PredictionException)\n"
        "assert not {'numpy', 'torch', 'marserve'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-P", "-c", program], check=True)


def test_a_bad_picture_is_the_clients_fault() -> None:
    """Its code is 400."""
    assert describe_failure(BadPicture("no picture")) == ("bad_input", "no picture", 400)


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


def test_notes_stand_behind_what_an_exception_says() -> None:
    """In the order in which they were added, beside those of Python's own."""
    error = ValueError("odd")
    error.add_note("first")

    add_note(error, "second")

    assert error.__notes__ == ["first", "second"]
    assert traceback.format_exception_only(error) == ["ValueError: odd\n", "first\n", "second\n"]


@pytest.mark.parametrize(
    ("error", "plain", "with_kind"),
    [
        (ValueError("\n  bad shape  \nSet TORCH_LOGS for more"), "bad shape", "ValueError: bad shape"),
        (KeyError(), "KeyError", "KeyError"),
        (RuntimeError("x" * 400), "x" * 300 + "…", "RuntimeError: " + "x" * 300 + "…"),
    ],
)
def test_of_an_error_its_first_line_is_said(error: Exception, plain: str, with_kind: str) -> None:
    """Libraries' advice for their own users is left out."""
    assert (first_line(error), first_line_with_kind(error)) == (plain, with_kind)
