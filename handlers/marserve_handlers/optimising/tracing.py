"""Whether a trace still does what its class does: the same samples through both, at several batch sizes.

A trace keeps the way that its example went. Where `forward` branches on sizes or numbers, it is wrong elsewhere,
without a word; torch warns only while it traces, so the class is traced once more here, to learn of the author's lines.
"""

from __future__ import annotations

import inspect
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from marserve_handlers.optimising.call_arrays import Call, as_numpy, join, leaves_of
from marserve_handlers.optimising.capture import run_model
from marserve_handlers.optimising.traps import Line, watching
from marserve_handlers.support.shown import first_line, first_line_with_kind

SIZES = (1, 2, 3, 4, 5, 8, 16, 32)
# Of the largest output: what the same arithmetic in another order may differ by.
TOLERANCE = 1e-4
MOST_LINES = 3


class CannotCompare(Exception):
    """The trace, its class or a sample is none that can be run; the message says why."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What a trace and its class showed. `faults` are sentences, `lines` the author's that torch warned of."""

    runs: int
    faults: list[str]
    lines: list[str]


def compare_trace(trace: Path, source: Path, name: str, samples: Sequence[Path]) -> Compared:
    """Run the samples through both. Raises CannotCompare."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch would rather have another format
            traced = torch.jit.load(str(trace), map_location="cpu").eval()  # type: ignore[no-untyped-call]
    except Exception as error:  # torch's reader raises what it stumbles over
        raise CannotCompare(f"{trace.name} is no TorchScript: {first_line(error)}") from None
    model = _make(source, name)
    _take_weights(model, traced, trace.name)
    calls = [_read(sample) for sample in samples]
    faults: list[str] = []
    runs = 0
    with torch.no_grad():
        for sample, call in zip(samples, calls, strict=True):
            try:
                run_model(model, call)
            except Exception as error:  # the author's code, or a sample that does not suit it
                raise CannotCompare(
                    f"{sample.name} as it is: the class fails with {first_line_with_kind(error)}"
                ) from None
        for label, call in _batches(calls, [sample.name for sample in samples]):
            runs += 1
            fault = _compare(model, traced, call)
            if fault:
                faults.append(f"{label}: {fault}")
        lines = _lines(model, calls[0])
    return Compared(runs, faults, lines)


def _make(source: Path, name: str) -> Any:
    """The module that the file's class, or function, makes without arguments."""
    sys.path.insert(0, str(source.parent))
    try:
        found = runpy.run_path(str(source), run_name=source.stem)
    except Exception as error:  # the author's code
        raise CannotCompare(f"{source.name} cannot be imported: {type(error).__name__}: {error}") from None
    if not name:
        own = [
            key
            for key, value in found.items()
            if inspect.isclass(value) and issubclass(value, torch.nn.Module) and value.__module__ == source.stem
        ]
        if len(own) != 1:
            there = f"has the classes {', '.join(own)}" if own else "has no class that extends torch.nn.Module"
            raise CannotCompare(f"{source.name} {there}: name one, as in {source.name}:Net")
        name = own[0]
    if name not in found:
        raise CannotCompare(f"{source.name} has no {name!r}")
    try:
        made = found[name] if isinstance(found[name], torch.nn.Module) else found[name]()
    except Exception as error:  # the author's code
        raise CannotCompare(
            f"{name} of {source.name} cannot be made without arguments ({type(error).__name__}: {error}): name a "
            "function that makes it"
        ) from None
    if not isinstance(made, torch.nn.Module):
        raise CannotCompare(f"{name} of {source.name} is a {type(made).__name__}, no module of torch")
    return made.eval()


def _take_weights(model: Any, traced: Any, name: str) -> None:
    """The trace's weights for the class. A frozen trace has none: then the class must have its own."""
    weights = traced.state_dict()
    if not weights and model.state_dict():
        raise CannotCompare(f"{name} is frozen and holds no weights by name: compare it before torch.jit.freeze")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise CannotCompare(f"the weights of {name} are not those of the class: {said[:300]}") from None


