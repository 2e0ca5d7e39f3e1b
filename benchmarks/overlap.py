"""Overlap: what `overlapPreprocess` brings to a handler that preprocesses for 10 ms and computes for 10 ms.

Both steps sleep, as code does that lets go of the interpreter: measured is whether they are side by side. One worker,
batches of one, four connections, beside the same handler without the key, in turns.
"""

from __future__ import annotations

import contextlib

from figures import Figure, Goal
from plan import Plan
from servers import Marserve, Sample, make_archive
from turns import in_turns, rate

LEAST_RATIO = 1.7
CONNECTIONS = 4
PIECES, PIECE_S = 4, 1.0


def measure(plan: Plan) -> list[Figure]:
    """The figure of a pipeline of two steps."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    with contextlib.ExitStack() as stack:
        servers = {}
        for overlaps in rates:
            name = "overlapped" if overlaps else "serial"
            config = {"minWorkers": 1, "maxWorkers": 1, "overlapPreprocess": overlaps}
            archive = make_archive(plan.folder / f"two-steps-{name}", "two_steps", "two_steps.py", config)
            servers[overlaps] = stack.enter_context(
                Marserve(f"marserve, {name}", archive, plan.new_folder(name), sample=Sample(b"x"))
            )
        for number in range(plan.rounds):
            plan.say(f"overlap: round {number + 1} of {plan.rounds}")
            seen = in_turns(
                list(rates),
                number,
                1 if plan.is_quick else PIECES,
                lambda overlaps: plan.generator.run(
                    servers[overlaps].port,
                    servers[overlaps].path,
                    body_bytes=1,
                    connections=CONNECTIONS,
                    seconds=PIECE_S,
                ).must_be_clean(servers[overlaps].name),
            )
            for overlaps, loads in seen.items():
                rates[overlaps].append(rate(loads))
                servers[overlaps].forget_output()
    return [
        Figure("preprocess 10 ms, compute 10 ms, one worker", "1/s", rates[True], "without overlapPreprocess",
               rates[False], goal=Goal("at least", LEAST_RATIO, "compared"), digits=1),
    ]  # fmt: skip
