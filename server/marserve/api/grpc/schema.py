"""The messages and services that gRPC clients know, as tables, and the classes made of them (contract §5.1 to §5.3).

Clients have compiled in the names, numbers and types; marserve's own numbers begin at 1001. No file is read. The
descriptors are in a pool of their own, so that other imported modules cannot clash with them. Reflection shows that
pool.

A field is written `number name type`. Types are protobuf's words and names of messages. After a type, `*` means
repeated, `?` optional, `|` one of the message's alternatives. `map<…>` maps strings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, empty_pb2, message_factory
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

INFERENCE: Final = "org.pytorch.serve.grpc.inference"
MANAGEMENT: Final = "org.pytorch.serve.grpc.management"
# TorchServe gave the protocol's service a name of its own, which clients of the standard do not know.
OPEN_INFERENCE_OF_TORCHSERVE: Final = "org.pytorch.serve.grpc.openinference"
OPEN_INFERENCE: Final = "inference"

EMPTY: Final = ".google.protobuf.Empty"
RPC_STATUS: Final = ".google.rpc.Status"

Fields = tuple[str, ...]
Messages = Mapping[str, "Fields | Messages"]


class Method(NamedTuple):
    """One method of a service: its messages, and which side sends a stream of them."""

    request: str
    response: str
    streams_requests: bool = False
    streams_responses: bool = False


class File(NamedTuple):
    """The content of a `.proto` file."""

    name: str
    package: str
    messages: Messages
    service: str
    methods: Mapping[str, Method]
    imports: tuple[str, ...] = ()


_INFERENCE_MESSAGES: Messages = {
    "PredictionsRequest": (
        "1 model_name string",
        "2 model_version string",
        "3 input map<bytes>",
        "4 sequence_id string?",
    ),
    "PredictionResponse": ("1 prediction bytes", "2 sequence_id string?", f"3 status {RPC_STATUS}?"),
    "TorchServeHealthResponse": ("1 health string",),
}

_MANAGEMENT_MESSAGES: Messages = {
    "ManagementResponse": ("1 msg string",),
    "DescribeModelRequest": ("1 model_name string", "2 model_version string", "3 customized bool"),
    "ListModelsRequest": ("1 limit int32", "2 next_page_token int32"),
    "RegisterModelRequest": (
        "1 batch_size int32",
        "2 handler string",
        "3 initial_workers int32",
        "4 max_batch_delay int32",
        "5 model_name string",
        "6 response_timeout int32",
        "7 runtime string",
        "8 synchronous bool",
        "9 url string",
        "10 s3_sse_kms bool",
        "11 startup_timeout int32",
        # marserve's own, far above any number that TorchServe may add.
        "1001 memory string",
        "1002 load string",
        "1003 pinned bool",
    ),
    "ScaleWorkerRequest": (
        "1 model_name string",
        "2 model_version string",
        "3 max_worker int32",
        "4 min_worker int32",
        "5 number_gpu int32",
        "6 synchronous bool",
        "7 timeout int32",
    ),
    "SetDefaultRequest": ("1 model_name string", "2 model_version string"),
    "UnregisterModelRequest": ("1 model_name string", "2 model_version string"),
}

_TENSOR: Fields = ("1 name string", "2 datatype string", "3 shape int64*")
_FILLED_TENSOR: Fields = (*_TENSOR, "4 parameters map<InferParameter>", "5 contents InferTensorContents")

_OPEN_INFERENCE_MESSAGES: Messages = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": ("1 live bool",),
    "ServerReadyRequest": (),
    "ServerReadyResponse": ("1 ready bool",),
    "ModelReadyRequest": ("1 name string", "2 version string"),
    "ModelReadyResponse": ("1 ready bool",),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": ("1 name string", "2 version string", "3 extensions string*"),
    "ModelMetadataRequest": ("1 name string", "2 version string"),
    "ModelMetadataResponse": {
        "": (
            "1 name string",
            "2 versions string*",
            "3 platform string",
            "4 inputs ModelMetadataResponse.TensorMetadata*",
            "5 outputs ModelMetadataResponse.TensorMetadata*",
        ),
        "TensorMetadata": _TENSOR,
    },
    "InferParameter": ("1 bool_param bool|", "2 int64_param int64|", "3 string_param string|"),
    "InferTensorContents": (
        "1 bool_contents bool*",
        "2 int_contents int32*",
        "3 int64_contents int64*",
        "4 uint_contents uint32*",
        "5 uint64_contents uint64*",
        "6 fp32_contents float*",
        "7 fp64_contents double*",
        "8 bytes_contents bytes*",
    ),
    "ModelInferRequest": {
        "": (
            "1 model_name string",
            "2 model_version string",
            "3 id string",
            "4 parameters map<InferParameter>",
            "5 inputs ModelInferRequest.InferInputTensor*",
            "6 outputs ModelInferRequest.InferRequestedOutputTensor*",
            "7 raw_input_contents bytes*",
        ),
        "InferInputTensor": _FILLED_TENSOR,
        "InferRequestedOutputTensor": ("1 name string", "2 parameters map<InferParameter>"),
    },
    "ModelInferResponse": {
        "": (
            "1 model_name string",
            "2 model_version string",
            "3 id string",
            "4 parameters map<InferParameter>",
            "5 outputs ModelInferResponse.InferOutputTensor*",
            "6 raw_output_contents bytes*",
        ),
        "InferOutputTensor": _FILLED_TENSOR,
    },
}

_OPEN_INFERENCE_METHODS = {
    name: Method(f"{name}Request", f"{name}Response")
    for name in ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")
}

FILES: Final = (
    File(
        "org/pytorch/serve/grpc/inference.proto",
        INFERENCE,
        _INFERENCE_MESSAGES,
        "InferenceAPIsService",
        {
            "Ping": Method(EMPTY, "TorchServeHealthResponse"),
            "Predictions": Method("PredictionsRequest", "PredictionResponse"),
            "StreamPredictions": Method("PredictionsRequest", "PredictionResponse", False, True),
            "StreamPredictions2": Method("PredictionsRequest", "PredictionResponse", True, True),
        },
        (empty_pb2.DESCRIPTOR.name, status_pb2.DESCRIPTOR.name),
    ),
    File(
        "org/pytorch/serve/grpc/management.proto",
        MANAGEMENT,
        _MANAGEMENT_MESSAGES,
        "ManagementAPIsService",
        {
            name: Method(f"{name}Request", "ManagementResponse")
            for name in ("DescribeModel", "ListModels", "RegisterModel", "ScaleWorker", "SetDefault", "UnregisterModel")
        },
    ),
    File(
        "org/pytorch/serve/grpc/open_inference.proto",
        OPEN_INFERENCE_OF_TORCHSERVE,
        _OPEN_INFERENCE_MESSAGES,
        "GRPCInferenceService",
        _OPEN_INFERENCE_METHODS,
    ),
    File(
        "inference/open_inference.proto",
        OPEN_INFERENCE,
        _OPEN_INFERENCE_MESSAGES,
        "GRPCInferenceService",
        _OPEN_INFERENCE_METHODS,
    ),
)

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
    "float": _Field.TYPE_FLOAT,
    "double": _Field.TYPE_DOUBLE,
}


class Schema:
    """Message classes and method descriptions by full name."""

    def __init__(self, files: Sequence[File] = FILES) -> None:
        self.pool = descriptor_pool.DescriptorPool()
        for known in (any_pb2, empty_pb2, status_pb2, health_pb2, reflection_pb2):
            self.pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
        for file in files:
            self.pool.AddSerializedFile(_describe_file(file).SerializeToString())

    def message(self, full_name: str) -> Any:
        """The class of a message. Raises KeyError."""
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(full_name.removeprefix(".")))

    def methods(self, service: str) -> dict[str, Any]:
        """The methods of a service by name: protobuf's descriptions. Raises KeyError."""
        return dict(self.pool.FindServiceByName(service).methods_by_name)


