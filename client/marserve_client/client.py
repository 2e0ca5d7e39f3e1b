"""`Client`: the calls of marserve, for programs without asyncio and for threads.

What is sent and how answers are read is in `inference` and `management`, the course of a call in `calls`; this adds the
I/O. `AsyncClient` in `aio` has the same names.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import httpx

from marserve_client import inference, management
from marserve_client.calls import Action, After, Api, Before, Doable, Pause, Reply, Steps, Try
from marserve_client.inference import Opening
from marserve_client.retries import Retries
from marserve_client.setup import Key, Setup, as_method, read_piece
from marserve_client.streams import Stream

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound="Client")
PIECE_BYTES: Final = 1 << 18


def _calling(build: Callable[P, Doable[T]]) -> Callable[Concatenate[Client, P], T]:
    """The method that carries out what `build` makes."""

    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._carry_out(build(*args, **kwargs).steps(self._session))

    as_method(build, method)
    return method


def _opening(build: Callable[P, Opening[T]]) -> Callable[Concatenate[Client, P], Stream[T]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]:
        opening = build(*args, **kwargs)
        reply = self._carry_out(opening.call.steps(self._session))
        assert reply.response is not None
        assert reply.watch is not None
        return Stream(reply.response, opening.decoder(), reply.watch)

    as_method(build, method)
    return method


class Client:
    """A client of one server. It may be shared by threads, and keeps connections open until it is closed.

    `inference` and `management` are addresses (`http://host:port`, `https://…`, `unix:/path`); with neither they are
    those of a server on this machine, ports 8080 and 8081. A client that is given one has that one alone.

    `key` is sent as `Authorization: Bearer`: one text, or `key_file(path)`. `timeout` in seconds bounds calls that name
    none, None: no bound; `connect_timeout` bounds each try to connect. `retries` says which calls that failed are tried
    again. `max_connections` is how many requests may be under way at once; more wait. `headers` go with every request.
    `verify` is False, or the certificates to trust in place of the system's. `before` and `after` are hooks, or lists
    of them: see docs/client.md. `transport` takes the place of httpx's, for tests.
    """

    def __init__(
        self,
        inference: str | None = None,
        management: str | None = None,
        *,
        key: Key = None,
        timeout: float | None = 60.0,
        connect_timeout: float = 5.0,
        retries: Retries = Retries(),  # noqa: B008 - frozen
        max_connections: int = 100,
        headers: Mapping[str, str] | None = None,
        verify: bool | ssl.SSLContext = True,
        before: Before | Sequence[Before] = (),
        after: After | Sequence[After] = (),
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        setup = Setup(
            inference,
            management,
            key=key,
            timeout=timeout,
            connect_timeout=connect_timeout,
            retries=retries,
            max_connections=max_connections,
            headers=headers,
            verify=verify,
            before=before,
            after=after,
        )
        self._session = setup.session
        self._clients: dict[Api, httpx.Client] = {}
        for api in setup.addresses:
            options = setup.options(api)
            if transport is not None:
                options["transport"] = transport
            elif api in setup.sockets:
                options["transport"] = httpx.HTTPTransport(uds=setup.sockets[api], limits=options["limits"])
            self._clients[api] = httpx.Client(**options)

    predict = _calling(inference.predict)
    explain = _calling(inference.explain)
    infer = _calling(inference.infer)
    stream = _opening(inference.stream)
    events = _opening(inference.events)
    metadata = _calling(inference.metadata)
    is_alive = _calling(inference.is_alive)
    readiness = _calling(inference.readiness)
    wait_until_ready = _calling(inference.wait_until_ready)
    register = _calling(management.register)
    swap = _calling(management.swap)
    unregister = _calling(management.unregister)
    scale = _calling(management.scale)
    set_default = _calling(management.set_default)
    describe = _calling(management.describe)
    models = _calling(management.models)
    traffic = _calling(management.traffic)
    set_traffic = _calling(management.set_traffic)
    reset_traffic = _calling(management.reset_traffic)
    rollout = _calling(management.rollout)
    begin_rollout = _calling(management.begin_rollout)
    order_rollout = _calling(management.order_rollout)
    upload = _calling(management.upload)

    def close(self) -> None:
        """Close the connections; open streams break off."""
        for client in self._clients.values():
            client.close()

    def __enter__(self: C) -> C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _carry_out(self, steps: Steps[T]) -> T:
        try:
            action = next(steps)
            while True:
                try:
                    outcome = self._do(action)
                except Exception as error:  # the steps say what becomes of it
                    action = steps.throw(error)
                else:
                    action = steps.send(outcome)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            steps.close()

    def _do(self, action: Action) -> Any:
        if isinstance(action, Try):
            return self._send(action)
        if isinstance(action, Pause):
            time.sleep(action.seconds)
            return None
        return action.function()

    def _send(self, action: Try) -> Reply:
        call, watch = action.call, action.watch
        client = self._clients[call.api]
        content = call.content if call.file is None else _pieces(call.file)
        request = client.build_request(
            call.method, action.url, content=content, **action.options, timeout=action.timeout
        )
        response = client.send(request, stream=True)
        try:
            watch.saw(response)
            if call.streams and response.status_code < 300:
                return Reply(response.status_code, response.headers, b"", response, watch)
            pieces = []
            for piece in response.iter_bytes():
                watch.check(len(piece))
                pieces.append(piece)
        except BaseException:
            response.close()
            raise
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return Reply(response.status_code, response.headers, body)


def _pieces(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while piece := read_piece(opened, PIECE_BYTES):
            yield piece
