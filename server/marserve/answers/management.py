"""What the server answers as JSON, each document typed once: what is written, its JSON Schema, and what clients read.

A field is called as its member, and members come in the order of the fields. A member with the value None that may
be left out is left out, never null. A client ignores members that it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct


class Document(Struct, omit_defaults=True):
    """Base of all documents, and of their parts."""


class StatusMessage(Document):
    """What was done, in a sentence."""

    status: str


class RegisteredStatus(StatusMessage):
    """What was registered, under `marserve`; as `torchserve` the server answers only `status`."""

    modelName: str | None = None
    modelVersion: str | None = None


class DryRunStatus(StatusMessage):
    """What was done, or with `dry_run` what would be: then `isDryRun` is there, and nothing was changed."""

    isDryRun: bool | None = None
    modelName: str | None = None
    modelVersion: str | None = None
    before: Annotated[dict[str, Any] | None, Meta(description="what the call is about, as it is")] = None
    after: Annotated[dict[str, Any] | None, Meta(description="the same, as it would be")] = None
    memory: Annotated[dict[str, Any] | None, Meta(description="the host's, in bytes")] = None
    deviceMemory: Annotated[dict[str, Any] | None, Meta(description="that of its devices, in bytes")] = None
    notes: Annotated[list[str] | None, Meta(description="what else would be, and what was not tried")] = None


class ErrorBody(Document):
    """Why a request was not done. The request's id is in the header `x-request-id`."""

    code: Annotated[int, Meta(description="the HTTP status once more")]
    type: Annotated[
        str, Meta(description="the kind of error, in TorchServe's words", examples=["ModelNotFoundException"])
    ]
    message: str


class ListedModel(Document):
    """A model in the list."""

    modelName: str
    modelUrl: Annotated[str, Meta(description="what its default version was registered with")]


class ModelList(Document, kw_only=True):
    """One page of the models, by name."""

    nextPageToken: Annotated[str | None, Meta(description="`next_page_token` of the next page, if one follows")] = None
    models: list[ListedModel]


class Death(Document):
    """The end of a worker that was not asked for."""

    cause: Annotated[str, Meta(examples=["killed", "out_of_memory", "response_timeout", "load_failed"])]
    at: Annotated[str, Meta(description="UTC")]
    detail: str
    traceback: Annotated[str | None, Meta(description="the handler's, where it raised while loading")] = None
    lastLines: Annotated[list[str] | None, Meta(description="what the worker printed last")] = None


class WorkerRank(Document):
    """One process of a worker that is a group of them."""

    rank: int
    pid: int


class WorkerHealth(Document):
    """What the handler's own `health()` said of a worker, where the model has a `healthInterval`."""

    state: Literal["unknown", "well", "failing"]
    failures: Annotated[int, Meta(description="checks in a row that it failed")]
    checkedAt: Annotated[str | None, Meta(description="when it was last asked, UTC")] = None
    reason: Annotated[str | None, Meta(description="what it said or raised, if it failed")] = None


class LoadedCheckpoint(Document):
    """How the weights of a `checkpoint` came into a worker, or into the template that it was forked from.

    Of a group of ranks the part of rank 0.
    """

    bytes: int
    mapped: Annotated[int, Meta(description="those of its bytes that are mapped files, and no memory of the worker's")]
    seconds: float
    secondsPerGB: Annotated[float | None, Meta(description="absent where there are no bytes")] = None


class Worker(Document, kw_only=True):
    """One worker of a version."""

    id: str
    startTime: Annotated[str, Meta(description="when this worker's slot was made, UTC")]
    status: Literal["READY", "LOADING", "UNLOADING"]
    memoryUsage: Annotated[int, Meta(description="resident bytes")]
    pid: Annotated[
        int | None, Meta(description="absent while there is no process; as `torchserve` the server says -1 then")
    ] = None
    gpu: bool
    gpuUsage: str
    restarts: int
    node: str | None = None
    waitsFor: str | None = None
    gpuId: int | None = None
    computesOn: Annotated[str | None, Meta(description="the model's providers, where it is an ONNX model")] = None
    engine: Annotated[str | None, Meta(description="the runtime of a built-in handler's model, and its version")] = None
    cpuFlags: Annotated[
        list[str] | None, Meta(description="the processor's kind, and its instructions that kernels depend on")
    ] = None
    checkpoint: LoadedCheckpoint | None = None
    share: Annotated[
        LoadedCheckpoint | None, Meta(description="rank 0's part of a divided model, where there is no checkpoint")
    ] = None
    gpuIds: list[int] | None = None
    ranks: list[WorkerRank] | None = None
    health: WorkerHealth | None = None
    lastDeath: Death | None = None
    nextStart: Annotated[
        str | None, Meta(description="when it is tried again after failing, UTC, or `when scaled`")
    ] = None


