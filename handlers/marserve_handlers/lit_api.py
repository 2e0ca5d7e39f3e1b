"""A handler around a class of LitServe's `LitAPI`: the author's file runs as it is, without LitServe's server.

It calls `setup`, `decode_request`, `batch`, `predict`, `unbatch` and `encode_response` in LitServe's order. LitServe
itself is imported by the author's file alone; what is needed of FastAPI is looked up among the modules that it brings.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from marserve_handlers.context import Context
from marserve_handlers.errors import BadInput, add_note

_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
# Arguments of LitServer that are the API's, of releases before 0.3.
_MOVED = ("max_batch_size", "batch_timeout", "stream", "api_path")
_END = object()
# Calls of these do not block: their work is done later.
_BEGUN_AT_ONCE = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)


def is_lit_api(found: object) -> bool:
    """Whether an object is a class of LitServe's LitAPI."""
    return inspect.isclass(found) and any(
        base.__name__ == "LitAPI" and base.__module__.partition(".")[0] == "litserve" for base in found.__mro__[1:]
    )


class LitApiHandler:
    """One API as a handler. `arguments` and `keywords` are its constructor's, `server` what LitServer was given."""

    def __init__(
        self,
        api_class: Callable[..., Any],
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
        server: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            self.api = api_class(*arguments, **(keywords or {}))
        except TypeError as error:
            add_note(
                error,
                "The API is made with the arguments that its file gives it in literals; any other must have a default.",
            )
            raise
        for name in _MOVED:
            if server and name in server:
                setattr(self.api, name, server[name])
        self._server = dict(server or {})
        self._has_context: dict[Any, bool] = {}

    def initialize(self, context: Context) -> None:
        """Set the API up on this worker's device. Raises ValueError for what is not served, and the author's errors."""
        api = self.api
        if getattr(api, "spec", None) is not None:
            raise ValueError(
                f"{type(api).__name__} has the spec {type(api.spec).__name__}: marserve serves predict alone, not the "
                "routes of a spec of LitServe"
            )
        api.request_timeout = self._server.get("timeout", 30)
        if hasattr(api, "pre_setup"):
            api.pre_setup()
        gpu = context.system_properties.get("gpu_id")
        device = "cpu" if gpu is None else f"cuda:{gpu}"
        api.setup(device)
        api.device = device
        self._annotation = _annotation_of(api.decode_request)

    @property
    def is_async(self) -> bool:
        """Whether the API's methods are coroutines."""
        return bool(getattr(self.api, "enable_async", False))

    # ------------------------------------------------------------------------------------------- blocking

    def handle(self, rows: list[dict[str, Any]], context: Context) -> list[Any]:
        """Answer a batch."""
        if self.is_async:
            return asyncio.run(self.handle_async(rows, context))
        if self.api.stream:
            return self._stream(rows, context)
        if self.api.max_batch_size > 1:
            return self._batched(rows, context)
        return [self._attempt(context, index, self._single, row) for index, row in enumerate(rows)]

    def _single(self, row: dict[str, Any], context: Context, index: int) -> Any:
        said: dict[str, Any] = {}
        api = self.api
        x = self._call(said, api.decode_request, self._request(row, context, index))
        return self._call(said, api.encode_response, self._call(said, api.predict, x))

    def _batched(self, rows: list[dict[str, Any]], context: Context) -> list[Any]:
        api, answers = self.api, [None] * len(rows)
        inputs: list[tuple[int, dict[str, Any], Any]] = []
        for index, row in enumerate(rows):
            said: dict[str, Any] = {}
            try:
                x = self._call(said, api.decode_request, self._request(row, context, index))
            except Exception as error:  # of this request alone
                answers[index] = _failed(error, context, index)
            else:
                inputs.append((index, said, x))
        if not inputs:
            return answers
        contexts = [said for _, said, _ in inputs]
        x = self._call(contexts, api.batch, [each for _, _, each in inputs])
        outputs = self._call(contexts, api.unbatch, self._call(contexts, api.predict, x))
        if len(outputs) != len(inputs):
            raise ValueError(
                f"predict and unbatch gave {len(outputs)} outputs for {len(inputs)} inputs; they must give one for each"
            )
        for (index, said, _), output in zip(inputs, outputs, strict=True):
            answers[index] = self._attempt(
                context, index, lambda y, context, index, said=said: self._call(said, api.encode_response, y), output
            )
        return answers

    def _stream(self, rows: list[dict[str, Any]], context: Context) -> list[Any]:
        """Send pieces as they are made: of a batching API for all requests together, else for each its own."""
        api = self.api
        requests = [self._request(row, context, index) for index, row in enumerate(rows)]
        if api.max_batch_size > 1:
            contexts: list[dict[str, Any]] = [{} for _ in rows]
            xs = [self._call(said, api.decode_request, each) for said, each in zip(contexts, requests, strict=True)]
            made = self._call(contexts, api.predict, self._call(contexts, api.batch, xs))
            together: Iterator[Any] = iter(
                self._call(contexts, api.encode_response, self._call(contexts, api.unbatch, made))
            )
        else:
            each_alone = []
            for request in requests:
                said: dict[str, Any] = {}
                x = self._call(said, api.decode_request, request)
                each_alone.append(iter(self._call(said, api.encode_response, self._call(said, api.predict, x))))
            together = _side_by_side(each_alone)
        for pieces in together:
            self._send([self._piece(piece) for piece in pieces], context)
        return [b""] * len(rows)

    def _call(self, said: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the API, with its context if it asks for one."""
        return function(*arguments, context=said) if self._asks_context(function) else function(*arguments)

    def _asks_context(self, function: Callable[..., Any]) -> bool:
        key = getattr(function, "__func__", function)
        if key not in self._has_context:
            self._has_context[key] = "context" in inspect.signature(function).parameters
        return self._has_context[key]

    def _attempt(self, context: Context, index: int, call: Callable[..., Any], value: Any) -> Any:
        """The answer to one request, or its error in its place."""
        try:
            return _as_answer(call(value, context, index), context, index)
        except Exception as error:
            return _failed(error, context, index)

    # ------------------------------------------------------------------------------------------- coroutines

    async def handle_async(self, rows: list[dict[str, Any]], context: Context) -> list[Any]:
        """Answer a batch of an API whose methods are coroutines."""
        return list(await asyncio.gather(*(self._one_async(row, context, index) for index, row in enumerate(rows))))

    async def _one_async(self, row: dict[str, Any], context: Context, index: int) -> Any:
        said: dict[str, Any] = {}
        api = self.api
        try:
            x = await self._await(said, api.decode_request, self._request(row, context, index))
            encoded = await self._await(said, api.encode_response, await self._await(said, api.predict, x))
            if not api.stream:
                return _as_answer(encoded, context, index)
            async for piece in _pieces_of(encoded):
                self._send([self._piece(piece)], context)
            return b""
        except Exception as error:
            return _failed(error, context, index)

    async def _await(self, said: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        if (
            inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
            or inspect.isgeneratorfunction(function)
        ):
            made = self._call(said, function, *arguments)
        else:
            made = await asyncio.to_thread(self._call, said, function, *arguments)
        return await made if inspect.isawaitable(made) else made

    # ------------------------------------------------------------------------------------------- requests

    def _request(self, row: dict[str, Any], context: Context, index: int) -> Any:
        """What `decode_request` gets: the JSON of the body, a form's fields, or what its annotation asks for."""
        headers = context.get_all_request_header(index)
        is_form = _content_type(headers) in _FORMS
        if not is_form and "body" in row:
            value = _parse(row["body"])
        else:
            value = {name: _field(body, headers.get(name)) for name, body in row.items()}
        wanted = self._annotation
        validate = getattr(wanted, "model_validate", None)
        if validate is not None:
            return validate(value)
        if is_form and inspect.isclass(wanted) and wanted.__name__ == "UploadFile":
            return value.get("request", next(iter(value.values()), None))
        return value

    def _piece(self, piece: Any) -> Any:
        """A piece as LitServe writes it: a line of JSON for dicts and pydantic models."""
        return self.api.format_encoded_response(piece) if piece is not None else b""

    def _send(self, pieces: list[Any], context: Context) -> None:
        send = context.send_pieces
        if send is None:
            raise RuntimeError(
                "There is no server to stream to: set context.send_pieces to a callable to catch pieces."
            )
        context.begin_stream()
        send(pieces)


def _annotation_of(function: Callable[..., Any]) -> Any:
    """What `decode_request` says that its request is; None if nothing."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (NameError, TypeError, SyntaxError):  # a name of `if TYPE_CHECKING:`
        return None
    first = next(iter(parameters.values()), None)
    return None if first is None or first.annotation is first.empty else first.annotation


def _content_type(headers: Mapping[str, Any]) -> str:
    """The request's content type, without parameters."""
    for name, value in headers.items():
        if name.lower() == "content-type" and isinstance(value, str):
            return value.partition(";")[0].strip().lower()
    return ""


def _parse(body: Any) -> Any:
    if not isinstance(body, bytes | bytearray | str):
        return body
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body is not JSON: {error}") from None


def _field(body: Any, header: Any) -> Any:
    """A field of a form: text, or an UploadFile where the client says what it is."""
    content_type = header.get("content-type") if isinstance(header, dict) else ""
    if not isinstance(body, bytes | bytearray):
        return body
    starlette: Any = sys.modules.get("starlette.datastructures")
    if not content_type or starlette is None:
        return body.decode("utf-8", "replace")
    headers = starlette.Headers({"content-type": content_type})
    return starlette.UploadFile(io.BytesIO(body), size=len(body), filename="", headers=headers)


# ----------------------------------------------------------------------------------------------- answers


def _as_answer(output: Any, context: Context, index: int) -> Any:
    """What `encode_response` gave, as FastAPI would answer with it: a response as it is, all else as JSON."""
    body = getattr(output, "body", None)
    if isinstance(body, bytes | bytearray) and hasattr(output, "status_code"):
        context.set_response_status(int(output.status_code), "", index)
        for name, value in output.headers.items():
            if name.lower() != "content-length":
                context.set_response_header(index, name, value)
        return bytes(body)
    return _as_json(output, context, index)


def _as_json(value: Any, context: Context, index: int) -> bytes:
    encoders: Any = sys.modules.get("fastapi.encoders")
    if encoders is not None:
        value = encoders.jsonable_encoder(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    context.set_response_content_type(index, "application/json")
    return text.encode()


def _failed(error: Exception, context: Context, index: int) -> Any:
    """The answer for an error of one request: of FastAPI's HTTPException status and detail, as LitServe has them."""
    status, errors = getattr(error, "status_code", None), getattr(error, "errors", None)
    if type(error).__name__ == "ValidationError" and callable(errors):
        error = BadInput(_first_of(errors()))
    if not isinstance(status, int):
        return error
    context.set_response_status(status, "", index)
    for name, value in (getattr(error, "headers", None) or {}).items():
        context.set_response_header(index, name, value)
    return _as_json({"detail": getattr(error, "detail", "")}, context, index)


def _first_of(errors: Sequence[Mapping[str, Any]]) -> str:
    first = errors[0] if errors else {}
    where = ".".join(str(part) for part in first.get("loc", ()))
    return f"{where}: {first.get('msg', 'it does not fit')}" if where else str(first.get("msg", "it does not fit"))


def _side_by_side(made: Sequence[Iterator[Any]]) -> Iterator[list[Any]]:
    """A piece of each in every step; None for those that have ended, until all have."""
    while True:
        pieces = [next(each, _END) for each in made]
        if all(piece is _END for piece in pieces):
            return
        yield [None if piece is _END else piece for piece in pieces]


async def _pieces_of(made: Any) -> AsyncIterator[Any]:
    if hasattr(made, "__aiter__"):
        async for piece in made:
            yield piece
    else:
        for piece in made:
            yield piece
