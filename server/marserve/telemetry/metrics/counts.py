"""Counts the events of one model version. It knows no HTTP, no pool, no clock and no page.

The pool and the surfaces add to plain integers and lists: `VersionMetrics` belongs to one model version,
`server_metrics.Metrics` to the server. Most fields of a version declare the family that shows them; a further histogram
or stage is one line. `pool/dispatch/dispatcher.py` adds a request that was refused or waited too long. There are no
locks, as everything runs on the event loop's thread. Text is made only at a scrape (`page/`).
"""

# ruff: noqa: RUF009 - the calls beside the fields declare their families
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from marserve.telemetry.happenings import Happenings, Kind
from marserve.telemetry.metrics.histogram import SECONDS_BOUNDS, Histogram, SecondsHistogram
from marserve.telemetry.metrics.measurements import Tap
from marserve.telemetry.metrics.stages import StageSeconds
from marserve.telemetry.metrics.windows import Windows

STAGES_FAMILY = "marserve_request_seconds"
PADDING_FAMILY = "marserve_batch_padding_ratio"
PADDING_BOUNDS = (0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9)
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Processes(NamedTuple):
    """What the processes of a version's workers use, as they were last seen: seconds of processors, and bytes.

    `cpu_s` counts those that ended, too. `proportional_bytes` has their share of shared pages; None before it was read.
    """

    cpu_s: float
    resident_bytes: int
    proportional_bytes: int | None = None


class Flops(NamedTuple):
    """Floating-point operations for each batch of a version, and for each request of it, of inputs like `inputs`.

    `peak` is what one worker's device could do a second, for `dtype`.
    """

    per_batch: float
    per_request: float
    peak: float
    dtype: str
    inputs: str

    def of(self, batches: float, requests: float) -> float:
        """FLOPs of so many batches that have so many requests in all."""
        return self.per_batch * batches + self.per_request * requests


class Gauges(NamedTuple):
    """The figures of a version's pool at a scrape.

    `workers` counts workers by state (`ready`, `loading`, …). `load_s` is how long each living worker's load took, by
    the worker's name as in logs (`W-9000-noop_1.0`). `computing` counts ready workers by what their model runs on,
    where handlers say it; `build_ratios` is how many times as fast as its parent the build was that serves, by build
    and rows of a batch. `workers_target` is how many there should be. `sequences` is how many are open, None for a
    model without them. `memory_bytes` is what its processes hold, None if it is not measured.
    `failing` is how many workers are not well by their handler's own word, None where it is not asked.
    `oldest_s` is how long the request that came first has waited. `busy_ratio` is the share of the last minute in which
    ready workers ran batches, None without such a worker. `flops_utilisation` is which share of the peak of its ready
    workers' devices the last minute's batches took, None where FLOPs are not counted.
    """

    queue_length: int = 0
    workers: Mapping[str, int] = {}
    load_s: Mapping[str, float] = {}
    computing: Mapping[str, int] = {}
    build_ratios: Mapping[tuple[str, str], float] = {}
    workers_target: int = 0
    sequences: int | None = None
    memory_bytes: int | None = None
    failing: int | None = None
    oldest_s: float = 0.0
    busy_ratio: float | None = None
    flops_utilisation: float | None = None


def _count(family: str, kind: type[int] | type[float] = int) -> Any:
    """A field that the page shows as this family, one number a version."""
    return field(default=kind(), metadata={"family": family})


def _by(label: str, family: str, read: Callable[[VersionMetrics], Mapping[str, int]] | None = None) -> Any:
    """A field of numbers by a word, the family's label; with `read` the page shows what that gives instead."""
    metadata = {"family": family, "label": label, "read": read}
    return field(default_factory=lambda: defaultdict(int), metadata=metadata)


def _histogram(family: str, bounds: Sequence[float], *words: str) -> Any:
    """A field that counts values between bounds; `words` are the values of the family's labels after the version's."""
    return field(default_factory=lambda: Histogram(bounds), metadata={"histogram": family, "words": words})


