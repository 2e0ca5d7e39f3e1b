"""The Open Inference Protocol over gRPC: from tensors to a JSON request of the data plane, and back (contract §5.3).

A handler gets one part `body` of `application/json`, as over HTTP, and answers JSON; the envelope `kservev2` reads and
writes it. Tensors come in typed contents or raw. Those of the answer are raw if the request's were, or if a data type
(FP16) has no typed form.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from google.protobuf.json_format import ParseDict

from marserve import __version__
from marserve.api.decoding import Decoding
from marserve.api.grpc.answers import Pieces
from marserve.api.grpc.calls import Answers, Call, Calls
from marserve.api.grpc.data_types import (
    DATA_TYPES,
    DataType,
    bad_answer,
    is_shared,
    join_elements,
    raw_contents,
    read_parameters,
    split_elements,
    write_parameters,
)
from marserve.api.grpc.dialogues.infer_stream import InferStream
from marserve.api.grpc.errors import ReportedInternal
from marserve.api.grpc.raw_tensors import LENGTH_HEADER, RAW_TYPE, write_body
from marserve.api.grpc.raw_tensors import fill_response as fill_raw
from marserve.api.grpc.schema import OPEN_INFERENCE_OF_TORCHSERVE, Schema
from marserve.api.open_inference.documents import (
    config_document,
    index_document,
    metadata_document,
    server_document,
    statistics_document,
    versions_of,
)
from marserve.api.open_inference.mark import MARK
from marserve.api.open_inference.request_parameters import NOTHING, read_asked
from marserve.api.open_inference.shared_tensors import SharedTensors
from marserve.errors import BadInput, ModelNotFound, VersionNotFound
from marserve.messages import Part, Request
from marserve.registry.intake.call_modes import PLAIN_NAMES, SequenceHeaderNames
from marserve.registry.models import Registry

JSON_TYPE: Final = "application/json"


class GrpcOpenInference:
    """The methods of the service, under the name that `package` gives it.

    With `is_whole` (`marserve`) models tell and take the tensors that they declare; else as TorchServe's service does.
    """

    def __init__(
        self,
        schema: Schema,
        calls: Calls,
        registry: Registry,
        package: str,
        decoding: Decoding | None = None,
        *,
        is_whole: bool = False,
        sequence: SequenceHeaderNames = PLAIN_NAMES,
        shared_tensors: SharedTensors | None = None,
    ) -> None:
        """`sequence` are the headers in which a handler finds the sequence that a request's parameters name.

        `shared_tensors` finds the shared memory that requests name, None if the server takes none.
        """
        self._shared_tensors = shared_tensors
        self._sequence = sequence
        self._decoding = decoding or Decoding()
        self._calls = calls
        self._registry = registry
        self._is_whole = is_whole
        self.name = f"{package}.GRPCInferenceService"
        self._data_plane = registry.data_plane
        self._is_torchserves = package == OPEN_INFERENCE_OF_TORCHSERVE
        self._responses = {
            name: schema.message(described.output_type.full_name)
            for name, described in schema.methods(self.name).items()
        }

    def answers(self) -> Answers:
        """The coroutine of each method."""
        return {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
            **(self._further() if self._is_whole and not self._is_torchserves else {}),
        }

    def _further(self) -> Answers:
        """The methods that TorchServe's service does not have."""
        stream = InferStream(self._calls, self._submit, self._fill, self._responses["ModelStreamInfer"])
        return {
            "ModelStreamInfer": stream.answer,
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
        }

    async def _live(self, _: Any, call: Call) -> Any:
        return self._responses["ServerLive"](live=True)

    async def _ready(self, _: Any, call: Call) -> Any:
        return self._responses["ServerReady"](ready=True)

    async def _server_metadata(self, _: Any, call: Call) -> Any:
        if self._is_whole:
            return self._responses["ServerMetadata"](**server_document(shares_memory=self._shared_tensors is not None))
        return self._responses["ServerMetadata"](
            name="marserve", version=__version__, extensions=["kserve", "kubeflow"]
        )

    async def _model_ready(self, message: Any, call: Call) -> Any:
        if not message.name:
            raise BadInput("Parameter name is required.")
        try:
            is_ready = self._data_plane.is_model_ready(message.name, message.version or None)
        except (ModelNotFound, VersionNotFound):
            if self._is_torchserves or not self._is_whole:
                raise
            is_ready = False  # as Triton says; its clients ask for a model that is to come
        return self._responses["ModelReady"](ready=is_ready)

    async def _model_metadata(self, message: Any, call: Call) -> Any:
        if not message.name:
            raise BadInput("Parameter name is required.")
        self._data_plane.check_exists(message.name, message.version or None)
        versions = self._data_plane.version_names(message.name)
        if not self._is_whole:
            return self._responses["ModelMetadata"](name=message.name, versions=versions)
        declaration = self._registry.declaration_of(message.name, message.version or None)
        # The protocol's messages have no parameters of tensors.
        document = metadata_document(message.name, versions, declaration, has_parameters=False)
        return self._responses["ModelMetadata"](**document)

    async def _config(self, message: Any, call: Call) -> Any:
        if not message.name:
            raise BadInput("Parameter name is required.")
        described = self._registry.describe(message.name, message.version or None)
        declaration = self._registry.declaration_of(message.name, message.version or None)
        return ParseDict({"config": config_document(described, declaration)}, self._responses["ModelConfig"]())

    async def _statistics(self, message: Any, call: Call) -> Any:
        counts = self._registry.version_metrics(message.name or None, message.version or None)
        found = [statistics_document(each) for each in counts]
        return ParseDict({"model_stats": found}, self._responses["ModelStatistics"](), ignore_unknown_fields=True)

    async def _index(self, message: Any, call: Call) -> Any:
        found = index_document(versions_of(self._registry), only_ready=message.ready)
        return self._responses["RepositoryIndex"](models=found)

    async def _infer(self, message: Any, call: Call) -> Any:
        """Return one answer. Of a streaming handler that is the first piece, and the job is cancelled."""
        pieces = await self._submit(message, call)
        try:
            body = await pieces.next()
        finally:
            call.version_header = pieces.version_header
            pieces.cancel()
        response = self._responses["ModelInfer"]()
        await self._fill(message, pieces, body or b"", response)
        return response

    async def _submit(self, message: Any, call: Call) -> Pieces:
        model, version = message.model_name, message.model_version or None
        if not model:
            raise BadInput("Parameter model_name is required.")
        try:
            request = await self._request(message, call)
            return Pieces.of(
                lambda pieces: self._data_plane.submit(model, version, request, pieces),
                functools.partial(call.keep_time, request),
            )
        except (ModelNotFound, VersionNotFound) as error:
            raise ReportedInternal(error) if self._is_torchserves else error from None

    async def _fill(self, message: Any, pieces: Pieces, body: bytes, response: Any) -> None:
        """Write one piece of an answer into a `ModelInferResponse`. Raises HandlerFailed."""
        length_of_json = next((value for name, value in pieces.headers if name == LENGTH_HEADER), None)
        if length_of_json is None and any(is_shared(output) for output in message.outputs):
            # All outputs are there, and the body is their description.
            length_of_json = str(len(body))
        if length_of_json is not None:
            await self._decoding.run(len(body), fill_raw, response, message, body, length_of_json)
        else:
            await self._decoding.run(len(body), fill_response, response, message, body)

    async def _request(self, message: Any, call: Call) -> Request:
        """The request for the data plane: raw tensors for a model that declares its own, else JSON."""
        model, version = message.model_name, message.model_version or None
        asked = NOTHING
        if self._is_whole and message.parameters:
            asked = read_asked(read_parameters(message.parameters), self._sequence)
            call.ask(asked.timeout_s, asked.priority)
        if self._is_whole and self._registry.takes_tensors(model, version):
            body, length = await self._decoding.run(call.message_bytes, write_body, message)
            headers = [(LENGTH_HEADER.encode(), str(length).encode())]
            marks = [MARK]
            if self._shared_tensors is not None:
                header = self._shared_tensors.header(model, version or call.wishes.asked_version, body, length)
                marks += [] if header is None else [header]
            return call.request([Part("body", body, RAW_TYPE)], version, asked.headers(headers), server_headers=marks)
        if self._is_whole and any(is_shared(tensor) for tensor in (*message.inputs, *message.outputs)):
            raise BadInput(
                f"The model {model!r} takes no tensors in shared memory, as it does not declare its tensors; send them "
                "in the message."
            )
        document = await self._decoding.run(call.message_bytes, write_request, message)
        return call.request([Part("body", document, JSON_TYPE)], version, asked.headers([]))


