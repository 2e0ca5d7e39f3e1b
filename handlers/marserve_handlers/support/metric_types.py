"""The kinds of metrics that handlers have, and the errors of their cache. `metrics.py` hands both out."""

from __future__ import annotations

import enum


class MetricsCacheTypeError(TypeError):
    """An argument of a metrics call has the wrong type."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class MetricsCacheValueError(ValueError):
    """An argument of a metrics call has a value that is not allowed, such as an unknown unit of time."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class MetricsCacheKeyError(KeyError):
    """No metric of that name and type is known."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)

    def __str__(self) -> str:
        return self.message


class MetricsCacheIOError(OSError):
    """The metrics file cannot be read."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class GeneralMetricsCacheError(Exception):
    """Any other trouble with the metrics cache."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class MetricTypes(enum.Enum):
    """What the server does with a metric's values: add them up, keep the last, count them in buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