def _read(sample: Path) -> Call:
    """What the model is called with, the batch axis first: an array (.npy, .json), several by order (.npz), tensors."""
    try:
        if sample.suffix == ".npz":
            with np.load(sample, allow_pickle=False) as arrays:
                args = tuple(torch.from_numpy(arrays[name]) for name in arrays)
        elif sample.suffix == ".npy":
            args = (torch.from_numpy(np.load(sample, allow_pickle=False)),)
        elif sample.suffix == ".json":
            args = (torch.tensor(_numbers(sample)),)
        elif sample.suffix in (".pt", ".pth"):
            held = torch.load(sample, map_location="cpu", weights_only=True)
            args = tuple(held) if isinstance(held, (list, tuple)) else (held,)
        else:
            raise CannotCompare(f"{sample.name} ends in none of .npy, .npz, .json, .pt")
    except CannotCompare:
        raise
    except Exception as error:  # of three readers
        raise CannotCompare(f"{sample.name} is no sample: {first_line(error)}") from None
    call = Call(args, {})
    if not call.rows:
        raise CannotCompare(f"{sample.name} has no batch axis: give what the model is called with, rows first")
    return call


def _numbers(sample: Path) -> Any:
    import json  # here, as few samples are

    return json.loads(sample.read_bytes())


def _batches(calls: Sequence[Call], names: Sequence[str]) -> Iterator[tuple[str, Call]]:
    """Each sample as it is, then its rows over and over at several sizes, then beside the next of its shape."""
    for name, call in zip(names, calls, strict=True):
        yield f"{name} as it is", call
        for size in SIZES:
            if size != call.rows:
                many = join([call] * (size // call.rows + 1))
                rows = many.replaced({leaf: value[:size] for leaf, value in many.leaves.items()})
                yield f"{name} as a batch of {size}", rows
    for (first, call), (second, other) in zip(
        zip(names, calls, strict=True), zip(names[1:], calls[1:], strict=True), strict=False
    ):
        if {key: leaf.shape[1:] for key, leaf in call.leaves.items()} == {
            key: leaf.shape[1:] for key, leaf in other.leaves.items()
        }:
            yield f"{first} beside {second}", join([call, other])


def _compare(model: Any, traced: Any, call: Call) -> str:
    """How the trace is off; empty where it is not. Where both fail, nothing is off."""
    wanted, theirs_failed = _run(model, call)
    seen, ours_failed = _run(traced, call)
    if theirs_failed or ours_failed:
        if bool(theirs_failed) == bool(ours_failed):
            return ""
        return (
            f"the trace fails: {ours_failed}" if ours_failed else f"the trace answers, the class fails: {theirs_failed}"
        )
    if len(wanted) != len(seen):
        return f"the trace gives {len(seen)} outputs, the class {len(wanted)}"
    for (name, expected), given in zip(wanted.items(), seen.values(), strict=True):
        ours, theirs = as_numpy(given), as_numpy(expected)
        if ours.shape != theirs.shape:
            return f"{name} has the shape {list(ours.shape)}, the class gives {list(theirs.shape)}"
        ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
        differs = (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs))
        if not differs.any():
            continue
        largest = float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)) or 1.0
        off = float(np.abs(ours[differs] - theirs[differs]).max()) / largest
        if not off <= TOLERANCE:
            return f"{name} is off by {off:.3g} of its largest number"
    return ""


def _run(model: Any, call: Call) -> tuple[dict[str, Any], str]:
    """What it gives, and what it fails with; TorchScript says that last."""
    try:
        return leaves_of(run_model(model, call)), ""
    except Exception as error:  # the author's code
        return {}, (str(error).strip() or type(error).__name__).rpartition("\n")[2]


def _lines(model: Any, call: Call) -> list[str]:
    """The author's lines that tracing the class bakes, each once."""
    with watching(model) as traps:
        try:
            torch.jit.trace(model, call.args, check_trace=False)  # type: ignore[no-untyped-call]
        except Exception as error:  # a class that cannot be traced today was traced elsewhere
            return [f"it cannot be traced again: {first_line(error)}"]
    found: dict[Line, str] = {}
    for words, line in traps.traced:
        found.setdefault(line, words)
    return [f"{line} ({words})" for line, words in list(found.items())[:MOST_LINES]]