def write_request(message: Any) -> bytes:
    """A `ModelInferRequest` as the protocol's JSON. Raises BadInput for tensors that cannot be read."""
    raw = raw_contents(message)
    is_finite = True
    inputs = []
    for number, tensor in enumerate(message.inputs):
        kind = _type_of(tensor)
        data = _read_raw(tensor, kind, raw[number]) if raw else _read_contents(tensor, kind)
        # JSON has no NaN and Infinity; Python's reader accepts them.
        is_finite = is_finite and (tensor.datatype not in ("FP16", "FP32", "FP64") or math.isfinite(sum(data)))
        described = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype, "data": data}
        inputs.append(_with_parameters(described, tensor.parameters))
    document = _with_parameters(
        {"id": message.id, "model_name": message.model_name, "inputs": inputs}, message.parameters
    )
    if message.outputs:
        document["outputs"] = [_with_parameters({"name": one.name}, one.parameters) for one in message.outputs]
    return msgspec.json.encode(document) if is_finite else json.dumps(document).encode()


def fill_response(response: Any, message: Any, body: bytes) -> None:
    """Write a handler's JSON answer into a `ModelInferResponse`. Raises HandlerFailed if it cannot be read as one.

    `id` and `model_name` are the request's if the answer leaves them out.
    """
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            document = json.loads(body)  # for NaN and Infinity
        except (ValueError, RecursionError):
            raise bad_answer("it is no JSON") from None
    if not isinstance(document, dict) or not isinstance(document.get("outputs"), list):
        raise bad_answer("it is no object with a list `outputs`")
    response.id = str(document.get("id") or message.id)
    response.model_name = str(document.get("model_name") or message.model_name)
    response.model_version = str(document.get("model_version") or message.model_version)
    write_parameters(response.parameters, document.get("parameters"))
    read = [_read_output(output) for output in document["outputs"]]
    is_raw = bool(message.raw_input_contents) or any(not kind.field for _, kind, _ in read)
    for output, kind, data in read:
        try:
            tensor = response.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
            write_parameters(tensor.parameters, output.get("parameters"), without=("binary_data_size",))
            if is_raw:
                response.raw_output_contents.append(_write_raw(kind, data))
            else:
                getattr(tensor.contents, kind.field).extend(data)
        except (KeyError, TypeError, ValueError, struct.error, OverflowError) as error:
            raise bad_answer(f"output {output.get('name')!r} cannot be written ({error})") from None


