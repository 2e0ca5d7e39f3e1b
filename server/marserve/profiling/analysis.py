"""`python -m marserve.profiling.analysis`: what a worker measured in, a `ModelProfile` and one trace out.

Reading a trace takes up to a second, in which the server's own process could do nothing else. It runs at a low
priority, and within limits: a worker may have written anything.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys

import msgspec

from marserve.answers.profiles import ModelProfile
from marserve.messages import Profiled
from marserve.profiling.breakdown import parts_of, top_operators, whole_s
from marserve.profiling.flame import operator_stacks, python_stacks
from marserve.profiling.ranks import describe_ranks
from marserve.profiling.trace import BadTrace, Trace, merge, read_trace

NICENESS = (
    10  # not the lowest: of busy processors a process of 19 gets a fiftieth, and this one has a client that waits
)
MOST_MEMORY = 4 << 30
# How much a trace may be when it is unpacked, for each byte of `max_bytes`: a file has a fifth of what memory holds.
UNPACKED = 2


class Measured(msgspec.Struct, array_like=True):
    """What goes in: the worker's message, its traces, the bound that was asked for, and what py-spy wrote."""

    profiled: Profiled
    traces: list[bytes]
    max_bytes: int
    python: str = ""


class Analysed(msgspec.Struct, array_like=True):
    """What comes out: the profile, and all its traces as one, packed by gzip; empty without any."""

    profile: ModelProfile
    trace: bytes


def most_unpacked(measured: Measured) -> int:
    """How many bytes a trace may have when it is unpacked."""
    return max(1 << 20, measured.max_bytes * UNPACKED)


def analyse(measured: Measured) -> ModelProfile:
    """The profile, without the names that only the server knows."""
    profiled = measured.profiled
    remarks = list(profiled.remarks)
    by_rank: dict[int, list[Trace]] = {}
    for rank, packed in zip(profiled.traces, measured.traces, strict=True):
        try:
            by_rank.setdefault(rank, []).append(read_trace(packed, most_unpacked(measured)))
        except BadTrace as error:
            remarks.append(f"A trace of rank {rank} cannot be read: {error}")
    own = by_rank.get(0, [])
    if not profiled.knows_waiting:
        remarks.append("This system does not say how long a thread waits for a processor: that is told as blocked.")
    if not profiled.batches:
        remarks.insert(
            0, "No request came to this worker meanwhile: send the model requests, as many as it gets in service."
        )
    if profiled.threads > 1 and own:
        remarks.append(
            f"Operators use {profiled.threads} threads here. What they wait for each other may be told as blocked; "
            "with one thread the parts are exact."
        )
    if 0 < profiled.recorded < len(profiled.batches):
        remarks.append(
            f"Operators were recorded in {profiled.recorded} of {len(profiled.batches)} batches: no more fit "
            "max_bytes. The shares of operators and Python are those of these batches."
        )
    python = python_stacks(measured.python)
    return ModelProfile(
        ms=round(whole_s(profiled) * 1000, 3),
        requests=sum(each.requests for each in profiled.batches),
        batches=len(profiled.batches),
        parts=parts_of(profiled, own),
        recordedBatches=profiled.recorded,
        operators=top_operators(own),
        noOperators=profiled.no_operators or None,
        threads=profiled.threads,
        ranks=describe_ranks(by_rank) if len(by_rank) > 1 else None,
        operatorStacks=operator_stacks(own) or None,
        pythonStacks=python or None,
        remarks=remarks or None,
        hasTrace=bool(measured.traces),
    )


def main() -> None:
    """Read, analyse, write."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    measured = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Measured)
    written = Analysed(analyse(measured), merge(measured.traces, most_unpacked(measured)))
    sys.stdout.buffer.write(msgspec.msgpack.encode(written))


if __name__ == "__main__":
    main()
