"""`overlapPreprocess`: a `BaseHandler` whose `preprocess` runs on a thread beside the batch that computes.

`handle` stays as it is written. Where it calls `preprocess` with rows that were prepared, it gets what that gave,
or the error that it raised. One context serves both threads: each sees the batch that it works for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marserve_handlers.base import BaseHandler
from marserve_handlers.context import Context, RequestProcessor, RequestView
from marserve_handlers.support.overlapping.kept import kept_between

NOT_USED = "overlapPreprocess is not used"
# The steps in between, which must be ours: that `preprocess` comes first is known of these alone.
_WHOLE = ("handle", "_answer", "_answer_rows")

# ------------------------------------------------------------------------------------------- the context


class BatchState:
    """What a context says of one batch, and what its handler has said of the answers so far."""

    def __init__(self, items: Sequence[RequestView] = ()) -> None:
        self.items = items
        self.processors: list[RequestProcessor | None] | None = None
        self.is_streaming = False
        self.spans: list[tuple[str, float, float]] | None = None
        self.stopping_criteria: Any = None
        self.request_ids: dict[int, str] | None = {index: item.id for index, item in enumerate(items)}
        self.send_pieces: Any = None
        self.ask_cancelled: Any = None


class _OfBatch:
    """An attribute of the context that each thread has of its own batch."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, context: Any, owner: type[Any]) -> Any:
        return self if context is None else getattr(context.batch, self._name)

    def __set__(self, context: Any, value: Any) -> None:
        setattr(context.batch, self._name, value)


class _Ids(Mapping[int, str]):
    """The request ids of the thread's batch, so that measurements belong to its own requests."""

    def __init__(self, context: OverlapContext) -> None:
        self._context = context

    def __getitem__(self, index: int) -> str:
        return (self._context.batch.request_ids or {})[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._context.batch.request_ids or {})

    def __len__(self) -> int:
        return len(self._context.batch.request_ids or {})


class OverlapContext(Context):
    """A context that the thread which preprocesses sees as that of its batch, all others as that of the running one.

    A thread that an author's `preprocess` starts sees the running batch.
    """

    _items = _OfBatch("items")
    _processors = _OfBatch("processors")
    _is_streaming = _OfBatch("is_streaming")
    _spans = _OfBatch("spans")
    stopping_criteria = _OfBatch("stopping_criteria")
    request_ids = _OfBatch("request_ids")
    send_pieces = _OfBatch("send_pieces")
    ask_cancelled = _OfBatch("ask_cancelled")

    def __init__(self, *args: Any, **named: Any) -> None:
        self._running = BatchState()
        self._begun: BatchState | None = None
        self._here = threading.local()
        super().__init__(*args, **named)

    @property
    def batch(self) -> BatchState:
        """The state of this thread's batch."""
        return getattr(self._here, "batch", None) or self._running

    def enter(self, state: BatchState | None) -> None:
        """This thread works for that batch from now on; None: for the running one."""
        self._here.batch = state

    def take_over(self, state: BatchState) -> None:
        """The batch that begins next was begun as `state` by the thread that preprocesses."""
        self._begun = state

    def begin_batch(self, items: Sequence[RequestView]) -> None:
        """As `Context.begin_batch`; goes on with what was begun for just these items."""
        begun, self._begun = self._begun, None
        self._running = begun if begun is not None and begun.items is items else BatchState(items)
        try:
            if self._metrics is not None:
                self._metrics.request_ids = _Ids(self)
        except Exception:  # an object of the author's own, which need not have them
            return

    async def call(self, *args: Any, **named: Any) -> Any:
        """As `Context.call`. Raises RuntimeError in `preprocess`, which runs before its batch has begun."""
        if getattr(self._here, "batch", None) is not None:
            raise RuntimeError(_ahead("call another model"))
        return await super().call(*args, **named)


def refuse_pieces(_: list[Any]) -> None:
    """Raises RuntimeError: a batch has no answers yet while it is preprocessed."""
    raise RuntimeError(_ahead("send pieces of an answer"))


def _ahead(what: str) -> str:
    return (
        f"with overlapPreprocess, preprocess runs before its batch has begun, and cannot {what}: do it in inference, "
        "or set overlapPreprocess: false"
    )


# ------------------------------------------------------------------------------------------- a batch ahead


class Prepared:
    """The rows of a batch, what `preprocess` made of them or raised, and its state. Filled by one thread.

    `is_read` is set once the rows are there; `wait` waits for `preprocess`.
    """

    def __init__(self) -> None:
        self.is_read = threading.Event()
        self.rows: list[Any] = []
        self.state: BatchState | None = None
        self.error: BaseException | None = None
        self.value: Any = None
        self._is_done = threading.Event()

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """`preprocess` has returned, or raised."""
        self.value, self.error = value, error
        self.is_read.set()
        self._is_done.set()

    def wait(self) -> Any:
        """What `preprocess` returned, which is handed out once. Raises what it raised."""
        self._is_done.wait()
        value, error = self.value, self.error
        self.value = self.error = None
        if error is not None:
            raise error
        return value


class Overlap:
    """The seam in a handler: its own `preprocess`, and the one that its `handle` calls."""

    def __init__(self, service: BaseHandler, context: OverlapContext) -> None:
        self.context = context
        self._own = service.preprocess
        self._expected: Prepared | None = None
        service.preprocess = self._take  # type: ignore[method-assign,assignment] # of it alone

    def preprocess(self, rows: list[Any]) -> Any:
        """What the handler's own `preprocess` makes of these rows; nothing for a request to describe the model."""
        if self.context.get_request_header(0, "describe") == "True":
            return None
        return self._own(rows)

    def expect(self, prepared: Prepared | None) -> None:
        """The next call of `handle` gets the rows of `prepared`."""
        self._expected = prepared

    def _take(self, rows: Any) -> Any:
        expected = self._expected
        if expected is None or rows is not expected.rows:
            return self._own(rows)  # a check's rows, or a warm-up's
        self._expected = None
        return expected.wait()


def open_overlap(service: Any, context: Context, envelope: str | None) -> Overlap | None:
    """The seam of a handler that is loaded. None, with a sentence in describe, if its steps cannot be taken apart."""
    reason = _why_not(service, context, envelope)
    if reason:
        context.load_warnings.append(f"{NOT_USED}: {reason}")
        return None
    assert isinstance(context, OverlapContext)
    return Overlap(service, context)


def _why_not(service: Any, context: Context, envelope: str | None) -> str:
    if envelope:
        return f"the envelope {envelope} stands before preprocess"
    if not isinstance(service, BaseHandler):
        return "the handler does not extend BaseHandler, so that nobody knows its preprocess"
    if not isinstance(context, OverlapContext):
        return "the worker does not look for the next batch while it computes"
    for name in _WHOLE:
        if getattr(type(service), name) is not getattr(BaseHandler, name) or name in vars(service):
            return f"the handler has a {name} of its own; only BaseHandler's is known to call preprocess first"
    if service._named is not None:
        return "the model's inputs have names, and are read and computed in one call"
    if os.environ.get("ENABLE_TORCH_PROFILER"):
        return "ENABLE_TORCH_PROFILER is set"
    kept = kept_between(type(service))
    if kept is None:
        return "the handler's source cannot be read, so that nobody knows what preprocess leaves for the later steps"
    if kept:
        names = ", ".join(f"self.{name}" if not name.startswith("global ") else name for name in kept)
        return f"preprocess and the later steps share {names}, which the next batch would change meanwhile"
    return ""
