"""Requests and answers, and the messages between server and worker. No I/O, no clock.

The first half is the data plane: every surface (REST, gRPC, …) turns its encoding into a `Request` and gives the
`Answer`, or the pieces of a stream, back through a `Receiver`. The second half has the messages between the server
process and one worker; `wire.py` frames them, and both ends import this file.

All times are seconds. `deadline` and `started` are on the monotonic clock, which processes of one machine share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec

from marserve.errors import MarserveError, Thrown
from marserve.option_values import ParallelPlan, Sample, Tolerance

# ---------------------------------------------------------------------------------------------- msgpack

_encode = msgspec.msgpack.Encoder().encode


def pack(message: Any) -> bytes:
    """A message as msgpack.

    Text that UTF-8 cannot encode (lone surrogates, which JSON may contain) is escaped, as `\\ud800`. Raises TypeError
    for a value that no message holds, OverflowError for an integer of more than 64 bits.
    """
    try:
        return _encode(message)
    except (UnicodeEncodeError, TypeError):
        return _encode(_encodable(message))


def _encodable(value: Any) -> Any:
    """The same value with text that UTF-8 can encode, and with plain types for subclasses."""
    if isinstance(value, str):
        return str.encode(value, "utf-8", "backslashreplace").decode()
    if value is None or isinstance(value, bool | bytes | bytearray):
        return value
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list | tuple):
        return [_encodable(each) for each in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        fields = [_encodable(getattr(value, name)) for name in value.__struct_fields__]
        return fields if tag is None else [tag, *fields]
    return value


# ---------------------------------------------------------------------------------------------- the data plane


SHARED_TENSORS = "open_inference_shared_tensors"
"""The server's header that says where in shared memory a request's tensors lie; its worker looks for it."""


PACKED_BODY = "open_inference_packed_body"
"""The server's header that says how a request's body is compressed, and how long it may be; its worker looks for it."""


class Part(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One named input of a request: a raw body (named `body`), a form field, a file, a query parameter.

    `content_type` is the value's own content type, None without one (form fields without a file name, query
    parameters, a raw body without one); handlers then see a `bytearray`.
    """

    name: str
    body: bytes | bytearray
    content_type: str | None = None


class Request(msgspec.Struct, frozen=True):
    """One inference request, as every surface makes it and as a pool takes it.

    `headers` are the client's, names in the case they came in. `server_headers` are the server's additions
    (`url_path`, `explain`, `describe`), which win over client headers of that spelling. Of two parts with the same name
    the later one wins. `deadline` is None without one. `names_version`: the client named the version itself. `priority`
    is 0 (most urgent) to 9, None for the model's own. `is_inner`: it is a part of an accepted request (a node of a
    workflow), so it is accepted while the server drains, and not counted again. `asked_version` is the version, or a
    label, that the client asks for beside the path. `metadata` came with the request and is not shown to handlers; a
    sticky key is looked for there, too. `is_rescued`: another version takes the request if this one cannot, so it does
    not wait for a worker that may not come. `depth` counts the models whose handlers wait for it.

    `id` is what the client sees. Where `key` is 0 the server made it, and no other request has it. Otherwise the client
    chose it, or parts of one request share it; then `key` alone tells them apart. `client_id` is a client's id that
    stands beside the server's in the logs. `timeline` is a `telemetry.timeline.Timeline`, which is built upon these
    messages; None if none is kept, or not yet (`give_timeline`). `trace_ids` are those of its trace where it has no
    timeline yet, as bytes. A copy of a request that is answered by itself must not share either.
    """

    id: str
    parts: list[Part]
    headers: list[tuple[bytes, bytes]] = []
    server_headers: list[tuple[str, str]] = []
    deadline: float | None = None
    is_describe: bool = False
    is_explain: bool = False
    names_version: bool = False
    priority: int | None = None
    is_inner: bool = False
    asked_version: str | None = None
    metadata: Sequence[tuple[bytes, bytes]] = ()
    is_rescued: bool = False
    depth: int = 0
    key: int = 0
    client_id: str = ""
    timeline: Any = None
    trace_ids: bytes = b""

    def give_timeline(self, timeline: Any) -> None:
        """Have a timeline from now on: its stages are of interest after all."""
        msgspec.structs.force_setattr(self, "timeline", timeline)

    @property
    def kept_trace_id(self) -> str:
        """That of its trace, if its spans are kept however it ends; else empty."""
        trace = None if self.timeline is None else self.timeline.trace
        return trace.trace_id if trace is not None and trace.is_sampled else ""

    @property
    def shares_memory(self) -> bool:
        """Whether tensors of it lie in memory that its client changes: it is never run again to compare answers."""
        return any(name == SHARED_TENSORS for name, _ in self.server_headers)


