"""Reads the model's configuration (`model-config.yaml`): the keys of contract 7.1 and ours. Knows no server's defaults.

Each key is declared once, in `KEYS`: its name in the file, its attribute, its type, its unit and its rule. As the
contract wants, a value that cannot be used is left out and the model still loads; unlike TorchServe, a sentence about
it goes to `ModelConfig.warnings`. YAML that tries to build objects, or that expands beyond bounds, is refused.
"""

from __future__ import annotations

import errno
import json
import mimetypes
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml

from marserve.archive.contents.manifest import Manifest
from marserve.archive.reading.bounded_yaml import load_yaml
from marserve.errors import BadArchive
from marserve.files.nearest import nearest
from marserve.files.regular import NotRegular, open_regular
from marserve.messages import Sample, Tolerance
from marserve.settings.values import parse_size

_MAX_BYTES = 1 << 18
_MAX_SAMPLES = 64
_TOLERANCE = Tolerance()
_LENGTH_RULE = re.compile(r"body_bytes|handler|header:[!#$%&'*+.^_`|~0-9A-Za-z-]+|json:[^.\s]+(?:\.[^.\s]+)*")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the model's configuration sets; None (or the contract's default) for what it does not. Times in seconds.

    `document` is the whole file, for handlers (`context.model_yaml_config`), None when there is none or it is no
    YAML. `max_batch_delay_s` 0.0 is a delay of none, which TorchServe could not express.
    """

    min_workers: int | None = None
    max_workers: int | None = None
    batch_size: int | None = None
    max_batch_delay_s: float | None = None
    batch_policy: Literal["idle", "fixed", "goal"] = "idle"
    latency_goal_s: float | None = None
    length_from: str | None = None
    padding_budget: float = 0.25
    batch_isolation: bool = True
    samples: tuple[Sample, ...] = ()
    warm_up: bool = False
    batch_check: Literal["off", "warn", "refuse"] | None = None
    batch_check_sample: float = 0.0
    batch_tolerance: Tolerance = _TOLERANCE
    autoscale: bool | None = None
    idle_timeout_s: float | None = None
    response_timeout_s: float | None = None
    startup_timeout_s: float | None = None
    client_timeout_s: float | None = None
    default_priority: int = 5
    max_retry_timeout_s: float = 300.0
    retry_failed_every_s: float = 300.0
    retry_on_worker_death: bool = True
    max_restarts: int = 0
    no_restart_exit_codes: tuple[int, ...] = ()
    on_crash: Literal["retry", "fail"] = "retry"
    readiness_rule: Literal["any", "min", "all"] | None = None
    max_worker_memory_bytes: int | None = None
    max_requests_per_worker: int = 0
    max_worker_age_s: float = 0.0
    max_worker_growth_bytes: int = 0
    memory_bytes: int | None = None
    load: Literal["start", "on_demand"] | None = None
    is_pinned: bool | None = None
    worker_start: Literal["auto", "fork", "fresh"] = "auto"
    launcher: Literal["local", "ray"] = "local"
    worker_resources: Mapping[str, float] | None = None
    worker_placement: Literal["spread", "pack"] = "spread"
    device_type: Literal["cpu", "gpu"] | None = None
    device_ids: tuple[int, ...] | None = None
    device_memory_bytes: int | None = None
    cpu_pinning: Literal["off", "near"] | None = None
    parallel_type: Literal["pp", "tp", "pptp", "custom"] | None = None
    parallel_level: int = 0
    torchrun: dict[str, Any] | None = None
    job_queue_size: int | None = None
    use_job_ticket: bool = False
    continuous_batching: bool = False
    sequence_batching: bool = False
    sequence_max_idle_s: float = 0.0
    sequence_timeout_s: float = 0.0
    max_sequence_job_queue_size: int = 1
    max_num_sequence: int | None = None
    free_ended_sequences: bool = False
    async_communication: bool = False
    max_concurrent_requests: int = 1000
    use_venv: bool = False
    document: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)


_AMOUNTS = "a map of resources to numbers of 0 or more, as {cpus: 2, gpus: 1, memory: 4GiB}"


class _Unusable(Exception):
    """The value of one key cannot be used; the text says what it must be. Caught here, key by key."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the file: its name there, the attribute it sets, how a value is read, one sentence for the docs."""

    name: str
    attribute: str
    read: Callable[[object], object]
    help: str


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 31:
        raise _Unusable("a whole number")
    return value


