"""A handler under test: batches of any make-up, run in this process as a worker runs them. No server is started.

    from marserve_handlers.testing import Request, serve

    def test_digits():
        with serve(Digits, batch_size=4) as model:
            assert model({"pixels": [[...]]}).json() == {"scores": [...]}
            good, bad = model.batch({"pixels": [[...]]}, b"no json")
            assert (good.status, bad.status) == (200, 400)

Bodies are read, and answers are written, by the worker's own code; a batch that raises is run in halves, as the server
does. marserve itself must be installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `body` is bytes, text, an array (as `.npy`), or what JSON can say.

    `content_type` is the body's, without one that of JSON, text or `.npy`, none for bytes; `form` has fields in the
    place of a body. `deadline_s` is how long the client waits, from the call on. With `is_cancelled` it has gone before
    the batch begins, with `leaves_after` once it has read so many pieces of a stream.
    """

    body: Any = b""
    content_type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, bytes] | None = None
    deadline_s: float | None = None
    is_cancelled: bool = False
    leaves_after: int | None = None


@dataclass(slots=True)
class Answer:
    """What the client gets. `body` is all of it, `pieces` the parts that a stream came in.

    A failure has a `status` from 400 on and its `message`; `traceback` is what stands in the log, empty where nothing
    does.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""
    traceback: str = ""
    pieces: list[bytes] = field(default_factory=list)

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()


class Served:
    """A loaded handler. A call sends one request, alone; `batch` sends several together."""

    def __init__(self, run: Callable[[list[Request]], list[Answer]], declaration: dict[str, Any] | None) -> None:
        self._run = run
        self.declaration = declaration
        """What the model declares; None for a handler of TorchServe's shape."""

    def __call__(self, request: Any, /, **of_the_request: Any) -> Answer:
        """The answer to one request: a `Request`, or its body and the other members by name."""
        return self._run([_as_request(request, **of_the_request)])[0]

    def batch(self, *requests: Any) -> list[Answer]:
        """The answers to requests that run together, in order."""
        return self._run([_as_request(request) for request in requests])


def serve(
    handler: Any,
    *,
    batch_size: int = 8,
    max_rows: int = 1024,
    model_dir: str | Path | None = None,
    manifest: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> AbstractContextManager[Served]:
    """Load a handler as a worker does, and serve it for the time of the `with` block. Raises what its load raises.

    `handler` is a class or function, declared or of TorchServe's shape. `model_dir` is the folder that it finds its
    files in, that of its module if not given; `config` is what `model-config.yaml` would say. One
    call of a declared model of tensors has at most `batch_size` rows.
    """
    # By name: this package stands below marserve, and only tests need this.
    opened: AbstractContextManager[Served] = import_module("marserve.worker.without_server.in_process").serve(
        handler, batch_size, max_rows, model_dir, manifest, config
    )
    return opened


def _as_request(request: Any, **members: Any) -> Request:
    return request if isinstance(request, Request) and not members else Request(request, **members)
