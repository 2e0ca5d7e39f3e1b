"""The shapes of what the management, health and metrics listeners answer, as the API description shows them.

They describe; nothing is validated with them on the way out. A test plays real answers against them, so they are true.
Members that a shape calls optional are left out of an answer, never null. `defer_build`: pydantic prepares a shape when
it is first used, which most servers never do; preparing all of them takes a tenth of a second of a start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from fastapi import Path
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from marserve.api.parameters import Parameter


class Shape(BaseModel):
    """Base: what is not listed does not occur."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


class StatusMessage(Shape):
    """What was done, in a sentence."""

    status: str


class DryRunStatus(StatusMessage):
    """What was done, or with `dry_run` what would be: then `isDryRun` is there, and nothing was changed."""

    isDryRun: bool | None = None
    modelName: str | None = None
    modelVersion: str | None = None
    before: Annotated[dict[str, Any] | None, Field(description="what the call is about, as it is")] = None
    after: Annotated[dict[str, Any] | None, Field(description="the same, as it would be")] = None
    memory: Annotated[dict[str, Any] | None, Field(description="the host's, in bytes")] = None
    deviceMemory: Annotated[dict[str, Any] | None, Field(description="that of its devices, in bytes")] = None
    notes: Annotated[list[str] | None, Field(description="what else would be, and what was not tried")] = None


class ErrorBody(Shape):
    """Why a request was not done. The request's id is in the header `x-request-id`."""

    code: Annotated[int, Field(description="the HTTP status once more")]
    type: Annotated[
        str, Field(description="the kind of error, in TorchServe's words", examples=["ModelNotFoundException"])
    ]
    message: str


# A name in a path: what would be ambiguous there arrives still encoded (`application.split_path`).
Name = Annotated[str, Path(), AfterValidator(lambda word: unquote(word, errors="replace"))]


def error_answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route's description says of refusals with these statuses."""
    return {status: {"model": ErrorBody} for status in statuses}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """What a route's description says of a body that it reads itself."""
    schema = {"schema": model.model_json_schema(ref_template="#/components/schemas/{model}")}
    return {"requestBody": {"required": True, "content": {"application/json": schema}}}


def takes(parameters: Mapping[str, Parameter], *, in_body: bool = False) -> dict[str, Any]:
    """What a route's description says of parameters that it reads itself: in the query, or as JSON in their place.

    `in_body`: they may come as JSON, and then `url` must be there.
    """
    described: dict[str, Any] = {
        "parameters": [
            {"name": name, "in": "query", "required": False, "description": each.help, "schema": each.schema}
            for name, each in parameters.items()
        ]
    }
    if in_body:
        properties = {name: {**each.schema, "description": each.help} for name, each in parameters.items()}
        schema = {"type": "object", "properties": properties, "required": ["url"]}
        content = {"application/json": {"schema": schema}}
        described["requestBody"] = {"description": "the parameters as JSON, in place of the query", "content": content}
    return described


class ListedModel(Shape):
    """A model in the list."""

    modelName: str
    modelUrl: Annotated[str, Field(description="what its default version was registered with")]


class ModelList(Shape):
    """One page of the models, by name."""

    nextPageToken: Annotated[str | None, Field(description="`next_page_token` of the next page, if one follows")] = None
    models: list[ListedModel]


class Death(Shape):
    """The end of a worker that was not asked for."""

    cause: Annotated[str, Field(examples=["killed", "out_of_memory", "response_timeout", "load_failed"])]
    at: Annotated[str, Field(description="UTC")]
    detail: str
    traceback: Annotated[str | None, Field(description="the handler's, where it raised while loading")] = None
    lastLines: Annotated[list[str] | None, Field(description="what the worker printed last")] = None


class WorkerRank(Shape):
    """One process of a worker that is a group of them."""

    rank: int
    pid: int


