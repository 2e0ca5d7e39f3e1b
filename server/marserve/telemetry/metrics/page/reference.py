"""Writes the reference of all metrics:

python -m marserve.telemetry.metrics.page.reference > docs/metrics-reference.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from marserve.telemetry.metrics.causes import CAUSES
from marserve.telemetry.metrics.counts import HISTOGRAMS, STAGES_FAMILY
from marserve.telemetry.metrics.metric_definitions import BUILT_IN, Definition
from marserve.telemetry.metrics.page.catalogue import CATALOGUE, Meaning
from marserve.telemetry.metrics.page.foreign import WHY
from marserve.telemetry.metrics.page.torchserve import family_of, help_of
from marserve.telemetry.timeline import STAGES

COMMAND: Final = "python -m marserve.telemetry.metrics.page.reference > docs/metrics-reference.md"

# What the values of labels are, where the label is not a name of the operator's.
_OF_FIELDS = [words[0] for _, words in HISTOGRAMS[STAGES_FAMILY]]
_FURTHER = [stage for stage in STAGES if stage not in (*_OF_FIELDS, "handle")]
_STAGES = ", ".join(f"`{stage}`" for stage in (*_OF_FIELDS, *_FURTHER, "first_chunk", "next_chunk"))
LABELS: Final[Mapping[str, str]] = {
    "model": "the name under which the model is registered",
    "version": "the version's name",
    "stage": f"where the time was spent, one of [the stages](slow-requests.md#the-stages): {_STAGES}",
    "status": "the status of the answer, as a number",
    "cause": "a word of [the table of causes](#causes)",
    "reason": "why: of traffic `path`, `override`, `sticky`, `weight`, `default`; of copies `busy`, `memory`; of "
    "replaced workers `requests`, `age`, `growth`, `template`, `device`, `unhealthy`; of stalls `held`, `paused`; of "
    "spans `queue_full`, `not_taken`, `stopped`; of roll-outs `judge`, a measure that was worse (`errors`, "
    "`rejections`, `p99`, `answers`), `too_few`, `workers`, `batching`, `not_ready`, `error`, `call`, `changed`",
    "state": "`ready`, `loading`, `failed` (given up), `stopping`",
    "on": "what handlers said at the load: a build of `marserve optimise`, the names of ONNX Runtime's providers",
    "build": "the name of a build, as `marserve optimise` has it; `unknown` for others",
    "rows": "the rows of a batch that was measured",
    "arm": "`baseline` or `candidate` of a roll-out",
    "result": "what became of it: of arms `answered`, `rejected`, `failed`; of downloads `fetched`, `cached`, "
    "`failed`, `cancelled`; of desired states `applied`, `failed`, `unreadable`",
    "direction": "`in` (inputs) or `out` (answers)",
    "verdict": "`passed` or `failed`",
    "source": "`handler`, `cache`, `guess`, `failed`",
    "class": "`2xx` and the like",
    "code": "the name of a gRPC status",
    "of": "`bodies`, `small_bodies`, `waiting`, `answers`",
    "log": "the name of a log; `workers` for lines that workers printed",
    "collector": "the name of a plug-in's entry point, or `prometheus_client`",
    "why": ", ".join(f"`{word}`" for word in WHY),
    "gpu_id": "the accelerator's number, as handlers have it",
    "digest": "the digest of the document in force",
    "what": "`duration` or `at`",
    "watch": "the watch's name",
    "outcome": "what became of it: of archives `loaded`, `swapped`, `refused`, `ignored`, `unloaded`, `retried`; of "
    "events `look`, `ignored`, `bad`, `unauthorized`; of roll-outs `promoted`, `rolled_back`, `aborted`",
}

# When TorchServe's metrics move.
_LAST = "with each batch that ends: it is that of the last request"
_SYSTEM = "every `metric_time_interval`"
_MOVES: Final[Mapping[str, str]] = {
    "Requests2XX": "when an answer begins",
    "Requests4XX": "when an answer begins",
    "Requests5XX": "when an answer begins; it has all that is neither 2xx nor 4xx",
    "ts_inference_requests_total": "when a request is let into the queue",
    "ts_inference_latency_microseconds": "when the request has ended",
    "ts_queue_latency_microseconds": "when a batch is sent to a worker",
    "QueueTime": _LAST,
    "WorkerThreadTime": _LAST,
    "WorkerLoadTime": "when a worker has loaded; it goes with the worker",
    "PredictionTime": "with each batch that ends",
    "HandlerTime": "with each batch of a handler that is a `BaseHandler`",
}

HEAD: Final = f"""# Every metric