# Stands between an id and what tells its requests apart within the server. No client's id has it.
PART_MARK = "~"
# Stands before the trace of a request and before the span in it, as the ids of a line have them. No id has it.
TRACE_MARK = "@"
# Lines of batches of more requests have no traces: they would be longer than the line.
MOST_TRACED = 16
# In characters: the ids before one line of a log. A batch of a hundred requests has fewer.
MAX_LINE_IDS = 4096


class Named(Protocol):
    """A `Request`, or an `Item` of one."""

    @property
    def id(self) -> str:
        """The request's id."""


def line_ids(requests: Iterable[Named]) -> str:
    """The ids of these requests as a log line has them: `a,b`; with the client's beside the server's `a/c,b`.

    Where traces are made each has its own and its span behind it, `a@TRACE@SPAN`; `without_traces` takes them away.
    Parts of one request have its id, once. More than `MAX_LINE_IDS` characters end with `+N` for the N left out.
    """
    found: dict[str, str] = {}
    for each in requests:
        client_id = getattr(each, "client_id", "")
        name = f"{shown_id(each.id)}/{client_id}" if client_id else shown_id(each.id)
        if name not in found:
            found[name] = _trace_of(each)
    if len(found) <= MOST_TRACED:
        return ",".join(map("".join, found.items()))
    text = ",".join(found)
    if len(text) <= MAX_LINE_IDS:
        return text
    kept = text[:MAX_LINE_IDS].rpartition(",")[0]
    return f"{kept},+{len(found) - kept.count(',') - 1}"


def _trace_of(request: Named) -> str:
    """The trace and the span of a request, with their marks; empty without traces."""
    timeline = getattr(request, "timeline", None)
    if timeline is not None and timeline.trace is not None:
        return f"{TRACE_MARK}{timeline.trace.trace_id}{TRACE_MARK}{timeline.trace.span_id}"
    traceparent: bytes = getattr(request, "traceparent", b"")
    if not traceparent:
        return ""
    _, trace_id, span_id, _ = traceparent.decode("ascii", "replace").split("-")
    return f"{TRACE_MARK}{trace_id}{TRACE_MARK}{span_id}"


def without_traces(ids: str) -> str:
    """The ids of a line as text logs have them."""
    return ids if TRACE_MARK not in ids else ",".join(each.partition(TRACE_MARK)[0] for each in ids.split(","))


def shown_id(request_id: str) -> str:
    """A request's id as its client knows it."""
    return request_id.partition(PART_MARK)[0]


class Answer(msgspec.Struct, frozen=True):
    """A handler's answer to one request, or one piece of it.

    `headers` are those that the handler set, content type included; the surface checks names and values. An empty
    `reason` is an empty reason phrase. `thrown` is the exception behind a piece that is the last event of a failed
    stream, a line of JSON after `data: `: the surface may add it to that.
    """

    body: bytes | bytearray
    status: int = 200
    reason: str = ""
    headers: list[tuple[str, str]] = []
    thrown: Thrown | None = None


class Receiver(Protocol):
    """Takes a request's answer. Exactly one of these calls ends it: `on_answer`, a last `on_piece`, `on_error`.

    All three are made on the event loop and must not block or raise. After a cancel no call is made.
    """

    def on_answer(self, answer: Answer) -> None:
        """The whole answer."""

    def on_piece(self, piece: Answer, last: bool) -> None:
        """One piece of a stream, in order; only the first one's status and headers count."""

    def on_error(self, error: MarserveError) -> None:
        """No answer, or (after a first piece) no rest of it."""


class Accepted(Protocol):
    """An accepted request, for the caller: a pool's job, a job that observers follow, a workflow's execution.

    All three calls may come at any time, any number of times.
    """

    def cancel(self) -> None:
        """The client has gone: the receiver is not called any more."""

    def hold(self) -> None:
        """The client does not keep up with its stream: have no further pieces made."""

    def resume(self) -> None:
        """The client has caught up."""

    @property
    def keeps_the_only_worker(self) -> bool:
        """Whether it was cancelled, and the version's only worker still runs it, so that later requests wait."""


