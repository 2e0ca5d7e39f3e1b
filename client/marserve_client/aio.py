"""`AsyncClient`: as `Client`, for asyncio. Files are read in threads, so that the event loop goes on."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx

from marserve_client import inference, management
from marserve_client.calls import Action, After, Api, Before, Doable, Pause, Reply, Steps, Try
from marserve_client.client import PIECE_BYTES
from marserve_client.inference import Opening
from marserve_client.retries import Retries
from marserve_client.setup import Key, Setup, as_method, read_piece
from marserve_client.streams import AsyncStream

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound="AsyncClient")


def _calling(build: Callable[P, Doable[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The coroutine method that carries out what `build` makes."""

    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._carry_out(build(*args, **kwargs).steps(self._session))

    as_method(build, method)
    return method


def _opening(build: Callable[P, Opening[T]]) -> Callable[Concatenate[AsyncClient, P], Awaitable[AsyncStream[T]]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncStream[T]:
        opening = build(*args, **kwargs)
        reply = await self._carry_out(opening.call.steps(self._session))
        assert reply.response is not None
        assert reply.watch is not None
        return AsyncStream(reply.response, opening.decoder(), reply.watch)

    as_method(build, method)
    return method


class AsyncClient:
    """A client of one server for one event loop. Its arguments, methods and errors are those of `Client`; each call is
    awaited, and `stream` and `events` give an `AsyncStream`. A call that is cancelled closes its connection, and the
    server ends the work.
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
        transport: httpx.AsyncBaseTransport | None = None,
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
        self._clients: dict[Api, httpx.AsyncClient] = {}
        for api in setup.addresses:
            options = setup.options(api)
            if transport is not None:
                options["transport"] = transport
            elif api in setup.sockets:
                options["transport"] = httpx.AsyncHTTPTransport(uds=setup.sockets[api], limits=options["limits"])
            self._clients[api] = httpx.AsyncClient(**options)

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

    async def aclose(self) -> None:
        """Close the connections; open streams break off."""
        for client in self._clients.values():
            await client.aclose()

    async def __aenter__(self: C) -> C:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _carry_out(self, steps: Steps[T]) -> T:
        try:
            action = next(steps)
            while True:
                try:
                    outcome = await self._do(action)
                except Exception as error:  # the steps say what becomes of it
                    action = steps.throw(error)
                else:
                    action = steps.send(outcome)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            steps.close()

    async def _do(self, action: Action) -> Any:
        if isinstance(action, Try):
            return await self._send(action)
        if isinstance(action, Pause):
            await asyncio.sleep(action.seconds)
            return None
        return await asyncio.to_thread(action.function)

    async def _send(self, action: Try) -> Reply:
        call, watch = action.call, action.watch
        client = self._clients[call.api]
        content = call.content if call.file is None else _pieces(call.file)
        request = client.build_request(
            call.method, action.url, content=content, **action.options, timeout=action.timeout
        )
        response = await client.send(request, stream=True)
        try:
            watch.saw(response)
            if call.streams and response.status_code < 300:
                return Reply(response.status_code, response.headers, b"", response, watch)
            pieces = []
            async for piece in response.aiter_bytes():
                watch.check(len(piece))
                pieces.append(piece)
        except BaseException:
            await response.aclose()
            raise
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return Reply(response.status_code, response.headers, body)


async def _pieces(file: Path) -> AsyncIterator[bytes]:
    opened = await asyncio.to_thread(file.open, "rb")
    try:
        while piece := await asyncio.to_thread(read_piece, opened, PIECE_BYTES):
            yield piece
    finally:
        opened.close()