<!-- Written by `{COMMAND}`. -->

What each family on [the metrics page](metrics.md) means, what its labels are, and when its numbers move. Series exist
for registered versions and for the fixed words below only, so no client can make new ones.

A counter that ends in `_total` has that name in both formats. TorchServe's counters without the ending are counters in
text and of type `unknown` in OpenMetrics, which knows no counters of such names; so is a counter beside a family that
has its name without `_total`. Dashboards find the same names in both.

"""

LIBRARY: Final = """## The library's

`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_virtual_memory_bytes`, `process_open_fds`,
`process_max_fds` and `process_start_time_seconds` are of the server's own process, without its workers.
`python_info` names its Python, and `python_gc_objects_collected_total`, `python_gc_objects_uncollectable_total` and
`python_gc_collections_total` count its garbage collection by `generation`. They come from `prometheus_client`, as does
whatever code of yours in the server's process measures by that library ([plug-ins](plugins.md#metrics-of-ones-own)).
"""


def write_reference() -> str:
    """The page."""
    return "".join(
        (
            HEAD,
            _section("## Of a version", _with(("model", "version"))),
            _section("## Of a model, over all its versions", _with(("model",))),
            _section("## Of the server", _with(())),
            "## TorchServe's\n\n"
            "A metrics file may give them another type, unit and names of labels, or leave them out.\n\n",
            *_torchserves(),
            "\n",
            LIBRARY,
            "\n## Labels\n\n" + _head("label", "values"),
            *(f"| `{name}` | {values} |\n" for name, values in LABELS.items()),
            "\n## Causes\n\nThe label `cause`, and the header `x-marserve-cause`. A word that is not in the table is "
            "shown as `other`.\n\n" + _head("cause", "means"),
            *(f"| `{word}` | {meaning} |\n" for word, meaning in CAUSES.items()),
        )
    )


def _with(labels: Sequence[str]) -> Iterator[Meaning]:
    """The families that have these of the labels `model` and `version`."""
    for meaning in CATALOGUE.values():
        if tuple(name for name in meaning.labels if name in ("model", "version")) == tuple(labels):
            yield meaning


def _section(title: str, meanings: Iterator[Meaning]) -> str:
    rows = [
        f"| `{each.name}` | {each.kind} | {_names(each.labels)} | {each.unit} | {each.text} | {each.moves} |\n"
        for each in meanings
    ]
    return f"{title}\n\n{_head('metric', 'type', 'labels', 'unit', 'is', 'moves')}{''.join(rows)}\n"


def _torchserves() -> Iterator[str]:
    yield _head("metric", "type", "in OpenMetrics", "labels", "unit", "is", "moves")
    for definition in (*BUILT_IN.front.values(), *BUILT_IN.model.values()):
        yield _row(definition)


def _row(definition: Definition) -> str:
    family = family_of(definition, list)
    moves = _MOVES.get(definition.name, _SYSTEM)
    cells = (
        f"`{definition.name}`",
        definition.kind,
        family.open_kind,
        _names(definition.dimensions),
        definition.unit,
        help_of(definition),
        moves,
    )
    return f"| {' | '.join(cells)} |\n"


def _head(*columns: str) -> str:
    return f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n"


def _names(labels: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in labels) or "–"


if __name__ == "__main__":
    sys.stdout.write(write_reference())
