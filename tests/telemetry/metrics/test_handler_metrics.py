"""Which values of handlers are kept."""

from __future__ import annotations

import logging

import pytest

from marserve.messages import Metric
from marserve.telemetry.metrics.handler_metrics import MAX_DETECTED, MAX_IDS, MAX_WORDS, ModelMetrics
from marserve.telemetry.metrics.metric_definitions import BUILT_IN, Definition, Definitions

DEPTH = Definition("Depth", "gauge", "m", ("ModelName", "Level", "Hostname"))
LISTED = Definitions({"Front": Definition("Front", "gauge", "m", ("Host",))}, {"Depth": DEPTH})


def metric(name: str = "Depth", kind: str = "counter", **dimensions: str) -> Metric:
    """A value with these dimensions."""
    return Metric(name, 1.0, "Count", kind, list((dimensions or {"ModelName": "m", "Level": "Model"}).items()), "")


@pytest.mark.parametrize(
    "dimensions",
    [
        {"ModelName": "m", "Level": "Model"},
        {"Level": "Model", "ModelName": "m"},
        {"Other": "m", "Names": "Model"},
    ],
    ids=["as listed", "in another order", "under other names"],
)
def test_a_listed_metric_goes_by_its_definition(dimensions: dict[str, str]) -> None:
    """Its type is the file's, whatever the call's was; dimensions go by name, else by position, as in TorchServe."""
    fitting = ModelMetrics(LISTED).fit("m", metric(**dimensions))

    assert fitting == (DEPTH, ("m", "Model"))


def test_what_is_not_listed_is_dropped_and_counted() -> None:
    """TorchServe's rule."""
    models = ModelMetrics(LISTED)

    assert models.fit("m", metric("Width")) is None
    assert models.dropped == 1


def test_a_value_whose_words_have_no_end_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """What a handler measures is kept, on the page or on its way to a log: text that it saw must not fill memory."""
    models = ModelMetrics(LISTED, detects=True)
    endless = "x" * (MAX_WORDS + 1)

    with caplog.at_level(logging.ERROR):
        fitted = [
            models.fit("m", metric(ModelName="m", Level=endless)),
            models.fit("m", metric(endless)),
            models.fit("m", metric("New", **{endless: "d"})),
            models.fit(
                "m", Metric("Depth", 1.0, "m", "gauge", [("ModelName", "m"), ("Level", "Model")], "x" * (MAX_IDS + 1))
            ),
        ]

    assert fitted == [None] * 4
    assert models.dropped == 4
    assert max(len(record.getMessage()) for record in caplog.records) < 1000


def test_dimensions_that_do_not_fit_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A handler does it with each batch."""
    models = ModelMetrics(LISTED)

    with caplog.at_level(logging.ERROR):
        fitted = [models.fit("m", metric(Level="Error")) for _ in range(3)]

    assert fitted == [None] * 3
    assert models.dropped == 3
    [record] = caplog.records
    assert "Metric Depth of model m has the dimensions ['Level']" in record.getMessage()
    assert "['ModelName', 'Level']" in record.getMessage()


@pytest.mark.parametrize("kind", ["counter", "gauge", "histogram"])
def test_what_is_detected_keeps_the_type_and_the_dimensions_it_came_with(kind: str) -> None:
    """From then on it is known."""
    models = ModelMetrics(LISTED, detects=True)

    fitting = models.fit("m", metric("Width", kind, Colour="blue"))

    assert fitting == (Definition("Width", kind, "Count", ("Colour", "Hostname")), ("blue",))
    assert models.known["Width"] is fitting.definition
    assert models.fit("m", metric("Width", kind)) is None


@pytest.mark.parametrize(("kind", "word"), [("summary", "the type 'summary'"), ("", "no type")])
def test_a_type_that_is_none_is_not_detected(kind: str, word: str, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, with what it may be."""
    models = ModelMetrics(LISTED, detects=True)

    with caplog.at_level(logging.ERROR):
        assert models.fit("m", metric("Width", kind)) is None

    assert models.dropped == 1
    assert f"has {word}, and can be detected only with counter, gauge or histogram" in caplog.text


@pytest.mark.parametrize("name", ["Front", "marserve_requests_total"])
def test_no_handler_takes_a_name_of_the_servers(name: str) -> None:
    """A page with a family that stands twice is refused whole."""
    assert ModelMetrics(LISTED, detects=True).fit("m", metric(name)) is None


def test_names_without_end_stop_at_the_bound() -> None:
    """A handler may name metrics after anything it sees."""
    models = ModelMetrics(LISTED, detects=True)

    fitted = [models.fit("m", metric(f"M{number}")) for number in range(MAX_DETECTED + 3)]

    assert fitted[-3:] == [None] * 3
    assert models.dropped == 3


def test_the_servers_own_time_is_no_detected_one_where_the_file_has_it() -> None:
    """As a metric of the server's, say."""
    front = Definitions({"PredictionTime": BUILT_IN.model["PredictionTime"]}, {})

    assert "PredictionTime" not in ModelMetrics(front, detects=True).known
