"""What may be said of how one version is served. Each option is declared once, beside its field in `ModelOptions`.

The declaration has the option's name in files, how its values are read and written, one sentence, and its order: which
layers may set it, the highest first. `fold` takes what each layer says (`Said`) and gives what wins. Pure.
"""
# ruff: noqa: RUF009 - the calls beside the fields declare the options

from __future__ import annotations

import json
import mimetypes
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, Literal, ParamSpec

from marserve.option_values import (
    AMOUNTS,
    BATCH_SIZES,
    BUILDS,
    CHECKPOINT,
    DEVICE_IDS,
    DURATION,
    EXIT_CODES,
    FLAG,
    FLAG_OR_WORD,
    LENGTH_RULE,
    MAP,
    PARALLEL,
    PART,
    PEAKS,
    POSITIVE_SIZE,
    PROGRAM,
    SHARE,
    SIZE,
    TEXT,
    THREADS,
    Kind,
    Optimising,
    ParallelPlan,
    Sample,
    Tolerance,
    Unusable,
    at_least,
    between,
    is_encodable,
    milliseconds,
    raised_to,
    seconds,
    words,
)

# Where something is said of a version: `models` is the setting of that name, `server` are the other settings.
Layer = Literal["snapshot", "registration", "desired", "archive", "models", "server"]
_ARCHIVE: tuple[Layer, ...] = ("desired", "archive")
_RANKS: tuple[Layer, ...] = ("snapshot", "desired", "archive")
_BATCHES: tuple[Layer, ...] = ("snapshot", "registration", "desired", "archive", "models")
_TIME_OUTS: tuple[Layer, ...] = ("snapshot", "desired", "archive", "registration", "models")
_MEMORY: tuple[Layer, ...] = ("snapshot", "registration", "models", "desired", "archive")
# The least and the most workers count together, and some layers' at some calls alone: `effective_options` has the rule.
_WORKERS: tuple[Layer, ...] = ("snapshot", "desired", "archive", "models", "registration")

# Layers that take a number as it is meant, and refuse one that is too small where an archive's is raised.
_WORKERS_FROM: Mapping[Layer, Kind] = {"snapshot": at_least(0), "models": at_least(1)}
_FROM_1: Mapping[Layer, Kind] = {"snapshot": at_least(1), "registration": at_least(1), "models": at_least(1)}
# The server itself writes parts of seconds there.
_ANY_SECONDS: Mapping[Layer, Kind] = {"snapshot": DURATION}
_AS_A_WORD: Mapping[Layer, Kind] = {"snapshot": FLAG_OR_WORD, "models": FLAG_OR_WORD}

_MAX_SAMPLES = 64
_TOLERANCE = Tolerance()


def _read_samples(value: object) -> tuple[Sample, ...]:
    """A list of inputs: `{file: cat.jpg, contentType: image/jpeg}`, `{json: {…}}` or `{text: …}`.

    A bare word cannot be used: handlers written for TorchServe may have a key `samples` of their own.
    """
    if not isinstance(value, list) or len(value) > _MAX_SAMPLES:
        raise Unusable(f"a list of at most {_MAX_SAMPLES} samples")
    return tuple(_read_sample(each) for each in value)


def _read_sample(value: object) -> Sample:
    if not isinstance(value, dict) or len(value.keys() & {"file", "json", "text"}) != 1:
        raise Unusable("a list of samples, each with one of the keys file, json and text")
    content_type = value.get("contentType")
    if content_type is not None and not isinstance(content_type, str):
        raise Unusable("a list of samples whose contentType is text")
    if "file" in value:
        name = value["file"]
        if not isinstance(name, str) or not _is_inside(name):
            raise Unusable("a list of samples whose files are named by paths inside of the archive")
        return Sample(content_type or mimetypes.guess_type(name)[0], file=name)
    if "text" in value:
        return Sample(content_type, body=str(value["text"]).encode())
    try:
        return Sample(content_type or "application/json", body=json.dumps(value["json"]).encode())
    except (TypeError, ValueError):  # a date, a set: YAML has more than JSON
        raise Unusable("a list of samples whose json is JSON") from None