# ------------------------------------------------------------------------------------------- what fields may be

# A message with other numbers or longer texts is refused when it is decoded: a worker may send anything.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Status = Annotated[int, msgspec.Meta(ge=100, le=999)]
Flops = Annotated[float, msgspec.Meta(ge=0, le=1e24)]
Count = Annotated[int, msgspec.Meta(ge=0)]
# The JSON of what a model declares (`MAR-INF/declaration.json`).
MAX_DECLARATION_BYTES = 64 << 10
DeclarationText = Annotated[bytes, msgspec.Meta(max_length=MAX_DECLARATION_BYTES)]
# How many warnings for describe a worker's handler may give.
MAX_WARNINGS = 20
Sentence = Annotated[str, msgspec.Meta(max_length=4096)]
# How a warning begins that says why FLOPs are not counted, and how many batches are watched before they are. Both are
# those of `marserve_handlers.flops`, which the server does not import.
FLOPS_NOT_COUNTED = "FLOPs are not counted"
FLOPS_WATCHED_BATCHES = 8
Message = Annotated[str, msgspec.Meta(max_length=1 << 21)]
Traceback = Annotated[str, msgspec.Meta(max_length=1 << 17)]
# A worker adds up the measurements of one batch, and sends at most so many values at a time.
MAX_METRIC_VALUES = 10_000

# Modules that are slow to import. For a model that cannot be forked after loading a template imports those that the
# model uses. onnxruntime is left out: it starts a thread at its import (1.31), after which no fork would be safe.
HEAVY_MODULES = ("torch", "transformers", "numpy", "PIL.Image")

# ------------------------------------------------------------------------------------------- server to worker


