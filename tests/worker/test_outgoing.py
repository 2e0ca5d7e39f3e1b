"""Tests for what the author's values become on their way out of a worker."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.messages import MAX_METRIC_VALUES, Metric
from marserve.worker.outgoing import (
    cut,
    encode_value,
    exact,
    metrics_of,
    misfit,
    name_of,
    not_loaded,
    raised,
    say,
    shown,
    traceback_of,
    words_of,
)
from marserve_handlers.errors import PredictionException
from marserve_handlers.metrics import MetricValue
from support.hostile_handler import Speechless, SpeechlessError, Stubborn, Text


@pytest.mark.parametrize("text", ["x", Text("x"), Stubborn("x")], ids=lambda text: type(text).__name__)
def test_text_of_any_class_becomes_plain_text(text: str) -> None:
    """The wire carries no others."""
    assert (type(exact(text)), exact(text)) == (str, "x")


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    """A traceback begins with where, and ends with what."""
    seen = cut("a" * 50 + "-" * 10_000 + "z" * 50, 100)

    assert seen.startswith("a" * 25 + "\n…")
    assert seen.endswith("-" * 25 + "z" * 50)
    assert "10000 characters are left out" in seen
    assert cut("a" * 100, 100) == "a" * 100


def test_a_text_of_nothing_but_surrogates_is_no_longer_on_the_wire() -> None:
    """Escaped they take six times their room."""
    seen = cut("\ud800" * 1000, 1000)

    assert len(seen) < 1100
    assert seen.startswith("\\ud800\\ud800")


def test_the_name_of_a_class_is_bounded() -> None:
    """It is the author's, too."""
    assert len(name_of(type("x" * 100_000, (), {})())) < 300
    assert name_of(Text("x")) == "Text"


def test_what_cannot_say_what_it_is_is_named_by_its_type() -> None:
    """Though it raises what is no Exception."""
    assert words_of(Speechless()) == "Speechless, which cannot be shown"
    assert shown(SpeechlessError()) == "SpeechlessError, which cannot be shown"
    assert traceback_of(SpeechlessError()).startswith("support.hostile_handler.SpeechlessError: <exception str()")


def test_a_log_that_raises_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The author's code may have closed the streams."""

    def refuse(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("marserve.worker.outgoing.log.log", refuse)

    say(30, "%s", "x")


HONEST = MetricValue("n", 1.5, "ms", "gauge", [("a", "b")], "id")


def test_an_honest_value_goes_out_as_it_is() -> None:
    """Its fields are the wire's."""
    assert metrics_of([HONEST]) == ([Metric("n", 1.5, "ms", "gauge", [("a", "b")], "id")], 0)


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (HONEST._replace(name=Text("n")), Metric("n", 1.5, "ms", "gauge", [("a", "b")], "id")),
        (HONEST._replace(unit=5), Metric("n", 1.5, "5", "gauge", [("a", "b")], "id")),
        (HONEST._replace(dimensions=[(5, None)]), Metric("n", 1.5, "ms", "gauge", [("5", "None")], "id")),
        (HONEST._replace(request_ids=7), Metric("n", 1.5, "ms", "gauge", [("a", "b")], "7")),
        (HONEST._replace(value=True), Metric("n", 1.0, "ms", "gauge", [("a", "b")], "id")),
        (HONEST._replace(value=math.inf), Metric("n", math.inf, "ms", "gauge", [("a", "b")], "id")),
        (HONEST._replace(value="many"), None),
        (HONEST._replace(value=10**400), None),
        (HONEST._replace(kind="summary"), None),
        (HONEST._replace(dimensions=5), None),
        ((1, 2, 3), None),
        (None, None),
    ],
    ids=str,
)
def test_any_other_value_is_written_out_or_counted_as_dropped(value: Any, sent: Metric | None) -> None:
    """An author may have put an object of another kind in the place of the metrics."""
    metrics, dropped = metrics_of([value])

    assert metrics == ([] if sent is None else [sent])
    assert dropped == (sent is None)
    assert all(type(text) is str for metric in metrics for text in (metric.name, metric.unit, metric.request_ids))


def test_more_values_than_a_message_takes_are_dropped() -> None:
    """The server would end the worker for them."""
    metrics, dropped = metrics_of([HONEST] * (MAX_METRIC_VALUES + 3))

    assert (len(metrics), dropped) == (MAX_METRIC_VALUES, 3)


# ------------------------------------------------------------------------------------------- loads that fail


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ModuleNotFoundError("No module named 'x'", name="x"), "missing_module"),
        (ImportError("cannot import name"), "import_error"),
        (FileNotFoundError(2, "No such file"), "missing_file"),
        (MemoryError(), "out_of_memory"),
        (SyntaxError("invalid syntax"), "load_failed"),
        (KeyboardInterrupt(), "load_failed"),
    ],
    ids=repr,
)
def test_a_failed_load_has_a_kind(error: BaseException, kind: str) -> None:
    """A name of the causes that describe shows."""
    told = not_loaded(error)

    assert told.kind == kind
    assert told.message.startswith(type(error).__name__)
    assert type(error).__name__ in told.traceback


