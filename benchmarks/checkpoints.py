"""Checkpoints: what an eager model takes that is filled from one, how long that is, and whether its answers stay.

A tower of linear layers is saved as safetensors and by `torch.distributed.checkpoint`, as one and as two ranks save it.
It is loaded by one process and by 2 and 4 ranks, and answers the same inputs. Of each is measured how much anonymous
memory it has at most while it is loaded, beyond what it has with torch imported, as `sharding.py` does, and how many
bytes it reads. The seconds are those of describe: filling the model, once it is built.

    .venv/bin/python benchmarks/checkpoints.py --gib 1
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sharding import (
    MOST_BESIDE_BYTES,
    MOST_DIFFERENCE,
    MOST_OF_SHARE,
    PLAN,
    WIDTH,
    Peak,
    anonymous_bytes,
    largest_difference,
    run_together,
    write_model,
)

# By name: the folder, whether it is mapped, and how many ranks load it.
CASES = {
    "safetensors, mapped": ("safe", True, 1),
    "safetensors, read": ("safe", False, 1),
    "dcp 1 -> 1": ("by1", False, 1),
    "dcp 2 -> 1": ("by2", False, 1),
    "dcp 1 -> 2": ("by1", False, 2),
    "dcp 2 -> 4": ("by2", False, 4),
    "safetensors -> 2": ("safe", True, 2),
}


# As a share of the parts of all ranks, and what a process reads beside: what torch imports when it first divides.
MOST_READ, MOST_READ_BESIDE = 1.05, 16 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one process measured: bytes of its weights, of them mapped; its peak beyond its start; bytes that it read of
    files; seconds; answers."""

    case: str
    rank: int
    share_bytes: int
    mapped_bytes: int
    peak_bytes: int
    read_bytes: int
    seconds: float
    answers: list[list[float]]

    @property
    def most_bytes(self) -> int:
        """What its peak may be: mapped weights are no anonymous memory."""
        return int(MOST_OF_SHARE * (self.share_bytes - self.mapped_bytes)) + MOST_BESIDE_BYTES


def write_checkpoints(folder: Path, bytes_wanted: int) -> None:
    """The model of about so many bytes, and its weights in three folders."""
    state = write_model(folder, bytes_wanted, "safe/tower.safetensors")
    for ranks in (1, 2):
        _save_pieces(folder / f"by{ranks}", state, ranks)


def _save_pieces(folder: Path, state: dict[str, Any], ranks: int) -> None:
    """As ranks of `torch.distributed.checkpoint` save what is divided by rows."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir()
    described, places = {}, {}
    files = [(folder / f"__{rank}_0.distcp").open("wb") for rank in range(ranks)]
    for name, tensor in state.items():
        chunks = []
        for rank, piece in enumerate(tensor.chunk(ranks)):
            begin = torch.Size([rank * piece.shape[0], *[0] * (tensor.dim() - 1)])
            at = files[rank].tell()
            torch.save(piece.clone(), files[rank])
            chunks.append(dcp.ChunkStorageMetadata(begin, piece.shape))
            places[dcp.MetadataIndex(name, begin)] = _StorageInfo(f"__{rank}_0.distcp", at, files[rank].tell() - at)
        described[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(tensor.dtype), tensor.shape, chunks)
    for file in files:
        file.close()
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata(described, storage_data=places)))


def run_case(folder: Path, case: str) -> list[Loaded]:
    """Load the model in the processes of the case. Raises CalledProcessError if one does not end well."""
    with tempfile.TemporaryDirectory() as meeting:
        program = [__file__, "--as-process", str(folder), case, str(Path(meeting, "store"))]
        return [Loaded(**each) for each in run_together(program, CASES[case][2])]


def be_a_process(folder: str, case: str, store: str) -> Loaded:
    """Load the model, or this rank's part of it, and say what that took."""
    import torch  # here, and below: such a process's alone
    import torch.distributed as dist

    from marserve.archive.checkpoints.checkpoint import read_checkpoint
    from marserve_handlers.context import Checkpoint, Context
    from marserve_handlers.sharding import dcp_reader, parallel  # noqa: F401 - imported before anything is measured
    from marserve_handlers.sharding.meta_load import load_with_checkpoint

    place, may_map, ranks = CASES[case]
    read = read_checkpoint(Path(folder, place))
    layout = json.dumps(read.layout).encode() if read.kind == "dcp" else b""
    checkpoint = Checkpoint(str(Path(folder, place)), may_map, layout)
    rank = int(os.environ["RANK"])
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    start, peak, read_before = anonymous_bytes(), Peak(), _bytes_read()
    with peak:
        if ranks > 1:
            divided = SimpleNamespace(
                parallel=({"tp": ranks}, PLAN), load_warnings=[], one_rank=None, checkpoint=checkpoint
            )
            model = parallel.load_parallel(folder, "tower.py", None, torch.device("cpu"), divided)
        else:
            context = Context("tower", folder, None, 1, None, "")
            model = load_with_checkpoint(folder, "tower.py", torch.device("cpu"), checkpoint, context)
        read_bytes = _bytes_read() - read_before
        torch.manual_seed(1)
        with torch.no_grad():
            answers = model(torch.randn(4, WIDTH)).tolist()
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    peak_bytes, seconds = peak.bytes - start, checkpoint.seconds or 0.0
    return Loaded(case, rank, checkpoint.size, checkpoint.mapped, peak_bytes, read_bytes, seconds, answers)


def _bytes_read() -> int:
    """What this process has read of files, wherever they were; maps are none of it."""
    return int(Path("/proc/self/io").read_text().split()[1])


def most_read(loaded: Sequence[Loaded]) -> int:
    """What the processes of a case may read together."""
    whole = max(each.share_bytes for each in loaded) * len(loaded)
    return int(MOST_READ * (whole - sum(each.mapped_bytes for each in loaded))) + len(loaded) * MOST_READ_BESIDE


def measure(bytes_wanted: int) -> list[tuple[Loaded, float]]:
    """Each process of each case, with the difference of its answers from those of the first."""
    with tempfile.TemporaryDirectory() as name:
        write_checkpoints(Path(name), bytes_wanted)
        loaded = [each for case in CASES for each in run_case(Path(name), case)]
    return [(each, largest_difference(each.answers, loaded[0].answers)) for each in loaded]


def main() -> int:
    """Measure, print a table, and say by the exit status whether all is within its bounds."""
    reader = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    reader.add_argument("--gib", type=float, default=1.0)
    reader.add_argument("--as-process", nargs=3, metavar=("FOLDER", "CASE", "STORE"), help=argparse.SUPPRESS)
    asked = reader.parse_args()
    if asked.as_process:
        print(json.dumps(asdict(be_a_process(*asked.as_process))))
        return 0
    print("| checkpoint | rank | share, MiB | mapped | most anonymous, MiB | at most | read | s a GB | difference |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    is_well = True
    measured = measure(int(asked.gib * (1 << 30)))
    for case in CASES:
        of_case = [each for each, _ in measured if each.case == case]
        is_well = is_well and sum(each.read_bytes for each in of_case) <= most_read(of_case)
    for each, difference in measured:
        sizes = (each.share_bytes, each.mapped_bytes, each.peak_bytes, each.most_bytes, each.read_bytes)
        shown = " | ".join(f"{size / (1 << 20):.0f}" for size in sizes)
        print(
            f"| {each.case} | {each.rank} | {shown} | {each.seconds / each.share_bytes * 1e9:.2f} | {difference:.1e} |"
        )
        is_well = is_well and each.peak_bytes <= each.most_bytes and difference <= MOST_DIFFERENCE
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