class Rank(msgspec.Struct, frozen=True, array_like=True):
    """This process's place in a worker that is a group of processes (`parallelType`).

    `is_mirrored`: every rank makes every call of the handler (`tp`, `pptp`), not rank 0 alone (`pp`). The ranks find
    each other at `store_port` on loopback; rank 0 has its listening socket.
    """

    rank: int
    size: int
    is_mirrored: bool
    store_port: int


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """The weights of a model apart from it: a `folder`, below the model's if it is no absolute path, and their bytes.

    `may_map`: nothing overwrites its files, so that they may be mapped instead of read. `layout` is JSON: where the
    pieces of its tensors lie in the files of a checkpoint of `torch.distributed.checkpoint`; empty for other files.
    """

    folder: str
    may_map: bool
    size: int
    layout: bytes = b""


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Load this model. It has everything that the worker needs, which reads no settings and no archive itself.

    `manifest` and `model_config` are the archive's documents as `documents.pack` writes them, None if it has none.
    `handler` is the manifest's or the registration's word (`image_classifier`, `h.py`, `h:entry`). `threads` is how
    many intra-op threads the worker may use, 0 for all cores; `inter_threads` run operators side by side, 0 for the
    runtime's own choice. `environment` is added to the worker's.
    `memory_limit_bytes` is how much the worker may allocate beyond what it holds at its start, 0 for no limit.
    `warm_up` are the inputs that each worker runs once before it is ready. `rank` is None except in a group.
    `import_paths` come first on the import path; `packages` is the folder of the model's own requirements, after the
    archive and before installed packages, empty without any. `metrics_file` lists the metrics that a handler may
    use by name; None: the two ready-made ones. `is_continuous`: the handler says for each answer whether more follows.
    `is_concurrent`: it is called again while it still runs. `cpus` are the processors that the worker keeps to, empty
    for no restriction. `must_use_device`: a model that cannot compute on its device is not loaded.
    `declaration` is the archive's own, which the handler's must equal, empty if it has none. `max_rows` is how many
    rows one request to a declared model may have. With `refuses_bad_json` a value of type application/json that
    does not parse is not passed to the handler; its request fails.
    `is_trusted`: the operator allows any pickles in the archive. With `checks_health` the handler's `health` is called
    when the server asks for it. With `overlaps` batches are preprocessed beside the one that computes, where the
    handler allows that (`worker/overlap/`). `allowed_batch_sizes`, in order, are the only numbers of rows the model is
    called with, empty for any. With `peak_flops` the model's FLOPs are counted: FLOPs a second by dtype, under the
    empty name those of every other; measured where none is given. With `parallel` each rank loads its part of the
    model, and `parallel_samples` must be answered as by the whole model, whose weights are `parallel_bytes`. `build` is
    the folder of a faster build of the model that this server made, empty for none: the build serves if it does what is
    recorded there.
    `checkpoint` are the weights of an eager model that the archive names apart from it, None without any.
    """

    model: str
    version: str
    model_dir: str
    handler: str
    manifest: Any
    model_config: Any
    batch_size: int
    gpu_id: int | None = None
    device_type: str = "cpu"
    envelope: str | None = None
    decode_input: bool = True
    limit_max_image_pixels: bool = True
    max_answer_bytes: int = 6_553_500
    threads: int = 0
    import_paths: list[str] = []
    environment: dict[str, str] = {}
    memory_limit_bytes: int = 0
    warm_up: list[Sample] = []
    rank: Rank | None = None
    metrics_file: str | None = None
    packages: str = ""
    is_continuous: bool = False
    is_concurrent: bool = False
    cpus: list[int] = []
    must_use_device: bool = False
    declaration: bytes = b""
    max_rows: int = 1024
    refuses_bad_json: bool = False
    is_trusted: bool = False
    checks_health: bool = False
    overlaps: bool = False
    inter_threads: int = 0
    allowed_batch_sizes: list[int] = []
    peak_flops: dict[str, float] | None = None
    parallel: ParallelPlan | None = None
    parallel_samples: list[Sample] = []
    parallel_bytes: int = 0
    build: str = ""
    checkpoint: Checkpoint | None = None

    @property
    def loading_limit_bytes(self) -> int:
        """`memory_limit_bytes` while the model is loaded: mapped weights count there, and are none that it holds."""
        mapped = 0
        if self.checkpoint is not None and self.checkpoint.may_map and not self.checkpoint.layout:
            mapped = self.checkpoint.size
        mapped += 2 * self.parallel_bytes  # for the rank's part, and for the whole model that it is compared with
        return self.memory_limit_bytes + mapped if self.memory_limit_bytes else 0


class Item(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One request of a batch; the bodies of its parts follow the metadata, in order.

    `parts` are (name, content type) pairs; empty if the worker has the request already and is called with it again.
    `head` holds the headers packed by `pack_head`: few handlers read them, and they mostly equal the last request's.
    `key` and `client_id` are those of the `Request`. `traceparent` is what a handler sees in place of the client's; it
    differs for each request, so that it is not among the packed headers. Empty where no traces are kept, or where the
    worker is to make it of `trace_ids`, the request's.
    """

    id: str
    parts: list[tuple[str, str | None]]
    head: bytes
    deadline: float | None
    key: int = 0
    client_id: str = ""
    traceparent: bytes = b""
    trace_ids: bytes = b""

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """The client's headers, but for the `traceparent`."""
        headers = _read_head(self.head)[0]
        traceparent = self.traceparent
        if self.trace_ids:
            ids = self.trace_ids.hex()
            traceparent = f"00-{ids[:32]}-{ids[48:]}-02".encode()  # random, and not known to be kept
        return _within(headers, traceparent) if traceparent else headers

    @property
    def server_headers(self) -> Sequence[tuple[str, str]]:
        """The server's additions."""
        return _read_head(self.head)[1]


def _within(headers: Sequence[tuple[bytes, bytes]], traceparent: bytes) -> list[tuple[bytes, bytes]]:
    """The headers with this `traceparent`; a `tracestate` that came with one of another trace is left out."""
    theirs = [value.strip() for name, value in headers if name.lower() == b"traceparent"]
    is_same = len(theirs) == 1 and theirs[0][3:35] == traceparent[3:35]
    drops = (b"traceparent",) if is_same else (b"traceparent", b"tracestate")
    return [*(line for line in headers if line[0].lower() not in drops), (b"traceparent", traceparent)]


_Head = tuple[tuple[tuple[bytes, bytes], ...], tuple[tuple[str, str], ...]]
_head_decoder = msgspec.msgpack.Decoder(_Head)


def pack_head(headers: Sequence[tuple[bytes, bytes]], server_headers: Sequence[tuple[str, str]]) -> bytes:
    """Headers as an `Item` carries them."""
    return pack((headers, server_headers))


@lru_cache(maxsize=64)
def _read_head(head: bytes) -> _Head:
    read: _Head = _head_decoder.decode(head)
    return read


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="batch"):
    """Requests to be handled together. `number` counts from 1 for each worker."""

    number: int
    items: list[Item]


