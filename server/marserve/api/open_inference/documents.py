"""The protocol's documents about a server, its models, their configuration and what they have answered.

Declared tensors (`declaration`) become the protocol's: dtypes by its names, sizes that vary as -1. A model of one text,
of bytes or of a picture has one BYTES tensor each way. A model that declares nothing, or another item in place of
tensors, has no inputs and outputs here, unless an envelope takes tensors for it (`registry/catalogue`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from marserve import __version__
from marserve.api.open_inference.data_types import DATA_TYPES
from marserve.registry.catalogue.describe import takes_elements
from marserve.registry.catalogue.protocol_tensors import ELEMENTS
from marserve.registry.models import Registry
from marserve.telemetry.metrics.counts import VersionMetrics

PLATFORM: Final = "marserve_python"
EXTENSIONS: Final = (
    *("binary_tensor_data", "classification", "logging", "model_configuration", "model_repository"),
    *("model_repository(unload_dependents)", "parameters", "schedule_policy", "sequence", "sequence(string_id)"),
    *("statistics", "trace"),
)
"""What is answered beyond the protocol itself, by the names that its clients look for."""

_DATATYPES: Final = {each.dtype: name for name, each in DATA_TYPES.items()}

_CONTENT_TYPES: Final = {"text": "str", "bytes": "base64", "image": "base64", "json": "json"}
"""MLServer's words for items that are elements of a tensor."""

Document = dict[str, Any]


def server_document(*, shares_memory: bool = False) -> Document:
    """Name, version and extensions of the server; `shares_memory`: regions of system shared memory are taken."""
    further = ("system_shared_memory",) if shares_memory else ()
    return {"name": "marserve", "version": __version__, "extensions": sorted((*EXTENSIONS, *further))}


def metadata_document(
    name: str, versions: Sequence[str], declaration: Mapping[str, Any] | None, *, has_parameters: bool = True
) -> Document:
    """A model's versions, and the tensors of the one that was asked for, with their parameters or without."""
    inputs, outputs = (_tensors(declaration, kind, has_parameters=has_parameters) for kind in ("input", "output"))
    return {"name": name, "versions": list(versions), "platform": PLATFORM, "inputs": inputs, "outputs": outputs}


def config_document(described: Mapping[str, Any], declaration: Mapping[str, Any] | None) -> Document:
    """A version's configuration in the words of Triton's `ModelConfig`, made of its describe answer and its tensors."""
    is_on_gpu = described["deviceType"] == "gpu"
    first = 0 if isinstance(declaration, Mapping) and declaration.get("batch") is False else 1
    return {
        "name": described["modelName"],
        "platform": PLATFORM,
        "backend": "marserve",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": described["batchSize"] if first else 0,
        "input": [_of_config(each, first) for each in _declared(declaration, "input")],
        "output": [_of_config(each, first) for each in _declared(declaration, "output")],
        "instance_group": [
            {
                "name": described["modelName"],
                "kind": "KIND_GPU" if is_on_gpu else "KIND_CPU",
                "count": described["minWorkers"],
                "gpus": list(described.get("deviceIds", ())),
            }
        ],
        "dynamic_batching": {"max_queue_delay_microseconds": round(1000 * described["maxBatchDelay"])},
        "parameters": {"version": {"string_value": described["modelVersion"]}},
    }


def versions_of(registry: Registry) -> Iterator[tuple[str, str, bool, str]]:
    """Model, version, whether it answers, and its state, of all versions in order of the models' names."""
    for model in registry.all_offered():
        for each in model.versions:
            yield model.name, each.version, registry.data_plane.is_model_ready(model.name, each.version), each.state


def index_document(versions: Iterable[tuple[str, str, bool, str]], *, only_ready: bool) -> list[Document]:
    """The repository's index. `versions` has model, version, whether it answers, and the state if it does not."""
    return [
        {
            "name": model,
            "version": version,
            "state": "READY" if is_ready else "UNAVAILABLE",
            "reason": "" if is_ready else state,
        }
        for model, version, is_ready, state in versions
        if is_ready or not only_ready
    ]


def statistics_document(metrics: VersionMetrics) -> Document:
    """What a version has answered since it was registered; times in nanoseconds.

    An inference is a request. One that was accepted and ended with an error counts as failed, whatever its cause; so
    does one whose client went away, as in Triton (its reason is `CANCELED`), though its time is not known.
    `compute_input` is what workers took to read requests, `compute_output` to write answers. All three have one count,
    as perf_analyzer ends itself where they differ. Of the batches of each size only the handler's time is known.
    """
    succeeded = sum(count for status, count in metrics.answers.items() if status < 400)
    failed = sum(count for status, count in metrics.answers.items() if status >= 400) + sum(metrics.errors.values())
    total = metrics.total_seconds
    mean_s = total.sum / total.count if total.count else 0.0
    nothing = {"count": 0, "ns": 0}
    runs = metrics.handler_seconds.count
    read_ns, written_ns = (
        _ns(stage.sum) if (stage := metrics.stages.by_stage.get(name)) is not None else 0
        for name in ("decode", "encode")
    )
    return {
        "name": metrics.model,
        "version": metrics.version,
        "inference_count": succeeded,
        "execution_count": metrics.batch_sizes.count,
        "inference_stats": {
            "success": {"count": succeeded, "ns": _ns(mean_s * succeeded)},
            "fail": {"count": failed + metrics.cancelled, "ns": _ns(mean_s * failed)},
            "queue": {"count": metrics.queue_seconds.count, "ns": _ns(metrics.queue_seconds.sum)},
            "compute_input": {"count": runs, "ns": read_ns},
            "compute_infer": {"count": runs, "ns": _ns(metrics.handler_seconds.sum)},
            "compute_output": {"count": runs, "ns": written_ns},
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": {"count": count, "ns": 0},
                "compute_infer": {"count": count, "ns": _ns(seconds)},
                "compute_output": {"count": count, "ns": 0},
            }
            for size, (count, seconds) in sorted(metrics.runs_by_size.items())
        ],
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _declared(declaration: Mapping[str, Any] | None, kind: str) -> list[Mapping[str, Any]]:
    """The tensors of a kind, `input` or `output`. Items that are elements of a tensor are in one of that name."""
    if not isinstance(declaration, Mapping):
        return []
    if takes_elements(declaration):
        content_type = _CONTENT_TYPES.get(declaration[kind]["type"])
        return [{"name": kind, "dtype": ELEMENTS, "shape": ["batch", 1], "content_type": content_type}]
    found = declaration.get(f"{kind}s")
    return list(found) if isinstance(found, Sequence) else []


def _sizes(shape: Sequence[Any]) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in shape]


def _tensors(declaration: Mapping[str, Any] | None, kind: str, *, has_parameters: bool) -> list[Document]:
    found: list[Document] = []
    for each in _declared(declaration, kind):
        tensor = {"name": each["name"], "datatype": _DATATYPES[each["dtype"]], "shape": _sizes(each["shape"])}
        if has_parameters and each.get("content_type"):
            tensor["parameters"] = {"content_type": each["content_type"]}
        found.append(tensor)
    return found


def _of_config(declared: Mapping[str, Any], first: int) -> Document:
    """A tensor without its batch axis: from its size `first` on."""
    described = {
        "name": declared["name"],
        "data_type": "TYPE_STRING" if declared["dtype"] == ELEMENTS else f"TYPE_{_DATATYPES[declared['dtype']]}",
        "dims": _sizes(declared["shape"])[first:],
    }
    return {**described, "optional": True} if declared.get("optional") else described
