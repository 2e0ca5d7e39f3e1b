"""Every key that TorchServe reads from a model's configuration makes a difference, or reaches its handler.

The list is the contract's inventory; each entry is a test.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from marserve.archive.contents.model_config import ModelConfig, parse_model_config
from marserve.model_options import ModelOptions
from marserve.pool.dispatch.modes.steps_and_sequences import STREAM_HEADER
from marserve.pool.options import PoolOptions
from marserve.registry.intake.call_modes import SequenceHeaderNames
from marserve.registry.intake.effective_options import effective_options
from marserve.registry.intake.registration import RegistryOptions
from support.inventory import inventory

# What to write for a key, and what else it needs to count.
EXAMPLES = {
    "minWorkers": ("minWorkers: 2", "maxWorkers: 3"),
    "maxWorkers": ("maxWorkers: 3", "minWorkers: 2"),
    "batchSize": ("batchSize: 7", ""),
    "maxBatchDelay": ("maxBatchDelay: 7", ""),
    "responseTimeout": ("responseTimeout: 7", ""),
    "startupTimeout": ("startupTimeout: 7", ""),
    "deviceType": ("deviceType: cpu", ""),
    "deviceIds": ("deviceIds: [2, 3]", ""),
    "parallelType": ("parallelType: tp", "parallelLevel: 2"),
    "parallelLevel": ("parallelLevel: 2", "parallelType: tp"),
    "torchrun": ("torchrun: {nproc-per-node: 2}", "parallelType: tp"),
    "maxRetryTimeoutInSec": ("maxRetryTimeoutInSec: 7", ""),
    "clientTimeoutInMills": ("clientTimeoutInMills: 7", ""),
    "jobQueueSize": ("jobQueueSize: 7", ""),
    "useJobTicket": ("useJobTicket: true", ""),
    "sequenceMaxIdleMSec": ("sequenceMaxIdleMSec: 7", "sequenceBatching: true"),
    "sequenceTimeoutMSec": ("sequenceTimeoutMSec: 7", "sequenceBatching: true"),
    "maxSequenceJobQueueSize": ("maxSequenceJobQueueSize: 7", "sequenceBatching: true"),
    "maxNumSequence": ("maxNumSequence: 7", "sequenceBatching: true"),
    "continuousBatching": ("continuousBatching: true", ""),
    "sequenceBatching": ("sequenceBatching: true", ""),
    "asyncCommunication": ("asyncCommunication: true", ""),
    "useVenv": ("useVenv: true", ""),
}
# What a pool does not read: it has `sequences`, `gpu_ids` and `parallel_level` of them.
WORKED_IN = (
    *("sequence_batching", "sequence_max_idle_s", "sequence_timeout_s", "max_sequence_job_queue_size"),
    *("max_num_sequence", "device_type", "device_ids", "torchrun"),
)


def options_of(config: ModelConfig) -> PoolOptions:
    """What a version with this configuration runs with, on a machine with four accelerators."""
    server = RegistryOptions(workers_by_api=1, gpu_count=4)
    options, _ = effective_options("m", "1.0", {"archive": config.said}, server, at_startup=False)
    return replace(options, **{name: getattr(ModelOptions(), name) for name in WORKED_IN})


@pytest.mark.parametrize("entry", inventory("model_config_keys"), ids=lambda entry: entry["key"])
def test_every_key_of_a_model_s_configuration_counts(entry: dict[str, Any]) -> None:
    """It makes a difference to the version, or the handler finds it in its context."""
    key = entry["key"]
    if entry.get("read_by") == "handler":
        assert parse_model_config(f"{key}: {{a: 1}}".encode()).document == {key: {"a": 1}}
        return
    text, needed = EXAMPLES[key]

    with_key = options_of(parse_model_config(f"{text}\n{needed}\n".encode()))
    without = options_of(parse_model_config(f"{needed}\n".encode()))

    assert with_key != without


def test_special_headers_are_those_of_the_inventory() -> None:
    """The names by which clients and handlers speak of sequences and streams."""
    names = SequenceHeaderNames()

    assert {*names} <= {*inventory("special_request_headers")}
    assert {STREAM_HEADER, names.id, names.end} <= {*inventory("special_response_headers")}