class Batches(msgspec.Struct, frozen=True, array_like=True, tag="batches"):
    """Small batches that share a frame, to be handled one after the other and each answered by itself.

    Their bodies follow each other as the batches do.
    """

    batches: list[Batch]


class Check(msgspec.Struct, frozen=True, array_like=True, tag="check"):
    """Run these items alone and in batches, and report whether the answers are alike. `number` as for a batch.

    Bodies as in `Batch`. With `wanted` they are items of a batch that got these answers (`Result`s, their bodies after
    those of the items): each item is then run alone and compared with its answer, and `batch_size` is not used. After
    `limit_s` seconds no further call of the handler is begun.

    With `answers` there are no items, and `wanted` are pairs of answers to one request each, the primary's and the
    shadow's: nothing is run, and each pair is compared, within the tolerance, by the handler's own `compare`, or by the
    best class of the scores in both. At most ten pairs: one difference is reported for each, with the `run` `answers`,
    or `failed` if the comparison failed.
    """

    number: int
    items: list[Item]
    batch_size: int
    tolerance: Tolerance
    limit_s: float
    wanted: list[Result] | None = None
    answers: Literal["tolerance", "handler", "scores"] | None = None


class AskLengths(msgspec.Struct, frozen=True, array_like=True, tag="ask_lengths"):
    """Say how long these items are, by the handler's own `length_of`. Bodies as in `Batch`.

    It is sent before batch `number`, never alone. After `limit_s` seconds no further length is computed.
    """

    number: int
    items: list[Item]
    limit_s: float


class AskHealth(msgspec.Struct, frozen=True, array_like=True, tag="ask_health"):
    """Call the handler's `health`, after what was sent before.

    `number` as for a batch, if the worker has no other work and gets none until it has answered; 0 if batches may
    follow at once.
    """

    number: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """To a worker that runs many batches at once: item `index` of batch `number` is no longer wanted."""

    number: int
    index: int


class SetLevel(msgspec.Struct, frozen=True, array_like=True, tag="set_level"):
    """Log from this level on from now on. `level` is a name of Python's logging. Rank 0 passes it on to the others."""

    level: str


class Profile(msgspec.Struct, frozen=True, array_like=True, tag="profile"):
    """Measure how the time of the next batches is spent, and say so with `Profiled`, which has the same `number`.

    The worker ends by itself after `requests` requests (0: only `EndProfile` ends it). Operators of torch are recorded
    until about `max_bytes` of the worker's memory hold them; 0: none are. `shapes`, `memory` and `stacks` have more
    recorded of each operator. With a process group the other ranks record theirs, too.
    """

    number: int
    requests: int
    max_bytes: int
    shapes: bool = True
    memory: bool = False
    stacks: bool = False


class EndProfile(msgspec.Struct, frozen=True, array_like=True, tag="end_profile"):
    """End the profile of that number and send what was measured; with `drop` it is dropped, and nothing is sent."""

    number: int
    drop: bool = False


class Returned(msgspec.Struct, frozen=True, array_like=True, tag="returned"):
    """The answer to `Called` with the same `call`; its body follows. With a `failure`, words for the client, none."""

    call: int
    status: Status
    headers: list[tuple[str, str]]
    failure: str = ""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Finish what was sent and end."""


class Preload(msgspec.Struct, frozen=True, array_like=True, tag="preload"):
    """To a template that loads no model: import these modules; workers that are forked load for themselves."""

    modules: list[str]


class Fork(msgspec.Struct, frozen=True, array_like=True, tag="fork"):
    """To a template: fork a worker; its descriptors come along as ancillary data (wire, stdout, stderr, page).

    `more` further ones follow for a rank of a group. `lineage` marks the worker's own processes (`lineage.py`).
    """

    worker_id: str
    seed: int
    threads: int
    more: int = 0
    lineage: str = ""


# ------------------------------------------------------------------------------------------- worker to server


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The worker is up and waits for its order to load."""

    pid: int
    python: str


