"""Loads the build that an optimised archive holds, and its parent where the build does not do what was promised.

`MAR-INF/optimised.json` names the build; `optimised/` has its files, and samples with what the build gave. At each load
some samples are run again. Where their outputs are others, or the build does not load, the parent serves, and
`warnings` of describe say why. On a processor with other instructions, or with other versions of libraries, both are
measured, and the faster one serves; a build that was chosen for its memory serves unless it is surely slower. A build
of native code, which runs as soon as it is loaded, is loaded for archives that are trusted alone, and of a folder in
which the server made it by itself (`context.build_folder`).

The digests that the proof has of the files are not computed here: for 50 MB that takes as long as the load itself. A
damaged archive fails when it is unpacked, by its own checksums, and a damaged folder of the server's when that starts.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from marserve_handlers.context import note_warning
from marserve_handlers.optimising.builds import NATIVE, CannotBuild, find_build
from marserve_handlers.optimising.call_arrays import Call, as_numpy, leaves_of
from marserve_handlers.optimising.capture import run_model
from marserve_handlers.optimising.machine import cpu_flags, versions
from marserve_handlers.optimising.sample_calls import read_samples

logger = logging.getLogger(__name__)

PROOF, FOLDER, SAMPLES = "MAR-INF/optimised.json", "optimised", "samples.npz"
FORMAT = 1
"""Of the proof; another one may mean other things by the same names."""
# The time for samples beyond the first, as a share of the load's.
CHECK_SHARE = 0.1
MAX_ERROR = 1e-3
PAIRS = 9
MEASURE_S = 0.5
# Of what a proof says: so many bytes, so many ratios, none larger.
MOST_PROOF = 1 << 20
MOST_RATIOS, MOST_RATIO = 8, 1e6


class NotAsPromised(Exception):
    """The build does not do what the archive says: the message says what."""


def load_optimised(folder: str, parent: Callable[[], Any], threads: int, context: Any) -> Any:
    """The model to serve: the build of the folder, whose name the context then has, or the parent."""
    name = ""
    try:
        proof = _read_proof(Path(folder, PROOF))
        name = str(proof["build"])
        is_trusted = getattr(context, "is_trusted", False) is True or bool(getattr(context, "build_folder", ""))
        if name in NATIVE and not is_trusted:
            raise NotAsPromised(
                "it is native code, which runs as soon as it is loaded, and the archive is not among trusted_models. "
                "Add the archive's name or SHA-256 there if you trust where it comes from"
            )
        missing = [file for file in proof["files"] if not Path(folder, file).is_file()]
        if missing:
            raise NotAsPromised(f"{missing[0]} is missing, which {PROOF} names")
        model, again = _load(Path(folder, FOLDER), name, proof, parent, threads)
    except NotAsPromised as error:
        what = f"the build {name} of the archive" if name else "the build of the archive"
        note_warning(context, f"{what} is not used, the parent serves: {error}")
    except Exception as error:  # of a library's, or of a file that is not what it should be
        what = f"{type(error).__name__}: {error}"
        note_warning(context, f"the build {name or 'of the archive'} cannot be loaded, the parent serves: {what}")
    else:
        logger.info("The model is served as %s", name)
        context.computes_on = context.build = name
        flops = proof.get("flops")
        context.build_flops = flops if isinstance(flops, dict) else None
        context.build_ratios = again or _recorded_ratios(proof)
        return model
    context.refused_build = name or "unknown"
    return parent()


def _read_proof(path: Path) -> dict[str, Any]:
    """What the archive says of its build. Raises NotAsPromised for another format, OSError, ValueError.

    RecursionError for lists in lists.
    """
    with path.open("rb") as file:
        text = file.read(MOST_PROOF + 1)
    if len(text) > MOST_PROOF:
        raise ValueError(f"{PROOF} has more than {MOST_PROOF} bytes")
    proof = json.loads(text)
    if not isinstance(proof, dict):
        raise ValueError(f"{PROOF} is no JSON object")
    if proof.get("format") != FORMAT:
        seen = json.dumps(proof.get("format"))[:20]
        raise NotAsPromised(
            f"{PROOF} is of format {seen}, and this marserve reads {FORMAT}: optimise the archive's parent anew"
        )
    return proof


def _recorded_ratios(proof: Mapping[str, Any]) -> dict[str, float]:
    """The ratios of the proof, by rows of a batch; none where it has none that are numbers."""
    try:
        found = {str(int(rows)): float(ratio[0]) for rows, ratio in proof["ratios"].items()}
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError):
        return {}
    return {rows: ratio for rows, ratio in list(found.items())[:MOST_RATIOS] if 0 < ratio < MOST_RATIO}


def _load(
    folder: Path, name: str, proof: Mapping[str, Any], parent: Callable[[], Any], threads: int
) -> tuple[Any, dict[str, float]]:
    """The build, and its ratios where they had to be measured again."""
    began = time.perf_counter()
    try:
        model = find_build(name).load(parent, folder, threads)
    except CannotBuild as error:
        raise NotAsPromised(str(error)) from None
    first = _check(folder / SAMPLES, model, CHECK_SHARE * (time.perf_counter() - began))
    here = {"cpu": cpu_flags(), "versions": versions()}
    there = {key: proof[key] for key in here}
    if here != there:
        may_be_as_fast = proof.get("goal") == "memory"
        return model, _measure_again(model, parent, first, _changed(there, here), may_be_as_fast=may_be_as_fast)
    return model, {}


def _check(samples: Path, model: Any, seconds: float) -> Call:
    """Run as many samples as fit the time, one at least; the first of them. Raises NotAsPromised."""
    first: Call | None = None
    began = time.perf_counter()
    until = began + seconds
    # Of one sample: the first run of a model is often slow, so it stands for others only until there are any.
    longest = 0.0
    for at, (call, wanted) in enumerate(read_samples(samples, model)):
        now = time.perf_counter()
        longest = now - began if at < 3 else max(longest, now - began)
        if first is not None and now + longest > until:
            break
        began = now
        first = first or call
        if not wanted:
            raise NotAsPromised(f"no output of sample {at} is recorded to check it by")
        seen = {output: as_numpy(leaf) for output, leaf in leaves_of(run_model(model, call)).items()}
        if seen.keys() != wanted.keys():
            raise NotAsPromised(f"sample {at} has the outputs {', '.join(seen)}, recorded are {', '.join(wanted)}")
        for output, array in wanted.items():
            _compare(f"{output} of sample {at}", seen[output], array)
    if first is None:
        raise NotAsPromised("there are no samples to check it by")
    return first


def _compare(what: str, seen: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    if seen.shape != wanted.shape:
        raise NotAsPromised(f"{what} is {list(seen.shape)}, recorded is {list(wanted.shape)}")
    if "U" in (seen.dtype.kind, wanted.dtype.kind):
        if seen.dtype.kind != wanted.dtype.kind or (seen != wanted).any():
            raise NotAsPromised(f"{what} is not the text that was recorded")
        return
    ours, theirs = (_as_reals(each).ravel() for each in (seen, wanted))
    finite = np.isfinite(ours) & np.isfinite(theirs)
    strange = np.flatnonzero(~finite & ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs))))
    if strange.size:
        first = strange[0]
        raise NotAsPromised(
            f"{what} is {ours[first]:g} where {theirs[first]:g} is recorded, in {strange.size} of {ours.size} numbers"
        )
    # Infinities and what is no number on both sides are left out.
    ours, theirs = ours[finite], theirs[finite]
    count = max(1, ours.size)
    error, scale = float(np.abs(ours - theirs).sum()) / count, float(np.abs(theirs).sum()) / count
    if error > MAX_ERROR * scale:
        share = f"{error / scale:.2g} of what was recorded" if scale else f"{error:.2g}, and only zeros were recorded"
        raise NotAsPromised(f"{what} is off by {share}")


def _as_reals(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Complex numbers as two real ones each."""
    if array.dtype.kind != "c":
        return array.astype(np.float64)
    return np.stack([array.real, array.imag], -1).astype(np.float64)


