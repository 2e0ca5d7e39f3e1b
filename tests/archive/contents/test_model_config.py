"""What `model-config.yaml` sets, what is left out with a warning, and what is refused (contract 7, RELIABILITY H4)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from marserve.archive.contents.manifest import Manifest
from marserve.archive.contents.model_config import ModelConfig, parse_model_config, read_model_config
from marserve.errors import BadArchive
from marserve.model_options import ModelOptions
from marserve.option_values import Sample, Tolerance

EVERYTHING = b"""\
minWorkers: 1
maxWorkers: 2
batchSize: 4
maxBatchDelay: 200
batchPolicy: fixed
latencyGoalMs: 250
lengthFrom: json:inputs.text
paddingBudget: 0.4
batchIsolation: false
autoscale: true
idleTimeout: 90
responseTimeout: 7
startupTimeout: 33
clientTimeoutInMills: 700
defaultPriority: 2
maxRetryTimeoutInSec: 30
retryFailedEvery: 12.5
retryOnWorkerDeath: false
maxRestarts: 5
noRestartExitCodes: [3, 78]
onCrash: fail
readinessRule: min
maxWorkerMemory: 1.5GB
maxRequestsPerWorker: 1000
maxWorkerAge: 3600
healthInterval: 0.5
maxWorkerGrowth: 200MiB
workerStart: fresh
deviceType: GPU
deviceIds: [2, 0]
parallelType: TP
parallelLevel: 2
jobQueueSize: 50
useJobTicket: true
continuousBatching: true
sequenceBatching: true
sequenceMaxIdleMSec: 3000
sequenceTimeoutMSec: 500
maxSequenceJobQueueSize: 4
maxNumSequence: 8
asyncCommunication: true
useVenv: true
handler:
  profile: true
pt2:
  compile: {enable: true}
