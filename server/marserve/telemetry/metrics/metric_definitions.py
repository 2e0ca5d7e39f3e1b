"""The list of metrics: TorchServe's, or the operator's own from a metrics file (`metrics_config`).

A definition's `dimensions` are names in the file's spelling and order, the host's last. As in TorchServe, front-end
metrics list the host themselves, and it is added to those of models. A file may give another type, unit and names of
dimensions to a metric that the server measures, so that dashboards find the names they know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from marserve.errors import BadSettings

KINDS = ("counter", "gauge", "histogram")

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
# Metrics files usually have some kilobytes.
_MAX_FILE_BYTES = 1024 * 1024


class Definition(NamedTuple):
    """One metric. `kind` is one of KINDS; the last of `dimensions` is the host's name."""

    name: str
    kind: str
    unit: str
    dimensions: tuple[str, ...]

    @property
    def fits_a_page(self) -> bool:
        """Whether these names are valid for Prometheus; a log takes any."""
        return (
            _NAME.fullmatch(self.name) is not None
            and all(_LABEL.fullmatch(name) and not name.startswith("__") for name in self.dimensions)
            and len(set(self.dimensions)) == len(self.dimensions)
            and not (self.kind == "histogram" and "le" in self.dimensions)
        )


class Definitions(NamedTuple):
    """The metrics of the server (`front`) and of handlers (`model`), by name, in the file's order."""

    front: Mapping[str, Definition]
    model: Mapping[str, Definition]


def _built_in() -> Definitions:
    host = ("Level", "Hostname")
    asked = ("model_name", "model_version", "hostname")
    device = ("Level", "DeviceId", "Hostname")
    front = (
        Definition("Requests2XX", "counter", "Count", host),
        Definition("Requests4XX", "counter", "Count", host),
        Definition("Requests5XX", "counter", "Count", host),
        Definition("ts_inference_requests_total", "counter", "Count", asked),
        Definition("ts_inference_latency_microseconds", "counter", "Microseconds", asked),
        Definition("ts_queue_latency_microseconds", "counter", "Microseconds", asked),
        Definition("QueueTime", "gauge", "Milliseconds", host),
        Definition("WorkerThreadTime", "gauge", "Milliseconds", host),
        Definition("WorkerLoadTime", "gauge", "Milliseconds", ("WorkerName", *host)),
        Definition("CPUUtilization", "gauge", "Percent", host),
        Definition("MemoryUsed", "gauge", "Megabytes", host),
        Definition("MemoryAvailable", "gauge", "Megabytes", host),
        Definition("MemoryUtilization", "gauge", "Percent", host),
        Definition("DiskUsage", "gauge", "Gigabytes", host),
        Definition("DiskAvailable", "gauge", "Gigabytes", host),
        Definition("DiskUtilization", "gauge", "Percent", host),
        Definition("GPUMemoryUtilization", "gauge", "Percent", device),
        Definition("GPUMemoryUsed", "gauge", "Megabytes", device),
        Definition("GPUUtilization", "gauge", "Percent", device),
    )
    model = (
        Definition("PredictionTime", "gauge", "ms", ("ModelName", "Level", "Hostname")),
        Definition("HandlerTime", "gauge", "ms", ("ModelName", "Level", "Hostname")),
    )
    return Definitions({each.name: each for each in front}, {each.name: each for each in model})


BUILT_IN = _built_in()


def read_metrics_file(path: Path) -> Definitions:
    """The metrics of a file in TorchServe's form, sections `ts_metrics` and `model_metrics`.

    Raises BadSettings for a file that cannot be read or is not a metrics file: TorchServe's workers would not start
    with it, and a server that measures nothing would go unnoticed.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror})") from error
    if len(text) > _MAX_FILE_BYTES:
        raise _bad(path, f"has more than {_MAX_FILE_BYTES} bytes")
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(path, f"is no YAML ({' '.join(str(error).split())})") from error
    if not isinstance(document, dict) or not document.get("model_metrics"):
        raise _bad(path, "has no section model_metrics")
    front = _section(path, "ts_metrics", document.get("ts_metrics") or {}, ())
    model = _section(path, "model_metrics", document["model_metrics"], ("Hostname",))
    if both := front.keys() & model.keys():
        raise _bad(path, f"lists {min(both)} under ts_metrics and under model_metrics; a name can stand once")
    return Definitions(front, model)


def _section(path: Path, word: str, section: Any, added: tuple[str, ...]) -> dict[str, Definition]:
    if not isinstance(section, dict):
        raise _bad(path, f"has no mapping under {word}: it must have counter, gauge or histogram, each with a list")
    found: dict[str, Definition] = {}
    for kind, entries in section.items():
        if kind not in KINDS:
            raise _bad(path, f"has the type {kind!r} under {word}; it must be counter, gauge or histogram")
        if not isinstance(entries, list):
            raise _bad(path, f"must have a list of metrics under {word}, {kind}")
        for entry in entries:
            definition = _definition(path, f"{word}, {kind}", kind, entry, added)
            if definition.name in found:
                raise _bad(path, f"lists {definition.name} twice under {word}")
            found[definition.name] = definition
    return found


def _definition(path: Path, where: str, kind: str, entry: Any, added: tuple[str, ...]) -> Definition:
    if not isinstance(entry, dict):
        raise _bad(path, f"must have a mapping for each metric under {where}, not {entry!r}")
    missing = [key for key in ("name", "unit", "dimensions") if entry.get(key) is None]
    if missing:
        raise _bad(path, f"has a metric without {' and '.join(missing)} under {where}: {entry}")
    if str(entry["name"]).startswith("marserve_"):
        raise _bad(path, f"lists {entry['name']}: names that begin with marserve_ are the server's own")
    names = entry["dimensions"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _bad(path, f"must have a list of names as dimensions of {entry['name']}, not {names!r}")
    return Definition(str(entry["name"]), kind, str(entry["unit"]), (*names, *added))


def _bad(path: Path, what: str) -> BadSettings:
    return BadSettings(
        f"metrics_config is {str(path)!r}, which {what}; correct the file, or remove the key to have the built-in list",
        key="metrics_config",
    )