class JobQueueStatus(Document):
    """The queue of a version."""

    remainingCapacity: int
    pendingRequests: int


class BatchDifference(Document):
    """One place where an item's answer in a batch was another than alone. `item` is -1 for the whole batch."""

    run: str
    item: int
    path: str
    seen: str
    wanted: str


class Recheck(Document):
    """What running served batches again, item by item, has found."""

    batches: int
    items: int
    differingBatches: int
    seconds: float
    lastDifferences: list[str]


class UsedTolerance(Document):
    """How far answers were allowed to be apart, and what that was taken from."""

    relative: float
    absolute: float
    basis: Annotated[str, Meta(description="`batchTolerance`, or the precision that the model computes in")]


class BatchingStatus(Document, kw_only=True):
    """Whether batches are answered as single requests, as far as that was checked."""

    certificate: Literal["not checked", "passed", "failed"]
    policy: Literal["off", "warn", "refuse"]
    largestBatch: Annotated[int, Meta(description="1 while batches are refused")]
    reason: str | None = None
    isChecking: bool | None = None
    warmUpSeconds: Annotated[list[float] | None, Meta(description="how long each worker's warm-up took")] = None
    checkedAt: Annotated[str | None, Meta(description="UTC")] = None
    passed: bool | None = None
    samples: int | None = None
    batchSizes: list[int] | None = None
    answersCompared: int | None = None
    differencesFound: int | None = None
    differences: Annotated[list[BatchDifference] | None, Meta(description="the first ones")] = None
    notes: list[str] | None = None
    seconds: float | None = None
    tolerance: UsedTolerance | None = None
    inService: Recheck | None = None


class CheckReport(Document):
    """What a check of batches against single requests found."""

    modelName: str
    modelVersion: str
    certificate: Literal["not checked", "passed", "failed"]
    passed: bool
    samples: int
    batchSizes: list[int]
    answersCompared: int
    differencesFound: int
    differences: Annotated[list[BatchDifference], Meta(description="the first ones")]
    notes: Annotated[list[str], Meta(description="what the check could not see")]
    seconds: float
    tolerance: UsedTolerance | None = None


class DescribedInterpreter(Document):
    """The interpreter that a version's workers run under, if it is not the server's."""

    path: str
    version: Annotated[str, Meta(description="of Python")]
    name: Annotated[str | None, Meta(description="the operator's, in allowed_interpreters")] = None


class Requirements(Document):
    """What became of an archive's own requirements."""

    status: Literal["installed", "not installed"]
    file: Annotated[str | None, Meta(description="its name in the archive")] = None
    kind: Annotated[Literal["packages", "venv"] | None, Meta(description="a folder, or an environment")] = None
    folder: Annotated[str | None, Meta(description="where they are")] = None
    log: Annotated[str | None, Meta(description="what pip said")] = None
    installed: Annotated[list[str] | None, Meta(description="as in a lock file: name==version and hash")] = None
    seconds: Annotated[float | None, Meta(description="how long their installation took")] = None
    wasInstalledBefore: Annotated[bool | None, Meta(description="for another model, version or server")] = None


class Arriving(Document, kw_only=True):
    """An archive that is fetched for a model, and is no version yet."""

    modelVersion: Annotated[str | None, Meta(description="where it is known which it will be")] = None
    url: Annotated[str, Meta(description="its address, without the query")]
    state: Literal["waiting", "downloading", "unpacking"]
    seconds: Annotated[float, Meta(description="since it was asked for")]
    download: Annotated[int | None, Meta(description="its `id` in the list of downloads")] = None
    bytes: Annotated[int | None, Meta(description="how many are there")] = None
    size: Annotated[int | None, Meta(description="how many there will be, where that is known")] = None


class NotThere(ErrorBody):
    """There is no such model or version; what is being fetched for it."""

    arriving: list[Arriving] | None = None


class LastMinute(Document):
    """Figures of the last minute, or since the version was registered."""

    requestsPerSecond: float
    p95Milliseconds: Annotated[float | None, Meta(description="95 % of the answers took at most so long")] = None
    meanBatch: Annotated[float | None, Meta(description="requests in a batch, on average")] = None


