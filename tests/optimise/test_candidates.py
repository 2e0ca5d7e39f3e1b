"""Which builds are tried, and which one wins."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from marserve.optimise.candidates import (
    CANDIDATES,
    NAMES,
    Measured,
    UnknownCandidate,
    beaten_by,
    best,
    bounds_of,
    choose,
    in_order,
    split,
)
from marserve.optimise.comparison import MAX_ERROR_FLOAT32, Bounds
from marserve.optimise.ratio import Ratio

ALL = ("torch", "onnx", "onnxruntime", "onnxscript", "openvino", "nncf", "torchao", "g++")


def chosen(kind: str = "torch", **given: Any) -> dict[str, str]:
    """Name to why it is not tried."""
    values: dict[str, Any] = {
        "flags": ["avx512_bf16"],
        "installed": ALL,
        "wanted": (),
        "compared": 1000,
        "min_agreement": 0.98,
        "has_agreement": True,
        **given,
    }
    found = choose(
        kind,
        values["flags"],
        values["installed"],
        values["wanted"],
        values["compared"],
        values["min_agreement"],
        has_agreement=values["has_agreement"],
        is_drawn=values.get("is_drawn", False),
        calibrating=values.get("calibrating", 16),
    )
    return {choice.candidate.name: choice.why_not for choice in found}


def test_all_are_tried_where_everything_is_there() -> None:
    """Of a model of torch."""
    assert chosen() == dict.fromkeys(NAMES, "")


def test_an_onnx_model_is_quantised_and_no_more() -> None:
    """It runs in ONNX Runtime already."""
    assert [name for name, why in chosen("onnx").items() if not why] == ["onnx-int8"]
    assert chosen("onnx")["bf16"] == "it is not made of a model that is onnx"


def test_a_missing_package_is_named_with_what_to_type() -> None:
    """Each that is missing."""
    told = chosen(installed=("torch", "onnx", "onnxruntime", "onnxscript"))

    assert told["openvino-int8"] == 'openvino, nncf is not installed: pip install "marserve[optimise]"'
    assert told["onnx"] == ""


def test_a_missing_compiler_is_named_too() -> None:
    """It is no package of Python's."""
    told = chosen(installed=[name for name in ALL if name != "g++"])

    assert told["aot"] == "g++ is not installed, and compiles it (apt-get install g++)"
    assert chosen("torchscript")["compile"] == "it is not made of a model that is torchscript"


def test_bfloat16_is_only_tried_where_the_processor_computes_in_it() -> None:
    """Elsewhere it is slower."""
    assert "has none of avx512_bf16" in chosen(flags=["avx2"])["bf16"]


def test_with_too_few_inputs_only_builds_in_float32_are_tried_and_it_says_how_many_are_missing() -> None:
    """Unless nothing could say whether answers agree."""
    told = chosen(compared=64)

    assert [name for name, why in told.items() if not why] == ["channels-last", "onnx", "openvino", "compile", "aot"]
    assert told["onnx-int8"] == "85 more inputs are needed to show the agreement that is asked for"
    assert chosen(compared=64, has_agreement=False)["onnx-int8"] == ""


def test_one_input_alone_calibrates_nothing_so_that_builds_that_calibrate_are_one_short() -> None:
    """Whether or not something tells agreement; the others take it as an example."""
    found = chosen(compared=1, calibrating=0, has_agreement=False)
    told = {name for name, why in found.items() if why}

    assert told == {"onnx-int8", "openvino-int8", "aot-int8"}
    assert {found[name] for name in told} == {"1 more input is needed: one calibrates it, and another one is compared"}
    agreeing = chosen(compared=148, calibrating=0)
    assert agreeing["bf16"] == "1 more input is needed to show the agreement that is asked for"


def test_drawn_inputs_are_for_builds_in_float32_alone_whether_or_not_something_tells_agreement() -> None:
    """They show errors, and nothing of what users send."""
    for has_agreement in (True, False):
        found = chosen(is_drawn=True, has_agreement=has_agreement, compared=1000)
        exact = {each.name for each in CANDIDATES if each.is_exact}
        assert {name for name, why in found.items() if not why} == exact
        assert all("drawn from the signature" in why for name, why in found.items() if name not in exact)


