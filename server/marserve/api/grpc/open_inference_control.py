"""The Open Inference Protocol's calls over gRPC that change the server: loading, unloading, shared memory, settings of
log and traces.

A port for inference answers what is in force, and takes changes only if it is open to them. What each call does is
`api/open_inference`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.json_format import ParseDict

from marserve.api.grpc.calls import Answers, Call
from marserve.api.grpc.data_types import read_parameters
from marserve.api.grpc.schema import OPEN_INFERENCE, Schema
from marserve.api.open_inference.regions import NO_CUDA, Regions, no_cuda_region
from marserve.api.open_inference.repository import Repository
from marserve.api.open_inference.server_settings import LogSettings, TraceSettings
from marserve.errors import BadInput, ControlClosed

SERVICE: Final = f"{OPEN_INFERENCE}.GRPCInferenceService"


NO_TRACES: Final = TraceSettings()


@dataclass(frozen=True, slots=True)
class ServerControl:
    """What the calls need. `check_exists` raises ModelNotFound."""

    repository: Repository
    log_settings: LogSettings
    check_exists: Callable[[str], None]
    regions: Regions
    trace_settings: TraceSettings = NO_TRACES


class GrpcOpenInferenceControl:
    """The calls, under the protocol's own name. Unless `is_open` changes are refused."""

    def __init__(self, schema: Schema, control: ServerControl, *, is_open: bool) -> None:
        self._repository = control.repository
        self._log_settings = control.log_settings
        self._trace_settings = control.trace_settings
        self._check_exists = control.check_exists
        self._regions = control.regions
        self._is_open = is_open
        self._responses = {
            name: schema.message(described.output_type.full_name) for name, described in schema.methods(SERVICE).items()
        }

    def answers(self) -> Answers:
        """The coroutine of each call that may change something."""
        return {
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "LogSettings": self._log,
            "TraceSetting": self._trace,
            "SystemSharedMemoryStatus": self._regions_status,
            "SystemSharedMemoryRegister": self._register_region,
            "SystemSharedMemoryUnregister": self._unregister_region,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._register_cuda,
            "CudaSharedMemoryUnregister": self._unregister_cuda,
        }

    def index(self) -> Answers:
        """The index of the repository, with the models that could be loaded."""
        return {"RepositoryIndex": self._index}

    async def _load(self, message: Any, call: Call) -> Any:
        self._check_open("A load")
        await self._repository.load(_named(message), read_parameters(message.parameters))
        return self._responses["RepositoryModelLoad"]()

    async def _unload(self, message: Any, call: Call) -> Any:
        self._check_open("An unload")
        await self._repository.unload(_named(message), read_parameters(message.parameters))
        return self._responses["RepositoryModelUnload"]()

    async def _index(self, message: Any, call: Call) -> Any:
        found = await self._repository.index(only_ready=message.ready)
        return self._responses["RepositoryIndex"](models=found)

    async def _log(self, message: Any, call: Call) -> Any:
        if message.settings:
            self._check_open("Another setting of the log")
            given = {name: value.WhichOneof("parameter_choice") for name, value in message.settings.items()}
            self._log_settings.change(
                {name: getattr(message.settings[name], field) if field else None for name, field in given.items()}
            )
        fields = {bool: "bool_param", int: "uint32_param", str: "string_param"}
        shown = self._log_settings.document()
        settings = {name: {fields[type(value)]: value} for name, value in shown.items()}
        return ParseDict({"settings": settings}, self._responses["LogSettings"]())

    async def _trace(self, message: Any, call: Call) -> Any:
        if message.settings:
            self._check_open("Another setting of traces")
        if message.model_name:
            self._check_exists(message.model_name)
        self._trace_settings.check({name: list(value.value) for name, value in message.settings.items()})
        settings = {
            name: {"value": value if isinstance(value, list) else [value]}
            for name, value in self._trace_settings.document().items()
        }
        return ParseDict({"settings": settings}, self._responses["TraceSetting"]())

    async def _regions_status(self, message: Any, call: Call) -> Any:
        found = {region.name: region.document() for region in self._regions.status(message.name)}
        return ParseDict({"regions": found}, self._responses["SystemSharedMemoryStatus"]())

    async def _register_region(self, message: Any, call: Call) -> Any:
        self._check_open("Registering shared memory")
        self._regions.register(message.name, message.key, message.offset, message.byte_size)
        return self._responses["SystemSharedMemoryRegister"]()

    async def _unregister_region(self, message: Any, call: Call) -> Any:
        self._check_open("Unregistering shared memory")
        if message.name:
            self._regions.unregister(message.name)
        else:
            self._regions.unregister_all()
        return self._responses["SystemSharedMemoryUnregister"]()

    async def _cuda_status(self, message: Any, call: Call) -> Any:
        if message.name:
            raise no_cuda_region(message.name)
        return self._responses["CudaSharedMemoryStatus"]()

    async def _register_cuda(self, message: Any, call: Call) -> Any:
        raise BadInput(NO_CUDA)

    async def _unregister_cuda(self, message: Any, call: Call) -> Any:
        self._check_open("Unregistering shared memory")
        return self._responses["CudaSharedMemoryUnregister"]()

    def _check_open(self, call: str) -> None:
        if not self._is_open:
            raise ControlClosed(call)


def _named(message: Any) -> str:
    if not message.model_name:
        raise BadInput("Parameter model_name is required.")
    name: str = message.model_name
    return name