class CountedFlops(Document):
    """Floating-point operations of a model's batches (`peakFlops`)."""

    state: Annotated[
        Literal["waiting for batches", "counting", "counted", "not counted"],
        Meta(description="figures come with `counted`; why it is `not counted` stands in `warnings`"),
    ]
    perBatch: Annotated[float | None, Meta(description="for each batch, whatever its size")] = None
    perRequest: Annotated[float | None, Meta(description="for each request of it")] = None
    inputs: Annotated[str | None, Meta(description="what the model was called with when they were counted")] = None
    dtype: Annotated[str | None, Meta(description="of the model's weights")] = None
    peakPerSecond: Annotated[
        float | None, Meta(description="what a worker's device could do: as given, else as measured")
    ] = None


class BuildRatio(Document):
    """How many times as fast as its parent a build was, by pairs that took turns."""

    rows: Annotated[int, Meta(description="of a batch")]
    threads: int
    ratio: float
    low: Annotated[float, Meta(description="of the interval that holds it with 96 % certainty")]
    high: float


class Optimising(Document):
    """Which build of a version serves, and why, where its configuration has the key `optimise`."""

    state: Annotated[
        Literal["none", "waits", "builds", "serves", "parent"],
        Meta(
            description="no build is looked for, it waits for others' searches, builds are tried, a build serves, or "
            "the parent stays"
        ),
    ]
    step: Annotated[str | None, Meta(description="what is done now")] = None
    build: Annotated[str | None, Meta(description="the build that serves")] = None
    ratios: list[BuildRatio] | None = None
    meanError: Annotated[float | None, Meta(description="as a share of the mean output, of the worst output")] = None
    agreement: Annotated[float | None, Meta(description="of the answers, as shown with 95 % certainty")] = None
    why: Annotated[str | None, Meta(description="why the parent serves")] = None
    isCached: Annotated[bool | None, Meta(description="found by an earlier search, with the same archive here")] = None


class ModelDescription(Document, kw_only=True):
    """One version of a model: the values it runs with, and its workers."""

    modelName: str
    modelVersion: str
    modelUrl: Annotated[str, Meta(description="what it was registered with")]
    copyOf: Annotated[
        str | None,
        Meta(description="the model that this is a copy of, to be measured; no document has it"),
    ] = None
    runtime: Literal["python", "python3"]
    minWorkers: int
    maxWorkers: int
    batchSize: int
    maxBatchDelay: Annotated[int, Meta(description="milliseconds")]
    responseTimeout: Annotated[float, Meta(description="seconds")]
    startupTimeout: Annotated[float, Meta(description="seconds")]
    maxRetryTimeoutInSec: Annotated[float, Meta(description="seconds")]
    clientTimeoutInMills: Annotated[int, Meta(description="milliseconds; 0 for no limit")]
    parallelType: Literal["", "pp", "tp", "pptp", "custom"]
    parallelLevel: int
    parallel: Annotated[
        dict[str, dict[str, int | str]] | None, Meta(description="how the model is divided over a worker's ranks")
    ] = None
    deviceType: Literal["cpu", "gpu"]
    deviceIds: list[int] | None = None
    continuousBatching: bool
    useJobTicket: bool
    useVenv: Annotated[bool, Meta(description="whether the model's configuration asks for it")]
    stateful: bool
    sequenceMaxIdleMSec: int
    sequenceTimeoutMSec: int
    maxNumSequence: int
    maxSequenceJobQueueSize: int
    loadedAtStartup: bool
    workers: list[Worker]
    jobQueueStatus: JobQueueStatus
    isDefault: bool
    labels: Annotated[list[str] | None, Meta(description="further names of the version")] = None
    trafficShare: Annotated[
        float | None, Meta(description="of the requests naming no version, 0 to 1; where the model has weights")
    ] = None
    batching: BatchingStatus | None = None
    state: Annotated[
        Literal["ready", "degraded", "loading", "failed", "idle"],
        Meta(description="`degraded`: serves, but dead workers are missing; `failed`: given up for a while"),
    ]
    lastMinute: LastMinute | None = None
    optimising: Optimising | None = None
    flops: CountedFlops | None = None
    peakFlops: Annotated[
        float | str | dict[str, float] | None, Meta(description="as asked for: FLOPs a second, by dtype, or auto")
    ] = None
    runningRequests: Annotated[int, Meta(description="requests that workers have now")]
    defaultPriority: Annotated[int, Meta(description="priority of requests that name none, 0 (most urgent) to 9")]
    jobQueueSize: Annotated[int, Meta(description="requests that may wait")]
    maxConcurrentRequests: Annotated[int | None, Meta(description="that a worker has at once, of coroutines")] = None
    idleTimeout: Annotated[float | None, Meta(description="seconds without a request until the model sleeps")] = None
    retryFailedEvery: Annotated[float | None, Meta(description="seconds between probes of a failed version")] = None
    maxWorkerMemory: Annotated[int | None, Meta(description="bytes that a worker may hold by itself")] = None
    overlapPreprocess: Annotated[bool | None, Meta(description="where it is asked for; `warnings` say where not")] = (
        None
    )
    allowedBatchSizes: Annotated[list[int] | None, Meta(description="the only numbers of rows of a batch")] = None
    cpuPinning: Literal["near", "cores"] | None = None
    threads: Annotated[dict[str, int] | None, Meta(description="of each worker, as asked for: intra, inter")] = None
    workerProgram: Annotated[list[str] | None, Meta(description="what workers are, in another language")] = None
    maxRequestsPerWorker: int | None = None
    maxWorkerAge: Annotated[float | None, Meta(description="seconds")] = None
    maxWorkerGrowth: Annotated[int | None, Meta(description="bytes")] = None
    healthInterval: Annotated[float | None, Meta(description="seconds between two calls of a worker's health()")] = None
    maxRestarts: Annotated[int | None, Meta(description="in a row")] = None
    noRestartExitCodes: list[int] | None = None
    onCrash: Literal["fail"] | None = None
    readinessRule: Literal["min", "all"] | None = None
    resolvedUrl: Annotated[
        str | None, Meta(description="what was fetched: with a commit or a digest where modelUrl names what changes")
    ] = None
    arriving: Annotated[
        list[Arriving] | None, Meta(description="what is fetched for the model, or the version, now")
    ] = None
    interpreter: Annotated[
        DescribedInterpreter | None, Meta(description="where workers do not run under the server's")
    ] = None
    requirements: Requirements | None = None
    declaration: Annotated[
        dict[str, Any] | None, Meta(description="what the model takes and gives, if it declares that, under `marserve`")
    ] = None
    warnings: Annotated[list[str] | None, Meta(description="what was asked for and is not used, and why")] = None
    lastDeath: Death | None = None
    customizedMetadata: Annotated[
        dict[str, Any] | None, Meta(description="what the handler says of itself (`customized=true`)")
    ] = None