class CheckpointRead(msgspec.Struct, frozen=True, array_like=True):
    """How long the weights of a checkpoint took; `mapped` of their bytes are mapped files, and no memory of its own."""

    size: Count
    mapped: Count
    seconds: Seconds


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The model is loaded and the worker waits for batches. `warnings` are sentences for describe.

    `warm_up_s` is how long the warm-up inputs took, 0 without any. `has_length_of`: the handler can be asked how long
    an item is (`AskLengths`). `device_bytes` is the most that the runtime has taken of a device so far, 0 if it used
    none or cannot say. `computes_on` is what the model runs on, empty if its handler does not say. `warm_up_failure` is
    the one of `warnings` about the first warm-up inputs that were not answered, else empty. `declaration` is the JSON
    of what the model declares, empty if its handler declares nothing. `has_health`: the handler can be asked whether
    the worker is well (`AskHealth`). With `overlaps` the worker preprocesses the next batch beside the one that
    computes, so that it should be sent one ahead. `engine` is the runtime with its version, empty where the handler
    loads by itself; `cpu_flags` are then the instructions by which runtimes choose kernels. `refused_build` is the
    build of `marserve optimise` that was to serve and does not, empty for none; `warnings` say why. `build_ratios` is
    how many times as fast as its parent the build was that serves, by rows of a batch; empty without one.
    `checkpoint` is how the weights of a checkpoint came, None without one.
    """

    seconds: Seconds
    warnings: list[str] = []
    warm_up_s: Seconds = 0.0
    has_length_of: bool = False
    device_bytes: Count = 0
    computes_on: Sentence = ""
    warm_up_failure: Sentence = ""
    declaration: DeclarationText = b""
    has_health: bool = False
    overlaps: bool = False
    engine: Sentence = ""
    cpu_flags: list[Sentence] = []
    refused_build: Sentence = ""
    build_ratios: dict[Sentence, Seconds] = {}
    checkpoint: CheckpointRead | None = None


class NotLoaded(msgspec.Struct, frozen=True, array_like=True, tag="not_loaded"):
    """Loading failed; the worker ends. `kind` is a name of `pool.worker_end.cause_of_death.Cause`."""

    kind: str
    message: Sentence
    traceback: Traceback


# A reason against forking that lies in what the model is, and that no author can mend.
OPEN_SESSION: Final = "an ONNX Runtime session is open"


class Templated(msgspec.Struct, frozen=True, array_like=True, tag="templated"):
    """From a template: the model is loaded. `refusals` are the reasons against forking it (empty: it is safe).

    `preload` names the heavy modules that the model's code imported, for a template that only imports.
    """

    seconds: Seconds
    refusals: list[str] = []
    preload: list[str] = []


class Forked(msgspec.Struct, frozen=True, array_like=True, tag="forked"):
    """From a template: the process id of the worker that was ordered under this id; 0 if the system would not fork."""

    worker_id: str
    pid: int


class Exited(msgspec.Struct, frozen=True, array_like=True, tag="exited"):
    """From a template: a worker it forked has ended. `status` as from `os.waitpid`."""

    pid: int
    status: int


class Result(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How one item of a batch ended; its body follows the metadata.

    `error` is None for an answer. Otherwise it is a kind of `marserve_handlers.errors`: `handler`, `prediction`,
    `bad_input`, `memory`, `expired`, `cancelled`, `too_large`, `bad_header`; `reason` is then the message for the
    client and `status` its code, and `thrown` is the exception behind a fault of the author's code. An answer has
    `thrown` if it is the last event of a stream that failed.
    """

    status: Status
    reason: Message
    headers: list[tuple[str, str]]
    error: str | None = None
    thrown: Thrown | None = None


# How many spans of an author's a batch may have, and the characters of a span's name.
MAX_SPANS = 32
MAX_SPAN_NAME = 64


