"""What a version is thought to take before it is loaded."""

from __future__ import annotations

import pytest

from marserve.memory.needs import (
    CONTEXT_BYTES,
    INTERPRETER_BYTES,
    MIB,
    RUNTIME_BYTES,
    DeviceNeed,
    Learned,
    Need,
    budget_of,
    device_need,
    need_of,
)

GIB = 1 << 30


def test_what_is_declared_is_believed() -> None:
    """Before what was learned and what the files say; further workers take what was learned of them."""
    learned = Learned(900, 30, 2000, 1.0)

    declared = need_of(declared_bytes=500, learned=learned, weight_bytes=10**9, shares_weights=True, uses_devices=False)

    assert declared == Need(500, 30, 500, "declared")


def test_what_was_learned_is_believed_before_an_estimate() -> None:
    """With the peak that was seen while it was loaded."""
    learned = Learned(900, 30, 2000, 1.0)

    assert need_of(
        declared_bytes=None, learned=learned, weight_bytes=10**9, shares_weights=True, uses_devices=False
    ) == Need(900, 30, 2000, "learned")


def test_an_estimate_counts_weights_interpreter_and_runtime() -> None:
    """Each further worker takes all of it again where weights are not shared; without weights there is no runtime."""
    weights = 1000 * MIB
    alone = need_of(declared_bytes=None, learned=None, weight_bytes=weights, shares_weights=False, uses_devices=False)
    shared = need_of(declared_bytes=None, learned=None, weight_bytes=weights, shares_weights=True, uses_devices=False)
    small = need_of(declared_bytes=None, learned=None, weight_bytes=0, shares_weights=True, uses_devices=False)

    assert alone.first_bytes == alone.more_bytes == weights + INTERPRETER_BYTES + RUNTIME_BYTES
    assert shared.first_bytes == alone.first_bytes
    assert shared.more_bytes < 100 * MIB
    assert small.first_bytes == INTERPRETER_BYTES
    assert {alone.source, shared.source, small.source} == {"estimated"}


def test_weights_for_a_device_only_pass_through() -> None:
    """They count while the model is loaded, and no longer."""
    weights = 1000 * MIB

    on_device = need_of(
        declared_bytes=None, learned=None, weight_bytes=weights, shares_weights=False, uses_devices=True
    )

    assert on_device.peak_bytes - on_device.first_bytes == weights
    assert on_device.first_bytes < 300 * MIB


def test_a_need_grows_with_workers() -> None:
    """The peak is of one load at a time; no worker takes nothing."""
    each = Need(100, 20, 150, "declared")

    assert [each.resident(workers) for workers in (0, 1, 3)] == [0, 100, 140]
    assert [each.loading(workers) for workers in (0, 1, 3)] == [0, 150, 190]


def test_auto_leaves_something_for_others() -> None:
    """A tenth, and never less than 256 MiB."""
    assert budget_of(100 * 1024 * MIB) == 90 * 1024 * MIB
    assert budget_of(1024 * MIB) == 768 * MIB
    assert budget_of(100 * MIB) == 0


@pytest.mark.parametrize(
    ("learned", "shares_weights", "more"),
    [(None, False, 500), (None, True, 48 * MIB), (Learned(1, 30, 2, 1.0), False, 30)],
)
def test_further_workers_of_a_declared_model_take_what_is_known_of_them(
    learned: Learned | None, shares_weights: bool, more: int
) -> None:
    """What was seen; else a fork's own pages where they are forked from the loaded model; else all of it again."""
    found = need_of(
        declared_bytes=500, learned=learned, weight_bytes=100, shares_weights=shares_weights, uses_devices=False
    )

    assert found == Need(500, more, 500, "declared")


def test_an_estimate_is_in_whole_pieces() -> None:
    """40 MiB of interpreter, 220 MiB of runtime where there are weights, 48 MiB for a fork."""
    small = need_of(declared_bytes=None, learned=None, weight_bytes=0, shares_weights=True, uses_devices=True)
    large = need_of(declared_bytes=None, learned=None, weight_bytes=MIB, shares_weights=False, uses_devices=False)

    assert small == Need(40 * MIB, 48 * MIB, 40 * MIB, "estimated")
    assert large == Need(261 * MIB, 261 * MIB, 261 * MIB, "estimated")


def test_a_peak_below_what_is_held_is_none() -> None:
    """What was learned may say so, where the load was seen late."""
    each = Need(100, 20, 60, "learned")

    assert [each.loading(workers) for workers in (-1, 0, 1, 2)] == [0, 0, 100, 120]
    assert each.resident(-1) == 0


@pytest.mark.parametrize(
    ("declared", "learned", "wanted"),
    [
        (9 * GIB, 7 * GIB, DeviceNeed(9 * GIB, "declared")),
        (None, 7 * GIB, DeviceNeed(7 * GIB, "learned")),
        (None, None, DeviceNeed(2 * GIB + CONTEXT_BYTES, "estimated")),
    ],
)
def test_what_is_said_goes_before_what_was_seen_and_that_before_a_guess(
    declared: int | None, learned: int | None, wanted: DeviceNeed
) -> None:
    """Weights are shared among the devices of a worker; the context is paid on each."""
    need = device_need(declared_bytes=declared, learned_bytes=learned, weight_bytes=4 * GIB, devices_per_worker=2)

    assert need == wanted