class ListedWorkflow(Document):
    """A workflow in the list."""

    workflowName: str
    workflowUrl: Annotated[str, Meta(description="what it was registered with")]


class WorkflowList(Document, kw_only=True):
    """One page of the workflows, by name."""

    nextPageToken: Annotated[str | None, Meta(description="`next_page_token` of the next page, if one follows")] = None
    workflows: list[ListedWorkflow]


class WorkflowNode(Document):
    """One node of a workflow, and the version that stands behind it."""

    nodeName: str
    nodeType: Literal["model", "function"]
    modelName: str
    modelVersion: str
    retryAttempts: Annotated[int, Meta(description="how often a failed attempt is followed by another")]
    timeoutMs: Annotated[int, Meta(description="longest time for an attempt, milliseconds")]


class WorkflowDescription(Document):
    """A workflow: its graph, and the values that its spec has for all models."""

    workflowName: str
    workflowUrl: Annotated[str, Meta(description="what it was registered with")]
    minWorkers: int
    maxWorkers: int
    batchSize: int
    maxBatchDelay: Annotated[int, Meta(description="milliseconds")]
    workflowDag: Annotated[str, Meta(examples=["{prepare=[detect], detect=[finish]}"])]
    nodes: list[WorkflowNode]
    runningRequests: Annotated[int, Meta(description="requests that are on their way")]
    warnings: Annotated[list[str] | None, Meta(description="what was asked for and is not used, and why")] = None


class DownloadEntry(Document, kw_only=True):
    """A download: an archive that was asked for by its address."""

    id: int
    url: Annotated[str, Meta(description="the address, without its query")]
    name: Annotated[str, Meta(description="the archive's name", examples=["digits.mar"])]
    state: Literal["waiting", "downloading", "done", "failed", "cancelled"]
    bytes: Annotated[int, Meta(description="how many are there")]
    seconds: Annotated[float, Meta(description="how long it has taken")]
    fromCache: Annotated[bool, Meta(description="whether it was kept from before, and nothing was fetched")]
    size: Annotated[int | None, Meta(description="how many there will be, where that is known")] = None
    reason: Annotated[str | None, Meta(description="why it failed")] = None


