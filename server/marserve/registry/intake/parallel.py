"""What a model's `parallel`, `parallelType`, `parallelLevel` and `torchrun` mean on this server. Pure.

Contract 7.1, 7.2 and 10.5: the level counts only together with a type. With devices a worker takes as many of them as
the level says, so there can be at most devices ÷ level workers. On a server without devices a group of ranks computes
on the CPU, and a `custom` worker is one process like any other. `parallel` says both by itself: every rank makes every
call, and there are as many as its mesh has places.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from marserve.errors import BadArchive, NotEnoughDevices
from marserve.machine.devices import most_groups
from marserve.model_options import ModelOptions
from marserve.option_values import MOST_RANKS

# Options of torchrun that hold here anyway; they get no warning.
_MEANT_ANYWAY: Mapping[str, object] = {"nnodes": 1, "node-rank": 0, "rdzv-backend": "c10d", "monitor-interval": 5}
_THREADS = ("OMP_NUMBER_THREADS", "OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Parallel:
    """The fields of `PoolOptions` of these names; all are empty for an ordinary model."""

    parallel_type: Literal["pp", "tp", "pptp", "custom"] | None = None
    parallel_level: int = 0
    rank_threads: int = 0
    most_workers: int = 0


def read_parallel(
    model: str, asked: ModelOptions, gpu_ids: Sequence[int], warnings: list[str], mig_instances: Collection[int] = ()
) -> Parallel:
    """The values for a model whose workers may have `gpu_ids`; unused options get a sentence in `warnings`.

    Raises NotEnoughDevices if there are too few devices for one worker, BadArchive if a worker of several devices would
    have one of the `mig_instances`: CUDA shows a process one such instance and no other device; and BadArchive for
    `parallel` beside other words for the ranks of a worker.
    """
    kind, level, key = asked.parallel_type, asked.parallel_level, "parallelLevel"
    if asked.parallel is not None:
        _check_alone(model, asked)
        kind, level, key = "tp", asked.parallel.ranks, "parallel.mesh.tp"
    if kind is None:
        if level:
            key = "torchrun" if asked.torchrun is not None else "parallelLevel"
            warnings.append(f"{key} of the model's configuration is not used: it needs a parallelType")
        return Parallel()
    if not level:
        warnings.append(f"parallelType {kind} of the model's configuration is not used: it needs a parallelLevel")
        return Parallel()
    if level > MOST_RANKS:
        warnings.append(f"parallelLevel {level} of the model's configuration is not used: it is more than {MOST_RANKS}")
        return Parallel()
    threads = 0
    if asked.torchrun is not None:
        threads = _read_torchrun(asked.torchrun, is_group=kind != "custom", warnings=warnings)
    cut = [device for device in gpu_ids if device in mig_instances]
    if cut and level > 1:
        raise BadArchive(_says_cut(model, key, level, cut, len(gpu_ids)))
    most = most_groups(gpu_ids, level) if gpu_ids else 0
    if gpu_ids and not most:
        raise NotEnoughDevices(model, level, len(gpu_ids))
    return Parallel(kind, level, threads, most)


def _check_alone(model: str, asked: ModelOptions) -> None:
    """Raise BadArchive where other keys say how many ranks there are, too."""
    from_torchrun = asked.torchrun is not None and "nproc-per-node" in asked.torchrun
    # An archive's torchrun implies the level 1 where another layer says parallel.
    says_level = asked.parallel_level > (0 if asked.torchrun is None else 1) and not from_torchrun
    others = {
        f"parallelType is {asked.parallel_type}": asked.parallel_type is not None,
        f"parallelLevel is {asked.parallel_level}": says_level,
        f"torchrun has nproc-per-node {(asked.torchrun or {}).get('nproc-per-node')}": from_torchrun,
    }
    if said := [sentence for sentence, is_said in others.items() if is_said]:
        mesh = dict(asked.parallel.mesh) if asked.parallel else {}
        raise BadArchive(
            f"parallel has the mesh {mesh} in the configuration of model {model}, and {', '.join(said)}: parallel says "
            "by itself how many ranks a worker has, so leave the other out."
        )


def _says_cut(model: str, key: str, level: int, cut: Sequence[int], devices: int) -> str:
    numbers = ", ".join(map(str, cut))
    named = f"device {numbers} is a MIG instance" if len(cut) == 1 else f"devices {numbers} are MIG instances"
    whole = "name none of them with deviceIds, " if len(cut) < devices else ""
    return (
        f"{key} is {level} in the configuration of model {model}, and {named}: CUDA shows a process one "
        f"instance alone, so they cannot be joined to a worker. Take MIG mode off these GPUs (nvidia-smi -mig 0), "
        f"{whole}or use {key}: 1, or deviceType: cpu."
    )


def _read_torchrun(torchrun: Mapping[str, Any], *, is_group: bool, warnings: list[str]) -> int:
    """The threads of each rank, 0 for a fair share. Options that marserve's launcher does not use get a warning."""
    threads = 0
    for name, value in torchrun.items():
        if name == "nproc-per-node" or (name in _MEANT_ANYWAY and _MEANT_ANYWAY[name] == value):
            continue
        if name in _THREADS and is_group and type(value) is int and value > 0:
            threads = value
        elif name in _THREADS and is_group:
            warnings.append(f"{name} of torchrun is {value!r}, which is not used: it must be a whole number above 0")
        elif name == "nnodes":
            warnings.append(f"nnodes of torchrun is {value!r}, which is not used: a worker's ranks run on one machine")
        else:
            warnings.append(f"{name} of torchrun is not used: marserve starts and watches the ranks itself")
    return threads