def _type_of(tensor: Any) -> DataType:
    kind = DATA_TYPES.get(tensor.datatype)
    if kind is None:
        raise BadInput(
            f"Input {tensor.name!r} has datatype {tensor.datatype!r}; it must be one of {', '.join(DATA_TYPES)}."
        )
    return kind


def _read_contents(tensor: Any, kind: DataType) -> list[Any]:
    if not kind.field:
        raise BadInput(f"Input {tensor.name!r} is {tensor.datatype}, which travels in raw_input_contents only.")
    values = getattr(tensor.contents, kind.field)
    return [_in_json(value) for value in values] if tensor.datatype == "BYTES" else list(values)


def _read_raw(tensor: Any, kind: DataType, raw: bytes) -> list[Any]:
    if not kind.code:
        try:
            return [_in_json(element) for element in split_elements(raw)]
        except ValueError:
            raise BadInput(f"The raw contents of input {tensor.name!r} end in the middle of an element.") from None
    count, rest = divmod(len(raw), struct.calcsize(f"<{kind.code}"))
    if rest:
        raise BadInput(f"The raw contents of input {tensor.name!r} are no whole number of {tensor.datatype} values.")
    return list(struct.unpack(f"<{count}{kind.code}", raw))


def _in_json(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _with_parameters(document: dict[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    if parameters:
        document["parameters"] = read_parameters(parameters)
    return document


def _read_output(output: Any) -> tuple[dict[str, Any], DataType, list[Any]]:
    if not isinstance(output, dict) or not isinstance(output.get("data"), list):
        raise bad_answer("an output is no object with a list `data`")
    kind = DATA_TYPES.get(str(output.get("datatype")))
    if kind is None:
        raise bad_answer(f"output {output.get('name')!r} has datatype {output.get('datatype')!r}")
    data = list(_flat(output["data"]))
    if kind is DATA_TYPES["BYTES"]:
        data = [value.encode() if isinstance(value, str) else msgspec.json.encode(value) for value in data]
    return output, kind, data


def _flat(data: list[Any]) -> Iterator[Any]:
    for value in data:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value


def _write_raw(kind: DataType, data: list[Any]) -> bytes:
    if kind.code:
        return struct.pack(f"<{len(data)}{kind.code}", *data)
    return join_elements(data)