def _raised_to(least: int) -> Callable[[object], int]:
    """A whole number; a smaller one becomes `least`."""
    return lambda value: max(least, _integer(value))


def _at_least(least: int) -> Callable[[object], int]:
    """A whole number; a smaller one counts as absent."""

    def read(value: object) -> int:
        number = _integer(value)
        if number < least:
            raise _Unusable(f"a whole number of {least} or more")
        return number

    return read


def _between(least: int, most: int) -> Callable[[object], int]:
    """A whole number between the two, both included."""

    def read(value: object) -> int:
        number = _integer(value)
        if not least <= number <= most:
            raise _Unusable(f"a whole number from {least} to {most}")
        return number

    return read


def _seconds(read: Callable[[object], int], per_second: int = 1) -> Callable[[object], float]:
    """The same value in seconds as a float."""
    return lambda value: read(value) / per_second


def _number_of_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise _Unusable("a number of seconds above 0")
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _Unusable("true or false")
    return value


def _word(*words: str) -> Callable[[object], object]:
    def read(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in words:
            raise _Unusable(f"one of {', '.join(words)}")
        return value.lower()

    return read


def _length_rule(value: object) -> str:
    if not isinstance(value, str) or _LENGTH_RULE.fullmatch(value) is None:
        raise _Unusable("body_bytes, header:NAME, json:PATH or handler")
    return value


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise _Unusable("a number from 0 to below 1")
    return float(value)


def _device_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise _Unusable("a list of device numbers of 0 or more")
    return tuple(value)


def _size(value: object) -> int:
    size = parse_size(value) if isinstance(value, str) else _integer_of_any_size(value)
    if size is None or size < 0:
        raise _Unusable("a number of bytes of 0 or more, as 500MB or 2GiB")
    return size


def _positive_size(value: object) -> int:
    size = _size(value)
    if not size:
        raise _Unusable("a number of bytes above 0, as 500MB or 2GiB")
    return size


def _amounts(value: object) -> dict[str, float]:
    """Resources of a cluster by name: `memory` is a size, the others are numbers of 0 or more."""
    if not isinstance(value, dict) or not all(isinstance(name, str) and name for name in value):
        raise _Unusable(_AMOUNTS)
    amounts: dict[str, float] = {}
    for name, much in value.items():
        if name == "memory":
            amounts[name] = _size(much)
        elif isinstance(much, bool) or not isinstance(much, int | float) or not 0 <= much < 1e6:
            raise _Unusable(_AMOUNTS)
        else:
            amounts[name] = float(much)
    return amounts


def _integer_of_any_size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62 else None


def _exit_codes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= 255 for item in value):
        raise _Unusable("a list of exit statuses from 0 to 255")
    return tuple(value)


