"""Tests for what a model's `parallel`, `parallelType`, `parallelLevel` and `torchrun` come to."""

from __future__ import annotations

import pytest

from marserve.archive.contents.model_config import parse_model_config
from marserve.errors import BadArchive, BadInput, NotEnoughDevices
from marserve.model_options import ModelOptions, fold, say
from marserve.option_values import MOST_RANKS, ParallelPlan
from marserve.registry.intake.effective_options import effective_options
from marserve.registry.intake.parallel import Parallel, read_parallel
from marserve.registry.intake.registration import RegistryOptions

PLAN = "plan: {layers.*.up: colwise, layers.*.down: rowwise}"


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


@pytest.mark.parametrize(
    ("mesh", "devices", "parallel"),
    [
        ("{tp: 2}", 0, Parallel("tp", 2)),
        ("{data: 1, tp: 2}", 5, Parallel("tp", 2, most_workers=2)),
        ("{tp: 1}", 0, Parallel("tp", 1)),
        ("{tp: 64}", 0, Parallel("tp", 64)),
    ],
)
def test_a_plan_implies_its_type_and_as_many_ranks_as_its_mesh_has(mesh: str, devices: int, parallel: Parallel) -> None:
    """With devices there are as many workers as these are enough for, as with `parallelType: tp`."""
    assert read(f"parallel: {{mesh: {mesh}, {PLAN}}}", devices) == (parallel, [])


def test_threads_of_torchrun_go_with_a_plan() -> None:
    """They say nothing of the number of ranks."""
    text = f"parallel: {{mesh: {{tp: 2}}, {PLAN}}}\ntorchrun: {{OMP_NUMBER_THREADS: 3}}"

    assert read(text) == (Parallel("tp", 2, 3), [])

    archive = parse_model_config(b"torchrun: {OMP_NUMBER_THREADS: 3}").said
    asked = ModelOptions(
        **fold({"desired": say(parallel=ParallelPlan({"tp": 2}, {"up": "colwise"})), "archive": archive})
    )
    assert read_parallel("m", asked, (), []) == Parallel("tp", 2, 3)


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ("parallelType: tp", "parallelType is tp"),
        ("parallelLevel: 2", "parallelLevel is 2"),
        ("parallelType: pp\nparallelLevel: 3", "parallelType is pp, parallelLevel is 3"),
        ("torchrun: {nproc-per-node: 2}", "torchrun has nproc-per-node 2"),
        ("parallelLevel: 2\ntorchrun: {OMP_NUMBER_THREADS: 3}", "parallelLevel is 2"),
        ("torchrun: {nnodes: 1}\nparallelLevel: 4", "parallelLevel is 4"),
    ],
)
def test_a_plan_beside_other_words_for_ranks_is_refused(beside: str, said: str) -> None:
    """With both, and what to do."""
    with pytest.raises(BadArchive) as refused:
        read(f"parallel: {{mesh: {{tp: 2}}, {PLAN}}}\n{beside}")

    assert refused.value.message == (
        f"parallel has the mesh {{'tp': 2}} in the configuration of model m, and {said}: parallel says by itself how "
        "many ranks a worker has, so leave the other out."
    )


def test_a_plan_on_a_cluster_is_refused() -> None:
    """As other groups of ranks."""
    layers = {"archive": say(launcher="ray", parallel=ParallelPlan({"tp": 2}, {"up": "colwise"}))}

    with pytest.raises(BadInput, match="launcher is ray and there is a parallel, which makes a worker of several"):
        effective_options("m", "1.0", {**layers, "registration": say()}, RegistryOptions(), at_startup=False)


def test_mig_instances_are_not_joined_by_a_plan() -> None:
    """The sentence names its own key."""
    config = parse_model_config(f"parallel: {{mesh: {{tp: 2}}, {PLAN}}}".encode()).options

    with pytest.raises(BadArchive, match=r"^parallel\.mesh\.tp is 2 .* or use parallel\.mesh\.tp: 1"):
        read_parallel("m", config, (0, 1), [], (1,))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{mesh: {tp: 2}}", "a map of mesh and plan, as .*, with both and nothing else"),
        (f"{{mesh: {{tp: 2}}, {PLAN}, more: 1}}", "with both and nothing else"),
        (f"{{mesh: 2, {PLAN}}}", "whose mesh says how many ranks share a layer, as {tp: 2}, and not 2"),
        (f"{{mesh: {{data: 1}}, {PLAN}}}", "whose mesh says how many ranks share a layer"),
        (f"{{mesh: {{tp: 2, pp: 2}}, {PLAN}}}", "has the dimensions data, tp, and not 'pp'"),
        (f"{{mesh: {{tp: 0}}, {PLAN}}}", "whose mesh.tp is a whole number of 1 or more, and not 0"),
        (f"{{mesh: {{tp: -2}}, {PLAN}}}", "whose mesh.tp is a whole number of 1 or more, and not -2"),
        (f"{{mesh: {{tp: true}}, {PLAN}}}", "whose mesh.tp is a whole number of 1 or more, and not True"),
        (f"{{mesh: {{tp: 2.0}}, {PLAN}}}", "whose mesh.tp is a whole number of 1 or more, and not 2.0"),
        (f"{{mesh: {{tp: 65}}, {PLAN}}}", "whose mesh.tp is 64 or less, and not 65"),
        (f"{{mesh: {{data: 0, tp: 2}}, {PLAN}}}", "whose mesh.data is a whole number of 1 or more, and not 0"),
        (
            f"{{mesh: {{data: 3, tp: 2}}, {PLAN}}}",
            "mesh.data is 1 or left out, and not 3: .* several workers .minWorkers: 3., each of 2 ranks",
        ),
        ("{mesh: {tp: 2}, plan: {}}", "whose plan is a map of 1 to 1024 patterns"),
        ("{mesh: {tp: 2}, plan: [up]}", "whose plan is a map of 1 to 1024 patterns .* and not \\['up'\\]"),
        ("{mesh: {tp: 2}, plan: {up: columns}}", "styles colwise, rowwise, .*, and not 'columns' for up"),
        ("{mesh: {tp: 2}, plan: {up: [colwise]}}", "and not \\['colwise'\\] for up"),
        ("{mesh: {tp: 2}, plan: {'**.up': colwise}}", "not '\\*\\*.up': torch knows no \\*\\*, so write a \\* for"),
        ("{mesh: {tp: 2}, plan: {layers..up: colwise}}", "names of modules or patterns of them, .* not 'layers..up'"),
        ("{mesh: {tp: 2}, plan: {'': colwise}}", "and not ''"),
        ("{mesh: {tp: 2}, plan: {3: colwise}}", "and not 3"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_what_is_wrong_in_it(value: str, said: str) -> None:
    """The value that is wrong, and what it must be."""
    with pytest.raises(BadArchive, match=f"^parallel of the model's configuration is .*; it must be .*{said}"):
        parse_model_config(f"parallel: {value}".encode())


@pytest.mark.parametrize("value", ["true", "2", "[0, 1]", "{workers: 3}"])
def test_a_handlers_own_word_of_that_name_is_left_to_it(value: str) -> None:
    """Handlers that were written for TorchServe may have it; a sentence says that it is not used."""
    config = parse_model_config(f"parallel: {value}".encode())

    assert config.options.parallel is None
    assert "which is not used: it must be a map of mesh and plan" in config.warnings[0]