class DownloadsList(Document):
    """Downloads under way, and the last that ended, the oldest first."""

    downloads: Sequence[DownloadEntry]


class LogLine(Document):
    """A record of a log: a line, with the lines of its traceback."""

    log: Literal["server", "model", "access"]
    time: Annotated[str | None, Meta(description="as the log has it: local time in text, UTC in JSON")]
    level: str
    requestId: Annotated[str | None, Meta(description="several with commas, a client's behind the server's and a /")]
    text: Annotated[str, Meta(description="as the log has it")]


class LogLines(Document):
    """The newest lines that were asked for, the oldest first."""

    lines: list[LogLine]
    complete: Annotated[bool, Meta(description="false where time or room did not suffice for all of them")]
    since: Annotated[str | None, Meta(description="the oldest line that was looked at, if not all were")] = None


class LoggingLevels(Document):
    """The levels of logging."""

    level: Annotated[str, Meta(description="the server log's")]
    workers: Annotated[str, Meta(description="that of workers of models without a level of their own")]
    models: Annotated[dict[str, str], Meta(description="those of single models' workers")]


class UploadedArchive(Document):
    """An archive that was uploaded into the model store, or was there with the same content."""

    archive: Annotated[str, Meta(description="its name, for a registration's `url`", examples=["digits.mar"])]
    sha256: str
    bytes: int
    isDryRun: Annotated[bool | None, Meta(description="it was checked, and not kept")] = None


class EventVerdict(Document):
    """What becomes of one event."""

    object: Annotated[str, Meta(description="the object that it is about", examples=["s3://bucket/models/m.mar"])]
    event: Literal["there", "gone"]
    action: Literal["look", "ignore"]
    watch: Annotated[str | None, Meta(description="the watch that looks")] = None
    reason: Annotated[str | None, Meta(description="why it is ignored")] = None


class EventsTaken(Document):
    """What becomes of the events of a request: the first hundred, and the kinds that mean nothing here."""

    status: str
    events: list[EventVerdict]
    ignoredKinds: list[str]


class WatchError(Document):
    """The last failure of a watch."""

    at: str
    reason: str


class UnfinishedArchive(Document):
    """A file that is not taken yet."""

    key: str
    size: int | None
    reason: str


class ListedWatch(Document, kw_only=True):
    """A place that is watched. Times are UTC."""

    name: str
    place: str
    reachable: Annotated[bool, Meta(description="whether its last look was answered")]
    mode: Annotated[Literal["notices", "polling"], Meta(description="whether the system tells of changes")]
    noNotices: Annotated[str | None, Meta(description="why the system tells of none")] = None
    pollIntervalSeconds: float
    archives: Annotated[int, Meta(description="archives that the last look saw")]
    lastSuccess: str | None
    lastLookSeconds: float
    failuresInARow: int
    lastError: WatchError | None
    looks: dict[str, int]
    changes: dict[str, int]
    hints: dict[str, int]
    unfinished: list[UnfinishedArchive]
    policy: Literal["ignore", "load", "load-and-default", "canary"]
    removedPolicy: Literal["ignore", "unload"]
    keptVersions: int | Literal["all"]
    modelName: Annotated[str | None, Meta(description="the model whose versions all of them are")] = None
    outcomes: dict[str, int]
    states: Annotated[dict[str, int], Meta(description="archives by what became of them")]


class WatchList(Document):
    """The places that are watched."""

    watches: list[ListedWatch]


class WatchedArchive(Document, kw_only=True):
    """What became of one archive."""

    key: str
    state: str
    at: str
    modelName: str | None = None
    modelVersion: str | None = None
    reason: str | None = None
    etag: str | None = None
    size: int | None


class WatchDescription(ListedWatch, kw_only=True):
    """A watch, with its archives: the thousand that changed last."""

    archivesShown: int
    archiveList: list[WatchedArchive]


class KServeReady(Document):
    """Whether a model can answer, as KServe asks."""

    name: str
    ready: bool


class WorkersOfModel(Document):
    """How many workers of a version have loaded it, and how many it needs."""

    ready: int
    needed: int


class ModelOfV1(Document):
    """A model as OpenAI's clients know it, and as KServe's do. While it cannot answer, it says why."""

    id: str
    object: Literal["model"]
    created: Annotated[int, Meta(description="when its default version was registered, in seconds since 1970")]
    owned_by: str
    name: str
    ready: bool
    reason: Annotated[str | None, Meta(description="why it cannot answer")] = None
    workers: WorkersOfModel | None = None


