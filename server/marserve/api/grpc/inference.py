"""TorchServe's inference service over gRPC: from its messages to the data plane, and back (contract §5.1)."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any, Final

from marserve.api.decoding import MAX_PARTS
from marserve.api.grpc.answers import Pieces
from marserve.api.grpc.calls import Answers, Call, Calls, Messages
from marserve.api.grpc.errors import StalledReader, error_reason, grpc_status
from marserve.api.grpc.schema import ERRORS, INFERENCE, Schema
from marserve.errors import BadInput, MarserveError
from marserve.messages import PART_MARK, Part
from marserve.registry.data_plane import DataPlane
from marserve.registry.intake.call_modes import SequenceHeaderNames

SERVICE: Final = f"{INFERENCE}.InferenceAPIsService"
# The most requests of one dialogue that are under way; the next one is read when one of them has ended.
MOST_AT_ONCE: Final = 64


class GrpcInference:
    """The four methods of the service."""

    def __init__(
        self,
        schema: Schema,
        calls: Calls,
        data_plane: DataPlane,
        sequence: SequenceHeaderNames,
    ) -> None:
        self._calls = calls
        self._data_plane = data_plane
        self._sequence = sequence
        self._response = schema.message(f"{INFERENCE}.PredictionResponse")
        self._error_info = schema.message(f"{ERRORS}.ErrorInfo")
        self._health_response = schema.message(f"{INFERENCE}.TorchServeHealthResponse")

    def answers(self) -> Answers:
        """The coroutine of each method."""
        return {
            "Ping": self._ping,
            "Predictions": self._predict,
            "StreamPredictions": self._predict_in_pieces,
            "StreamPredictions2": self._converse,
        }

    async def _ping(self, _: Any, call: Call) -> Any:
        status = "Healthy" if self._data_plane.is_healthy() else "Unhealthy"
        return self._health_response(health=json.dumps({"status": status}, indent=2))

    async def _predict(self, message: Any, call: Call) -> Any:
        """Return one answer. Of a streaming handler that is the first piece, and the job is cancelled."""
        pieces = self._submit(message, call, call.id, [])
        try:
            return self._response(prediction=await pieces.next())
        finally:
            call.version_header = pieces.version_header
            pieces.cancel()

    async def _predict_in_pieces(self, message: Any, call: Call) -> None:
        pieces = self._submit(message, call, call.id, [])
        try:
            while (piece := await pieces.next()) is not None:
                await call.write(self._response(prediction=piece))
        finally:
            call.version_header = pieces.version_header
            pieces.cancel()

    async def _converse(self, messages: Messages, call: Call) -> None:
        """Submit requests as they come, and write answers in the same order, refusals among them."""
        begun: asyncio.Queue[Pieces | MarserveError | None] = asyncio.Queue(MOST_AT_ONCE)
        unfinished: set[Pieces] = set()
        under_way = 0

        async def submit_all() -> None:
            nonlocal under_way
            number = 0
            async for message in messages:
                number += 1
                under_way += 1
                self._calls.begin_work()
                try:
                    headers, parts = self._read_sequence(message)
                    pieces = self._submit(message, call, f"{call.id}{PART_MARK}{number}", headers, parts)
                except MarserveError as error:
                    await begun.put(error)
                else:
                    unfinished.add(pieces)
                    await begun.put(pieces)
            await begun.put(None)

        async def answer_all() -> None:
            nonlocal under_way
            while (one := await begun.get()) is not None:
                try:
                    if isinstance(one, MarserveError):
                        raise one
                    while (piece := await one.next()) is not None:
                        await call.write(self._response(prediction=piece))
                except StalledReader:
                    raise
                except MarserveError as error:
                    await call.write(self._refusal(error, call))
                finally:
                    under_way -= 1
                    self._calls.end_work()
                    if isinstance(one, Pieces):
                        one.cancel()
                        unfinished.discard(one)

        submitting = asyncio.create_task(submit_all())
        answering = asyncio.create_task(answer_all())
        try:
            await asyncio.wait((submitting, answering), return_when=asyncio.FIRST_EXCEPTION)
            for task in (submitting, answering):
                if task.done():
                    task.result()
        finally:
            submitting.cancel()
            answering.cancel()
            await asyncio.wait((submitting, answering))
            for _ in range(under_way):
                self._calls.end_work()
            for pieces in unfinished:
                pieces.cancel()

    def _submit(
        self,
        message: Any,
        call: Call,
        request_id: str,
        headers: list[tuple[bytes, bytes]],
        parts: list[Part] | None = None,
    ) -> Pieces:
        """Submit a request to the data plane. Each input is a part; metadata do not reach handlers (contract §5.1)."""
        model, version = message.model_name, message.model_version or None
        if not model:
            raise BadInput("Parameter model_name is required.")
        if parts is None:
            _check_inputs(message)
            parts = [Part(name, value) for name, value in message.input.items()]
        request = call.request(parts, version, headers, request_id)
        return Pieces.of(
            lambda pieces: self._data_plane.submit(model, version, request, pieces),
            functools.partial(call.keep_time, request),
        )

    def _read_sequence(self, message: Any) -> tuple[list[tuple[bytes, bytes]], list[Part]]:
        """The sequence headers for the handler, and the inputs that do not concern the sequence.

        As over TorchServe's wire, a request ends its sequence unless an input with the name of the header says
        otherwise.
        """
        _check_inputs(message)
        names = self._sequence
        parts = []
        wishes = {names.end: b"true"}
        for name, value in message.input.items():
            if name in (names.start, names.end):
                wishes[name] = value.strip().lower()
            else:
                parts.append(Part(name, value))
        headers = [(name.encode(), b"true") for name, value in wishes.items() if value == b"true"]
        if message.sequence_id:
            headers.append((names.id.encode(), message.sequence_id.encode()))
        elif wishes.get(names.start) != b"true":
            raise BadInput(
                f"sequence_id is not given; a request of a sequence has one, or begins one with {names.start}=true "
                "among its inputs."
            )
        return headers, parts

    def _refusal(self, error: MarserveError, call: Call) -> Any:
        code, description, trailers = grpc_status(error, call.error_rules)
        response = self._response()
        response.status.code, response.status.message = code.value[0], description
        detail = self._error_info(reason=error_reason(error), domain="marserve", metadata=dict(trailers))
        packed = response.status.details.add()
        packed.type_url = f"type.googleapis.com/{detail.DESCRIPTOR.full_name}"
        packed.value = detail.SerializeToString()
        return response


def _check_inputs(message: Any) -> None:
    """Raise BadInput for more inputs than a form may have fields over HTTP."""
    if len(message.input) > MAX_PARTS:
        raise BadInput(f"The request has {len(message.input)} inputs; it may have {MAX_PARTS}.")
