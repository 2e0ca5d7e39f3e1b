"""What a handler knows of its model and of the requests it is given, and how it shapes their responses.

One `Context` lives as long as its worker; `begin_batch` points it at the next batch. It is on the hot path, so nothing
is built before a handler asks: request headers become dicts, and a request gets its `RequestProcessor`, at the first
look. Knows nothing of sockets: what must reach the server goes through callables that the worker's loop puts in place.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from marserve_handlers.errors import BadResponse, PredictionException

if TYPE_CHECKING:
    from marserve_handlers.calling import ModelAnswer

logger = logging.getLogger(__name__)

# The server says these to the handler; a client that sends them itself, in any case, must not be believed.
_SERVER_ONLY = frozenset((b"explain", b"describe", b"url_path", b"open_inference"))

STREAM_HEADER = "ts_stream_next"
# All headers of one response, with the four bytes between and behind name and value, and its reason phrase.
MAX_RESPONSE_HEADER_BYTES, HEADER_FRAME_BYTES = 64 * 1024, 4
# The headers of W3C's Trace Context and Baggage.
TRACE_HEADERS = frozenset(("traceparent", "tracestate", "baggage"))
# How many spans one batch may have, and the characters that are kept of a span's name.
MAX_SPANS, MAX_SPAN_NAME = 32, 64


class RequestView(Protocol):
    """What a context reads of one request of a batch; the items of the wire's batches look like this."""

    @property
    def id(self) -> str:
        """The server's id of the request."""

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """The client's headers in the order and case they came."""

    @property
    def server_headers(self) -> Sequence[tuple[str, str]]:
        """The server's additions, which win over the client's."""

    @property
    def parts(self) -> Sequence[tuple[str, str | None]]:
        """Name and content type of each input."""

    @property
    def deadline(self) -> float | None:
        """When the client stops waiting, in seconds on the monotonic clock; None for never."""


def note_warning(context: Any, sentence: str) -> None:
    """Have describe's `warnings` say this of the load; in the log if the context does not belong to a worker."""
    warnings = getattr(context, "load_warnings", None)
    if isinstance(warnings, list):
        warnings.append(sentence)
    else:
        logger.warning("%s", sentence)


class RequestProcessor:
    """One request's headers, and the status and headers of its response."""

    __slots__ = ("_reason", "_request_header", "_response_header", "_status", "_view")

    def __init__(self, request_header: dict[str, Any] | None) -> None:
        self._request_header = request_header
        self._view: RequestView | None = None
        self._status: Any = 200
        self._reason: str | None = None
        self._response_header: dict[str, str] = {}

    @classmethod
    def of(cls, view: RequestView) -> RequestProcessor:
        """The processor of a request whose header dict is built when it is first asked for."""
        processor = cls(None)
        processor._view = view
        return processor

    def get_request_property(self, key: str) -> Any:
        """The request header of exactly this spelling, a dict for a parameter's name, or None."""
        return self.get_request_properties().get(key)

    def get_request_properties(self) -> dict[str, Any]:
        """All request headers, names in the case they were sent."""
        headers = self._request_header
        if headers is None:
            headers = self._request_header = {} if self._view is None else _merge_headers(self._view)
        return headers

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        """Set the response's status, any code, and the phrase of its status line."""
        self._status = code
        self._reason = reason_phrase

    def get_response_status_code(self) -> int:
        """The response's status, 200 unless the handler set one."""
        return self._status  # type: ignore[no-any-return]

    def get_response_status_phrase(self) -> str | None:
        """The phrase of the status line, None unless the handler set one."""
        return self._reason

    def add_response_property(self, key: str, value: str) -> None:
        """Set a response header."""
        self._response_header[key] = value

    def get_response_headers(self) -> dict[str, str]:
        """The response headers set so far; the dict itself, so that changes to it count."""
        return self._response_header

    def get_response_header(self, key: str) -> str | None:
        """The response header of exactly this spelling, or None."""
        return self._response_header.get(key)

    def response(self) -> tuple[int, str, list[tuple[str, str]]] | None:
        """Status, reason and headers as the wire wants them, or None when the handler touched nothing.

        Raises BadResponse for a status that is no number of three digits, for a header that is not of text, and for
        more than `MAX_RESPONSE_HEADER_BYTES` of headers.
        """
        status, headers = self._status, self._response_header
        if status == 200 and not headers and not self._reason:
            return None
        if not isinstance(status, int) or not 100 <= status <= 999:
            raise BadResponse(f"The handler set the response status {status!r}; it must be a number from 100 to 999.")
        reason = self._reason
        if reason is None:
            reason = ""
        elif not isinstance(reason, str):
            raise BadResponse("The handler set a reason phrase that is no text.")
        size = len(reason)
        for name, value in headers.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise BadResponse(
                    f"The handler set the response header {repr(name)[:80]}; its name and value must be text."
                )
            size += len(name) + len(value) + HEADER_FRAME_BYTES
        if size > MAX_RESPONSE_HEADER_BYTES:
            raise BadResponse(
                f"The handler set response headers of {size} bytes; they may have {MAX_RESPONSE_HEADER_BYTES} in all."
            )
        return int(status), reason, list(headers.items())