class Worker(Shape):
    """One worker of a version."""

    id: str
    startTime: Annotated[str, Field(description="when this worker's slot was made, UTC")]
    status: Literal["READY", "LOADING", "UNLOADING"]
    memoryUsage: Annotated[int, Field(description="resident bytes")]
    pid: Annotated[
        int | None, Field(description="absent while there is no process; as `torchserve` the server says -1 then")
    ] = None
    gpu: bool
    gpuUsage: str
    restarts: int
    gpuId: int | None = None
    gpuIds: list[int] | None = None
    computesOn: Annotated[str | None, Field(description="the model's providers, where it is an ONNX model")] = None
    node: str | None = None
    waitsFor: str | None = None
    ranks: list[WorkerRank] | None = None
    lastDeath: Death | None = None
    nextStart: Annotated[
        str | None, Field(description="when it is tried again after failing, UTC, or `when scaled`")
    ] = None


class JobQueueStatus(Shape):
    """The queue of a version."""

    remainingCapacity: int
    pendingRequests: int


class BatchDifference(Shape):
    """One place where an item's answer in a batch was another than alone. `item` is -1 for the whole batch."""

    run: str
    item: int
    path: str
    seen: str
    wanted: str


class Recheck(Shape):
    """What running served batches again, item by item, has found."""

    batches: int
    items: int
    differingBatches: int
    seconds: float
    lastDifferences: list[str]


class UsedTolerance(Shape):
    """How far answers were allowed to be apart, and what that was taken from."""

    relative: float
    absolute: float
    basis: Annotated[str, Field(description="`batchTolerance`, or the precision that the model computes in")]


class BatchingStatus(Shape):
    """Whether batches are answered as single requests, as far as that was checked."""

    certificate: Literal["not checked", "passed", "failed"]
    policy: Literal["off", "warn", "refuse"]
    largestBatch: Annotated[int, Field(description="1 while batches are refused")]
    reason: str | None = None
    isChecking: bool | None = None
    warmUpSeconds: Annotated[list[float] | None, Field(description="how long each worker's warm-up took")] = None
    checkedAt: Annotated[str | None, Field(description="UTC")] = None
    passed: bool | None = None
    samples: int | None = None
    batchSizes: list[int] | None = None
    answersCompared: int | None = None
    differencesFound: int | None = None
    differences: Annotated[list[BatchDifference] | None, Field(description="the first ones")] = None
    notes: list[str] | None = None
    seconds: float | None = None
    tolerance: UsedTolerance | None = None
    inService: Recheck | None = None


class CheckReport(Shape):
    """What a check of batches against single requests found."""

    modelName: str
    modelVersion: str
    certificate: Literal["not checked", "passed", "failed"]
    passed: bool
    samples: int
    batchSizes: list[int]
    answersCompared: int
    differencesFound: int
    differences: Annotated[list[BatchDifference], Field(description="the first ones")]
    notes: Annotated[list[str], Field(description="what the check could not see")]
    seconds: float
    tolerance: UsedTolerance | None = None


class Requirements(Shape):
    """What became of an archive's own requirements."""

    status: Literal["installed", "not installed"]
    file: Annotated[str | None, Field(description="its name in the archive")] = None
    kind: Annotated[Literal["packages", "venv"] | None, Field(description="a folder, or an environment")] = None
    folder: Annotated[str | None, Field(description="where they are")] = None
    log: Annotated[str | None, Field(description="what pip said")] = None
    installed: Annotated[list[str] | None, Field(description="as in a lock file: name==version and hash")] = None
    seconds: Annotated[float | None, Field(description="how long their installation took")] = None
    wasInstalledBefore: Annotated[bool | None, Field(description="for another model, version or server")] = None


class Arriving(Shape):
    """An archive that is fetched for a model, and is no version yet."""

    modelVersion: Annotated[str | None, Field(description="where it is known which it will be")] = None
    url: Annotated[str, Field(description="its address, without the query")]
    state: Literal["waiting", "downloading", "unpacking"]
    seconds: Annotated[float, Field(description="since it was asked for")]
    download: Annotated[int | None, Field(description="its `id` in the list of downloads")] = None
    bytes: Annotated[int | None, Field(description="how many are there")] = None
    size: Annotated[int | None, Field(description="how many there will be, where that is known")] = None


class NotThere(ErrorBody):
    """There is no such model or version; what is being fetched for it."""

    arriving: list[Arriving] | None = None