class ModelReady(Document):
    """Whether a model can answer, in the Open Inference Protocol; else with the reason."""

    name: str
    ready: bool
    reason: Annotated[str | None, Meta(description="why it cannot answer")] = None
    workers: WorkersOfModel | None = None


class ModelsOfV1(Document):
    """The models, in order of their names."""

    object: Literal["list"]
    data: list[ModelOfV1]
    models: Annotated[list[str], Meta(description="their names")]


class Health(Document):
    """What `/ping` says."""

    status: Literal["Healthy", "Unhealthy"]


class Probe(Document):
    """What a probe says. `reasons` is empty when all is well."""

    status: str
    reasons: list[str]


class SwapStatus(Document):
    """What has taken whose place."""

    status: str
    modelName: str
    modelVersion: str
    replacedVersion: str
    order: Literal["load_first", "unload_first"]
    workers: int
    seconds: Annotated[float, Meta(description="from the call to the end of the version before")]
    notes: Annotated[list[str] | None, Meta(description="what could not be looked at")] = None
    isDryRun: bool | None = None
    before: Annotated[dict[str, Any] | None, Meta(description="in a dry run: versions and workers now")] = None
    after: Annotated[dict[str, Any] | None, Meta(description="the same, as they would be")] = None
    memory: Annotated[dict[str, Any] | None, Meta(description="the host's, in bytes")] = None
    deviceMemory: Annotated[dict[str, Any] | None, Meta(description="that of its devices, in bytes")] = None


class RecordedStage(Document):
    """A part of a request's time; together they are the whole."""

    name: Literal["header", "body", "admit", "queue", "send", "decode", "handle", "encode", "return", "write"]
    ms: float


class RecordedSpan(Document):
    """A part of the handler's work that its author named with `context.span`."""

    name: str
    after_ms: Annotated[float, Meta(description="how long after the batch's begin it began")]
    ms: float


class RecordedBatch(Document):
    """The last batch in which a request went to a worker."""

    size: int
    mates: Annotated[list[str], Meta(description="the ids of the other requests in it that are recorded")]
    runs: Annotated[int, Meta(description="how many batches it was in: more than one if it was run again")]
    first_of_worker: Annotated[bool, Meta(description="whether it was its worker's first")]
    handler_ms: float
    padding: Annotated[
        float | None,
        Meta(description="share of the batch that is padding if inputs are padded to the largest, by their bytes"),
    ] = None


class RecordedPart(Document, kw_only=True):
    """A request that another one made: for a node of a workflow, or by a call of the handler."""

    name: Annotated[str, Meta(examples=["node resize", "call digits"])]
    depth: Annotated[int, Meta(description="1; 2 for one that such a one made, which stands right behind it")]
    model: str
    version: str
    status: int
    error: Annotated[str | None, Meta(description="the class of the error's cause")] = None
    after_ms: Annotated[float, Meta(description="how long after the first byte of the whole it began")]
    ms: float
    stages: list[RecordedStage]


class OtherRequest(Document):
    """A further request of the same id: clients need not make theirs unique."""

    id: str
    started: str


class RecordedRequest(Document, kw_only=True):
    """One request from its first byte to its last, and why it took so long."""

    id: str
    client_id: Annotated[str | None, Meta(description="the client's own id, if it has another one")] = None
    trace_id: Annotated[str | None, Meta(description="its trace's, with `tracing=otlp`")] = None
    model: Annotated[str, Meta(description="of a workflow's its name; empty for one that no model took")]
    version: str
    worker: Annotated[str, Meta(description="as logs name it; empty for one that no worker had")]
    status: Annotated[int, Meta(description="499: the client went away")]
    error: Annotated[str | None, Meta(description="the class of the error's cause, as `x-marserve-cause`")] = None
    started: Annotated[str, Meta(description="when its first byte came, in UTC")]
    wall_ms: float
    bytes_in: int
    bytes_out: int
    stages: list[RecordedStage]
    spans: list[RecordedSpan] | None = None
    parts: Annotated[list[RecordedPart] | None, Meta(description="the requests that it made")] = None
    batch: Annotated[RecordedBatch | None, Meta(description="null for one that no worker had")]
    first_piece_ms: Annotated[float | None, Meta(description="until the first piece of a stream")] = None
    moved_from: Annotated[str | None, Meta(description="the version that had accepted it before")] = None
    remote_worker: Annotated[
        bool | None, Meta(description="its worker has another clock: `send` has all of the way there and back")
    ] = None
    cause: Annotated[str, Meta(description="what took most of the time")]
    why: str
    also: Annotated[list[str], Meta(description="what else took a tenth of the time or more")]
    meanwhile: Annotated[list[str], Meta(description="what else the server did then")]
    others: Annotated[list[OtherRequest], Meta(description="older requests of the same id")]


