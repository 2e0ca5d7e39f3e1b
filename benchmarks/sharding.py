"""Sharding: what a model divided by `parallel` takes on each rank, how long its load is, and whether its answers stay.

A tower of linear layers is loaded by 1, 2 and 4 processes as the ranks of a worker load it: from one `.safetensors`
file, and from what so many ranks saved by `torch.distributed.checkpoint`. All answer the same inputs. Of each rank is
measured how much anonymous memory it has at most beyond what it has with torch imported: looked at every two
milliseconds, so a shorter peak may be missed. `--gib 1` is what the figures are of.

    .venv/bin/python benchmarks/sharding.py --gib 1 --loads 1 2 1:2 2:1 2:4
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MOST_OF_SHARE, MOST_BESIDE_BYTES = 1.05, 128 << 20
MOST_DIFFERENCE = 1e-5
WIDTH = 2048
LAYER_BYTES = 4 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
MODEL = """
import torch
from torch import nn

class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(%(width)d, %(wide)d), "down": nn.Linear(%(wide)d, %(width)d)})
            for _ in range(%(layers)d)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return x
"""


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank measured: bytes of its parameters, its peak beyond its start, seconds, and what it answers.

    `saved_by` ranks wrote the checkpoint, 0 for the file. `differs` is why the ranks did not answer, empty if they did.
    """

    saved_by: int
    ranks: int
    rank: int
    share_bytes: int
    peak_bytes: int
    seconds: float
    answers: list[list[float]]
    differs: str

    @property
    def most_bytes(self) -> int:
        """What its peak may be."""
        return int(MOST_OF_SHARE * self.share_bytes) + MOST_BESIDE_BYTES

    @property
    def seconds_a_gb(self) -> float:
        """Of its own share."""
        return self.seconds / (self.share_bytes / 1e9)


def write_model(folder: Path, bytes_wanted: int, weights: str = "tower.safetensors") -> dict[str, Any]:
    """A model of about so many bytes in the folder, and its weights in a file of it; returns these."""
    import torch  # here: only a rank and the one that writes need it
    from safetensors.torch import save_file

    layers = max(1, round(bytes_wanted / LAYER_BYTES))
    (folder / "tower.py").write_text(MODEL % {"width": WIDTH, "wide": 4 * WIDTH, "layers": layers})
    torch.manual_seed(7)
    state = {}
    for at in range(layers):
        for name, shape in (("up", (4 * WIDTH, WIDTH)), ("down", (WIDTH, 4 * WIDTH))):
            state[f"layers.{at}.{name}.weight"] = torch.randn(shape) / shape[1] ** 0.5
            state[f"layers.{at}.{name}.bias"] = torch.randn(shape[0])
    (folder / weights).parent.mkdir(exist_ok=True)
    save_file(state, str(folder / weights))
    return state


def run_ranks(folder: Path, ranks: int, saved_by: int = 0, saves: str = "") -> list[Rank]:
    """Load the model on so many processes, have them answer, and save what they have as a checkpoint of that name.

    Raises CalledProcessError if one does not end well.
    """
    with tempfile.TemporaryDirectory() as meeting:
        arguments = [str(folder), str(saved_by), str(Path(meeting, "store")), saves]
        return [Rank(**each) for each in run_together([__file__, "--as-rank", *arguments], ranks)]