def _measure_again(
    model: Any, parent: Callable[[], Any], call: Call, changed: str, *, may_be_as_fast: bool
) -> dict[str, float]:
    """How many times as fast as its parent it is here, by rows. Raises NotAsPromised where it is not faster.

    One that may be as fast, for it takes less memory, must not be slower with certainty, as where it was chosen.
    """
    other = parent()
    ratios = []
    until = time.perf_counter() + MEASURE_S
    for _ in range(PAIRS):
        seconds = []
        for each in (other, model):
            began = time.perf_counter()
            run_model(each, call)
            seconds.append(time.perf_counter() - began)
        ratios.append(seconds[0] / max(seconds[1], 1e-9))
        if time.perf_counter() > until:
            break
    ratios.sort()
    # Of nine ratios the eighth is above the median with a certainty of 98 %.
    decides = ratios[-2 if len(ratios) >= PAIRS else -1] if may_be_as_fast else median(ratios)
    if decides < 1.0:
        raise NotAsPromised(f"it is {median(ratios):.2f} times as fast as the parent here; {changed}")
    logger.info("The build was measured again: %.2f times as fast as the parent; %s", median(ratios), changed)
    return {str(call.rows): median(ratios)}


def _changed(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    if there["cpu"] != here["cpu"]:
        return f"it was built for {' '.join(there['cpu'])}, and this processor has {' '.join(here['cpu'])}"
    words = [
        f"{name} {there['versions'].get(name, 'not there')} then, {here['versions'].get(name, 'not there')} now"
        for name in sorted({*there["versions"], *here["versions"]})
        if there["versions"].get(name) != here["versions"].get(name)
    ]
    return "; ".join(words)
