"""Measures what `docs/benchmarks.md` describes: marserve beside others, in one run, on this machine.

    python benchmarks/run.py [--only echo,start,kill,memory,neighbour,client,goal] [--rounds 5] [--quick] [--json FILE]

Prints one table; `--json` writes every round. The exit status says whether everything could be measured, never
whether a goal was met: speed depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import declared
import downloads
import echo
import eviction
import goal
import growing
import grpc_calls
import kill
import large_body
import many_models
import models
import neighbour
import object_stores
import observing
import open_inference
import optimised
import overlap
import peers
import printing
import ray_pool
import rolling_restart
import rollouts
import scheduler
import scrapes
import shared_memory
import start
import steps
import workers
from figures import Figure, document, table
from load_generator import CannotMeasure, LoadGenerator
from plan import Plan
from rich.console import Console

import client
import memory
import profiling
import tuning
from marserve import __version__

BENCHMARKS: dict[str, Callable[[Plan], list[Figure]]] = {
    "peers": peers.measure,
    "echo": echo.measure,
    "large_body": large_body.measure,
    "models": models.measure,
    "workers": workers.measure,
    "grpc": grpc_calls.measure,
    "client": client.measure,
    "start": start.measure,
    "kill": kill.measure,
    "memory": memory.measure,
    "neighbour": neighbour.measure,
    "printing": printing.measure,
    "profiling": profiling.measure,
    "observing": observing.measure,
    "declared": declared.measure,
    "many_models": many_models.measure,
    "steps": steps.measure,
    "overlap": overlap.measure,
    "optimised": optimised.measure,
    "goal": goal.measure,
    "eviction": eviction.measure,
    "scheduler": scheduler.measure,
    "tuning": tuning.measure,
    "scrapes": scrapes.measure,
    "open_inference": open_inference.measure,
    "shared_memory": shared_memory.measure,
    "growing": growing.measure,
    "downloads": downloads.measure,
    "download_start": downloads.measure_start,
    "object_stores": object_stores.measure,
    "rollouts": rollouts.measure,
    "rolling_restart": rolling_restart.measure,
    "ray_pool": ray_pool.measure,
}
# What takes many minutes is measured only when it is asked for by name.
DEFAULT = [name for name in BENCHMARKS if name not in ("goal", "optimised")]
ROUNDS, QUICK_ROUNDS = 5, 1


def main() -> int:
    """Read the command line, measure, show. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure marserve beside others on this machine.")
    parser.add_argument("--only", default=",".join(DEFAULT), help="which, with commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help=f"how often each is measured (default: {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="less of everything: shows that it runs, proves nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round to this file")
    words = parser.parse_args()
    chosen = [name for name in words.only.split(",") if name]
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown or not chosen:
        parser.error(f"--only takes some of {', '.join(BENCHMARKS)}; it got {words.only!r}")
    rounds = words.rounds if words.rounds is not None else QUICK_ROUNDS if words.quick else ROUNDS
    if rounds < 1:
        parser.error(f"--rounds must be 1 or more; it got {rounds}")
    signal.signal(signal.SIGTERM, _leave)  # as Ctrl-C does: through every `finally`, so that no server is left
    try:
        return _measure(chosen, rounds, words.quick, words.json)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _measure(chosen: list[str], rounds: int, is_quick: bool, json_file: Path | None) -> int:
    progress = Console(stderr=True)
    figures: list[Figure] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="marserve-benchmarks-") as folder:
        try:
            generator = LoadGenerator.compile(Path(folder))
        except CannotMeasure as error:
            print(error, file=sys.stderr)
            return 1
        plan = Plan(
            Path(folder), rounds, is_quick, generator, lambda text: progress.print(text, style="dim", soft_wrap=True)
        )
        for name in chosen:
            try:
                figures += BENCHMARKS[name](plan)
            except CannotMeasure as error:
                failures.append(f"{name} could not be measured: {error}")
    machine = (
        f"marserve {__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}; "
        f"medians of {rounds} round{'' if rounds == 1 else 's'}{', quick' if is_quick else ''}"
    )
    out = Console(width=None if sys.stdout.isatty() else 200)
    if figures:
        out.print(table(figures))
        out.print(machine, style="dim", highlight=False)
    for failure in failures:
        print(failure, file=sys.stderr)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine, "figures": document(figures)}, indent=2) + "\n")
    return 1 if failures else 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