def _read_tolerance(value: object) -> Tolerance:
    """`{relative: 1e-3, absolute: 1e-5, ignore: [request_id]}`, each of them optional."""
    if not isinstance(value, dict) or not value.keys() <= {"relative", "absolute", "ignore"}:
        raise Unusable("a map with the keys relative, absolute and ignore")
    numbers: dict[str, float] = {}
    for name in ("relative", "absolute"):
        try:
            numbers[name] = float(value.get(name, getattr(_TOLERANCE, name)))  # YAML reads 1e-3 as text
        except (TypeError, ValueError):
            numbers[name] = -1.0
        if not 0 <= numbers[name] < float("inf"):
            raise Unusable(f"a map whose {name} is a number of 0 or more")
    ignore = value.get("ignore", [])
    if not isinstance(ignore, list) or not all(isinstance(path, str) and path for path in ignore):
        raise Unusable("a map whose ignore is a list of paths")
    is_given = not value.keys().isdisjoint(numbers)
    return Tolerance(numbers["relative"], numbers["absolute"], tuple(ignore), is_given)


def _read_optimising(value: object) -> Optimising:
    """`{candidates: auto, inputs: requests}`; `candidates` may be a list of names."""
    if not isinstance(value, dict) or not value.keys() <= {"candidates", "inputs"}:
        raise Unusable("a map with the keys candidates, inputs, or both, as {candidates: auto, inputs: requests}")
    names = value.get("candidates", "auto")
    if names == "auto":
        names = []
    elif not isinstance(names, list) or not names or not all(name in BUILDS for name in names):
        raise Unusable(f"a map whose candidates are auto or a list of {', '.join(BUILDS)}")
    folder = value.get("inputs", "")
    if not isinstance(folder, str) or ("inputs" in value and not _is_inside(folder)):
        raise Unusable("a map whose inputs are a folder of the archive, named by its path inside of it")
    return Optimising(tuple(dict.fromkeys(names)), folder, is_asked=True)


def _write_optimising(value: Optimising) -> dict[str, Any]:
    written: dict[str, Any] = {"candidates": list(value.candidates) or "auto"}
    return written | ({"inputs": value.inputs} if value.inputs else {})


def _is_inside(path: str) -> bool:
    if not path or "\0" in path or not is_encodable(path):
        return False
    return not PurePosixPath(path).is_absolute() and ".." not in path.split("/")


