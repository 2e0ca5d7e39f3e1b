"""Tests for what the author's values become on their way out of a worker."""

from __future__ import annotations

import math
from typing import Any

import pytest

from marserve.messages import MAX_METRIC_VALUES, Metric
from marserve.worker.outgoing import cut, exact, metrics_of, name_of, not_loaded, say, shown, traceback_of, words_of
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
    """A new user has installed marserve alone; other modules are the author's."""
    told = not_loaded(ModuleNotFoundError(f"No module named '{module}'", name=module))
    other = not_loaded(ModuleNotFoundError("No module named 'einops'", name="einops"))

    assert told.kind == "missing_module"
    assert f"No module named '{module}'. The extra {extra} of marserve" in told.message
    assert f"pip install 'marserve[{extra}]'" in told.message
    assert other.message == "ModuleNotFoundError: No module named 'einops'"
