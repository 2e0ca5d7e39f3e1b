"""A GPU behind a server: what is left of a handler's speed, and what overlapping copies with computing brings.

    python benchmarks/gpu.py [--device cuda] [--works cnn,resnet,encoder] [--rounds 5] [--quick] [--json FILE]

    96 connections   W1 to W3 (`models.py`) on the GPU, one worker, batches of up to 32 within 5 ms: requests a second
                     beside the same code called with batches of 32 in a plain loop, in turns. Goal: 0.9 of it
    one connection   the median time, beside a call with a batch of one in the loop
    overlapped       the loop with copies and decoding beside the device's work, and one after the other

Server and loop use the same device in turns, the first that `nvidia-smi` counts or that `CUDA_VISIBLE_DEVICES` names. A
server that gives its worker none is not measured: it would compute on the CPU, and answer all the same.

`--device cpu` shows that it runs where there is no GPU (with `--quick` a minute for all three works); its figures mean
nothing. The exit status says whether everything could be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from figures import Figure, Goal, document, table
from load_generator import CannotMeasure, LoadGenerator
from models import WORKS, PlainLoop
from plan import Plan
from rich.console import Console
from servers import HANDLERS, Marserve, Sample, make_archive, one_piece
from turns import turn

from marserve import __version__

BATCH, DELAY_MS, MANY = 32, 5, 96
PIECES, OF_THE_LOOP = 4, 0.9


class Seen:
    """The figures of the rounds that were run; written to a file after each, so that a run cut off leaves them."""

    def __init__(self, machine: str, file: Path | None) -> None:
        self.machine, self._file = machine, file
        self._of: dict[str, list[Figure]] = {}

    @property
    def figures(self) -> list[Figure]:
        """Of all works, in their order."""
        return [figure for figures in self._of.values() for figure in figures]

    def put(self, work: str, figures: list[Figure]) -> None:
        """A work's figures, of one round more."""
        self._of[work] = figures
        if self._file is not None:
            told = {"machine": self.machine, "figures": document(self.figures)}
            beside = self._file.with_name(f"{self._file.name}.new")
            beside.write_text(json.dumps(told, indent=2) + "\n")
            beside.replace(self._file)