def test_an_exception_without_words_is_told_all_the_same() -> None:
    """Asking it for them raises."""

    class Unspeakable(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no words")

    assert not_loaded(Unspeakable()).message == "Unspeakable"


def test_an_endless_message_is_cut() -> None:
    """Describe is no place for a megabyte."""
    assert len(not_loaded(ValueError("x" * 10_000_000)).message) == 2000


@pytest.mark.parametrize(("module", "extra"), [("torch", "torch"), ("onnxruntime", "onnx")])
def test_a_missing_runtime_is_told_with_the_extra_that_brings_it(module: str, extra: str) -> None:
    """A new user has installed marserve alone; other modules are the author's, whose way is the requirements file."""
    told = not_loaded(ModuleNotFoundError(f"No module named '{module}'", name=module))
    other = not_loaded(ModuleNotFoundError("No module named 'einops'", name="einops"))

    assert told.kind == "missing_module"
    assert f"No module named '{module}'. The extra {extra} of marserve" in told.message
    assert f"pip install 'marserve[{extra}]'" in told.message
    assert other.message.startswith(
        "ModuleNotFoundError: No module named 'einops'. The package einops brings it: name it in the archive's "
    )


def test_what_is_no_list_of_as_many_elements_is_told_in_words() -> None:
    """A coroutine with what it needs, and closed: it would warn that nobody awaited it."""

    async def answer() -> None:
        """Never run."""

    coroutine = answer()
    told = misfit(3, 0.5, coroutine, 1)
    assert told is not None
    assert "asyncCommunication" in told.traceback
    assert coroutine.cr_frame is None
    assert (told.number, told.handler_s, told.kind, told.message, told.code) == (
        *(3, 0.5, "handler"),
        *("Invalid model predict output", 503),
    )
    few = misfit(3, 0.5, [1], 2)
    assert few is not None
    assert (few.message, few.code) == ("number of batch response mismatched", 503)
    assert "returned 1 elements for 2 rows" in few.traceback
    assert misfit(3, 0.5, [1, 2], 2) is None


class Unspeakable(Exception):
    """One that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class UnspeakableOfMemory(RuntimeError):
    """One that is asked for its words, which may be of memory, and cannot be shown."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


def test_an_error_that_cannot_even_be_judged_is_told_with_its_name() -> None:
    """Its words are asked for: the author's own may raise anything."""
    for error in (UnspeakableOfMemory(), PredictionException(Unspeakable(), 404)):  # type: ignore[arg-type]
        told = raised(4, 0.25, error)

        assert (told.number, told.handler_s, told.kind, told.message, told.code) == (
            *(4, 0.25, "handler"),
            *("Prediction failed", 503),
        )
        assert told.traceback.startswith(f"{type(error).__name__}, which cannot be shown:")


def test_an_error_that_cannot_be_shown_is_told_all_the_same() -> None:
    """With its type, of a batch and of a load."""
    told = raised(4, 0.25, Unspeakable())

    assert (told.number, told.handler_s, told.kind, told.message, told.code) == (
        *(4, 0.25, "handler"),
        *("Prediction failed", 503),
    )
    assert "Unspeakable" in told.traceback
    failed = not_loaded(Unspeakable())
    assert failed.kind == "load_failed"
    assert "Unspeakable" in failed.message


def test_notes_of_a_failed_load_are_told() -> None:
    """Behind its words."""
    error = ValueError("bad")
    error.add_note("and why")

    assert not_loaded(error).message == "ValueError: bad and why"


def test_notes_of_a_failure_are_exposed_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by Python 3.10, whose tracebacks leave them out; what is no text is left out."""
    error = TypeError("bad")
    error.__dict__["__notes__"] = ["and why", 5]

    with monkeypatch.context() as older:
        older.setattr("traceback.format_exception", lambda _: ["TypeError: bad\n"])
        by_older = raised(4, 0.25, error)
    failure = raised(4, 0.25, error)

    assert by_older.traceback == "TypeError: bad\nand why\n"
    assert failure.traceback.count("and why") == 1
    assert (failure.message, failure.error_text) == ("Prediction failed", "bad and why")


def test_only_tensors_are_saved_where_torch_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is what it was without it."""

    class Tensor:
        """One."""

    def save(value: Any, buffer: Any) -> None:
        buffer.write(b"saved")

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, save=save))

    assert encode_value(Tensor()) == (b"saved", False)
    assert encode_value([1]) == (b"[\n  1\n]", True)
    assert encode_value(5) == (b"5", False)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("huggingface_hub", "No module named 'huggingface_hub'. The extra hf of marserve brings it"),
        ("other", "No module named 'other'"),
    ],
)
def test_the_extra_that_brings_a_missing_module_is_named_once(module: str, said: str) -> None:
    """Behind one full stop."""
    told = not_loaded(ModuleNotFoundError(f"No module named '{module}'.", name=module))

    assert told.message.startswith("ModuleNotFoundError: ")
    assert said in told.message
    assert ".." not in told.message
    assert not_loaded(ModuleNotFoundError("gone", name=None)).message == "ModuleNotFoundError: gone"