"""


def test_every_key_is_read_in_its_unit() -> None:
    """Milliseconds and seconds of the file are seconds here; words are read in any case."""
    config = parse_model_config(EVERYTHING)

    assert config.said == {
        "min_workers": 1,
        "max_workers": 2,
        "batch_size": 4,
        "max_batch_delay_s": 0.2,
        "batch_policy": "fixed",
        "latency_goal_s": 0.25,
        "length_from": "json:inputs.text",
        "padding_budget": 0.4,
        "batch_isolation": False,
        "autoscale": True,
        "idle_timeout_s": 90.0,
        "response_timeout_s": 7.0,
        "startup_timeout_s": 33.0,
        "client_timeout_s": 0.7,
        "default_priority": 2,
        "max_retry_timeout_s": 30.0,
        "retry_failed_every_s": 12.5,
        "retry_on_worker_death": False,
        "max_restarts": 5,
        "no_restart_exit_codes": (3, 78),
        "on_crash": "fail",
        "readiness_rule": "min",
        "max_worker_memory_bytes": 1_500_000_000,
        "max_requests_per_worker": 1000,
        "max_worker_age_s": 3600.0,
        "max_worker_growth_bytes": 200 << 20,
        "health_interval_s": 0.5,
        "worker_start": "fresh",
        "device_type": "gpu",
        "device_ids": (2, 0),
        "parallel_type": "tp",
        "parallel_level": 2,
        "queue_size": 50,
        "use_job_ticket": True,
        "continuous_batching": True,
        "sequence_batching": True,
        "sequence_max_idle_s": 3.0,
        "sequence_timeout_s": 0.5,
        "max_sequence_job_queue_size": 4,
        "max_num_sequence": 8,
        "is_concurrent": True,
        "use_venv": True,
    }
    assert config.document is not None
    assert config.document["handler"] == {"profile": True}


def test_an_archive_without_the_file_says_nothing(tmp_path: Path) -> None:
    """Of what it does not say the defaults hold."""
    assert read_model_config(tmp_path, Manifest()) == ModelConfig({}, None, [])
    assert ModelConfig().options == ModelOptions()


@pytest.mark.parametrize(
    ("line", "attribute", "value"),
    [
        ("batchPolicy: GOAL", "batch_policy", "goal"),
        ("lengthFrom: header:X-Tokens", "length_from", "header:X-Tokens"),
        ("lengthFrom: body_bytes", "length_from", "body_bytes"),
        ("lengthFrom: handler", "length_from", "handler"),
        ("paddingBudget: 0", "padding_budget", 0.0),
        ("minWorkers: 0", "min_workers", 1),
        ("minWorkers: 0\nidleTimeout: 60", "min_workers", 0),
        ("minWorkers: -5", "min_workers", 1),
        ("maxWorkers: 0", "max_workers", 0),
        ("batchSize: -3", "batch_size", 1),
        ("maxBatchDelay: 0", "max_batch_delay_s", 0.0),
        ("maxRetryTimeoutInSec: -1", "max_retry_timeout_s", 0.0),
        ("clientTimeoutInMills: -1", "client_timeout_s", 0.0),
        ("maxNumSequence: 0", "max_num_sequence", 1),
        ("maxSequenceJobQueueSize: -1", "max_sequence_job_queue_size", 1),
    ],
)
def test_small_numbers_are_raised_as_the_contract_says(line: str, attribute: str, value: float) -> None:
    """Chapter 7.1; a delay of none is told apart from no delay named (Q25)."""
    config = parse_model_config(line.encode())

    assert config.said == {**config.said, attribute: value}
    assert config.warnings == []


@pytest.mark.parametrize(
    "line",
    [
        "minWorkers: two",
        "latencyGoalMs: 0",
        "lengthFrom: 'header: with space'",
        "lengthFrom: tokens",
        "lengthFrom: 'json:'",
        "paddingBudget: 1",
        "paddingBudget: much",
        "idleTimeout: 0",
        'batchSize: "8"',
        "batchSize: 8.0",
        "batchSize: true",
        "batchSize: 99999999999",
        "batchSize: [8]",
        "batchSize:",
        "maxWorkers: -1",
        "maxBatchDelay: -1",
        "responseTimeout: 0",
        "startupTimeout: -5",
        "deviceType: tpu",
        "deviceType: 3",
        "deviceIds: [0, x]",
        "deviceIds: [0, -1]",
        "deviceIds: 0",
        "parallelType: all",
        "parallelLevel: -1",
        "torchrun: 4",
        "useJobTicket: 1",
        'useJobTicket: "true"',
        "batchPolicy: eager",
        "workerStart: forked",
        "launcher: slurm",
        "workerResources: 2",
        "workerResources: {cpus: -1}",
        "workerResources: {cpus: true}",
        "workerResources: {memory: much}",
        "workerPlacement: anywhere",
        "defaultPriority: 10",
        "defaultPriority: -1",
        "defaultPriority: high",
        "retryFailedEvery: 0",
        "retryFailedEvery: .inf",
        "retryOnWorkerDeath: never",
        "maxRestarts: -1",
        "noRestartExitCodes: 3",
        "noRestartExitCodes: [256]",
        "noRestartExitCodes: [true]",
        "onCrash: panic",
        "readinessRule: most",
        "maxWorkerMemory: much",
        "maxWorkerMemory: -5",
        "maxWorkerMemory: true",
        "maxWorkerMemory: [1]",
        "maxRequestsPerWorker: 1.5",
        "maxWorkerAge: 0",
        "healthInterval: often",
        "maxWorkerGrowth: 1 GB a day",
    ],
)
def test_a_value_of_the_wrong_type_is_left_out_with_a_sentence(line: str) -> None:
    """The model still loads; the sentence names key, value and what would be right."""
    name = line.partition(":")[0]

    config = parse_model_config(line.encode())

    assert config.said == {}
    assert len(config.warnings) == 1
    assert config.warnings[0].startswith(f"{name} is ")
    assert "must be" in config.warnings[0]


@pytest.mark.parametrize(
    ("lines", "level"),
    [
        ("torchrun: {nproc-per-node: 4}", 4),
        ("parallelLevel: 2\ntorchrun: {nproc-per-node: 4}", 4),
        ("torchrun: {nproc-per-node: 4}\nparallelLevel: 2", 2),
        ("torchrun: {nnodes: 1}", 1),
    ],
)
def test_of_torchrun_and_parallel_level_the_later_wins(lines: str, level: int) -> None:
    """Chapter 7.1."""
    assert parse_model_config(lines.encode()).options.parallel_level == level


@pytest.mark.parametrize(
    ("key", "near"), [("batchsize", "batchSize"), ("minWorker", "minWorkers"), ("max_batch_delay", "maxBatchDelay")]
)
def test_a_key_that_looks_misspelt_is_told_with_the_nearest_name(key: str, near: str) -> None:
    """Other unknown keys are the handler's own business."""
    config = parse_model_config(f"{key}: 1\ngreeting: hello\n".encode())

    assert config.warnings == [f"{key} is no key of the server; did you mean {near}?"]
    assert config.document == {key: 1, "greeting": "hello"}