def measure(plan: Plan, device: str, works: list[str], seen: Seen) -> None:
    """Measure these works. Raises CannotMeasure."""
    plan.say("making the networks")
    files = plan.new_folder("networks")
    files.mkdir()
    program = [sys.executable, str(HANDLERS / "workload.py"), "make", str(files)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMeasure(f"the networks could not be made:\n{done.stderr.strip()}")
    for work in works:
        _measure_one(plan, device, work, files, seen)


def _measure_one(plan: Plan, device: str, work: str, files: Path, all_seen: Seen) -> None:
    name, body_name, content_type, many_s = WORKS[work]
    body_file = files / body_name
    config = {
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": BATCH,
        "maxBatchDelay": DELAY_MS,
        "deviceType": "cpu" if device == "cpu" else "gpu",
        "work": work,
    }
    archive = make_archive(
        plan.folder / f"gpu-{work}", work, "device_handler.py", config, files / f"{work}.pt",
        (str(body_file), str(HANDLERS / "device_work.py"), str(HANDLERS / "workload.py")),
    )  # fmt: skip
    # A batch must fit in, and on a CPU one of W2 takes a second.
    seconds, pieces = (many_s / 4, 1) if plan.is_quick else (many_s / 2, PIECES)
    rates: dict[str, list[float]] = defaultdict(list)
    alone: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        loop = stack.enter_context(PlainLoop(HANDLERS / "device_work.py", work, files, device))
        sample = Sample(body_file.read_bytes(), content_type)
        server = stack.enter_context(Marserve("marserve", archive, plan.new_folder("gpu"), sample=sample))
        _see_device(server, device)

        def ask(connections: int, for_s: float) -> tuple[float, float]:
            load = one_piece(
                plan.generator, server, body_file=body_file, content_type=content_type, connections=connections,
                seconds=for_s,
            )  # fmt: skip
            return load.per_second, load.p50_ms

        ask(MANY, seconds)
        for number in range(plan.rounds):
            plan.say(f"{name}, round {number + 1} of {plan.rounds}")
            seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for piece in range(pieces):
                for who in turn(["server", "loop", "in order", "server alone", "loop alone"], number + piece):
                    if who.startswith("server"):
                        seen[who].append(ask(MANY if who == "server" else 1, seconds))
                    else:
                        batch = 1 if who == "loop alone" else BATCH
                        seen[who].append(loop.run(batch, seconds, who != "in order"))
            for who, measured in seen.items():
                rates[who].append(median(per_second for per_second, _ in measured))
                alone[who].append(median(p50_ms for _, p50_ms in measured))
            all_seen.put(work, _figures(name, device, rates, alone))


def _figures(name: str, device: str, rates: dict[str, list[float]], alone: dict[str, list[float]]) -> list[Figure]:
    beside = f"plain loop, batches of {BATCH}"
    return [
        Figure(f"{name} on {device}, {MANY} connections", "/s", rates["server"], beside, rates["loop"],
               goal=Goal("at least", OF_THE_LOOP, "compared")),
        Figure(f"{name} on {device}, 1 connection, p50", "ms", alone["server alone"], "plain loop, batch of 1",
               alone["loop alone"], "difference", digits=3),
        Figure(f"{name} on {device}, overlapped loop", "/s", rates["loop"], "one after the other", rates["in order"]),
    ]  # fmt: skip


def _see_device(server: Marserve, device: str) -> None:
    """Raises CannotMeasure where the worker is not on the device that is measured."""
    _, described = server.manage("GET", f"/models/{Path(server.path).name}")
    (worker,) = json.loads(described)[0]["workers"]
    if worker["gpu"] != (device != "cpu"):
        raise CannotMeasure(
            f"The server's worker is{'' if worker['gpu'] else ' not'} on a device, and --device is {device}. The "
            "server finds devices by nvidia-smi or rocm-smi, torch by the driver: see that the tool is on the PATH and "
            "prints them."
        )


def main() -> int:
    """Read the command line, measure, show. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Measure marserve with a GPU beside the same handler in a plain loop.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cuda (ROCm too), or cpu to try it")
    parser.add_argument("--works", default=",".join(WORKS), help="which, with commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="less of everything: shows that it runs, proves nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round to this file, when it is over")
    words = parser.parse_args()
    works = words.works.split(",")
    if not set(works) <= set(WORKS) or words.rounds < 1:
        parser.error(f"--works takes some of {', '.join(WORKS)}, --rounds 1 or more")
    name = "no GPU"
    if words.device == "cuda":
        # As the server tells its workers: else device 0 of the loop may be another one than device 0 of the server.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        import torch

        if not torch.cuda.is_available():
            print(
                f"There is no GPU here that torch {torch.__version__} can use: torch.cuda.is_available() is False. Run "
                "this on a machine with one and torch's build for it, or with --device cpu to see that it runs.",
                file=sys.stderr,
            )
            return 1
        name = torch.cuda.get_device_name(0)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # through every `finally`
    progress = Console(stderr=True)
    rounds = 1 if words.quick else words.rounds
    machine = f"marserve {__version__}, Python {platform.python_version()}, {name}; medians of {rounds} rounds"
    seen = Seen(machine, words.json)
    with tempfile.TemporaryDirectory(prefix="marserve-gpu-") as folder:
        try:
            generator = LoadGenerator.compile(Path(folder))
            say = partial(progress.print, style="dim", soft_wrap=True)
            measure(Plan(Path(folder), rounds, words.quick, generator, say), words.device, works, seen)
        except CannotMeasure as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            if seen.figures:  # of a run that was ended, too
                out = Console(width=None if sys.stdout.isatty() else 200)
                out.print(table(seen.figures))
                out.print(seen.machine, style="dim", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