def test_named_ones_are_tried_alone_and_an_unknown_name_is_refused() -> None:
    """With those that there are."""
    assert list(chosen(wanted=("onnx",))) == ["onnx"]
    with pytest.raises(UnknownCandidate, match="there is no candidate 'fp16'; there are channels-last, bf16"):
        chosen(wanted=("fp16",))


def test_builds_in_float32_are_held_to_small_errors_alone() -> None:
    """Others to what is asked for."""
    bounds = Bounds(0.03, 0.98)
    exact = {each.name: bounds_of(each, bounds) for each in CANDIDATES}

    assert exact["onnx"] == Bounds(MAX_ERROR_FLOAT32, None)
    assert exact["onnx-int8"] == bounds
    assert bounds_of(CANDIDATES[0], Bounds(1e-6)).max_error == 1e-6


@pytest.mark.parametrize(("inputs", "calibrating"), [(0, 0), (1, 0), (2, 1), (20, 10), (40, 16), (100, 25), (1000, 64)])
def test_a_quarter_calibrates_and_is_not_compared(inputs: int, calibrating: int) -> None:
    """Sixteen at least and sixty-four at most, evenly spaced."""
    ours, theirs = split(inputs)

    assert len(ours) == calibrating
    assert sorted(ours + theirs) == list(range(inputs))
    if calibrating > 1:
        steps = {after - before for before, after in itertools.pairwise(ours)}
        assert max(steps) - min(steps) <= 1


def measured(one: float, full: float, low: float = 1.01, size: int = 0) -> Measured:
    """A build with these ratios at batch 1 and 8."""
    return Measured(
        {rows: Ratio(middle, min(low, middle), middle * 1.1) for rows, middle in ((1, one), (8, full))}, size
    )


def test_the_goal_says_which_ratio_counts() -> None:
    """One row at a time, or full batches."""
    builds = {"a": measured(3.0, 1.5), "b": measured(2.0, 4.0)}

    assert best("latency", 8, builds, 100) == "a"
    assert best("throughput", 8, builds, 100) == "b"


def test_what_is_not_surely_faster_does_not_win_however_large_its_ratio() -> None:
    """The low end of its interval is at or below one."""
    assert best("latency", 8, {"a": measured(9.0, 9.0, low=0.9)}, 100) == ""
    assert best("latency", 8, {}, 100) == ""


def test_for_memory_the_smallest_wins_if_it_is_smaller_than_the_parent() -> None:
    """It need not be faster; one whose size is not known is none."""
    builds = {"a": measured(0.95, 1.0, size=30), "b": measured(2.0, 2.0, size=60), "c": measured(9.0, 9.0)}

    assert best("memory", 8, builds, 100) == "a"
    assert best("memory", 8, builds, 30) == ""


@pytest.mark.parametrize(("one", "full"), [(0.5, 2.0), (2.0, 0.5), (0.9, 0.9)])
def test_for_memory_one_that_is_surely_slower_does_not_win(one: float, full: float) -> None:
    """Alone or in full batches: the whole interval is below one."""
    builds = {"a": measured(one, full, size=30), "b": measured(1.0, 1.0, size=60), "untimed": Measured({}, 10)}

    assert best("memory", 8, builds, 100) == "b"


def test_all_have_their_place_in_the_order_in_which_they_are_tried() -> None:
    """Those that are soon built and mostly win come first, and what is compiled last."""
    tried = [candidate.name for candidate in in_order(CANDIDATES)]

    assert sorted(tried) == sorted(NAMES)
    assert tried[:2] == ["onnx-int8", "openvino-int8"]
    assert tried[-1] == "compile"


def test_what_beats_another_is_the_surest_of_those_that_passed() -> None:
    """By the low ends of their intervals, against the high end of the other's; none no faster than the parent."""
    passed = {
        "onnx": Measured({1: Ratio(2.0, 1.9, 2.1), 8: Ratio(3.0, 2.0, 4.0)}, 100),
        "openvino": Measured({1: Ratio(2.1, 1.8, 2.4), 8: Ratio(2.5, 2.4, 2.6)}, 100),
    }

    assert beaten_by("latency", 8, 1.85, passed) == "onnx"
    assert beaten_by("throughput", 8, 1.85, passed) == "openvino"
    assert beaten_by("latency", 8, 1.9, passed) == ""
    assert beaten_by("latency", 8, 0.5, {"onnx": Measured({1: Ratio(1.0, 0.9, 1.1)}, 100)}) == ""
    assert beaten_by("memory", 8, 0.5, passed) == ""