_OPTIMISING = Kind(_read_optimising, {"type": "object"}, _write_optimising)
_SAMPLES = Kind(_read_samples, {"type": "array", "items": {"type": "object"}})
_BATCH_TOLERANCE = Kind(_read_tolerance, {"type": "object"})


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name in files, its field, its sort of value, a sentence, and its layers, the highest first.

    `otherwise` are the layers that read another sort of value. `setting` is the server's setting that it falls back to,
    None for none. With `is_described` describe shows the value that is in force, unless it is the `default`. With
    `is_strict` an archive that has a value which cannot be used is refused, where others' are left out (contract 7.1).
    """

    key: str
    attribute: str
    kind: Kind
    help: str
    order: tuple[Layer, ...]
    default: Any = None
    otherwise: Mapping[Layer, Kind] = field(default_factory=dict)
    setting: str | None = None
    is_described: bool = False
    is_strict: bool = False

    @property
    def parameter(self) -> str:
        """Its name among the parameters of a call: `max_batch_delay` for `maxBatchDelay`."""
        return re.sub("[A-Z]", lambda capital: f"_{capital.group().lower()}", self.key)

    def kind_in(self, layer: Layer) -> Kind:
        """The sort of value that this layer has."""
        return self.otherwise.get(layer, self.kind)


def _option(
    key: str,
    kind: Kind,
    help: str,
    default: Any = None,
    order: tuple[Layer, ...] = _ARCHIVE,
    *,
    setting: str | None = None,
    **more: Any,
) -> Any:
    if setting is not None:
        order = (*order, "server")
    return field(default=default, metadata={"option": (key, kind, help, order, {"setting": setting, **more})})


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How one version is to be served, as it was asked for; times in seconds, sizes in bytes.

    A default is what holds where no layer says anything. `model` and `version` are no options; they are empty while
    only the archive is known. What comes of the options on this server is `pool/options.py`'s to hold.
    """

    model: str = ""
    version: str = ""

    min_workers: int | None = _option(
        "minWorkers",
        raised_to(0),
        "Fewest workers, 1 or more (0 with idleTimeout); counts only together with maxWorkers.",
        order=_WORKERS,
        otherwise=_WORKERS_FROM,
    )
    max_workers: int | None = _option(
        "maxWorkers",
        at_least(0),
        "Most workers; counts only when it is not below minWorkers.",
        order=_WORKERS,
        otherwise=_WORKERS_FROM,
    )
    batch_size: int = _option("batchSize", raised_to(1), "Most requests in one batch.", 1, _BATCHES, otherwise=_FROM_1)
    allowed_batch_sizes: tuple[int, ...] = _option(
        "allowedBatchSizes",
        BATCH_SIZES,
        "The only numbers of rows the model is called with; a batch is filled up, the largest is the batch size.",
        (),
        is_described=True,
        is_strict=True,
    )
    max_rows: int = _option("maxRows", at_least(1), "Declared handlers: most rows in one request.", 1024)
    max_batch_delay_s: float = _option(
        "maxBatchDelay", milliseconds(at_least(0)), "Longest wait for a batch, milliseconds.", 0.1, _BATCHES
    )
    batch_policy: Literal["idle", "fixed", "goal"] = _option(
        "batchPolicy", words("idle", "fixed", "goal"), "When a batch leaves, and how large.", "idle"
    )
    latency_goal_s: float | None = _option(
        "latencyGoalMs",
        milliseconds(at_least(1)),
        "batchPolicy goal: time to answer that 95 % of requests are to have, ms.",
    )
    overlap_preprocess: bool = _option(
        "overlapPreprocess",
        FLAG,
        "Whether a BaseHandler's preprocess of the next batch runs beside the batch that computes.",
        False,
        is_described=True,
    )
    length_from: str | None = _option(
        "lengthFrom", LENGTH_RULE, "batchPolicy goal: how long inputs are: a rule, or handler."
    )
    padding_budget: float = _option(
        "paddingBudget", PART, "batchPolicy goal: which part of a batch may be padding, 0 to 1.", 0.25
    )
    autoscale: bool = _option(
        "autoscale", FLAG, "Whether the number of workers between the two follows the need.", False, setting="autoscale"
    )
    idle_timeout_s: float | None = _option(
        "idleTimeout",
        DURATION,
        "With minWorkers 0: after how long without a request there is no worker, seconds.",
        is_described=True,
    )
    batch_isolation: bool = _option(
        "batchIsolation", FLAG, "Whether a batch that raises is split to find the guilty item.", True
    )
    samples: tuple[Sample, ...] = _option(
        "samples", _SAMPLES, "Inputs to check batches and to warm up with: files, or inline.", ()
    )
    warm_up: bool = _option("warmUp", FLAG, "Whether each worker runs the samples once before it is ready.", False)
    batch_check: Literal["off", "warn", "refuse"] = _option(
        "batchCheck",
        words("off", "warn", "refuse"),
        "What follows when batches are not answered as single requests; refuse if there are samples, else off.",
        "off",
    )
    batch_check_sample: float = _option(
        "batchCheckSample", SHARE, "Share of served batches that is run again, one by one.", 0.0
    )
    batch_tolerance: Tolerance = _option(
        "batchTolerance",
        _BATCH_TOLERANCE,
        "How far answers may be apart and still be alike: relative, absolute, and paths to ignore.",
        _TOLERANCE,
    )
    optimise: Optimising = _option(
        "optimise",
        _OPTIMISING,
        "A faster build of the model is looked for: candidates, auto or names of builds, and inputs, a folder inside.",
        Optimising(),
        is_strict=True,
    )
    response_timeout_s: float = _option(
        "responseTimeout",
        seconds(at_least(1)),
        "Longest time for one batch, seconds.",
        120.0,
        _TIME_OUTS,
        otherwise=_ANY_SECONDS,
        setting="default_response_timeout",
    )
    startup_timeout_s: float = _option(
        "startupTimeout",
        seconds(at_least(1)),
        "Longest time to load the model, seconds.",
        120.0,
        _TIME_OUTS,
        otherwise=_ANY_SECONDS,
        setting="default_startup_timeout",
    )
    invalid_json: Literal["pass", "refuse"] = _option(
        "invalidJson",
        words("pass", "refuse"),
        "Whether a body of type application/json that is not JSON is refused with 400, or passed to the handler.",
        "pass",
        setting="invalid_json",
    )
    client_timeout_s: float | None = _option(
        "clientTimeoutInMills", milliseconds(raised_to(0)), "How long clients wait, ms; 0: ever."
    )
    default_priority: int = _option(
        "defaultPriority", between(0, 9), "Priority of requests that name none: 0 (most urgent) to 9.", 5
    )
    max_retry_timeout_s: float = _option(
        "maxRetryTimeoutInSec", seconds(raised_to(0)), "How long failing workers are started again, seconds.", 300.0
    )
    retry_failed_every_s: float = _option(
        "retryFailedEvery", DURATION, "Pause between probes of a failed version, s.", 300.0
    )
    retry_on_worker_death: bool = _option(
        "retryOnWorkerDeath", FLAG, "Whether requests of a dead worker are run once more.", True
    )
    max_restarts: int = _option(
        "maxRestarts", at_least(0), "Most restarts in a row before a worker is given up; 0: any.", 0, is_described=True
    )
    no_restart_exit_codes: tuple[int, ...] = _option(
        "noRestartExitCodes", EXIT_CODES, "Exit statuses after which none is started again.", (), is_described=True
    )
    on_crash: Literal["retry", "fail"] = _option(
        "onCrash",
        words("retry", "fail"),
        "Whether a crashed worker is replaced or the server ends.",
        "retry",
        is_described=True,
    )
    readiness_rule: Literal["any", "min", "all"] = _option(
        "readinessRule",
        words("any", "min", "all"),
        "How many loaded workers make it ready.",
        "any",
        setting="readiness_rule",
        is_described=True,
    )
    max_worker_memory_bytes: int = _option(
        "maxWorkerMemory",
        SIZE,
        "Memory a worker may hold by itself; 0: no limit.",
        0,
        setting="max_worker_memory",
        is_described=True,
    )
    max_requests_per_worker: int = _option(
        "maxRequestsPerWorker", at_least(0), "Requests before a worker is replaced.", 0, is_described=True
    )
    max_worker_age_s: float = _option(
        "maxWorkerAge", DURATION, "Age at which a worker is replaced, seconds.", 0.0, is_described=True
    )
    max_worker_growth_bytes: int = _option(
        "maxWorkerGrowth", SIZE, "Growth in memory at which a worker is replaced.", 0, is_described=True
    )
    peak_flops: Mapping[str, float] | None = _option(
        "peakFlops",
        PEAKS,
        "FLOPs a second that a worker's device could do, by dtype, or auto; with it the model's are counted.",
        is_described=True,
    )
    health_interval_s: float = _option(
        "healthInterval", DURATION, "How often each worker's health() is called, seconds.", 0.0, is_described=True
    )
    memory_bytes: int | None = _option(
        "memory",
        POSITIVE_SIZE,
        "Memory that the model takes with one worker, as 2GiB; else it is learned.",
        order=_MEMORY,
    )
    load: Literal["start", "on_demand"] = _option(
        "load",
        words("start", "on_demand"),
        "Whether it is loaded at once or at its first request.",
        "start",
        _MEMORY,
        setting="model_load",
    )
    is_pinned: bool = _option(
        "pinned", FLAG, "Whether it never makes room for another model.", False, _MEMORY, otherwise=_AS_A_WORD
    )
    worker_start: Literal["auto", "fork", "fresh"] = _option(
        "workerStart", words("auto", "fork", "fresh"), "How workers start.", "auto"
    )
    launcher: Literal["local", "ray"] = _option(
        "launcher", words("local", "ray"), "Whether workers run on this machine or on a Ray cluster.", "local"
    )
    worker_resources: Mapping[str, float] | None = _option(
        "workerResources", AMOUNTS, "What each worker on a cluster has for itself: cpus, gpus, …"
    )
    worker_placement: Literal["spread", "pack"] = _option(
        "workerPlacement", words("spread", "pack"), "On many nodes of a cluster, or on few.", "spread"
    )
    checkpoint: str | None = _option(
        "checkpoint",
        CHECKPOINT,
        "The weights of its modelFile, apart from it: a folder of the archive or of the model store, or an address/.",
        order=("snapshot", "desired", "archive"),
        is_strict=True,
    )
    device_type: Literal["cpu", "gpu"] | None = _option("deviceType", words("cpu", "gpu"), "Where workers compute.")
    device_ids: tuple[int, ...] | None = _option("deviceIds", DEVICE_IDS, "Which accelerators are used.")
    device_memory_bytes: int | None = _option(
        "deviceMemory", POSITIVE_SIZE, "Memory that a worker takes on each of its accelerators; else it is learned."
    )
    cpu_pinning: Literal["off", "near", "cores"] = _option(
        "cpuPinning",
        words("off", "near", "cores"),
        "Whether workers keep to processors: those near their device, or cores of their own, as many as threads.",
        "off",
        setting="cpu_pinning",
        is_described=True,
        is_strict=True,
    )
    threads: Mapping[str, int] | None = _option(
        "threads",
        THREADS,
        "Threads of each worker: intra, inside of one operator, and inter, for operators side by side.",
        is_described=True,
        is_strict=True,
    )
    parallel_type: Literal["pp", "tp", "pptp", "custom"] | None = _option(
        "parallelType", words("pp", "tp", "pptp", "custom"), "How one model spans several devices."
    )
    parallel_level: int = _option(
        "parallelLevel", at_least(0), "How many processes, or devices, make up one worker.", 0, _RANKS
    )
    parallel: ParallelPlan | None = _option(
        "parallel",
        PARALLEL,
        "How an eager model is divided over the ranks of each worker: a mesh, and styles of modules by their names.",
        is_described=True,
        is_strict=True,
    )
    torchrun: Mapping[str, Any] | None = _option(
        "torchrun", MAP, "Of torchrun's words those that count: nproc-per-node, OMP_NUMBER_THREADS."
    )
    queue_size: int = _option(
        "jobQueueSize",
        at_least(0),
        "Most waiting requests; 0: the server's job_queue_size.",
        100,
        setting="job_queue_size",
    )
    use_job_ticket: bool = _option("useJobTicket", FLAG, "Whether requests are refused unless a worker is idle.", False)
    continuous_batching: bool = _option("continuousBatching", FLAG, "Whether requests join a running batch.", False)
    sequence_batching: bool = _option(
        "sequenceBatching", FLAG, "Whether requests of one sequence keep their worker.", False
    )
    sequence_max_idle_s: float = _option(
        "sequenceMaxIdleMSec", milliseconds(at_least(0)), "When an idle sequence ends, ms.", 0.0
    )
    sequence_timeout_s: float = _option(
        "sequenceTimeoutMSec", milliseconds(at_least(0)), "When any sequence ends, ms; 0: never.", 0.0
    )
    max_sequence_job_queue_size: int = _option(
        "maxSequenceJobQueueSize", raised_to(1), "Most waiting requests of one sequence.", 1
    )
    max_num_sequence: int | None = _option(
        "maxNumSequence", raised_to(1), "Most sequences at a time; else batchSize x workers."
    )
    free_ended_sequences: bool = _option(
        "freeEndedSequences", FLAG, "Whether a client's end header frees its sequence.", False
    )
    is_concurrent: bool = _option("asyncCommunication", FLAG, "Whether the handler answers out of order.", False)
    most_concurrent: int = _option(
        "maxConcurrentRequests",
        between(1, 100_000),
        "asyncCommunication: most requests that a worker has at once.",
        1000,
    )
    use_venv: bool = _option(
        "useVenv", FLAG, "Whether the model's requirements get an environment of their own.", False
    )
    interpreter_path: str | None = _option(
        "python", TEXT, "The interpreter of its workers, by a path of the server's allowed_interpreters."
    )
    interpreter_name: str | None = _option(
        "environment", TEXT, "The interpreter of its workers, by a name of the server's allowed_interpreters."
    )
    worker_program: tuple[str, ...] = _option(
        "workerProgram",
        PROGRAM,
        "The program that its workers are, in another language: its name, a file of the archive, further words.",
        (),
        is_described=True,
        is_strict=True,
    )