class ModelDescription(Shape):
    """One version of a model: the values it runs with, and its workers."""

    modelName: str
    modelVersion: str
    modelUrl: Annotated[str, Field(description="what it was registered with")]
    runtime: Literal["python", "python3"]
    minWorkers: int
    maxWorkers: int
    batchSize: int
    maxBatchDelay: Annotated[int, Field(description="milliseconds")]
    responseTimeout: Annotated[float, Field(description="seconds")]
    startupTimeout: Annotated[float, Field(description="seconds")]
    maxRetryTimeoutInSec: Annotated[float, Field(description="seconds")]
    clientTimeoutInMills: Annotated[int, Field(description="milliseconds; 0 for no limit")]
    parallelType: Literal["", "pp", "tp", "pptp", "custom"]
    parallelLevel: int
    deviceType: Literal["cpu", "gpu"]
    deviceIds: list[int] | None = None
    continuousBatching: bool
    useJobTicket: bool
    useVenv: Annotated[bool, Field(description="whether the model's configuration asks for it")]
    stateful: bool
    sequenceMaxIdleMSec: int
    sequenceTimeoutMSec: int
    maxNumSequence: int
    maxSequenceJobQueueSize: int
    loadedAtStartup: bool
    workers: list[Worker]
    jobQueueStatus: JobQueueStatus
    isDefault: bool
    labels: Annotated[list[str] | None, Field(description="further names of the version")] = None
    trafficShare: Annotated[
        float | None, Field(description="of the requests naming no version, 0 to 1; where the model has weights")
    ] = None
    batching: BatchingStatus | None = None
    state: Annotated[
        Literal["ready", "degraded", "loading", "failed", "idle"],
        Field(description="`degraded`: serves, but dead workers are missing; `failed`: given up for a while"),
    ]
    runningRequests: Annotated[int, Field(description="requests that workers have now")]
    defaultPriority: Annotated[int, Field(description="priority of requests that name none, 0 (most urgent) to 9")]
    jobQueueSize: Annotated[int, Field(description="requests that may wait")]
    maxConcurrentRequests: Annotated[int | None, Field(description="that a worker has at once, of coroutines")] = None
    idleTimeout: Annotated[float | None, Field(description="seconds without a request until the model sleeps")] = None
    retryFailedEvery: Annotated[float | None, Field(description="seconds between probes of a failed version")] = None
    maxWorkerMemory: Annotated[int | None, Field(description="bytes that a worker may hold by itself")] = None
    maxRequestsPerWorker: int | None = None
    maxWorkerAge: Annotated[float | None, Field(description="seconds")] = None
    maxWorkerGrowth: Annotated[int | None, Field(description="bytes")] = None
    maxRestarts: Annotated[int | None, Field(description="in a row")] = None
    noRestartExitCodes: list[int] | None = None
    onCrash: Literal["fail"] | None = None
    readinessRule: Literal["min", "all"] | None = None
    resolvedUrl: Annotated[
        str | None, Field(description="what was fetched: with a commit or a digest where modelUrl names what changes")
    ] = None
    arriving: Annotated[
        list[Arriving] | None, Field(description="what is fetched for the model, or the version, now")
    ] = None
    requirements: Requirements | None = None
    warnings: Annotated[list[str] | None, Field(description="what was asked for and is not used, and why")] = None
    lastDeath: Death | None = None
    customizedMetadata: Annotated[
        dict[str, Any] | None, Field(description="what the handler says of itself (`customized=true`)")
    ] = None


class ListedWorkflow(Shape):
    """A workflow in the list."""

    workflowName: str
    workflowUrl: Annotated[str, Field(description="what it was registered with")]


class WorkflowList(Shape):
    """One page of the workflows, by name."""

    nextPageToken: Annotated[str | None, Field(description="`next_page_token` of the next page, if one follows")] = None
    workflows: list[ListedWorkflow]


class WorkflowNode(Shape):
    """One node of a workflow, and the version that stands behind it."""

    nodeName: str
    nodeType: Literal["model", "function"]
    modelName: str
    modelVersion: str
    retryAttempts: Annotated[int, Field(description="how often a failed attempt is followed by another")]
    timeoutMs: Annotated[int, Field(description="longest time for an attempt, milliseconds")]