def _describe_file(file: File) -> Any:
    described = descriptor_pb2.FileDescriptorProto(
        name=file.name, package=file.package, syntax="proto3", dependency=file.imports
    )
    for name, fields in file.messages.items():
        _describe_message(described.message_type.add(name=name), fields, file.package, f".{file.package}.{name}")
    service = described.service.add(name=file.service)
    for name, method in file.methods.items():
        service.method.add(
            name=name,
            input_type=_full_name(method.request, file.package),
            output_type=_full_name(method.response, file.package),
            client_streaming=method.streams_requests,
            server_streaming=method.streams_responses,
        )
    return described


def _describe_message(message: Any, fields: Fields | Messages, package: str, full_name: str) -> None:
    if isinstance(fields, Mapping):
        for name, inner in fields.items():
            if name:
                _describe_message(message.nested_type.add(name=name), inner, package, f"{full_name}.{name}")
        own = fields[""]
        assert isinstance(own, tuple)
        fields = own
    optional = []
    for line in fields:
        number, name, kind = line.split()
        field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
        if kind.startswith("map<"):
            entry = "".join(word.capitalize() for word in name.split("_")) + "Entry"
            _describe_map(message.nested_type.add(name=entry), kind[4:-1], package)
            field.label = _Field.LABEL_REPEATED
            field.type, field.type_name = _Field.TYPE_MESSAGE, f"{full_name}.{entry}"
            continue
        if kind.endswith("*"):
            field.label = _Field.LABEL_REPEATED
        elif kind.endswith("|"):
            if not message.oneof_decl:
                message.oneof_decl.add(name="parameter_choice")
            field.oneof_index = 0
        elif kind.endswith("?"):
            optional.append(field)
        _set_type(field, kind.rstrip("*?|"), package)
    for field in optional:  # after the true alternatives, as the format asks
        field.oneof_index = len(message.oneof_decl)
        field.proto3_optional = True
        message.oneof_decl.add(name=f"_{field.name}")


def _describe_map(entry: Any, kind: str, package: str) -> None:
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
    _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind, package)


def _set_type(field: Any, kind: str, package: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, _full_name(kind, package)


def _full_name(name: str, package: str) -> str:
    return name if name.startswith(".") else f".{package}.{name}"
