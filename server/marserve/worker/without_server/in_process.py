"""Runs a handler in this process as a worker does, for `marserve_handlers.testing`. No server, no socket."""

from __future__ import annotations

import inspect
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from marserve.documents import pack
from marserve.messages import Batch, Item, Load, Piece, Raised, Result, Results, pack_head
from marserve.shared_page import Page, create_page
from marserve.worker.connection import Connection
from marserve.worker.load import LoadedModel, make_context, open_class, open_definition, open_function
from marserve.worker.serving import ServedModel
from marserve_handlers.declared.decorator import definition_of
from marserve_handlers.errors import HANDLER
from marserve_handlers.testing import Answer, Request, Served

# What a server answers if the handler raised, by default.
HANDLER_STATUS = 500
MAX_ANSWER_BYTES = 1 << 30


@contextmanager
def serve(
    handler: Any,
    batch_size: int,
    max_rows: int,
    model_dir: str | Path | None,
    manifest: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
) -> Iterator[Served]:
    """As `marserve_handlers.testing.serve`."""
    folder = str(model_dir) if model_dir is not None else os.path.dirname(os.path.abspath(inspect.getfile(handler)))
    load = Load(
        handler.__name__,
        "1.0",
        folder,
        f"{handler.__module__}:{handler.__name__}",
        pack(dict(manifest or {"model": {"modelName": handler.__name__}})),
        None if config is None else pack(dict(config)),
        batch_size,
        max_rows=max_rows,
        max_answer_bytes=MAX_ANSWER_BYTES,
    )
    model = _open(handler, load)
    with in_process(model) as process:
        yield Served(process.run, json.loads(model.declaration) if model.declaration else None)


@contextmanager
def in_process(model: LoadedModel) -> Iterator[InProcess]:
    """A loaded model that answers requests in this process."""
    descriptor = create_page()
    page = Page(descriptor)
    os.close(descriptor)
    try:
        yield InProcess(model, page)
    finally:
        page.close()


def _open(handler: Any, load: Load) -> LoadedModel:
    context = make_context(load)
    definition = definition_of(handler)
    module = sys.modules.get(handler.__module__)
    if definition is not None:
        return open_definition(definition, context, load)
    return (open_class if isinstance(handler, type) else open_function)(handler, context, load, module)


class InProcess:
    """The two ends of a worker in one object: sends batches, and takes what the worker sends."""

    def __init__(self, model: LoadedModel, page: Page) -> None:
        self._page = page
        self._number = 0
        self._served = ServedModel(cast("Connection", self), page, model)
        self._requests: Sequence[Request] = ()
        self._answers: list[Answer] = []
        self._failure: Raised | None = None
        self._is_streaming = False

    def run(self, requests: list[Request]) -> list[Answer]:
        """Answer a batch; one that raised is run in halves until the guilty request stands alone."""
        self._number += 1
        number = self._number
        self._requests, self._answers = requests, [Answer() for _ in requests]
        self._failure, self._is_streaming = None, False
        items, bodies = [], []
        for index, request in enumerate(requests):
            parts = _parts(request)
            deadline = None if request.deadline_s is None else time.monotonic() + request.deadline_s
            headers = [(name.encode(), value.encode()) for name, value in request.headers.items()]
            items.append(
                Item(f"request-{number}-{index}", [part[:2] for part in parts], pack_head(headers, []), deadline)
            )
            bodies += [bytearray(part[2]) for part in parts]
            if request.is_cancelled:
                self._page.cancel(number, index)
        self._served.serve_batch(Batch(number, items), bodies)
        answers, failure = self._answers, self._failure
        if failure is None:
            return answers
        if len(requests) > 1 and not self._is_streaming:
            middle = len(requests) // 2
            return self.run(requests[:middle]) + self.run(requests[middle:])
        for answer in answers:
            _fail(answer, failure.kind, failure.code, failure.message, failure.traceback)
        return answers

    def send(self, message: Any, bodies: Sequence[bytes] = ()) -> None:
        """What the worker sends to the server."""
        if isinstance(message, Raised):
            self._failure = message
        elif isinstance(message, Results | Piece):
            self._is_streaming |= isinstance(message, Piece)
            for index, (result, body) in enumerate(zip(message.results, bodies, strict=True)):
                self._take(index, result, bytes(body))

    def _take(self, index: int, result: Result, body: bytes) -> None:
        answer, request = self._answers[index], self._requests[index]
        if answer.message:
            return  # its stream was broken off
        if result.error is not None:
            _fail(answer, result.error, result.status, result.reason, "")
            return
        if not answer.pieces:
            answer.status, answer.headers = result.status, dict(result.headers)
        answer.body += body
        if body:
            answer.pieces.append(body)
        if request.leaves_after is not None and len(answer.pieces) >= request.leaves_after:
            self._page.cancel(self._number, index)


def _fail(answer: Answer, kind: str, status: int, message: str, traceback: str) -> None:
    answer.status = HANDLER_STATUS if kind == HANDLER else status
    answer.message = message or kind
    answer.traceback = traceback


def _parts(request: Request) -> list[tuple[str, str | None, bytes]]:
    """The name, content type and bytes of each part."""
    if request.form is not None:
        return [(name, None, value) for name, value in request.form.items()]
    body, kind = request.body, request.content_type
    if isinstance(body, bytes | bytearray):
        return [("body", kind, bytes(body))]
    if isinstance(body, str):
        return [("body", kind or "text/plain", body.encode())]
    if type(body).__module__ == "numpy" and hasattr(body, "dtype"):
        import numpy  # here: the request has an array

        file = io.BytesIO()
        numpy.save(file, body)
        return [("body", kind or "application/x-npy", file.getvalue())]
    return [("body", kind or "application/json", json.dumps(body).encode())]