class Span(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A part of a handler's work that its author named: how long after the batch's begin it began, and its length."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_SPAN_NAME)]
    after_s: Seconds
    seconds: Seconds


class Work(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How a worker spent its time on a batch, beside the time inside the author's code.

    `began` is on the monotonic clock, 0 from a worker on another machine. `decode_s` was before the author's code,
    `encode_s` after it. Of the whole it was held up for `collected_s` by garbage collections, for `waited_s` by other
    processes that had the processor, and for `printed_s` by what it printed.
    """

    began: Seconds
    decode_s: Seconds
    encode_s: Seconds
    collected_s: Seconds = 0.0
    waited_s: Seconds = 0.0
    printed_s: Seconds = 0.0
    spans: Annotated[list[Span], msgspec.Meta(max_length=MAX_SPANS)] = []


class Results(msgspec.Struct, frozen=True, array_like=True, tag="results"):
    """The end of a batch: one result an item, in order. `handler_s` is the time inside the author's code.

    `work` is None if nothing was run.
    """

    number: int
    handler_s: Seconds
    results: list[Result]
    work: Work | None = None


class Raised(msgspec.Struct, frozen=True, array_like=True, tag="raised"):
    """The end of a batch whose handler raised for all its items, or did not return one answer for each.

    `kind` as in `Result.error`; `message` and `code` are for the client, `traceback` for the log. `error_type` and
    `error_text` are the class and the message of what was raised. `work` as in `Results`.
    """

    number: int
    handler_s: Seconds
    kind: str
    message: Message
    code: Status
    traceback: Traceback
    error_type: str = ""
    error_text: Message = ""
    work: Work | None = None


class Piece(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """One piece of a stream for each item of a running batch; the bodies follow the metadata."""

    number: int
    results: list[Result]


class Called(msgspec.Struct, frozen=True, array_like=True, tag="called"):
    """While it answers item `index` of running batch `number`, the handler calls another model; the body follows.

    `call` counts from 1 for each worker. Without a `version` the model's default one answers.
    """

    number: int
    index: Count
    call: int
    model: Sentence
    version: Sentence | None
    content_type: Sentence | None
    headers: Annotated[list[tuple[str, str]], msgspec.Meta(max_length=100)] = []


class Checked(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """The end of a `Check`: as `marserve_handlers.batch_check.Verdict`, bounded in size.

    `differences` are (run, item, path, seen, wanted) for the first of `found`; `compared` counts compared answers.
    `relative` and `absolute` are the bound that was used, `basis` says what it was derived from; empty if nothing was
    run. Of scores `error` and `magnitude` are the sums of all differences and of what was wanted.
    """

    number: int
    seconds: Seconds
    samples: int
    sizes: list[int]
    calls: int
    compared: int
    found: int
    differences: list[tuple[str, int, str, str, str]]
    notes: list[str]
    relative: float = 0.0
    absolute: float = 0.0
    basis: Sentence = ""
    error: float = 0.0
    magnitude: float = 0.0


class Lengths(msgspec.Struct, frozen=True, array_like=True, tag="lengths"):
    """The answer to `AskLengths`, before the answer to its batch; `seconds` is the time inside the author's code.

    One length an item, in order; fewer if the time was up. -1: the handler raised, or did not return a whole number
    from 0 on.
    """

    number: int
    seconds: Seconds
    lengths: list[int]


class Health(msgspec.Struct, frozen=True, array_like=True, tag="health"):
    """The answer to `AskHealth` with the same `number`. `failure` says why the worker is not well, empty if it is.

    `seconds` is the time inside the author's code.
    """

    number: int
    seconds: Seconds
    failure: Sentence


# How many batches a profile tells of; it ends when there are as many.
MAX_PROFILED = 20_000


class ProfiledBatch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How a worker spent its time on one batch of a profile.

    `began` is on the worker's monotonic clock. `decode_s` was before the author's code, `encode_s` after it. Of the
    `handler_s` in between its thread ran for `cpu_s`, waited for a processor for `waited_s`, and collected garbage for
    `collected_s` (which is in `cpu_s`, too).
    """

    number: int
    requests: Count
    began: Seconds
    decode_s: Seconds
    handler_s: Seconds
    encode_s: Seconds
    cpu_s: Seconds
    waited_s: Seconds
    collected_s: Seconds


class Profiled(msgspec.Struct, frozen=True, array_like=True, tag="profiled"):
    """The end of a profile. The bodies are traces in Chrome's format, packed by gzip, one for each of `traces`.

    `traces` has the rank of each; a rank may have two. `began` and `ended` are on the worker's monotonic clock.
    `own_s` is what recording took between batches. `recorded` counts the batches whose operators are in the traces.
    `no_operators` says why there are none, `remarks` what else a reader should know. `knows_waiting`: the kernel says
    how long threads wait for a processor.
    """

    number: int
    began: Seconds
    ended: Seconds
    batches: Annotated[list[ProfiledBatch], msgspec.Meta(max_length=MAX_PROFILED)]
    traces: Annotated[list[Count], msgspec.Meta(max_length=4096)]
    recorded: Count
    thread: int
    threads: Count
    knows_waiting: bool
    own_s: Seconds
    no_operators: Sentence = ""
    remarks: Annotated[list[Sentence], msgspec.Meta(max_length=MAX_WARNINGS)] = []


class OutOfStep(msgspec.Struct, frozen=True, array_like=True, tag="out_of_step"):
    """From a rank of a group: the ranks did not end a call of the handler alike, so the group must be ended.

    `traceback` is that of the rank that raised.
    """

    detail: Sentence
    traceback: Traceback


class DeviceLost(msgspec.Struct, frozen=True, array_like=True, tag="device_lost"):
    """The device is lost to the worker, which ends without answers to the batches that it had begun.

    `number` is the batch whose failure showed it, 0 if none ran. `traceback` is that of the failure, empty without one.
    """

    number: int
    detail: Sentence
    traceback: Traceback


class Warned(msgspec.Struct, frozen=True, array_like=True, tag="warned"):
    """Warnings for describe that a handler gave after its load, as when the first batch could not be compiled."""

    warnings: Annotated[list[Sentence], msgspec.Meta(max_length=MAX_WARNINGS)]


class Counted(msgspec.Struct, frozen=True, array_like=True, tag="counted"):
    """What the model's batches take, told once: FLOPs for each batch, and for each request of it.

    `peak` is what the worker's device could do a second for `dtype`; `inputs` says of what inputs that is true.
    """

    per_batch: Flops
    per_request: Flops
    peak: Annotated[float, msgspec.Meta(gt=0, le=1e24)]
    dtype: Sentence
    inputs: Sentence


class DevicePeak(msgspec.Struct, frozen=True, array_like=True, tag="device_peak"):
    """After a batch that was larger than any before: the most that the runtime has taken of a device, in bytes."""

    device_bytes: Count


class Metric(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One custom metric's value. `kind` is `counter`, `gauge` or `histogram`."""

    name: str
    value: float
    unit: str
    kind: str
    dimensions: list[tuple[str, str]]
    request_ids: str


class Metrics(msgspec.Struct, frozen=True, array_like=True, tag="metrics"):
    """Custom metrics of a batch, or of the load; sent before the message that ends it, and at most once.

    `dropped` counts values that the worker could not send.
    """

    values: Annotated[list[Metric], msgspec.Meta(max_length=MAX_METRIC_VALUES)]
    dropped: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0


ToWorker = (
    Load
    | Batch
    | Batches
    | AskLengths
    | AskHealth
    | Check
    | Cancel
    | SetLevel
    | Profile
    | EndProfile
    | Returned
    | Stop
    | Preload
    | Fork
)
ToServer = (
    Hello
    | Loaded
    | NotLoaded
    | Templated
    | Forked
    | Exited
    | Results
    | Raised
    | Piece
    | Called
    | Lengths
    | Checked
    | Health
    | Profiled
    | OutOfStep
    | DeviceLost
    | Counted
    | DevicePeak
    | Warned
    | Metrics
)

# ------------------------------------------------------------------------------------------- rank to rank


class Share(msgspec.Struct, frozen=True, array_like=True, tag="share"):
    """From rank 0 to the others: the items of the next calls; bodies as in `Batch`.

    `is_once`: only one call is made, so that it may use the bodies without a copy.
    """

    items: list[Item]
    is_once: bool


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """From rank 0 to the others: call the handler with these of the shared items. `number` counts from 1."""

    number: int
    chosen: list[int]


class CallEnded(msgspec.Struct, frozen=True, array_like=True, tag="call_ended"):
    """From a rank to rank 0, and from rank 0 to the others: this call of the handler has ended."""

    number: int
    has_raised: bool


class AskDevice(msgspec.Struct, frozen=True, array_like=True, tag="ask_device"):
    """From rank 0 to a rank that makes no calls of its own (`pp`): is your device lost? A batch has failed.

    `wait`: wait for the device's work, so that an error of a running kernel is seen. `number` counts from 1.
    """

    number: int
    wait: bool


class DeviceTold(msgspec.Struct, frozen=True, array_like=True, tag="device_told"):
    """The answer to `AskDevice`. A rank whose device is lost has reported that to the server before."""

    number: int
    is_lost: bool


class RankProfiled(msgspec.Struct, frozen=True, array_like=True, tag="rank_profiled"):
    """From a rank to rank 0: the end of profile `number`, with its traces as bodies, and why there are none."""

    number: int
    no_operators: Sentence = ""


ToRank = Share | Call | CallEnded | AskDevice | DeviceTold | SetLevel | Profile | EndProfile | RankProfiled