class ReplayedAnswer(Document, kw_only=True):
    """What is known of an answer; two of them are compared by all of it but the message."""

    compared: Annotated[
        Literal["equal", "different", "unknown"] | None,
        Meta(description="with the first time, which has none; unknown: it was too large then"),
    ] = None
    status: int
    bytes: int
    sha256: Annotated[str | None, Meta(description="of its body; null for a failure")] = None
    error: Annotated[str | None, Meta(description="the class of the error's cause, as `x-marserve-cause`")] = None
    message: Annotated[str | None, Meta(description="of the failure, as a client would have got it")] = None


class ReplayedTime(Document, kw_only=True):
    """One run of a request, in one batch with others. `stages` are those of the recorder."""

    version: str
    worker: str
    wall_ms: float
    stages: list[RecordedStage]
    first_of_worker: bool
    answer: ReplayedAnswer
    mates_different: Annotated[
        list[str] | None, Meta(description="the ids of those in its batch whose answers differ from the first time's")
    ] = None


class LeftOut(Document):
    """A request of the batch that could not be run again."""

    id: str
    why: str


class ReplayedBatch(Document):
    """The batch that was run again. `size` is what it had the first time."""

    size: int
    ran: Annotated[list[str], Meta(description="the ids of those that were run again, in their order")]
    missing: list[LeftOut]
    unknown: Annotated[int, Meta(description="how many more were in it of which nothing is kept any more")]


class ReplayedRequest(Document, kw_only=True):
    """A request that was run again, beside its first time."""

    id: str
    model: str
    version: Annotated[str, Meta(description="the version that ran it again")]
    answer: Annotated[
        Literal["equal", "different", "unknown"], Meta(description="different if it was so in any of the runs")
    ]
    first: ReplayedTime
    times: list[ReplayedTime]
    batch: ReplayedBatch
    headers_left_out: Annotated[
        list[str] | None, Meta(description="headers that are not kept, and that the handler did not see this time")
    ] = None
    asked_times: Annotated[int | None, Meta(description="how many runs were asked for, if it was for fewer time")] = (
        None
    )


class ListedRequest(Document, kw_only=True):
    """A recorded request in a list."""

    id: str
    client_id: str | None = None
    model: str
    version: str
    status: int
    error: str | None = None
    started: str
    wall_ms: float
    cause: str
    why: str


class RecordedRequests(Document):
    """The recorded requests that were asked for, in the order asked for."""

    requests: list[ListedRequest]
    recorded: Annotated[int, Meta(description="how many requests are known at present")]


class Times(Document):
    """How long requests took, in milliseconds. A percentile is at most 5 % off the true one."""

    count: int
    mean: float | None = None
    p50: Annotated[float | None, Meta(description="half of them took at most so long")] = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


class TimesSoFar(Document):
    """A histogram of times in milliseconds, since the start: what two answers differ by fell into the time between."""

    upTo: Annotated[list[float], Meta(description="the bounds")]
    counts: Annotated[list[int], Meta(description="how many times lie at a bound or below it, down to the one before")]
    sum: float


class StageSoFar(Document):
    """A part of the way of requests: how many had it since the start, and what it took of all of them together."""

    name: Annotated[str, Meta(description="as in a request's `stages`, or `first_chunk`, `next_chunk` of streams")]
    count: int
    milliseconds: float


class TimesByPart(Document):
    """Of requests: in the queue, in the author's code, and from arrival to answer."""

    queue: Times
    handler: Times
    total: Times


class BatchesOfSize(Document):
    """How many batches had so many requests, and more than the size before this one in the list."""

    upTo: Annotated[int | None, Meta(description="null for those that are larger than the last size")]
    batches: int