def _declared() -> tuple[Option, ...]:
    found = []
    for declared in fields(ModelOptions):
        if "option" in declared.metadata:
            key, kind, help, order, more = declared.metadata["option"]
            found.append(Option(key, declared.name, kind, help, order, declared.default, **more))
    return tuple(found)


OPTIONS: tuple[Option, ...] = _declared()
BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS}
# What a desired state may say of a version.
DECLARABLE = tuple(option.key for option in OPTIONS if "desired" in option.order)
# What a version can change while it serves; and what snapshots, plans and describe always say, as it is in force.
IN_PLACE = ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay")
IN_FORCE = (*IN_PLACE, "responseTimeout", "startupTimeout")
_NAMES = frozenset(option.attribute for option in OPTIONS)


class Said(Mapping[str, Any]):
    """What one layer says, by the names of the fields. What it does not say, or says to be None, is not in it.

    A name that no field has raises TypeError, in what is said and in what is asked for.
    """

    __slots__ = ("_values",)

    def __init__(self, *sayings: Mapping[str, Any]) -> None:
        """Of several that say the same the last one counts."""
        self._values: dict[str, Any] = {}
        for said in sayings:
            self._values.update((_known(name), value) for name, value in said.items() if value is not None)

    def __getitem__(self, name: str) -> Any:
        return self._values[_known(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values))  # some values are maps

    def __repr__(self) -> str:
        return f"Said({self._values})"


