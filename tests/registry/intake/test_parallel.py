"""Tests for what a model's `parallelType`, `parallelLevel` and `torchrun` come to."""

from __future__ import annotations

import pytest

from marserve.archive.contents.model_config import parse_model_config
from marserve.errors import BadArchive, NotEnoughDevices
from marserve.registry.intake.parallel import MOST_RANKS, Parallel, read_parallel


def read(text: str, devices: int = 0) -> tuple[Parallel, list[str]]:
    """What this configuration comes to on a server with so many devices, and what was said of it."""
    warnings: list[str] = []
    return read_parallel("m", parse_model_config(text.encode()).options, range(devices), warnings), warnings


@pytest.mark.parametrize(
    ("text", "devices", "parallel"),
    [
        ("batchSize: 2", 4, Parallel()),
        ("parallelType: tp\nparallelLevel: 2", 0, Parallel("tp", 2)),
        ("parallelType: tp\nparallelLevel: 2", 5, Parallel("tp", 2, most_workers=2)),
        ("parallelType: pp\ntorchrun: {nproc-per-node: 4}", 4, Parallel("pp", 4, most_workers=1)),
        ("parallelType: PPTP\ntorchrun: {nnodes: 1}", 0, Parallel("pptp", 1)),
        ("parallelType: tp\ntorchrun: {nproc-per-node: 2, OMP_NUMBER_THREADS: 3}", 0, Parallel("tp", 2, 3)),
        ("parallelType: custom\nparallelLevel: 2", 4, Parallel("custom", 2, most_workers=2)),
    ],
)
def test_type_and_level_count_together(text: str, devices: int, parallel: Parallel) -> None:
    """With devices there are at most as many workers as these are enough for; without, any number."""
    assert read(text, devices) == (parallel, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("parallelLevel: 2", "parallelLevel of the model's configuration is not used: it needs a parallelType"),
        ("torchrun: {nproc-per-node: 2}", "torchrun of the model's configuration is not used: it needs a parallelType"),
        ("parallelType: tp", "parallelType tp of the model's configuration is not used: it needs a parallelLevel"),
        (
            f"parallelType: tp\nparallelLevel: {MOST_RANKS + 1}",
            f"parallelLevel {MOST_RANKS + 1} of the model's configuration is not used: it is more than {MOST_RANKS}",
        ),
    ],
)
def test_one_without_the_other_is_an_ordinary_worker(text: str, said: str) -> None:
    """And says so."""
    assert read(text, 4) == (Parallel(), [said])


@pytest.mark.parametrize(
    ("devices", "cut", "said"),
    [
        (4, (1, 2), "devices 1, 2 are MIG instances: CUDA shows a process one instance alone"),
        (2, (1,), "device 1 is a MIG instance"),
    ],
)
@pytest.mark.parametrize("kind", ["tp", "pp", "custom"])
def test_mig_instances_are_not_joined(kind: str, devices: int, cut: tuple[int, ...], said: str) -> None:
    """With the key, its value, which devices those are, and what to do; whole GPUs beside them do."""
    config = parse_model_config(f"parallelType: {kind}\nparallelLevel: 2".encode()).options
    with pytest.raises(BadArchive) as caught:
        read_parallel("m", config, range(devices), [], cut)

    assert str(caught.value).startswith(f"parallelLevel is 2 in the configuration of model m, and {said}")
    assert "name none of them with deviceIds" in str(caught.value)
    assert read_parallel("m", config, (5, 6), [], cut).most_workers == 1


def test_a_group_of_one_may_have_a_mig_instance() -> None:
    """It is joined to nothing."""
    config = parse_model_config(b"parallelType: tp\nparallelLevel: 1").options

    assert read_parallel("m", config, (0, 1), [], (0, 1)).most_workers == 2


def test_fewer_devices_than_one_worker_needs_are_an_error() -> None:
    """In TorchServe's words."""
    with pytest.raises(NotEnoughDevices) as caught:
        read("parallelType: tp\nparallelLevel: 4", 3)

    assert str(caught.value) == "No enough gpu devices for model:m parallelLevel:4"
    assert (caught.value.level, caught.value.devices) == (4, 3)


def test_what_torchrun_would_have_done_otherwise_is_said() -> None:
    """Keys that hold here anyway need no remark; the rest is not used, each with its reason."""
    quiet = "{nproc-per-node: 2, nnodes: 1, node-rank: 0, rdzv-backend: c10d, monitor-interval: 5}"
    assert read(f"parallelType: tp\ntorchrun: {quiet}") == (Parallel("tp", 2), [])

    parallel, said = read(
        "parallelType: tp\ntorchrun: {nproc-per-node: 2, nnodes: 2, rdzv-endpoint: 'h:1', OMP_NUMBER_THREADS: 0, x: 1}"
    )

    assert parallel == Parallel("tp", 2)
    assert said == [
        "nnodes of torchrun is 2, which is not used: a worker's ranks run on one machine",
        "rdzv-endpoint of torchrun is not used: marserve starts and watches the ranks itself",
        "OMP_NUMBER_THREADS of torchrun is 0, which is not used: it must be a whole number above 0",
        "x of torchrun is not used: marserve starts and watches the ranks itself",
    ]