def test_a_key_that_stands_twice_is_told() -> None:
    """YAML forbids it, parsers take the last one without a word."""
    config = parse_model_config(b"batchSize: 2\nbatchSize: 3\n")

    assert config.options.batch_size == 3
    assert config.warnings == ["batchSize stands in model-config.yaml more than once; the last one counts"]


@pytest.mark.parametrize(
    "data",
    [b"minWorkers: [1\n  : : nonsense\n", b"\xff\xff", b"a: \x00", b"%", b"a: 2020-99-99", b"- 1\n- 2\n", b"text"],
)
def test_a_file_that_is_no_yaml_counts_as_absent_with_a_sentence(data: bytes) -> None:
    """Chapter 7: the model is registered all the same."""
    config = parse_model_config(data)

    assert config.document is None
    assert len(config.warnings) == 1
    assert config.warnings[0].startswith("model-config.yaml is not used")


def test_an_empty_file_sets_nothing() -> None:
    """It is there, so handlers see an empty map."""
    assert parse_model_config(b"# nothing yet\n") == ModelConfig(document={})


def test_a_file_that_is_missing_is_told(tmp_path: Path) -> None:
    """The manifest names it, the archive does not hold it."""
    config = read_model_config(tmp_path, Manifest(config_file="there.yaml"))

    assert config.warnings == ["the archive has no there.yaml, which its manifest names as configFile"]


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (os.mkfifo, "it is a named pipe, not a regular file"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    ],
)
def test_what_stands_in_the_place_of_the_file_is_named(tmp_path: Path, put: Callable[[Path], None], why: str) -> None:
    """A folder that is served in place may hold anything; that is no error of the server's."""
    put(tmp_path / "c.yaml")

    with pytest.raises(BadArchive, match=rf"c\.yaml cannot be read: {why}"):
        read_model_config(tmp_path, Manifest(config_file="c.yaml"))


def test_a_file_outside_of_the_archive_is_refused(tmp_path: Path) -> None:
    """Also by way of a link in a folder that is served in place."""
    (tmp_path / "secret.yaml").write_bytes(b"a: 1")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "c.yaml").symlink_to(tmp_path / "secret.yaml")

    for name in ("../secret.yaml", "c.yaml", str(tmp_path / "secret.yaml")):
        with pytest.raises(BadArchive, match="inside of the archive"):
            read_model_config(tmp_path / "model", Manifest(config_file=name))