def _known(name: str) -> str:
    if name not in _NAMES:
        raise TypeError(f"no option of a model is called {name}")
    return name


_Fields = ParamSpec("_Fields")


def _saying(record: Callable[_Fields, ModelOptions]) -> Callable[_Fields, Said]:
    def say(*_: _Fields.args, **said: _Fields.kwargs) -> Said:
        return Said(said)

    return say


# A layer of these values; type checkers know the names and the types as those of the record's fields.
say = _saying(ModelOptions)
NOTHING = Said()
Layers = Mapping[Layer, Said]


def fold(layers: Layers) -> Said:
    """What wins of what the layers say."""
    won: dict[str, Any] = {}
    for option in OPTIONS:
        for layer in option.order:
            if option.attribute in layers.get(layer, NOTHING):
                won[option.attribute] = layers[layer][option.attribute]
                break
    return Said(won)


def said_of(record: ModelOptions, *keys: str) -> Said:
    """What a record has of these options, to be said by a layer."""
    return Said({BY_KEY[key].attribute: getattr(record, BY_KEY[key].attribute) for key in keys})


def said_in(layer: Layer) -> tuple[Option, ...]:
    """The options that a layer may set."""
    return tuple(option for option in OPTIONS if layer in option.order)


def read_value(key: str, value: object) -> object:
    """What the value of a key means.

    Raises ValueError, saying what it must be, and KeyError for a key that is not known.
    """
    return BY_KEY[key].kind.read(value)


def written(said: ModelOptions | Said, *keys: str) -> dict[str, Any]:
    """The values of these options, of all without keys, as documents hold them; of `Said` only what it says."""
    options = [BY_KEY[key] for key in keys] if keys else OPTIONS
    if isinstance(said, Said):
        return {each.key: each.kind.write(said[each.attribute]) for each in options if each.attribute in said}
    return {each.key: each.kind.write(getattr(said, each.attribute)) for each in options}
