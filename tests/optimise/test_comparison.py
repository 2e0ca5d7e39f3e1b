"""Errors, agreement and the verdict, on sums that are given."""

from __future__ import annotations

import math

import pytest

from marserve.optimise.comparison import (
    Agreement,
    Bounds,
    OutputErrors,
    RowErrors,
    RunErrors,
    Sums,
    inputs_needed,
    judge,
    percent,
    worst,
)


def row(error: float = 0.0, wanted: float = 10.0, largest: float = 0.0, **more: float) -> RowErrors:
    """Sums of one row."""
    return RowErrors(
        Sums(
            elements=10,
            error=error,
            wanted=wanted,
            largest_error=largest,
            largest_wanted=2.0,
            **more,  # type: ignore[arg-type]
        )
    )


def run_of(*rows: RowErrors, output: str = "scores") -> RunErrors:
    """A run of these rows."""
    run = RunErrors()
    for index, each in enumerate(rows):
        run.add(output, index, each)
    return run


def test_errors_are_shares_of_what_is_wanted_over_all_rows() -> None:
    """Two rows of ten each, off by 0.4 together."""
    output = run_of(row(error=0.1, largest=0.3), row(error=0.3, largest=0.1)).outputs["scores"]

    assert output.mean_error == pytest.approx(0.4 / 20)
    assert output.largest == pytest.approx(0.15)


def test_an_error_where_all_is_zero_is_boundless_and_no_error_is_none() -> None:
    """A share of nothing."""
    wrong, right = OutputErrors(), OutputErrors()
    wrong.add(0, RowErrors(Sums(elements=1, error=1.0, largest_error=1.0)))
    right.add(0, RowErrors(Sums(elements=1)))

    assert wrong.mean_error == math.inf
    assert (right.mean_error, right.largest, right.cosine) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("product", "seen", "wanted", "cosine"), [(6.0, 4.0, 9.0, 1.0), (-6.0, 4.0, 9.0, -1.0), (0.0, 0.0, 9.0, 0.0)]
)
def test_the_cosine_is_that_of_all_elements_together(product: float, seen: float, wanted: float, cosine: float) -> None:
    """Also of nothing but zeros."""
    output = OutputErrors()
    output.add(0, RowErrors(Sums(product=product, seen_squares=seen, wanted_squares=wanted)))

    assert output.cosine == pytest.approx(cosine)


def test_equal_outputs_pass() -> None:
    """Without a fault."""
    verdict = judge({"alone": run_of(row())}, {}, Agreement("top-1 of scores", 200, 200), Bounds(min_agreement=0.98))

    assert verdict.has_passed
    assert verdict.faults == ()


@pytest.mark.parametrize(("error", "passes"), [(0.29, True), (0.31, False)])
def test_the_mean_error_is_bounded_in_each_run(error: float, passes: bool) -> None:
    """One run beyond the bound is enough, and is named."""
    runs = {"alone": run_of(row()), "in batches of 8": run_of(row(error=error))}

    verdict = judge(runs, {}, None, Bounds(max_error=0.03))

    assert verdict.has_passed is passes
    if not passes:
        assert verdict.faults[0].startswith("in batches of 8: scores has a mean error of 0.031 of the mean output")


def test_one_new_nan_refuses_however_small_the_error() -> None:
    """It says how many, and where the first is."""
    verdict = judge({"alone": run_of(row(), row(new_nans=1), row(new_nans=2))}, {}, None, Bounds())

    assert verdict.faults == ("alone: scores has 3 elements that are no finite number, first for input 1",)


def test_a_mean_error_that_is_no_number_is_over_every_bound() -> None:
    """It is not less than any."""
    verdict = judge({"alone": run_of(row(error=math.nan))}, {}, None, Bounds(max_error=1e9))

    assert not verdict.has_passed


def test_rows_that_could_not_be_compared_are_faults() -> None:
    """With the run."""
    run = RunErrors(faults=["input 3: scores is [1, 9], wanted [1, 10]"])

    assert judge({"alone": run}, {}, None, Bounds()).faults == ("alone: input 3: scores is [1, 9], wanted [1, 10]",)


def test_what_depends_on_its_mates_is_refused_unless_the_reference_does_as_much() -> None:
    """Batch normalisation in training does so."""
    mates = {"beside a loud mate": run_of(row(largest=0.02))}
    equal = {"beside a loud mate": run_of(row(largest=0.015))}
    runs = {"alone": run_of(row())}

    refused = judge(runs, mates, None, Bounds())
    allowed = judge(runs, mates, None, Bounds(), equal)

    assert refused.faults[0].startswith("beside a loud mate: scores of a row depends on its mates: off by 0.01 of")
    assert allowed.has_passed


@pytest.mark.parametrize(("agreement", "inputs"), [(0.98, 149), (0.995, 598), (0.5, 5), (0.0, 1)])
def test_how_many_inputs_show_an_agreement(agreement: float, inputs: int) -> None:
    """By the exact bound, and one fewer does not."""
    assert inputs_needed(agreement) == inputs
    if agreement:
        assert Agreement("x", inputs, inputs).shown >= agreement > Agreement("x", inputs - 1, inputs - 1).shown


def test_too_few_inputs_refuse_and_say_how_many_are_missing() -> None:
    """All agree, and still it is not shown."""
    verdict = judge({"alone": run_of(row())}, {}, Agreement("top-1 of scores", 64, 64), Bounds(min_agreement=0.98))

    assert verdict.faults == (
        "64 of 64 inputs agree by top-1 of scores, which shows 95.4 % with 95 % certainty; 98 % takes 85 more inputs "
        "that agree",
    )


def test_inputs_that_disagree_refuse_by_what_is_shown_and_not_by_what_was_seen() -> None:
    """985 of 1,000 are 98.5 %, and show 97.6 %."""
    agreement = Agreement("the handler's compare", 985, 1000)

    verdict = judge({"alone": run_of(row())}, {}, agreement, Bounds(min_agreement=0.98))

    assert "which shows 97.6 % with 95 % certainty; 98 % is asked for" in verdict.faults[0]


def test_without_scores_or_compare_errors_alone_decide_and_it_is_said() -> None:
    """In a note."""
    verdict = judge({"alone": run_of(row())}, {}, None, Bounds(min_agreement=0.98))

    assert verdict.has_passed
    assert "agreement was not looked at" in verdict.notes[0]


def test_nothing_to_compare_is_no_pass() -> None:
    """A verdict on nothing would be one on anything."""
    assert judge({}, {}, None, Bounds()).faults == ("nothing could be compared",)
    assert judge({"alone": RunErrors()}, {}, None, Bounds(), nothing="why").faults == ("why",)
    assert judge({"alone": RunErrors()}, {}, Agreement("x", 200, 200), Bounds(), nothing="why").faults == ("why",)


def test_the_worst_run_of_each_output_stands_for_all() -> None:
    """Each output by itself."""
    found = worst([run_of(row(error=0.1)), run_of(row(error=0.2)), run_of(row(error=0.05), output="box")])

    assert found.outputs["scores"].mean_error == pytest.approx(0.02)
    assert found.outputs["box"].mean_error == pytest.approx(0.005)


def test_percent_rounds_down_so_that_no_more_is_claimed_than_shown() -> None:
    """At the last digit."""
    assert percent(0.97999) == "97.9 %"
    assert percent(0.98) == "98 %"