def _map(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Unusable("a map")
    return value


def _samples(value: object) -> tuple[Sample, ...]:
    """A list of inputs: `{file: cat.jpg, contentType: image/jpeg}`, `{json: {…}}` or `{text: …}`.

    Bare words are none: handlers written for TorchServe may have a key `samples` of their own.
    """
    if not isinstance(value, list) or len(value) > _MAX_SAMPLES:
        raise _Unusable(f"a list of at most {_MAX_SAMPLES} samples")
    return tuple(_sample(each) for each in value)


def _sample(value: object) -> Sample:
    if not isinstance(value, dict) or len(value.keys() & {"file", "json", "text"}) != 1:
        raise _Unusable("a list of samples, each with one of the keys file, json and text")
    content_type = value.get("contentType")
    if content_type is not None and not isinstance(content_type, str):
        raise _Unusable("a list of samples whose contentType is text")
    if "file" in value:
        name = value["file"]
        if not isinstance(name, str) or not name or PurePosixPath(name).is_absolute() or ".." in name.split("/"):
            raise _Unusable("a list of samples whose files are named by paths inside of the archive")
        return Sample(content_type or mimetypes.guess_type(name)[0], file=name)
    if "text" in value:
        return Sample(content_type, body=str(value["text"]).encode())
    try:
        return Sample(content_type or "application/json", body=json.dumps(value["json"]).encode())
    except (TypeError, ValueError):  # a date, a set: YAML has more than JSON
        raise _Unusable("a list of samples whose json is JSON") from None


def _up_to_one(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise _Unusable("a number from 0 to 1")
    return float(value)


def _tolerance(value: object) -> Tolerance:
    """`{relative: 1e-3, absolute: 1e-5, ignore: [request_id]}`, each of them optional."""
    if not isinstance(value, dict) or not value.keys() <= {"relative", "absolute", "ignore"}:
        raise _Unusable("a map with the keys relative, absolute and ignore")
    numbers: dict[str, float] = {}
    for name in ("relative", "absolute"):
        try:
            numbers[name] = float(value.get(name, getattr(_TOLERANCE, name)))  # YAML reads 1e-3 as text
        except (TypeError, ValueError):
            numbers[name] = -1.0
        if not 0 <= numbers[name] < float("inf"):
            raise _Unusable(f"a map whose {name} is a number of 0 or more")
    ignore = value.get("ignore", [])
    if not isinstance(ignore, list) or not all(isinstance(path, str) and path for path in ignore):
        raise _Unusable("a map whose ignore is a list of paths")
    is_given = not value.keys().isdisjoint(numbers)
    return Tolerance(numbers["relative"], numbers["absolute"], tuple(ignore), is_given)


KEYS: tuple[Key, ...] = (
    Key(
        "minWorkers",
        "min_workers",
        _raised_to(0),
        "Fewest workers, 1 or more (0 with idleTimeout); counts only together with maxWorkers.",
    ),
    Key("maxWorkers", "max_workers", _at_least(0), "Most workers; counts only when it is not below minWorkers."),
    Key("batchSize", "batch_size", _raised_to(1), "Most requests in one batch."),
    Key("maxBatchDelay", "max_batch_delay_s", _seconds(_at_least(0), 1000), "Longest wait for a batch, milliseconds."),
    Key("batchPolicy", "batch_policy", _word("idle", "fixed", "goal"), "When a batch leaves, and how large."),
    Key(
        "latencyGoalMs",
        "latency_goal_s",
        _seconds(_at_least(1), 1000),
        "batchPolicy goal: time to answer that 95 % of requests are to have, ms.",
    ),
    Key("lengthFrom", "length_from", _length_rule, "batchPolicy goal: how long inputs are: a rule, or handler."),
    Key("paddingBudget", "padding_budget", _share, "batchPolicy goal: which part of a batch may be padding, 0 to 1."),
    Key("autoscale", "autoscale", _flag, "Whether the number of workers between the two follows the need."),
    Key(
        "idleTimeout",
        "idle_timeout_s",
        _number_of_seconds,
        "With minWorkers 0: after how long without a request there is no worker, seconds.",
    ),
    Key("batchIsolation", "batch_isolation", _flag, "Whether a batch that raises is split to find the guilty item."),
    Key("samples", "samples", _samples, "Inputs to check batches and to warm up with: files, or inline."),
    Key("warmUp", "warm_up", _flag, "Whether each worker runs the samples once before it is ready."),
    Key(
        "batchCheck",
        "batch_check",
        _word("off", "warn", "refuse"),
        "What follows when batches are not answered as single requests; refuse if there are samples, else off.",
    ),
    Key("batchCheckSample", "batch_check_sample", _up_to_one, "Share of served batches that is run again, one by one."),
    Key(
        "batchTolerance",
        "batch_tolerance",
        _tolerance,
        "How far answers may be apart and still be alike: relative, absolute, and paths to ignore.",
    ),
    Key("responseTimeout", "response_timeout_s", _seconds(_at_least(1)), "Longest time for one batch, seconds."),
    Key("startupTimeout", "startup_timeout_s", _seconds(_at_least(1)), "Longest time to load the model, seconds."),
    Key(
        "clientTimeoutInMills", "client_timeout_s", _seconds(_raised_to(0), 1000), "How long clients wait, ms; 0: ever."
    ),
    Key(
        "defaultPriority",
        "default_priority",
        _between(0, 9),
        "Priority of requests that name none: 0 (most urgent) to 9.",
    ),
    Key(
        "maxRetryTimeoutInSec",
        "max_retry_timeout_s",
        _seconds(_raised_to(0)),
        "How long failing workers are started again, seconds.",
    ),
    Key("retryFailedEvery", "retry_failed_every_s", _number_of_seconds, "Pause between probes of a failed version, s."),
    Key("retryOnWorkerDeath", "retry_on_worker_death", _flag, "Whether requests of a dead worker are run once more."),
    Key("maxRestarts", "max_restarts", _at_least(0), "Most restarts in a row before a worker is given up; 0: any."),
    Key("noRestartExitCodes", "no_restart_exit_codes", _exit_codes, "Exit statuses after which none is started again."),
    Key("onCrash", "on_crash", _word("retry", "fail"), "Whether a crashed worker is replaced or the server ends."),
    Key("readinessRule", "readiness_rule", _word("any", "min", "all"), "How many loaded workers make it ready."),
    Key("maxWorkerMemory", "max_worker_memory_bytes", _size, "Memory a worker may hold by itself; 0: no limit."),
    Key("maxRequestsPerWorker", "max_requests_per_worker", _at_least(0), "Requests before a worker is replaced."),
    Key("maxWorkerAge", "max_worker_age_s", _number_of_seconds, "Age at which a worker is replaced, seconds."),
    Key("maxWorkerGrowth", "max_worker_growth_bytes", _size, "Growth in memory at which a worker is replaced."),
    Key("memory", "memory_bytes", _positive_size, "Memory that the model takes with one worker; else it is learned."),
    Key("load", "load", _word("start", "on_demand"), "Whether it is loaded at once or at its first request."),
    Key("pinned", "is_pinned", _flag, "Whether it never makes room for another model."),
    Key("workerStart", "worker_start", _word("auto", "fork", "fresh"), "How workers start."),
    Key("launcher", "launcher", _word("local", "ray"), "Whether workers run on this machine or on a Ray cluster."),
    Key("workerResources", "worker_resources", _amounts, "What each worker on a cluster has for itself: cpus, gpus, …"),
    Key("workerPlacement", "worker_placement", _word("spread", "pack"), "On many nodes of a cluster, or on few."),
    Key("deviceType", "device_type", _word("cpu", "gpu"), "Where workers compute."),
    Key("deviceIds", "device_ids", _device_ids, "Which accelerators are used."),
    Key(
        "deviceMemory",
        "device_memory_bytes",
        _positive_size,
        "Memory that a worker takes on each of its accelerators; else it is learned.",
    ),
    Key("cpuPinning", "cpu_pinning", _word("off", "near"), "Whether workers keep to the processors near their device."),
    Key("parallelType", "parallel_type", _word("pp", "tp", "pptp", "custom"), "How one model spans several devices."),
    Key("parallelLevel", "parallel_level", _at_least(0), "How many processes, or devices, make up one worker."),
    Key("torchrun", "torchrun", _map, "Of torchrun's words those that count: nproc-per-node, OMP_NUMBER_THREADS."),
    Key("jobQueueSize", "job_queue_size", _at_least(0), "Most waiting requests; 0: the server's job_queue_size."),
    Key("useJobTicket", "use_job_ticket", _flag, "Whether requests are refused unless a worker is idle."),
    Key("continuousBatching", "continuous_batching", _flag, "Whether requests join a running batch."),
    Key("sequenceBatching", "sequence_batching", _flag, "Whether requests of one sequence keep their worker."),
    Key("sequenceMaxIdleMSec", "sequence_max_idle_s", _seconds(_at_least(0), 1000), "When an idle sequence ends, ms."),
    Key(
        "sequenceTimeoutMSec",
        "sequence_timeout_s",
        _seconds(_at_least(0), 1000),
        "When any sequence ends, ms; 0: never.",
    ),
    Key(
        "maxSequenceJobQueueSize",
        "max_sequence_job_queue_size",
        _raised_to(1),
        "Most waiting requests of one sequence.",
    ),
    Key("maxNumSequence", "max_num_sequence", _raised_to(1), "Most sequences at a time; else batchSize x workers."),
    Key("freeEndedSequences", "free_ended_sequences", _flag, "Whether a client's end header frees its sequence."),
    Key("asyncCommunication", "async_communication", _flag, "Whether the handler answers out of order."),
    Key(
        "maxConcurrentRequests",
        "max_concurrent_requests",
        _between(1, 100_000),
        "asyncCommunication: most requests that a worker has at once.",
    ),
    Key("useVenv", "use_venv", _flag, "Whether the model's requirements get an environment of their own."),
)

_HANDLER_KEYS = ("handler", "pt2", "micro_batching", "pippy", "deepspeed", "dali")


def read_model_config(folder: Path, manifest: Manifest) -> ModelConfig:
    """Read the configuration that `manifest` names from the unpacked archive at `folder`.

    No name gives an empty `ModelConfig`; a file that is missing, or no YAML, the same with a warning (contract 7).
    Raises BadArchive for YAML with application tags, alias bombs, over 256 KiB or nested more than 64 deep, and for
    a file name that leads outside of the archive.
    """
    name = manifest.config_file
    if name is None:
        return ModelConfig()
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise BadArchive(f"configFile is {name!r}; it must name a file inside of the archive.")
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ModelConfig(warnings=[f"the archive has no {name}, which its manifest names as configFile"])
    except OSError as error:
        if isinstance(error, NotRegular) or error.errno == errno.ELOOP:
            raise BadArchive(f"{name} cannot be read: {error.strerror}.") from error
        raise
    return parse_model_config(data, name)


def parse_model_config(data: bytes, name: str = "model-config.yaml") -> ModelConfig:
    """The configuration in the YAML text `data`; `name` stands in warnings.

    Raises BadArchive as `read_model_config` does.
    """
    if len(data) > _MAX_BYTES:
        raise BadArchive(f"{name} has more than {_MAX_BYTES} bytes.")
    warnings: list[str] = []
    try:
        document = load_yaml(data, name, warnings)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        return ModelConfig(warnings=[f"{name} is not used: it is no YAML{where}"])
    except (UnicodeError, ValueError, OverflowError):
        return ModelConfig(warnings=[f"{name} is not used: it is no YAML"])
    if document is None:
        return ModelConfig(document={})
    if not isinstance(document, dict):
        return ModelConfig(warnings=[f"{name} is not used: it must hold keys and values"])
    values = _read_keys(document, warnings)
    _apply_torchrun(document, values)
    if "idle_timeout_s" not in values and values.get("min_workers") == 0:
        values["min_workers"] = 1  # the contract's 7.1: without our key there is always one
    return ModelConfig(**values, document=document, warnings=warnings)


def read_value(name: str, value: object) -> object:
    """What the value of a key means.

    Raises ValueError, saying what it must be, and KeyError where there is no such key.
    """
    try:
        return {key.name: key for key in KEYS}[name].read(value)
    except _Unusable as error:
        raise ValueError(str(error)) from None


def declare(config: ModelConfig, declared: Mapping[str, Any]) -> ModelConfig:
    """The configuration with what an operator declares, under the file's names, in place of what the archive says.

    `document` stays the archive's. Raises ValueError and KeyError as `read_value` does.
    """
    attributes = {key.name: key.attribute for key in KEYS}
    values: dict[str, Any] = {attributes[name]: read_value(name, value) for name, value in declared.items()}
    _apply_torchrun(dict(declared), values)
    return replace(config, **values)


def _read_keys(document: dict[Any, Any], warnings: list[str]) -> dict[str, Any]:
    known = {key.name: key for key in KEYS}
    values: dict[str, Any] = {}
    for name, value in document.items():
        key = known.get(name)
        if key is None:
            near = nearest(str(name), known, least=0.85, is_loose=True)
            if near is not None and name not in _HANDLER_KEYS:
                warnings.append(f"{name} is no key of the server; did you mean {near}?")
            continue
        try:
            values[key.attribute] = key.read(value)
        except _Unusable as error:
            warnings.append(f"{name} is {_show(value)}, which is not used: it must be {error}")
    return values


def _apply_torchrun(document: dict[Any, Any], values: dict[str, Any]) -> None:
    """`nproc-per-node` sets the parallel level; of it and `parallelLevel` the later one in the file wins (7.1)."""
    torchrun = values.get("torchrun")
    if torchrun is None:
        return
    names = list(document)
    is_later = "parallelLevel" not in names or names.index("torchrun") > names.index("parallelLevel")
    processes = torchrun.get("nproc-per-node", 1)
    if is_later and type(processes) is int and processes > 0:
        values["parallel_level"] = processes


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
