"""Which builds are worth a try, for a kind of model on a machine, and by which bounds each is judged. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from marserve.optimise.comparison import MAX_ERROR_FLOAT32, Bounds, inputs_needed
from marserve.optimise.ratio import Ratio
from marserve.option_values import BUILDS

Goal = Literal["latency", "throughput", "memory"]

# What a build is held to where nothing else is said.
DEFAULT_BOUNDS: Final = Bounds(min_agreement=0.98)
# The share of the inputs that calibrates, and is not compared.
CALIBRATION_SHARE: Final = 0.25
LEAST_CALIBRATION, MOST_CALIBRATION = 16, 64


class UnknownCandidate(ValueError):
    """There is no build of that name; the message says which there are."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A build by its name. `is_exact`: it computes in float32, as its parent does, so that errors alone judge it.

    `needs` are packages, `tools` programs; `of` are the kinds of models that it is made of. `calibrates`: it takes its
    scales from inputs, which are not compared; others take them for examples alone.
    """

    name: str
    is_exact: bool
    needs: tuple[str, ...] = ()
    of: tuple[str, ...] = ("torch", "torchscript")
    flags: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    calibrates: bool = False


CANDIDATES: Final = (
    Candidate("channels-last", is_exact=True),
    Candidate("bf16", is_exact=False, flags=("avx512_bf16", "amx_bf16", "bf16")),
    Candidate("onnx", is_exact=True, needs=("onnxruntime", "onnx", "onnxscript")),
    Candidate(
        "onnx-int8",
        is_exact=False,
        needs=("onnxruntime", "onnx", "onnxscript"),
        of=("torch", "torchscript", "onnx"),
        calibrates=True,
    ),
    Candidate("openvino", is_exact=True, needs=("openvino", "onnx", "onnxscript")),
    Candidate("openvino-int8", is_exact=False, needs=("openvino", "nncf", "onnx", "onnxscript"), calibrates=True),
    Candidate("compile", is_exact=True, of=("torch",), tools=("g++",)),
    Candidate("aot", is_exact=True, of=("torch",), tools=("g++",)),
    Candidate("aot-int8", is_exact=False, needs=("torchao",), of=("torch",), tools=("g++",), calibrates=True),
    Candidate("int8-rows", is_exact=False, needs=("torchao",), of=("torch",), tools=("g++",)),
)
# In which order they are tried: those first that mostly win and are soon built, so that the others need only a look.
TRIED: Final = (
    "onnx-int8",
    "openvino-int8",
    "bf16",
    "onnx",
    "openvino",
    "channels-last",
    "aot-int8",
    "aot",
    "int8-rows",
    "compile",
)
# Those that hold native code, which runs as soon as it is loaded: a server wants the archive trusted.
NATIVE: Final = ("aot", "aot-int8")
# What candidates need beside the server: a file's being there is enough to say so, nothing is imported.
PACKAGES: Final = ("torch", "onnx", "onnxruntime", "onnxscript", "openvino", "nncf", "torchao")
TOOLS: Final = tuple(sorted({tool for candidate in CANDIDATES for tool in candidate.tools}))
NAMES: Final = BUILDS


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate, and why it is not tried, empty where it is."""

    candidate: Candidate
    why_not: str = ""


def refuse_unknown(wanted: Sequence[str]) -> None:
    """Raise UnknownCandidate for the first name that is no candidate's."""
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise UnknownCandidate(f"there is no candidate {unknown[0]!r}; there are {', '.join(NAMES)}")


def choose(
    kind: str,
    flags: Collection[str],
    installed: Collection[str],
    wanted: Sequence[str],
    compared: int,
    min_agreement: float | None,
    *,
    has_agreement: bool,
    is_drawn: bool = False,
    calibrating: int = LEAST_CALIBRATION,
) -> list[Choice]:
    """Each wanted candidate (none: all), in their order, with why it is not worth a try.

    `compared` is how many inputs are left to compare; `has_agreement`: something says whether two answers agree;
    `is_drawn`: the inputs are drawn from a declaration, and show errors alone; `calibrating` is how many calibrate.
    Raises UnknownCandidate for a name that no candidate has.
    """
    refuse_unknown(wanted)
    chosen = [each for each in CANDIDATES if not wanted or each.name in wanted]
    missing = inputs_needed(min_agreement) - compared if has_agreement and min_agreement is not None else 0
    return [
        Choice(each, _why_not(each, kind, flags, installed, missing, is_drawn=is_drawn, is_calibrated=calibrating > 0))
        for each in chosen
    ]