class WorkflowDescription(Shape):
    """A workflow: its graph, and the values that its spec has for all models."""

    workflowName: str
    workflowUrl: Annotated[str, Field(description="what it was registered with")]
    minWorkers: int
    maxWorkers: int
    batchSize: int
    maxBatchDelay: Annotated[int, Field(description="milliseconds")]
    workflowDag: Annotated[str, Field(examples=["{prepare=[detect], detect=[finish]}"])]
    nodes: list[WorkflowNode]
    runningRequests: Annotated[int, Field(description="requests that are on their way")]
    warnings: Annotated[list[str] | None, Field(description="what was asked for and is not used, and why")] = None


class DownloadEntry(Shape):
    """A download: an archive that was asked for by its address."""

    id: int
    url: Annotated[str, Field(description="the address, without its query")]
    name: Annotated[str, Field(description="the archive's name", examples=["digits.mar"])]
    state: Literal["waiting", "downloading", "done", "failed", "cancelled"]
    bytes: Annotated[int, Field(description="how many are there")]
    size: Annotated[int | None, Field(description="how many there will be, where that is known")] = None
    seconds: Annotated[float, Field(description="how long it has taken")]
    fromCache: Annotated[bool, Field(description="whether it was kept from before, and nothing was fetched")]
    reason: Annotated[str | None, Field(description="why it failed")] = None


class DownloadsList(Shape):
    """Downloads under way, and the last that ended, the oldest first."""

    downloads: list[DownloadEntry]


class EventVerdict(Shape):
    """What becomes of one event."""

    object: Annotated[str, Field(description="the object that it is about", examples=["s3://bucket/models/m.mar"])]
    event: Literal["there", "gone"]
    action: Literal["look", "ignore"]
    watch: Annotated[str | None, Field(description="the watch that looks")] = None
    reason: Annotated[str | None, Field(description="why it is ignored")] = None


class EventsTaken(Shape):
    """What becomes of the events of a request: the first hundred, and the kinds that mean nothing here."""

    status: str
    events: list[EventVerdict]
    ignoredKinds: list[str]


class WatchError(Shape):
    """The last failure of a watch."""

    at: str
    reason: str


class UnfinishedArchive(Shape):
    """A file that is not taken yet."""

    key: str
    size: int | None
    reason: str


class ListedWatch(Shape):
    """A place that is watched. Times are UTC."""

    name: str
    place: str
    reachable: Annotated[bool, Field(description="whether its last look was answered")]
    mode: Annotated[Literal["notices", "polling"], Field(description="whether the system tells of changes")]
    noNotices: Annotated[str | None, Field(description="why the system tells of none")] = None
    pollIntervalSeconds: float
    archives: Annotated[int, Field(description="archives that the last look saw")]
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
    modelName: Annotated[str | None, Field(description="the model whose versions all of them are")] = None
    outcomes: dict[str, int]
    states: Annotated[dict[str, int], Field(description="archives by what became of them")]


class WatchList(Shape):
    """The places that are watched."""

    watches: list[ListedWatch]


class WatchedArchive(Shape):
    """What became of one archive."""

    key: str
    state: str
    at: str
    modelName: str | None = None
    modelVersion: str | None = None
    reason: str | None = None
    etag: str | None = None
    size: int | None


class WatchDescription(ListedWatch):
    """A watch, with its archives: the thousand that changed last."""

    archivesShown: int
    archiveList: list[WatchedArchive]


class KServeReady(Shape):
    """Whether a model can answer, as KServe asks."""

    name: str
    ready: bool


class Health(Shape):
    """What `/ping` says."""

    status: Literal["Healthy", "Unhealthy"]


class Probe(Shape):
    """What a probe says. `reasons` is empty when all is well."""

    status: str
    reasons: list[str]


