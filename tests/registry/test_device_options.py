"""Tests for what a model's configuration says of devices, and for what the server's own settings say."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.archive.contents.model_config import parse_model_config
from marserve.errors import BadArchive
from marserve.model_options import Said, say
from marserve.pool.options import PoolOptions
from marserve.registry.intake.effective_options import effective_options
from marserve.registry.intake.registration import RegistryOptions


def choose(gpu_count: int, *, strict: bool = True, pinning: Any = "off", **keys: Any) -> tuple[PoolOptions, list[str]]:
    """The effective options of a model whose configuration has these, on a server with so many devices."""
    server = RegistryOptions(defaults=say(cpu_pinning=pinning), gpu_count=gpu_count, refuses_missing_devices=strict)
    said = {name: value for name, value in keys.items() if value is not None}
    return effective_options("m", "1.0", {"archive": Said(said)}, server, at_startup=False)


@pytest.mark.parametrize(
    ("gpu_count", "there"), [(2, "the server has devices 0 to 1"), (0, "the server has no accelerator")]
)
def test_a_device_that_is_not_there_is_refused(gpu_count: int, there: str) -> None:
    """With the key, its value, what there is and the next step."""
    with pytest.raises(BadArchive) as error:
        choose(gpu_count, device_ids=(0, 7))

    assert str(error.value).startswith("deviceIds is [0, 7] in the configuration of model m, and there is no device ")
    assert there in str(error.value)
    assert "leave deviceIds out" in str(error.value)


def test_a_model_on_the_cpu_may_name_any_device() -> None:
    """It uses none of them."""
    assert choose(0, device_ids=(7,), device_type="cpu")[0].gpu_ids == ()


def test_torchserve_leaves_such_a_list_out() -> None:
    """Contract 7.1; a sentence says so."""
    options, warnings = choose(2, strict=False, device_ids=(0, 7))

    assert options.gpu_ids == (0, 1)
    assert warnings == ["deviceIds [0, 7] of the model's configuration are not used: the server has devices 0 to 1"]
    assert choose(0, strict=False, device_ids=(0,))[0].gpu_ids == ()


@pytest.mark.parametrize(
    ("gpu_count", "server", "model", "stays"),
    [
        (2, "near", None, True),
        (2, "near", "off", False),
        (2, "off", "near", True),
        (2, "off", None, False),
        (0, "near", "near", False),
    ],
)
def test_the_models_word_on_processors_goes_before_the_servers(
    gpu_count: int, server: str, model: Any, stays: bool
) -> None:
    """And without a device there is nothing to be near to."""
    assert choose(gpu_count, pinning=server, cpu_pinning=model)[0].stays_near is stays


def test_device_memory_is_a_size() -> None:
    """One that is none is left out with a sentence."""
    assert parse_model_config(b"deviceMemory: 12GiB\n").options.device_memory_bytes == 12 << 30
    config = parse_model_config(b"deviceMemory: much\n")
    assert config.said == {}
    assert config.warnings == [
        "deviceMemory is 'much', which is not used: it must be a number of bytes above 0, as 500MB or 2GiB",
    ]


def test_processors_that_cannot_be_kept_to_are_refused() -> None:
    """With the value, and what it must be."""
    with pytest.raises(BadArchive) as refused:
        parse_model_config(b"cpuPinning: far\n")
    assert refused.value.message == (
        "cpuPinning of the model's configuration is 'far'; it must be one of off, near, cores."
    )


def test_only_what_has_no_state_is_run_again_in_halves() -> None:
    """Whatever is said of isolation."""
    assert choose(1)[0].halves_without_memory
    assert choose(1, batch_isolation=False)[0].halves_without_memory
    assert not choose(1, continuous_batching=True)[0].halves_without_memory
