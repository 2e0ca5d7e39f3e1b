"""Tests for the options of a version, against a table that was written by hand."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest

from marserve.model_options import BY_KEY, OPTIONS, Layer, ModelOptions, Said, fold, read_value, said_in, say, written
from marserve.option_values import Optimising, ParallelPlan, Sample, Tolerance
from marserve.settings import KEYS

LAYERS: dict[str, Layer] = {
    "n": "snapshot",
    "r": "registration",
    "d": "desired",
    "a": "archive",
    "m": "models",
    "s": "server",
}
# The key in files, the field, its default, a value as a file has it, what it means, and the layers by their letters,
# the highest first: contract 2.1 in the form that its recorded answers leave.
TABLE: tuple[tuple[str, str, Any, Any, Any, str], ...] = (
    ("minWorkers", "min_workers", None, 2, 2, "ndamr"),
    ("maxWorkers", "max_workers", None, 0, 0, "ndamr"),
    ("batchSize", "batch_size", 1, 8, 8, "nrdam"),
    ("allowedBatchSizes", "allowed_batch_sizes", (), [1, 4], (1, 4), "da"),
    ("maxRows", "max_rows", 1024, 32, 32, "da"),
    ("maxBatchDelay", "max_batch_delay_s", 0.1, 250, 0.25, "nrdam"),
    ("batchPolicy", "batch_policy", "idle", "Goal", "goal", "da"),
    ("latencyGoalMs", "latency_goal_s", None, 200, 0.2, "da"),
    ("overlapPreprocess", "overlap_preprocess", False, True, True, "da"),
    ("lengthFrom", "length_from", None, "json:a.b", "json:a.b", "da"),
    ("paddingBudget", "padding_budget", 0.25, 0.5, 0.5, "da"),
    ("autoscale", "autoscale", False, True, True, "das"),
    ("idleTimeout", "idle_timeout_s", None, 1.5, 1.5, "da"),
    ("batchIsolation", "batch_isolation", True, False, False, "da"),
    ("samples", "samples", (), [{"text": "x"}], (Sample(body=b"x"),), "da"),
    ("warmUp", "warm_up", False, True, True, "da"),
    ("batchCheck", "batch_check", "off", "warn", "warn", "da"),
    ("batchCheckSample", "batch_check_sample", 0.0, 1, 1.0, "da"),
    ("batchTolerance", "batch_tolerance", Tolerance(), {"absolute": 0}, Tolerance(1e-3, 0.0, (), True), "da"),
    (
        "optimise",
        "optimise",
        Optimising(),
        {"candidates": ["onnx"], "inputs": "in"},
        Optimising(("onnx",), "in", is_asked=True),
        "da",
    ),
    ("responseTimeout", "response_timeout_s", 120.0, 7, 7.0, "ndarms"),
    ("startupTimeout", "startup_timeout_s", 120.0, 9, 9.0, "ndarms"),
    ("invalidJson", "invalid_json", "pass", "refuse", "refuse", "das"),
    ("clientTimeoutInMills", "client_timeout_s", None, 700, 0.7, "da"),
    ("defaultPriority", "default_priority", 5, 9, 9, "da"),
    ("maxRetryTimeoutInSec", "max_retry_timeout_s", 300.0, 30, 30.0, "da"),
    ("retryFailedEvery", "retry_failed_every_s", 300.0, 2.5, 2.5, "da"),
    ("retryOnWorkerDeath", "retry_on_worker_death", True, False, False, "da"),
    ("maxRestarts", "max_restarts", 0, 5, 5, "da"),
    ("noRestartExitCodes", "no_restart_exit_codes", (), [3], (3,), "da"),
    ("onCrash", "on_crash", "retry", "fail", "fail", "da"),
    ("readinessRule", "readiness_rule", "any", "all", "all", "das"),
    ("maxWorkerMemory", "max_worker_memory_bytes", 0, "1MiB", 1 << 20, "das"),
    ("maxRequestsPerWorker", "max_requests_per_worker", 0, 10, 10, "da"),
    ("maxWorkerAge", "max_worker_age_s", 0.0, 60, 60.0, "da"),
    ("maxWorkerGrowth", "max_worker_growth_bytes", 0, 7, 7, "da"),
    ("peakFlops", "peak_flops", None, "2e12", {"": 2e12}, "da"),
    ("healthInterval", "health_interval_s", 0.0, 2.5, 2.5, "da"),
    ("memory", "memory_bytes", None, "2GiB", 2 << 30, "nrmda"),
    ("load", "load", "start", "on_demand", "on_demand", "nrmdas"),
    ("pinned", "is_pinned", False, True, True, "nrmda"),
    ("workerStart", "worker_start", "auto", "fresh", "fresh", "da"),
    ("launcher", "launcher", "local", "ray", "ray", "da"),
    ("workerResources", "worker_resources", None, {"cpus": 2, "memory": "1kB"}, {"cpus": 2.0, "memory": 1000}, "da"),
    ("workerPlacement", "worker_placement", "spread", "pack", "pack", "da"),
    ("checkpoint", "checkpoint", None, " weights ", "weights", "nda"),
    ("deviceType", "device_type", None, "GPU", "gpu", "da"),
    ("deviceIds", "device_ids", None, [1, 0], (1, 0), "da"),
    ("deviceMemory", "device_memory_bytes", None, 5, 5, "da"),
    ("cpuPinning", "cpu_pinning", "off", "near", "near", "das"),
    ("threads", "threads", None, {"intra": 4}, {"intra": 4}, "da"),
    ("parallelType", "parallel_type", None, "tp", "tp", "da"),
    ("parallelLevel", "parallel_level", 0, 2, 2, "nda"),
    (
        "parallel",
        "parallel",
        None,
        {"mesh": {"tp": 2}, "plan": {"up": "colwise"}},
        ParallelPlan({"tp": 2}, {"up": "colwise"}),
        "da",
    ),
    ("torchrun", "torchrun", None, {"nnodes": 1}, {"nnodes": 1}, "da"),
    ("jobQueueSize", "queue_size", 100, 0, 0, "das"),
    ("useJobTicket", "use_job_ticket", False, True, True, "da"),
    ("continuousBatching", "continuous_batching", False, True, True, "da"),
    ("sequenceBatching", "sequence_batching", False, True, True, "da"),
    ("sequenceMaxIdleMSec", "sequence_max_idle_s", 0.0, 3000, 3.0, "da"),
    ("sequenceTimeoutMSec", "sequence_timeout_s", 0.0, 500, 0.5, "da"),
    ("maxSequenceJobQueueSize", "max_sequence_job_queue_size", 1, -1, 1, "da"),
    ("maxNumSequence", "max_num_sequence", None, 8, 8, "da"),
    ("freeEndedSequences", "free_ended_sequences", False, True, True, "da"),
    ("asyncCommunication", "is_concurrent", False, True, True, "da"),
    ("maxConcurrentRequests", "most_concurrent", 1000, 8, 8, "da"),
    ("useVenv", "use_venv", False, True, True, "da"),
    ("python", "interpreter_path", None, "/opt/p/bin/python", "/opt/p/bin/python", "da"),
    ("environment", "interpreter_name", None, "torch-1", "torch-1", "da"),
    ("workerProgram", "worker_program", (), ["node", "w.mjs"], ("node", "w.mjs"), "da"),
)


def test_the_table_has_every_option_once() -> None:
    """A further option is a line here."""
    assert [option.key for option in OPTIONS] == [row[0] for row in TABLE]
    assert len(BY_KEY) == len(TABLE)
    assert {field.name for field in fields(ModelOptions)} == {"model", "version", *(row[1] for row in TABLE)}


@pytest.mark.parametrize(
    ("key", "attribute", "default", "given", "meant", "order"), TABLE, ids=lambda value: str(value)
)
def test_an_option_is_read_and_has_its_default_and_its_order(
    key: str, attribute: str, default: object, given: object, meant: object, order: str
) -> None:
    """Of two layers next to each other the higher one wins; a layer that is not named does not count."""
    named = [LAYERS[letter] for letter in order]

    assert BY_KEY[key].attribute == attribute
    assert getattr(ModelOptions(), attribute) == default
    assert (read_value(key, given), type(read_value(key, given))) == (meant, type(meant))
    for higher, lower in pairwise(named):
        assert fold({lower: Said({attribute: "lower"}), higher: Said({attribute: "higher"})}) == {attribute: "higher"}
    for layer in LAYERS.values():
        assert fold({layer: Said({attribute: meant})}) == ({attribute: meant} if layer in named else {})
    assert len(BY_KEY[key].help) > 10


def test_a_value_of_nothing_wins_too() -> None:
    """0, false and an empty list are said; what is not said is not there."""
    said = say(max_worker_memory_bytes=0, autoscale=False)

    assert fold({"archive": said, "server": say(max_worker_memory_bytes=5, autoscale=True)}) == said


def test_what_is_not_said_is_not_in_a_layer() -> None:
    """None says nothing; of several the later one counts, and layers that say the same are the same."""
    said = Said({"batch_size": 4, "autoscale": None}, say(batch_size=5, is_pinned=False))

    assert said == {"batch_size": 5, "is_pinned": False}
    assert (said, hash(said)) == (say(is_pinned=False, batch_size=5), hash(say(is_pinned=False, batch_size=5)))
    assert (said.get("autoscale"), "autoscale" in said) == (None, False)


def test_a_name_that_no_option_has_is_an_error() -> None:
    """In what a layer says and in what is asked of it; type checkers see the first before it runs."""
    said = say(batch_size=4)

    for wrong in (
        lambda: say(bacth_size=4),
        lambda: say(model="m"),
        lambda: Said({"batchSize": 4}),
        lambda: said.get("batchSize"),
        lambda: "batch" in said,
        lambda: said["url"],
    ):
        with pytest.raises(TypeError, match="no option of a model is called "):
            wrong()


def test_a_layer_reads_numbers_its_own_way() -> None:
    """An archive's 0 is raised, as in TorchServe; where it would hide a slip it is refused."""
    batch_size, time_out = BY_KEY["batchSize"], BY_KEY["responseTimeout"]

    assert batch_size.kind_in("archive").read(0) == 1
    for layer in ("snapshot", "registration", "models"):
        with pytest.raises(ValueError, match="1 or more"):
            batch_size.kind_in(layer).read(0)
    assert time_out.kind_in("snapshot").read(0.5) == 0.5
    with pytest.raises(ValueError, match="a whole number"):
        time_out.kind_in("models").read(0.5)