def billion_laughs() -> bytes:
    """Nine lists of ten aliases each: ten to the ninth values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    return "\n".join(lines).encode()


def merged_laughs() -> bytes:
    """The same with merge keys, which copy what they name while the document is built."""
    lines = ["a0: &a0 {k0: 0}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 9)]
    return "\n".join(lines).encode()


HOSTILE = {
    "Python call": (b"a: !!python/object/apply:os.system [echo]", "python/object/apply:os.system"),
    "Python name": (b"a: !!python/name:os.system", "objects are not built"),
    "Python object as key": (b"? !!python/object:os.x {}\n: 1", "objects are not built"),
    "long form": (b"a: !<tag:yaml.org,2002:python/object/apply:os.system> [x]", "objects are not built"),
    "application tag": (b"a: !javax.script.ScriptEngineManager []", "objects are not built"),
    "tag by prefix": (b"%TAG ! tag:yaml.org,2002:python/\n---\na: !object/apply:os.system [x]", "not built"),
    "alias bomb": (billion_laughs(), "expands to more than"),
    "merge bomb": (merged_laughs(), "expands to more than"),
    "loop": (b"a: &a [*a]", "contains itself"),
    "deep lists": (b"a: " + b"[" * 100_000, "nested more than"),
    "deep maps": (b"{a: " * 10_000, "nested more than"),
    "10 MB": (b"a: " + b"x" * 10_000_000, "more than 262144 bytes"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_yaml_is_refused_quickly_and_builds_nothing(what: str) -> None:
    """H4: no tag is constructed, no alias expanded."""
    data, words = HOSTILE[what]
    begun = time.monotonic()

    with pytest.raises(BadArchive, match=words):
        parse_model_config(data)

    assert time.monotonic() - begun < 6


def test_plain_tags_and_anchors_are_fine() -> None:
    """YAML's own types, and a value named once and used twice."""
    config = parse_model_config(b"batchSize: !!int 3\nhandler: &h {a: 1}\nother: {<<: *h, b: 2}\n")

    assert config.options.batch_size == 3
    assert config.document is not None
    assert config.document["other"] == {"a": 1, "b": 2}


def test_samples_are_files_or_inline() -> None:
    """A file's type is guessed from its name unless it is said; JSON stands as it is."""
    config = parse_model_config(
        b"""\
samples:
  - file: cat.jpg
  - {file: sub/x.bin, contentType: application/x-mine}
  - json: {text: hello, n: [1, 2]}
  - {text: plain, contentType: text/plain}
warmUp: true
batchCheck: WARN
batchCheckSample: 0.25
batchTolerance: {relative: 1e-2, absolute: 0, ignore: [id, "boxes[*].id"]}
"""
    )

    assert config.warnings == []
    assert config.options.samples == (
        Sample("image/jpeg", file="cat.jpg"),
        Sample("application/x-mine", file="sub/x.bin"),
        Sample("application/json", body=b'{"text": "hello", "n": [1, 2]}'),
        Sample("text/plain", body=b"plain"),
    )
    assert (config.options.warm_up, config.options.batch_check, config.options.batch_check_sample) == (
        True,
        "warn",
        0.25,
    )
    assert config.options.batch_tolerance == Tolerance(0.01, 0.0, ("id", "boxes[*].id"), is_given=True)


@pytest.mark.parametrize(
    "line",
    [
        "samples: cat.jpg",
        "samples: [{}]",
        "samples: [3]",
        "samples: [cat.jpg]",
        "samples: [{file: a, text: b}]",
        "samples: [{file: /etc/passwd}]",
        "samples: [{file: ../a}]",
        "samples: [{file: 3}]",
        "samples: [{text: a, contentType: 3}]",
        "samples: [{json: 2020-01-01}]",
        "samples: [" + ", ".join(["{text: a}"] * 65) + "]",
        "warmUp: 1",
        "batchCheck: maybe",
        "batchCheckSample: 1.5",
        "batchCheckSample: -0.1",
        "batchCheckSample: true",
        "batchTolerance: 0.1",
        "batchTolerance: {relative: -1}",
        "batchTolerance: {absolute: .inf}",
        "batchTolerance: {relative: much}",
        "batchTolerance: {ignore: id}",
        "batchTolerance: {ignore: [3]}",
        "batchTolerance: {precision: 3}",
    ],
)
def test_samples_and_checks_that_cannot_be_used_are_left_out_with_a_sentence(line: str) -> None:
    """As every other key."""
    config = parse_model_config(line.encode())

    assert config.said == {}
    assert len(config.warnings) == 1
    assert "which is not used: it must be" in config.warnings[0]


def test_what_a_worker_on_a_cluster_has_is_read_by_name() -> None:
    """Memory is a size, everything else a number."""
    text = b"launcher: Ray\nworkerResources: {cpus: 2, gpus: 0.5, memory: 4GiB, tpu: 1}\nworkerPlacement: pack\n"

    config = parse_model_config(text)

    assert config.options.launcher == "ray"
    assert config.options.worker_resources == {"cpus": 2.0, "gpus": 0.5, "memory": 4 << 30, "tpu": 1.0}
    assert config.options.worker_placement == "pack"
    assert config.warnings == []