def _stage(stage: str) -> Any:
    """A field for the seconds that requests spend in a stage."""
    return field(default_factory=SecondsHistogram, metadata={"histogram": STAGES_FAMILY, "words": (stage,)})


@dataclass(slots=True, eq=False)
class VersionMetrics:
    """The counts of one model version. Its pool adds to the attributes; they are read at scrape time.

    requests            accepted, before queueing; `named_requests` of them named this version in the URL,
                        `inner_requests` came from nodes of workflows, not from clients
    answers             by status, from the model or the server
    errors, refused     by cause (`x-marserve-cause`): after it was accepted, also streams whose last event says that
                        they failed; before (queue full, no worker, …)
    queue_seconds       arrival to being given to a worker; `named_queue_s` is what named requests have of its sum
    handler_seconds     inside the author's code, once a request (`observe(seconds, times=len(batch))`)
    total_seconds       arrival to answer; `named_total_s` as above
    stages              further stages of its requests, from first byte to last
    batch_sizes         requests a batch; `windows` samples these counts
    padding             share of a batch that is padding if its inputs are padded to the longest; counted where batches
                        are formed by length
    runs_by_size        batches that ended, and the seconds that they took together, by how many requests they had
    worker_starts       processes started; `worker_restarts` of them in the place of one that ended unasked
    worker_deaths       by cause
    worker_recycles     workers replaced because they had served long enough, by reason
    health_checks       calls of the handler's `health`, by `passed` or `failed`
    builds_refused      loads in which a faster build was not used, and its parent serves, by build
    loads_on_demand     times that a request found the model asleep and had it loaded
    evictions           times that it was put to sleep to make room for another model
    retried             re-run because their worker died; `isolated`: re-run because their batch raised
    out_of_memory       batches that ran out of memory, of the host or of a device
    expired, cancelled  deadline passed; client gone
    batch_checks        certificates won or lost, by `passed` or `failed`
    batch_rechecks      served batches that were run again item by item; `batch_differences`: answered otherwise;
                        `recheck_seconds` is what workers took for it
    busy_seconds        in which workers ran batches for clients
    input_bytes         of inputs sent to workers; `answer_bytes` of answers that came from them
    lengths             lengths of inputs, by where they came from: handler, cache, guess, or failed; `length_seconds`
                        is what workers took to say them
    shadow_mirrored     copies of requests that this version got as a shadow; `shadow_compared` answers were compared,
                        `shadow_differing` of them differed; `shadow_dropped` found no room, by reason; `shadow_errors`
                        were not answered or not compared, by cause
    expired_run         run though their deadline had passed before they were sent to a worker; it stays 0
    chosen              accepted requests that named no version, by why this one was chosen and not as the default:
                        `override`, `sticky`, `weight`
    read_gauges         asked at scrape time; `read_share`: which share of the requests that name no version it gets
    happenings          what `note` keeps, for explanations; None while the page does not have the version
    tap                 observer of single events; None if no metric needs it
    flops               what its batches take, once that is counted; None before
    processes           what its workers' processes use, as last seen; None before
    retired             what the page counts of it among its model's versions that went; None while it is shown
    """

    model: str
    version: str
    read_gauges: Callable[[], Gauges] = Gauges
    queue_seconds: SecondsHistogram = _stage("queue")
    handler_seconds: SecondsHistogram = _stage("handler")
    total_seconds: SecondsHistogram = _stage("total")
    stages: StageSeconds = field(init=False)
    batch_sizes: Histogram = _histogram("marserve_batch_size", BATCH_BOUNDS)
    padding: Histogram = _histogram(PADDING_FAMILY, PADDING_BOUNDS)
    windows: Windows = field(default_factory=Windows)
    runs_by_size: dict[int, tuple[int, float]] = field(default_factory=dict)
    named_requests: int = 0
    inner_requests: int = 0
    named_queue_s: float = 0.0
    named_total_s: float = 0.0
    read_share: Callable[[], float] | None = None
    happenings: Happenings | None = None
    tap: Tap | None = None
    processes: Processes | None = None
    flops: Flops | None = None
    retired: tuple[object, int, Mapping[str, float]] | None = None

    # On the page in this order: first those that are one number, then those by a word.
    requests: int = _count("marserve_requests_total")
    loads_on_demand: int = _count("marserve_loads_on_demand_total")
    evictions: int = _count("marserve_evictions_total")
    retried: int = _count("marserve_retried_total")
    isolated: int = _count("marserve_isolated_total")
    out_of_memory: int = _count("marserve_out_of_memory_total")
    expired: int = _count("marserve_expired_total")
    expired_run: int = _count("marserve_expired_run_total")
    cancelled: int = _count("marserve_cancelled_total")
    busy_seconds: float = _count("marserve_worker_busy_seconds_total", float)
    recheck_seconds: float = _count("marserve_batch_recheck_seconds_total", float)
    batch_rechecks: int = _count("marserve_batch_rechecks_total")
    batch_differences: int = _count("marserve_batch_differences_total")
    input_bytes: int = _count("marserve_input_bytes_total")
    answer_bytes: int = _count("marserve_answer_bytes_total")
    length_seconds: float = _count("marserve_length_seconds_total", float)
    shadow_mirrored: int = _count("marserve_shadow_mirrored_total")
    shadow_compared: int = _count("marserve_shadow_compared_total")
    shadow_differing: int = _count("marserve_shadow_differing_total")
    worker_starts: int = _count("marserve_worker_starts_total")
    worker_restarts: int = _count("marserve_worker_restarts_total")
    answers: dict[int, int] = _by("status", "marserve_answers_total")
    errors: dict[str, int] = _by("cause", "marserve_errors_total")
    refused: dict[str, int] = _by("cause", "marserve_model_refused_total")
    worker_deaths: dict[str, int] = _by("cause", "marserve_worker_deaths_total")
    chosen: dict[str, int] = _by("reason", "marserve_traffic_requests_total", lambda v: v.reasons())
    shadow_dropped: dict[str, int] = _by("reason", "marserve_shadow_dropped_total")
    shadow_errors: dict[str, int] = _by("cause", "marserve_shadow_errors_total")
    lengths: dict[str, int] = _by("source", "marserve_lengths_total")
    batch_checks: dict[str, int] = _by("verdict", "marserve_batch_checks_total")
    worker_recycles: dict[str, int] = _by("reason", "marserve_worker_recycles_total")
    health_checks: dict[str, int] = _by("verdict", "marserve_worker_health_checks_total")
    builds_refused: dict[str, int] = _by("build", "marserve_build_checks_failed_total")

    def __post_init__(self) -> None:
        self.stages = StageSeconds(self.model, self.version, SECONDS_BOUNDS)

    def sample(self, now: float) -> None:
        """Keep the counts as they are now (monotonic), for the figures of the last minutes."""
        self.windows.sample(now, self)

    @property
    def default_requests(self) -> int:
        """Accepted requests that named no version."""
        return self.client_requests - self.named_requests

    def note(self, kind: Kind, now: float, text: str, *, seconds: float = 0.0) -> None:
        """Keep what has just happened to it, after so many seconds, for the explanations of requests."""
        if self.happenings is not None:
            self.happenings.note(kind, now - seconds, now, text, self.model, self.version)

    def reasons(self) -> dict[str, int]:
        """Accepted requests by why this version was chosen."""
        by_default = self.default_requests - sum(self.chosen.values())
        counts = {"path": self.named_requests, **self.chosen, "default": by_default}
        return {reason: count for reason, count in counts.items() if count > 0}

    @property
    def client_requests(self) -> int:
        """Accepted requests of clients: TorchServe's metric does not count those of a workflow's nodes."""
        return self.requests - self.inner_requests


def _histograms() -> dict[str, tuple[tuple[str, tuple[str, ...]], ...]]:
    found: dict[str, list[tuple[str, tuple[str, ...]]]] = defaultdict(list)
    for each in fields(VersionMetrics):
        if "histogram" in each.metadata:
            found[each.metadata["histogram"]].append((each.name, each.metadata["words"]))
    return {family: tuple(its) for family, its in found.items()}


HISTOGRAMS = _histograms()
"""The histograms of a version by family: each one's field, and the values of its labels after the version's."""