def _why_not(
    candidate: Candidate,
    kind: str,
    flags: Collection[str],
    installed: Collection[str],
    missing: int,
    *,
    is_drawn: bool,
    is_calibrated: bool,
) -> str:
    if kind not in candidate.of:
        return f"it is not made of a model that is {kind}"
    lacking = [name for name in candidate.needs if name not in installed]
    if lacking:
        return f'{", ".join(lacking)} is not installed: pip install "marserve[optimise]"'
    lacking = [name for name in candidate.tools if name not in installed]
    if lacking:
        return f"{', '.join(lacking)} is not installed, and compiles it (apt-get install {' '.join(lacking)})"
    if candidate.flags and not any(flag in flags for flag in candidate.flags):
        return f"this processor has none of {', '.join(candidate.flags)}, and is slower in it"
    if not candidate.is_exact and is_drawn:
        return "inputs that are drawn from the signature show errors in float32 alone: it takes --inputs"
    if not candidate.is_exact and missing > 0:
        more = f"{missing} more inputs are" if missing > 1 else "1 more input is"
        return f"{more} needed to show the agreement that is asked for"
    if candidate.calibrates and not is_calibrated:
        return "1 more input is needed: one calibrates it, and another one is compared"
    return ""


def in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The same in the order in which they are tried."""
    return sorted(candidates, key=lambda each: TRIED.index(each.name))


def bounds_of(candidate: Candidate, bounds: Bounds) -> Bounds:
    """What a candidate is held to: one that computes in float32 to errors alone, and small ones."""
    if candidate.is_exact:
        return Bounds(min(bounds.max_error, MAX_ERROR_FLOAT32), None, bounds.max_mates)
    return bounds


def split(count: int) -> tuple[list[int], list[int]]:
    """The indices of the inputs that calibrate, evenly spaced, and of those that are compared: never the same.

    A quarter calibrates, at least 16 and at most 64 of them; with too few inputs, half.
    """
    calibrating = min(MOST_CALIBRATION, max(LEAST_CALIBRATION, round(count * CALIBRATION_SHARE)), count // 2)
    chosen = {at * count // calibrating for at in range(calibrating)} if calibrating else set()
    return sorted(chosen), [at for at in range(count) if at not in chosen]


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a build that passed: how many times as fast by batch size, and the bytes of its weights."""

    ratios: Mapping[int, Ratio]
    size: int


def rows_of(goal: Goal, batch_size: int) -> int:
    """The size of the batches whose ratio a goal is about."""
    return 1 if goal == "latency" else batch_size


def beaten_by(goal: Goal, batch_size: int, high: float, passed: Mapping[str, Measured]) -> str:
    """The best build that passed and is faster with certainty than one that is at most `high` times as fast, if any.

    Such a one need not be compared: it cannot win. Where the least memory wins nothing is known of it by its speed.
    """
    if goal == "memory":
        return ""
    rows = rows_of(goal, batch_size)
    lows = {name: each.ratios[rows].low for name, each in passed.items() if rows in each.ratios}
    lows = {name: low for name, low in lows.items() if low > max(high, 1.0)}
    return max(lows, key=lambda name: lows[name], default="")


def best(goal: Goal, batch_size: int, measured: Mapping[str, Measured], parent_bytes: int) -> str:
    """The name of the best build for a goal, empty where none is better than its parent.

    Faster is what is so with certainty: by the low end of its interval. One that is smaller must not be slower with
    certainty, neither alone nor in full batches. Of builds with the same figure the first wins.
    """
    if goal == "memory":
        smaller = {
            name: each.size
            for name, each in measured.items()
            if 0 < each.size < parent_bytes
            and each.ratios
            and not any(ratio.is_slower for ratio in each.ratios.values())
        }
        return min(smaller, key=lambda name: smaller[name], default="")
    rows = rows_of(goal, batch_size)
    ratios = {name: each.ratios[rows] for name, each in measured.items() if rows in each.ratios}
    faster = {name: ratio.middle for name, ratio in ratios.items() if ratio.is_faster}
    return max(faster, key=lambda name: faster[name], default="")