class WindowStatistics(Document, kw_only=True):
    """What a version did within some time."""

    seconds: Annotated[float, Meta(description="how long that time was: shorter for a younger version")]
    requests: Annotated[int, Meta(description="accepted")]
    requestsPerSecond: float
    answers: Annotated[dict[str, int], Meta(description="by status; those that failed are in `errors`")]
    answersPerSecond: Annotated[float, Meta(description="requests that ended, well or badly")]
    errors: Annotated[dict[str, int], Meta(description="accepted requests that failed, by cause")]
    refused: Annotated[dict[str, int], Meta(description="requests that were not accepted, by cause")]
    cancelled: Annotated[int, Meta(description="whose clients went away")]
    expired: Annotated[int, Meta(description="whose deadlines passed")]
    retried: Annotated[int, Meta(description="run again because their worker died")]
    isolated: Annotated[int, Meta(description="run again because their batch raised")]
    outOfMemory: Annotated[int, Meta(description="batches that ran out of memory")]
    milliseconds: TimesByPart
    batches: int
    meanBatch: Annotated[float | None, Meta(description="requests in a batch, on average")] = None
    batchSizes: Annotated[list[BatchesOfSize], Meta(description="sizes that no batch had are left out")]
    busyWorkers: Annotated[float, Meta(description="how many workers ran batches at once, on average")]
    workerStarts: int
    workerRestarts: Annotated[int, Meta(description="of these, in the place of a worker that had died")]
    workerDeaths: Annotated[dict[str, int], Meta(description="by cause")]
    loadsOnDemand: Annotated[int, Meta(description="times that a request had the sleeping model loaded")]
    evictions: Annotated[int, Meta(description="times that it was put to sleep to make room")]


class VersionStatistics(Document, kw_only=True):
    """What one version did. A window is left out before the version's first sample."""

    modelVersion: str
    isDefault: bool
    lastMinute: WindowStatistics | None = None
    last5Minutes: WindowStatistics | None = None
    last60Minutes: WindowStatistics | None = None
    sinceStart: Annotated[WindowStatistics, Meta(description="since the version was registered")]
    times: Annotated[TimesSoFar, Meta(description="from arrival to answer, since the version was registered")]
    stages: Annotated[list[StageSoFar], Meta(description="in their order; those that no request had are left out")]


class ModelStatistics(Document):
    """What the versions of a model did."""

    modelName: str
    at: Annotated[float, Meta(description="when, in seconds; of two answers of one server, the time between them")]
    versions: list[VersionStatistics]


class WorkerActivity(Document):
    """One worker of a version."""

    id: str
    status: Literal["READY", "LOADING", "UNLOADING"]
    memoryBytes: int
    restarts: int
    gpuId: int | None = None
    why: Annotated[str | None, Meta(description="what it waits for, or how the one before it ended")] = None


class VersionActivity(Document, kw_only=True):
    """What one version does now, and did in the last minute."""

    modelName: str
    modelVersion: str
    isDefault: bool
    state: Literal["ready", "degraded", "loading", "failed", "idle"]
    answersPerSecond: float
    p50: Annotated[float | None, Meta(description="milliseconds from arrival to answer")] = None
    p99: float | None = None
    errors: int
    refused: int
    queued: int
    running: int
    batchSize: int
    meanBatch: float | None = None
    minWorkers: int
    maxWorkers: int
    readyWorkers: int
    memoryBytes: int
    workers: list[WorkerActivity]


class DeviceActivity(Document, kw_only=True):
    """An accelerator, as it was last read."""

    gpuId: int
    busyPercent: float | None = None
    usedBytes: int | None = None
    totalBytes: int | None = None
    celsius: float | None = None
    trouble: Annotated[str | None, Meta(description="why it takes no worker")] = None


class EventLoopActivity(Document):
    """Whether the server itself keeps up: everything but models runs on its event loop."""

    lag: Annotated[TimesSoFar, Meta(description="how late the loop was at each of its beats")]
    stalls: Annotated[int, Meta(description="times that something held it for long")]
    longestStallSeconds: float


class ServerActivity(Document, kw_only=True):
    """What a server does now: the versions that were asked for, and sums over all of them."""

    at: Annotated[float, Meta(description="when, in seconds; of two answers of one server, the time between them")]
    ready: Annotated[bool, Meta(description="as `/readyz`")]
    reasons: Annotated[list[str], Meta(description="why it is not ready, and what is remarkable; the first ones")]
    versions: list[VersionActivity]
    versionsInAll: int
    versionsFound: Annotated[int, Meta(description="those of models whose names have what was searched for")]
    answersPerSecond: float
    errors: Annotated[int, Meta(description="of the last minute")]
    refused: Annotated[int, Meta(description="of the last minute")]
    queued: int
    running: int
    memoryBytes: int
    times: Annotated[TimesSoFar, Meta(description="from arrival to answer, of all requests of the present versions")]
    eventLoop: EventLoopActivity | None = None
    devices: list[DeviceActivity]