def run_together(program: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    """Run a Python program as so many ranks: what each says as JSON in its last line.

    Raises CalledProcessError if one does not end well.
    """
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    running: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            process = subprocess.Popen(
                [sys.executable, *program],
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            running.append(process)
        said = [process.communicate(timeout=600)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process in running:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return [json.loads(text.splitlines()[-1]) for text in said]


def be_a_rank(folder: str, saved_by: int, store: str, saves: str) -> Rank:
    """Load this rank's part, answer, and say what that took."""
    import torch  # here, and below: a rank's alone
    import torch.distributed as dist

    from marserve_handlers.sharding.parallel import bytes_of, load_parallel

    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    context = SimpleNamespace(parallel=({"tp": ranks}, PLAN), load_warnings=[], one_rank=None, checkpoint=None)
    if saved_by:
        context.checkpoint = checkpoint_in(Path(folder, f"by{saved_by}"))
    peak = Peak()
    start = peak.bytes
    with peak:
        model = load_parallel(folder, "tower.py", str(Path(folder, "tower.safetensors")), torch.device("cpu"), context)
        torch.manual_seed(1)
        inputs = torch.randn(4, WIDTH)
        answers: list[list[float]] = []

        def answer() -> None:
            with torch.inference_mode():
                answers.extend(model(inputs).tolist())

        differs = context.one_rank.run(0, answer)
        context.one_rank.compare()
    seconds = (context.checkpoint or context.share).seconds
    if saves:
        import torch.distributed.checkpoint as dcp

        dcp.save(model.state_dict(), checkpoint_id=str(Path(folder, saves)))
    dist.barrier()
    dist.destroy_process_group()
    return Rank(saved_by, ranks, rank, bytes_of(model), peak.bytes - start, seconds, answers, differs)


def checkpoint_in(folder: Path) -> object:
    """The checkpoint of a folder, as a server tells its workers of it."""
    from marserve.archive.checkpoints.checkpoint import read_checkpoint
    from marserve_handlers.context import Checkpoint

    return Checkpoint(str(folder), False, json.dumps(read_checkpoint(folder).layout).encode())


class Peak:
    """The most anonymous memory of this process while it is open."""

    def __init__(self) -> None:
        self.bytes = anonymous_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ends.wait(0.002):
            self.bytes = max(self.bytes, anonymous_bytes())


def anonymous_bytes() -> int:
    """The anonymous memory that this process has in RAM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not say how much anonymous memory a process has (RssAnon)")


def largest_difference(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Of all numbers, as a share of the largest."""
    pairs = [pair for answer, other in zip(ours, theirs, strict=True) for pair in zip(answer, other, strict=True)]
    return max(abs(one - another) for one, another in pairs) / max(abs(another) for _, another in pairs)


def measure(bytes_wanted: int, loads: Sequence[tuple[int, int]]) -> list[tuple[Rank, float]]:
    """Each rank of each load, with the difference of its answers from those of one rank that has the file.

    A load is by how many ranks its checkpoint was saved, 0 for the file, and how many load it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, bytes_wanted)
        (right,) = run_ranks(folder, 1)
        for saved_by in {saved_by for saved_by, _ in loads if saved_by}:
            run_ranks(folder, saved_by, saves=f"by{saved_by}")
        measured = [rank for saved_by, ranks in loads for rank in run_ranks(folder, ranks, saved_by)]
    return [(rank, largest_difference(rank.answers, right.answers)) for rank in measured]


def main() -> int:
    """Measure, print a table, and say by the exit status whether all is within its bounds."""
    reader = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    reader.add_argument("--gib", type=float, default=1.0)
    reader.add_argument("--loads", nargs="+", default=["1", "2", "4", "1:2", "2:1", "2:4"], metavar="[SAVED_BY:]RANKS")
    reader.add_argument("--as-rank", nargs=4, help=argparse.SUPPRESS)
    asked = reader.parse_args()
    if asked.as_rank:
        folder, saved_by, store, saves = asked.as_rank
        print(json.dumps(asdict(be_a_rank(folder, int(saved_by), store, saves))))
        return 0
    pairs = [(each if ":" in each else f"0:{each}").split(":") for each in asked.loads]
    print("| from | ranks | rank | share, MiB | peak of anonymous memory, MiB | at most | s a GB | difference |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    is_well = True
    for rank, difference in measure(int(asked.gib * (1 << 30)), [(int(saved), int(ranks)) for saved, ranks in pairs]):
        sizes = [f"{size / (1 << 20):.0f}" for size in (rank.share_bytes, rank.peak_bytes, rank.most_bytes)]
        source = f"{rank.saved_by} ranks" if rank.saved_by else "file"
        print(
            f"| {source} | {rank.ranks} | {rank.rank} | {' | '.join(sizes)} | {rank.seconds_a_gb:.2f} "
            f"| {difference:.1e} |"
        )
        is_well = is_well and rank.peak_bytes <= rank.most_bytes and difference <= MOST_DIFFERENCE and not rank.differs
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
