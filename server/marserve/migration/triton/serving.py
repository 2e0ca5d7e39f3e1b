"""How Triton serves a model, as options of marserve: batches, queues, instances, threads, warm-up, versions. Pure.

Each function reads one part of the configuration, gives keys of `model-config.yaml`, and notes what it maps, what it
can only approximate, and what it leaves out. What no function asks for is noted as left out by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from marserve.migration.triton.config_text import Block
from marserve.migration.triton.notes import Notes, Refused

Options = dict[str, Any]

_KINDS: Final = ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")
_MOST_PRIORITIES: Final = 10
_LEVELS: Final = {-1: "basic", 1: "extended", 2: "disable"}
# Parameters of Triton's ONNX Runtime backend that a session here has.
_THREADS: Final = {"intra_op_thread_count": "intra_op_num_threads", "inter_op_thread_count": "inter_op_num_threads"}
_SWITCHES: Final = {"enable_mem_arena": "enable_cpu_mem_arena", "enable_mem_pattern": "enable_mem_pattern"}
_MODES: Final = {"0": "sequential", "1": "parallel"}


def refuse_schedulers(config: Block) -> None:
    """Raise Refused for a model whose requests are no single calls."""
    if config.block("sequence_batching") is not None:
        config.skip("sequence_batching")
        raise Refused(
            config.line_of("sequence_batching"),
            "sequence_batching: the model gets the state and the controls of a sequence from Triton",
            "serve it with a handler that keeps the state, with sequenceBatching: true (docs/batching.md)",
        )
    policy = config.block("model_transaction_policy")
    if policy is not None and policy.flag("decoupled"):
        raise Refused(
            config.line_of("model_transaction_policy"),
            "decoupled: the model answers one request several times, or never",
            "serve it with a handler that streams (docs/streaming.md)",
        )


def batching(config: Block, max_batch_size: int, notes: Notes) -> Options:
    """`max_batch_size` and `dynamic_batching`."""
    line = config.line_of("max_batch_size")
    dynamic = config.block("dynamic_batching")
    if not max_batch_size:
        if dynamic is not None:
            config.skip("dynamic_batching")
            said = "dynamic_batching has no effect without a max_batch_size, here as in Triton"
            notes.works(config.line_of("dynamic_batching"), said)
        notes.works(
            line, "max_batch_size 0: tensors have no batch axis, and each request runs by itself (batch: false)"
        )
        return {"batchSize": 1}
    options: Options = {"batchSize": max_batch_size}
    if dynamic is None:
        notes.works(line, f"max_batch_size {max_batch_size}: batchSize {max_batch_size}")
        if max_batch_size > 1:
            said = "without dynamic_batching Triton runs each request by itself; here those that wait share a batch"
            notes.differs(line, said)
        return options
    options["batchSize"] = _batch_size(dynamic, max_batch_size, notes)
    notes.works(line, f"max_batch_size {max_batch_size}: batchSize {options['batchSize']}")
    options |= _delay(dynamic, notes)
    options |= _priorities(dynamic, notes)
    if dynamic.flag("preserve_ordering"):
        notes.differs(
            dynamic.line_of("preserve_ordering"), "preserve_ordering is left out: an answer leaves when it is made"
        )
    policy = dynamic.block("default_queue_policy")
    if policy is not None:
        options |= _queue_policy(policy, notes)
    if "priority_queue_policy" in dynamic:
        dynamic.skip("priority_queue_policy")
        said = "priority_queue_policy is left out: all priorities share one queue with one bound"
        notes.differs(dynamic.line_of("priority_queue_policy"), said)
    return options


def _batch_size(dynamic: Block, max_batch_size: int, notes: Notes) -> int:
    preferred = [size for size in dynamic.wholes("preferred_batch_size") if size > 0]
    if not preferred:
        return max_batch_size
    largest = min(max(preferred), max_batch_size)
    line = dynamic.line_of("preferred_batch_size")
    if preferred == [max_batch_size]:
        notes.works(line, f"preferred_batch_size {max_batch_size} is the batchSize")
    else:
        said = f"preferred_batch_size {preferred}: a batch here has one size at most, and batchSize is {largest}"
        notes.differs(line, said)
    return largest


def _delay(dynamic: Block, notes: Notes) -> Options:
    delay_us = dynamic.whole("max_queue_delay_microseconds", least=0)
    line = dynamic.line_of("max_queue_delay_microseconds")
    if not delay_us:
        notes.works(
            line, "dynamic_batching without a delay: a batch leaves as soon as a worker is idle (batchPolicy idle)"
        )
        return {}
    delay_ms = math.ceil(delay_us / 1000)
    said = f"max_queue_delay_microseconds {delay_us}: maxBatchDelay {delay_ms} ms with batchPolicy fixed"
    if delay_ms * 1000 == delay_us:
        notes.works(line, said)
    else:
        notes.differs(line, f"{said}, rounded up")
    return {"maxBatchDelay": min(delay_ms, (1 << 31) - 1), "batchPolicy": "fixed"}


def _priorities(dynamic: Block, notes: Notes) -> Options:
    levels = dynamic.whole("priority_levels", least=0)
    level = dynamic.whole("default_priority_level", least=0)
    if not levels:
        return {}
    line = dynamic.line_of("priority_levels")
    default = min(max(level, 1), _MOST_PRIORITIES) - 1
    said = f"priority_levels {levels}: defaultPriority {default}, of 0 (most urgent) to 9"
    notes.differs(line, f"{said}; a request says its own by the header x-marserve-priority, not by a parameter")
    return {"defaultPriority": default}


def _queue_policy(policy: Block, notes: Notes) -> Options:
    options: Options = {}
    size = policy.whole("max_queue_size", least=0)
    if size:
        options["jobQueueSize"] = min(size, (1 << 31) - 1)
        notes.works(policy.line_of("max_queue_size"), f"max_queue_size {size}: jobQueueSize {size}")
    timeout_us = policy.whole("default_timeout_microseconds", least=0)
    line = policy.line_of("default_timeout_microseconds")
    action = policy.choice("timeout_action", ("REJECT", "DELAY"))
    if timeout_us and action == "REJECT":
        timeout_ms = math.ceil(timeout_us / 1000)
        options["clientTimeoutInMills"] = min(timeout_ms, (1 << 31) - 1)
        said = f"default_timeout_microseconds {timeout_us}: clientTimeoutInMills {timeout_ms}"
        notes.differs(line, f"{said}, which counts until the answer and not only in the queue")
    elif timeout_us:
        notes.differs(
            line, "default_timeout_microseconds with timeout_action DELAY is left out: no request is put last"
        )
    if policy.flag("allow_timeout_override"):
        said = "a request sets its own time by the header x-marserve-timeout-ms, not by the parameter timeout"
        notes.differs(policy.line_of("allow_timeout_override"), said)
    return options


def instances(config: Block, notes: Notes) -> Options:
    """`instance_group`: workers and devices."""
    groups = config.blocks("instance_group")
    line = config.line_of("instance_group")
    read = [_Group(each, notes) for each in groups]
    serving = [each for each in read if not each.is_passive]
    if not serving:
        notes.differs(line, "one worker; Triton starts an instance on each GPU that is there (`marserve scale`)")
        return _workers(1)
    on_devices = [each for each in serving if each.kind != "KIND_CPU"]
    if not on_devices:
        count = sum(each.count for each in serving)
        notes.works(line, f"KIND_CPU, count {count}: {count} workers with deviceType cpu")
        return {**_workers(count), "deviceType": "cpu"}
    if len(on_devices) < len(serving):
        left = next(each for each in serving if each.kind == "KIND_CPU")
        notes.differs(left.line, "this group on the CPU is left out: all workers of a version have one kind of device")
    options: Options = {}
    if all(each.kind == "KIND_GPU" for each in on_devices):
        options["deviceType"] = "gpu"
    devices = sorted({device for each in on_devices for device in each.gpus})
    count = sum(each.count * max(1, len(each.gpus)) for each in on_devices)
    said = f"{count} workers" if count > 1 else "one worker"
    if devices:
        options["deviceIds"] = devices
        shares = {device: sum(each.count for each in on_devices if device in each.gpus) for device in devices}
        if len(set(shares.values())) > 1 or any(not each.gpus for each in on_devices):
            said += f", dealt to the devices {devices} in turn and not as the groups say"
            notes.differs(line, said)
        else:
            notes.works(line, f"{said} on deviceIds {devices}")
    elif any(each.kind == "KIND_MODEL" for each in on_devices):
        notes.differs(line, f"KIND_MODEL: {said}, each on the device that marserve gives it")
    else:
        notes.differs(line, f"{said}; Triton starts so many on each GPU that is there (`marserve scale`)")
    return {**_workers(count), **options}


class _Group:
    def __init__(self, block: Block, notes: Notes) -> None:
        self.line = block.line
        self.kind = block.choice("kind", _KINDS)
        self.count = block.whole("count", least=0) or 1
        self.gpus = sorted(set(block.wholes("gpus")))
        self.is_passive = block.flag("passive")
        block.text("name")
        for gpu in self.gpus:
            if not 0 <= gpu < 1 << 16:
                raise Refused(block.line_of("gpus"), f"gpus has {gpu}, which is no device", "name devices from 0 on")
        if self.count > 1 << 16:
            raise Refused(
                block.line_of("count"), f"count is {self.count}", "name as many workers as the machine can hold"
            )
        if self.is_passive:
            notes.differs(block.line_of("passive"), "a passive group is left out: every worker takes requests")


def _workers(count: int) -> Options:
    return {"minWorkers": count, "maxWorkers": count}


def onnx_session(config: Block, notes: Notes) -> Options:
    """`optimization.graph` and the parameters of the ONNX Runtime backend, as `onnx` of the configuration."""
    session: dict[str, Any] = {}
    optimization = config.block("optimization")
    graph = None if optimization is None else optimization.block("graph")
    if graph is not None and (level := graph.whole("level")):
        if level in _LEVELS:
            session["graph_optimization_level"] = _LEVELS[level]
            notes.works(graph.line_of("level"), f"level {level}: onnx.graph_optimization_level {_LEVELS[level]}")
        else:
            notes.differs(graph.line_of("level"), f"level {level} is left out: ONNX Runtime's default counts")
    for name, entry in config.entries("parameters").items():
        found = _parameter(name, entry, notes)
        if found is not None:
            session[found[0]] = found[1]
    return {"onnx": session} if session else {}


def _parameter(name: str, entry: Block, notes: Notes) -> tuple[str, Any] | None:
    value = entry.block("value")
    text = "" if value is None else value.text("string_value").strip()
    line = entry.line_of("key")
    found: tuple[str, Any] | None = None
    if name in _THREADS and text.isascii() and text.isdecimal() and len(text) < 6:
        found = _THREADS[name], int(text)
    elif name in _SWITCHES and text in ("0", "1"):
        found = _SWITCHES[name], text == "1"
    elif name == "execution_mode" and text in _MODES:
        found = name, _MODES[text]
    if found is None:
        notes.differs(line, f"the parameter {name} is left out")
    else:
        notes.works(line, f"the parameter {name}: onnx.{found[0]} {str(found[1]).lower()}")
    return found


def other_parameters(config: Block, notes: Notes) -> None:
    """Note the parameters of a backend that has none of them here."""
    for name, entry in config.entries("parameters").items():
        config.skip("parameters")
        notes.differs(entry.line_of("key"), f"the parameter {name} is left out")


def warm_up(config: Block, notes: Notes) -> Options:
    """`model_warmup`: workers run requests that are drawn from the declaration before they are ready."""
    entries = config.blocks("model_warmup")
    if not entries:
        return {}
    has_file = False
    for entry in entries:
        entry.text("name")
        entry.skip("batch_size")
        entry.skip("count")
        for each in entry.blocks("inputs"):
            value = each.block("value")
            has_file = has_file or (value is not None and "input_data_file" in value)
        entry.skip("inputs")
    line = config.line_of("model_warmup")
    said = "model_warmup: warmUp true, with inputs that are drawn from the declaration"
    if has_file:
        notes.differs(line, f"{said}, not with those of input_data_file; `samples` may name files (docs/batching.md)")
    else:
        notes.works(line, said)
    return {"warmUp": True}


def response_cache(config: Block, notes: Notes) -> None:
    """`response_cache`, which there is not here."""
    cache = config.block("response_cache")
    if cache is not None and cache.flag("enable"):
        notes.differs(config.line_of("response_cache"), "response_cache is left out: each request is run")


def served_versions(config: Block, there: Sequence[int], notes: Notes) -> list[int]:
    """The versions that `version_policy` serves, the lowest first. Raises Refused if there is none of them."""
    policy = config.block("version_policy")
    line = config.line_of("version_policy") if policy is not None else 0
    if not there:
        raise Refused(0, "it has no version: no folder whose name is a number", "put the model into a folder 1")
    if policy is not None and policy.block("all") is not None:
        notes.works(line, f"version_policy all: {_listed(there)}")
        return sorted(there)
    specific = None if policy is None else policy.block("specific")
    if specific is not None:
        asked = sorted(set(specific.wholes("versions")))
        missing = [number for number in asked if number not in there]
        found = [number for number in asked if number in there]
        if not found:
            raise Refused(
                line, f"version_policy names {_listed(asked)}, and there is {_listed(there)}", "name one of them"
            )
        if missing:
            notes.differs(line, f"version_policy names {_listed(missing)} too, which has no folder")
        notes.works(line, f"version_policy specific: {_listed(found)}")
        return found
    latest = None if policy is None else policy.block("latest")
    count = max(1, 1 if latest is None else latest.whole("num_versions", 1, least=0))
    found = sorted(there)[-count:]
    notes.works(line, f"version_policy latest {count}: {_listed(found)}")
    return found


def _listed(numbers: Sequence[int]) -> str:
    return f"version {numbers[0]}" if len(numbers) == 1 else f"versions {', '.join(map(str, numbers))}"


def described_ensemble(config: Block) -> str:
    """The steps of an ensemble in one line."""
    scheduling = config.block("ensemble_scheduling")
    steps: list[str] = []
    for step in [] if scheduling is None else scheduling.blocks("step"):
        maps: Mapping[str, list[str]] = {name: [] for name in ("input_map", "output_map")}
        for name, found in maps.items():
            for entry in step.blocks(name):
                found.append(f"{entry.text('key')}={entry.text('value')}")
        steps.append(f"{step.text('model_name')}({', '.join(maps['input_map'])})")
    return " → ".join(steps)