@dataclass
class Checkpoint:
    """The weights that the model's configuration names by `checkpoint`: a folder, as an absolute path.

    `may_map`: nothing overwrites its files, so that they may be mapped. `layout` is JSON: where the pieces of tensors
    lie in files of `torch.distributed.checkpoint`, as the server read it; empty for safetensors files. Once they are
    loaded, `size` are their bytes, `mapped` those that are mapped files, and `seconds` is how long it took.
    """

    folder: str
    may_map: bool = False
    layout: bytes = b""
    size: int = 0
    mapped: int = 0
    seconds: float | None = None


class Context:
    """The handler's view of its model and of the current batch. Handlers may set attributes of their own on it.

    Built by hand in unit tests of handlers: `Context(model_name, model_dir, manifest, batch_size, gpu, mms_version)`
    stands for one request without headers until `request_processor` is set.
    """

    # How the worker's loop is reached. Class attributes, so that two contexts made alike compare equal.
    send_pieces: Callable[[list[Any]], None] | None = None
    """Takes one list as long as the batch: the next piece of each response. Set by the loop; None outside a worker."""

    ask_cancelled: Callable[[int], bool] | None = None
    """Says whether the client of item i has gone. Set by the loop; None outside a worker."""

    send_call: Callable[..., Awaitable[ModelAnswer]] | None = None
    """Calls another model for the request at a place of the batch. Set by the loop; None outside a worker."""

    begin_call: Callable[[], None] | None = None
    """Says that a further call of a batch begins, which has the whole time limit again. None where none is kept."""

    open_model: Callable[[Any], Any] | None = None
    """Loads the archive's model for a context. Set where a handler is loaded; None outside a worker."""

    allowed_batch_sizes: tuple[int, ...] = ()
    """The only numbers of rows that the model is to be called with, in order; empty for any."""
    keeps_to_sizes: bool = False
    """Whether batches are filled up to `allowed_batch_sizes`; a handler that does it by itself sets it."""
    is_compiled: bool = False
    """Whether `pt2` compiles the model, anew for batches of other sizes; set by `BaseHandler.initialize`."""
    parallel: tuple[Mapping[str, int], Mapping[str, str]] | None = None
    """The mesh and the plan by which the model is divided over the ranks of the worker; None for a whole model."""
    one_rank: Any = None
    """Compares the ranks' answers with those of the whole model; set where a divided model was loaded."""
    share: Checkpoint | None = None
    """How this rank's part of a divided model came; None for a whole one, or where a checkpoint says it."""
    inter_threads: int = 0
    """How many threads the model's runtime may use for operators side by side, 0 for the runtime's own choice."""
    threads: int = 0
    """How many threads the model's runtime may use inside one operator, 0 for the runtime's own choice."""

    must_use_device: bool = False
    """Whether a model that cannot compute on the worker's device is not to be loaded; else that is a warning."""

    is_trusted: bool = False
    """Whether the operator trusts the archive (`trusted_models`), so that pickles of it may be opened."""

    checkpoint: Checkpoint | None = None
    """The weights of an eager model that lie apart from it; None where the archive names none."""
    has_taken_checkpoint: bool = False
    """Whether its weights were loaded; a handler that does it by itself sets it."""

    loaded_model: Any = None
    """The archive's model as `load_model`, or a base handler, last loaded it; None before."""

    build_folder: str = ""
    """The folder of a build that the server made of the archive, laid out as an optimised archive; empty for none."""

    build: str = ""
    """The name of the build of an optimised archive that serves in its own model's place, empty where none does."""

    refused_build: str = ""
    """The name of a build that was to serve and does not, so that the archive's own model does; empty for none."""

    build_ratios: Mapping[str, float] = {}
    """How many times as fast as its parent the build was that serves, by rows of a batch."""

    build_flops: Mapping[str, Any] | None = None
    """What the archive of such a build says that its own model takes, as it was counted; None where it does not say."""

    cl_socket: Any = None
    """TorchServe's raw socket to its server. Always None here; kept so that handlers may pass it on."""

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any] | None,
        batch_size: int,
        gpu: int | None,
        mms_version: str,
        limit_max_image_pixels: bool = True,
        metrics: Any = None,
        model_yaml_config: dict[str, Any] | None = None,
    ) -> None:
        self.model_name = model_name
        self.manifest = manifest
        self._system_properties: dict[str, Any] = {
            "model_dir": model_dir,
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": "MMS",
            "server_version": mms_version,
            "limit_max_image_pixels": limit_max_image_pixels,
        }
        self.model_yaml_config = model_yaml_config
        self.request_ids: dict[int, str] | None = None
        self.stopping_criteria: list[Callable[[Any], bool]] | None = None
        self.header_key_sequence_id = os.environ.get("TS_REQUEST_SEQUENCE_ID", "ts_request_sequence_id")
        self.header_key_sequence_start = os.environ.get("TS_REQUEST_SEQUENCE_START", "ts_request_sequence_start")
        self.header_key_sequence_end = os.environ.get("TS_REQUEST_SEQUENCE_END", "ts_request_sequence_end")
        self.load_warnings: list[str] = []
        """Sentences about the load for describe's `warnings`."""
        self.computes_on = ""
        """What the model runs on, as describe has it of the worker; empty where the handler does not say."""
        self.engine = ""
        """The runtime with its version, as describe has it of the worker; empty where the handler does not say."""
        self._metrics = metrics
        self._items: Sequence[RequestView] = ()
        # None: no handler has looked yet. A list has one place for each item, filled at the first look.
        self._processors: list[RequestProcessor | None] | None = [RequestProcessor({})]
        self._is_streaming = False
        self._spans: list[tuple[str, float, float]] | None = None

    # ------------------------------------------------------------------------------------- for the worker's loop

    def begin_batch(self, items: Sequence[RequestView]) -> None:
        """Point the context at the next batch; everything said of the last one is forgotten."""
        self._items = items
        self._processors = None
        self._is_streaming = False
        self._spans = None
        self.stopping_criteria = None
        self.request_ids = request_ids = {index: item.id for index, item in enumerate(items)}
        metrics = self._metrics
        if metrics is not None:
            try:
                metrics.request_ids = request_ids
            except Exception:  # an object of the author's own, which need not have them
                return

    def load_model(self) -> Any:
        """The model that the archive's manifest names, on the worker's device, ready to be called.

        For handlers that do not extend `BaseHandler`: a module of torch, or a session of ONNX Runtime. Of an archive
        that `marserve optimise` made it is the build that it holds, where that does what was promised. Raises
        ModelNotLoadable, and RuntimeError outside a worker.
        """
        if self.open_model is None:
            raise RuntimeError("There is no archive to load from: set context.open_model to a function in its place.")
        return self.open_model(self)

    @property
    def batch_items(self) -> Sequence[RequestView]:
        """What `begin_batch` was given last."""
        return self._items

    def response_of(self, idx: int) -> tuple[int, str, list[tuple[str, str]]] | None:
        """Status, reason and headers that the handler set for item `idx`, or None: 200, no phrase, no headers.

        Raises BadResponse when what it set is of the wrong type.
        """
        processors = self._processors
        if processors is None:
            return None
        processor = processors[idx]
        return None if processor is None else processor.response()

    @property
    def spans(self) -> Sequence[tuple[str, float, float]]:
        """Name, begin on the monotonic clock and seconds of each span of the batch that has ended."""
        return self._spans or ()

    @property
    def is_streaming(self) -> bool:
        """Whether a piece of the current batch's responses was sent already."""
        return self._is_streaming

    def begin_stream(self) -> None:
        """Mark every response of the batch as one that more pieces follow (`ts_stream_next: true`)."""
        self._is_streaming = True
        for idx in range(self._size()):
            self._processor(idx).add_response_property(STREAM_HEADER, "true")

    def end_stream(self) -> bool:
        """Flip `ts_stream_next` to `false` where it is `true`; says whether the batch was streamed at all."""
        if self._processors is not None:
            for processor in self._processors:
                if processor is not None and processor.get_response_header(STREAM_HEADER) == "true":
                    processor.add_response_property(STREAM_HEADER, "false")
        was_streaming = self._is_streaming
        self._is_streaming = False
        return was_streaming

    # ------------------------------------------------------------------------------------------- for the handler

    @property
    def system_properties(self) -> dict[str, Any]:
        """`model_dir`, `gpu_id`, `batch_size`, `server_name`, `server_version`, `limit_max_image_pixels`."""
        return self._system_properties

    @property
    def metrics(self) -> Any:
        """The metrics cache (`marserve_handlers.metrics.MetricsCache`), or None outside a worker."""
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: Any) -> None:
        self._metrics = metrics

    @property
    def request_processor(self) -> list[RequestProcessor]:
        """One processor for each request of the batch."""
        return [self._processor(idx) for idx in range(self._size())]

    @request_processor.setter
    def request_processor(self, request_processor: Iterable[RequestProcessor]) -> None:
        self._processors = list(request_processor)

    def get_request_id(self, idx: int = 0) -> str | None:
        """The server's id of request `idx`, or None outside a batch."""
        return None if self.request_ids is None else self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> Any:
        """Request header `key` in exactly this spelling; None if absent; a dict for the name of a parameter."""
        return self._processor(idx).get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, Any]:
        """All headers of request `idx`, names in the case they were sent."""
        return self._processor(idx).get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the content type of response `idx`; without one the response has none of the handler's choosing."""
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        """The content type set for response `idx`, or None."""
        return self.get_response_headers(idx).get("content-type")

    def get_response_status(self, idx: int) -> tuple[int, str | None]:
        """Code and phrase of response `idx`."""
        processor = self._processor(idx)
        return processor.get_response_status_code(), processor.get_response_status_phrase()

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set status and phrase of response `idx`. Mind the order of the arguments: it is TorchServe's."""
        self._processor(idx).report_status(code, reason_phrase=phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Set status and phrase of every response of the batch."""
        for idx in range(self._size()):
            self._processor(idx).report_status(code, reason_phrase=phrase)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        """The headers set for response `idx`; the dict itself, so that changes to it count."""
        return self._processor(idx).get_response_headers()

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Set a header of response `idx`; name and value must be text."""
        self._processor(idx).add_response_property(key, value)

    def get_sequence_id(self, idx: int) -> str | None:
        """The sequence that request `idx` belongs to, or None."""
        value: str | None = self.get_request_header(idx, self.header_key_sequence_id)
        return value

    def deadline(self, idx: int = 0) -> float | None:
        """When the client stops waiting for response `idx`, in seconds of `time.monotonic()`, or None for never."""
        return self._items[idx].deadline if self._items else None

    def traceparent(self, idx: int = 0) -> str | None:
        """The `traceparent` (W3C Trace Context) of what is done for request `idx`, or None.

        With `tracing=otlp` it names the span of this handler's work, else it is the client's.
        """
        return self.trace_headers(idx).get("traceparent")

    def trace_headers(self, idx: int = 0) -> dict[str, str]:
        """The headers that carry the trace of request `idx` on to a service that the handler calls by itself.

        `traceparent`, `tracestate` and `baggage`, those that there are and that any client can send: a value with other
        characters than printable ASCII is left out. `call` sends them by itself.
        """
        found: dict[str, str] = {}
        if not self._items:
            return found
        for raw_name, raw_value in self._items[idx].headers:
            name = raw_name.decode("latin-1").lower()
            if name in TRACE_HEADERS:
                value = raw_value.decode("latin-1").replace("\t", " ")
                if not (value.isascii() and value.isprintable()):
                    continue
                # Lists may come in several lines; of the traceparent the last one is the server's.
                found[name] = f"{found[name]},{value}" if name in found and name != "traceparent" else value
        return found

    def is_cancelled(self, idx: int = 0) -> bool:
        """Whether the client of request `idx` has gone, so that working on it is in vain."""
        ask = self.ask_cancelled
        return False if ask is None else ask(idx)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of the work: `with context.span("tokenise"): …`. Spans may contain others.

        It is shown for each request of the batch, with its begin and its length in milliseconds, by `marserve explain`
        and in traces. The first 32 of a batch are kept, and 64 characters of a name.
        """
        began = monotonic()
        try:
            yield
        finally:
            spans = self._spans
            if spans is None:
                spans = self._spans = []
            if len(spans) < MAX_SPANS:
                spans.append((str(name)[:MAX_SPAN_NAME], began, monotonic() - began))

    async def call(
        self,
        model: str,
        body: Any = b"",
        *,
        content_type: str | None = None,
        version: str | None = None,
        headers: Mapping[str, str] | None = None,
        idx: int = 0,
    ) -> ModelAnswer:
        """Call another model of this server for request `idx`, and wait for its answer.

        `body` is bytes, text, an array (sent as `.npy`), or what JSON can say. The call has the request's id, and ends
        no later than that. Raises CallFailed, which an author may pass on: it is answered with the other
        model's status. RuntimeError outside a server.
        """
        if self.send_call is None:
            raise RuntimeError("There is no server to call: set context.send_call to a coroutine in its place.")
        return await self.send_call(idx, model, body, content_type, version, headers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self._comparable() == other._comparable()

    __hash__ = None  # type: ignore[assignment]

    def _comparable(self) -> dict[str, Any]:
        """All attributes; processors by what they say, since they have no equality of their own."""
        state = dict(self.__dict__)
        state["_processors"] = [
            (
                p.get_request_properties(),
                p.get_response_status_code(),
                p.get_response_status_phrase(),
                p._response_header,
            )
            for p in self.request_processor
        ]
        return state

    def _size(self) -> int:
        processors = self._processors
        return len(self._items) if processors is None else len(processors)

    def _processor(self, idx: int) -> RequestProcessor:
        """The processor of request `idx`, made at the first look. Raises IndexError as a list does."""
        processors = self._processors
        if processors is None:
            processors = self._processors = [None] * len(self._items)
        processor = processors[idx]
        if processor is None:
            processor = processors[idx] = RequestProcessor.of(self._items[idx])
        return processor


def send_intermediate_predict_response(
    ret: list[Any], req_id_map: dict[int, str] | None, message: str, code: int, context: Context
) -> None:
    """Send one piece of every response of the batch now; the list that `handle` returns is the last piece.

    `ret` is as long as the batch. `req_id_map` is `context.request_ids` and is not looked at: pieces go to the batch
    that is running. A `code` other than 200 ends the batch with `message`, by raising PredictionException.

    Waits while a client does not keep up. Raises NobodyWaits when every client of the batch has gone, and RuntimeError
    outside a worker, unless the caller put a callable of its own into `context.send_pieces`.
    """
    if code != 200:
        raise PredictionException(message, code)
    send = context.send_pieces
    if send is None:
        raise RuntimeError("There is no server to stream to: set context.send_pieces to a callable to catch pieces.")
    context.begin_stream()
    send(ret)


def _merge_headers(view: RequestView) -> dict[str, Any]:
    """One dict of what handlers see as headers, later ones over earlier ones.

    A content type for each parameter under its name; then the client's headers, of one name the last; then the
    server's additions. Header bytes are ISO-8859-1, as HTTP says.
    """
    merged: dict[str, Any] = {name: {"content-type": content_type or ""} for name, content_type in view.parts}
    for raw_name, raw_value in view.headers:
        if raw_name.lower() not in _SERVER_ONLY:
            merged[raw_name.decode("latin-1")] = raw_value.decode("latin-1")
    merged.update(view.server_headers)
    return merged