class StickyKey(BaseModel):
    """Where requests have the key by which a client stays with a version: a header or a cookie, one of them."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    header: Annotated[str, Field(examples=["X-User"])] | None = None
    cookie: str | None = None
    salt: Annotated[str, Field(max_length=128, description="makes another draw of the same keys")] | None = None


class TrafficBody(BaseModel):
    """How requests that name no version are shared out."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    weights: Annotated[
        dict[str, Annotated[float, Field(ge=0, le=1_000_000)]],
        Field(description="by version; shares of their sum", examples=[{"1.0": 80, "2.0": 20}]),
    ]
    sticky: StickyKey | None = None


class TrafficStatus(TrafficBody):
    """What is in force."""

    pending: Annotated[
        list[str] | None, Field(description="versions with a weight that cannot answer now: the others get their share")
    ] = None
    isDefault: Annotated[bool | None, Field(description="no weights are set: the default version answers")] = None


class CompareTolerance(BaseModel):
    """How far numbers of two answers may be apart; paths in `ignore` are not looked at."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    relative: Annotated[float, Field(ge=0)] = 1e-3
    absolute: Annotated[float, Field(ge=0)] = 1e-5
    ignore: list[str] = []


class ShadowBody(BaseModel):
    """What is to be mirrored, and how answers are compared."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    version: str
    share: Annotated[float, Field(gt=0, le=1, description="of the requests that other versions answer")] = 0.1
    compare: Literal["exact", "handler"] | CompareTolerance = "exact"
    in_flight: Annotated[int, Field(ge=1, le=256, description="copies at a time")] = 8


class ShadowStatus(ShadowBody):
    """What a shadow is and has done since it began."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    ready: bool
    yields: Annotated[bool, Field(description="its workers leave the processors to others")]
    mirrored: int
    compared: int
    differing: int
    dropped: dict[str, int]
    skipped: dict[str, int]
    errors: dict[str, int]
    differences: list[dict[str, Any]]


class RolloutBody(BaseModel):
    """How a version is to take over. Times in seconds, shares from 0 to 1, steps in percent."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    version: str
    url: Annotated[str | None, Field(description="an archive to register first")] = None
    workers: int | None = None
    steps: list[float] = [5, 25, 50, 100]
    hold: float = 60
    max_hold: Annotated[float | None, Field(description="longest hold for want of requests; 10 times hold")] = None
    max_error_increase: float = 0.01
    max_p99_increase: Annotated[float | None, Field(description="relative; null: latency is not judged")] = 0.25
    max_difference: float = 0.001
    min_requests: int = 200
    significance: float = 0.01
    compare: Literal["exact", "handler"] | CompareTolerance | None = None
    share: Annotated[float, Field(description="of the requests that are mirrored, with compare")] = 0.1


class RolloutStatus(BaseModel):
    """Where a roll-out is, what was found, and what happened."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    id: str
    modelName: str
    modelVersion: str
    baseline: str
    state: Literal["preparing", "running", "paused", "promoted", "rolled back", "aborted"]
    reason: str
    step: int
    share: float
    began: Annotated[float, Field(description="seconds since 1970")]
    ended: Annotated[float | None, Field(description="seconds since 1970")] = None
    events: list[dict[str, Any]]


class LabelBody(BaseModel):
    """What a label is to name."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    version: Annotated[str, Field(examples=["2.0"])]


class LabelStatus(LabelBody):
    """What a label names."""

    isPending: Annotated[bool | None, Field(description="the version cannot answer now")] = None
    answeredBy: Annotated[str | None, Field(description="what the label still names, until then")] = None


class SwapStatus(Shape):
    """What has taken whose place."""

    status: str
    modelName: str
    modelVersion: str
    replacedVersion: str
    order: Literal["load_first", "unload_first"]
    workers: int
    seconds: Annotated[float, Field(description="from the call to the end of the version before")]
    notes: Annotated[list[str] | None, Field(description="what could not be looked at")] = None
    isDryRun: bool | None = None
    before: Annotated[dict[str, Any] | None, Field(description="in a dry run: versions and workers now")] = None
    after: Annotated[dict[str, Any] | None, Field(description="the same, as they would be")] = None
    memory: Annotated[dict[str, Any] | None, Field(description="the host's, in bytes")] = None
    deviceMemory: Annotated[dict[str, Any] | None, Field(description="that of its devices, in bytes")] = None
