"""How often values fell between bounds."""

from __future__ import annotations

from marserve.telemetry.metrics.histogram import Histogram


def test_a_value_equal_to_a_bound_counts_under_it() -> None:
    """`le` means less or equal."""
    histogram = Histogram((1, 2))

    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)

    assert histogram.buckets == [2, 2, 1]
    assert (histogram.count, histogram.sum, histogram.last) == (5, 8.0, 3)


def test_values_that_are_told_together_are_counted_as_though_alone() -> None:
    """Those of one batch mostly fall between the same two bounds."""
    together, alone = Histogram((1, 2)), Histogram((1, 2))

    for values in ([], [0.5, 0.7], [0.5, 1.5, 9.0]):
        together.observe_all(values)
        for value in values:
            alone.observe(value)

    assert (together.buckets, together.sum, together.last) == (alone.buckets, alone.sum, alone.last)


def test_an_example_with_a_trace_stays_until_the_next_with_one() -> None:
    """Where few requests have one, no page would show it."""
    histogram = Histogram((1.0,))
    histogram.exemplify(0.5, "before", "t")
    histogram.keep_examples()
    seen = []
    for request, trace in (("a", ""), ("b", ""), ("c", "t1"), ("d", ""), ("e", "t2")):
        histogram.exemplify(0.5, request, trace)
        assert histogram.examples is not None
        example = histogram.examples[0]
        assert example is not None
        seen.append((example.request_id, example.trace_id))

    assert seen == [("a", ""), ("b", ""), ("c", "t1"), ("c", "t1"), ("e", "t2")]