def test_the_server_s_settings_and_the_calls_have_names_of_their_own() -> None:
    """A setting for each option that falls back to one, and the parameters of a registration."""
    assert {option.setting for option in said_in("server")} <= set(KEYS)
    assert [option.parameter for option in said_in("registration")][:4] == [
        "min_workers",
        "max_workers",
        "batch_size",
        "max_batch_delay",
    ]


def test_options_are_written_in_the_units_of_files() -> None:
    """Of a record all that is asked for, of a layer what it says."""
    options = ModelOptions(max_batch_delay_s=0.25, response_timeout_s=7.0)

    assert written(options, "maxBatchDelay", "responseTimeout", "clientTimeoutInMills") == {
        "maxBatchDelay": 250,
        "responseTimeout": 7,
        "clientTimeoutInMills": 0,
    }
    assert written(say(startup_timeout_s=2.5), "responseTimeout", "startupTimeout") == {"startupTimeout": 2.5}
    assert written(say(startup_timeout_s=2.5, device_ids=(1,))) == {"startupTimeout": 2.5, "deviceIds": [1]}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("auto", "a map with the keys candidates, inputs, or both"),
        ({"candidate": ["onnx"]}, "a map with the keys candidates, inputs, or both"),
        ({"candidates": "onnx"}, "candidates are auto or a list"),
        ({"candidates": []}, "candidates are auto or a list"),
        ({"candidates": [1]}, "candidates are auto or a list"),
        ({"candidates": ["onnx", "onyx"]}, "candidates are auto or a list of channels-last, bf16, onnx, "),
        ({"inputs": "../in"}, "inputs are a folder of the archive"),
        ({"inputs": "/in"}, "inputs are a folder of the archive"),
        ({"inputs": ""}, "inputs are a folder of the archive"),
        ({"inputs": 3}, "inputs are a folder of the archive"),
        ({"inputs": "in-\ud800"}, "inputs are a folder of the archive"),
    ],
)
def test_what_is_to_be_optimised_is_a_map_of_builds_and_a_folder_inside(given: object, wanted: str) -> None:
    """Anything else is told what it must be."""
    with pytest.raises(ValueError, match=wanted):
        read_value("optimise", given)


def test_what_is_to_be_optimised_is_written_as_it_was_read() -> None:
    """`auto` is what no names mean."""
    for given in ({"candidates": "auto"}, {"candidates": ["onnx", "bf16"], "inputs": "requests"}):
        assert BY_KEY["optimise"].kind.write(read_value("optimise", given)) == given
