"""Names of TorchServe's own server that handlers and tests import and hardly ever call.

They exist so that such an import does not fail. Each call raises ServerInternal: one sentence that says what the name
was part of and what to use instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn


class ServerInternal(RuntimeError):
    """A part of TorchServe's server was called, which marserve has no use for."""

    def __init__(self, name: str, instead: str) -> None:
        self.name = name
        super().__init__(f"{name} is part of TorchServe's own server, which marserve replaces. {instead}")


class _Refusing(type):
    """The type of stand-ins: their methods can be looked up, and refuse when called."""

    place: str
    instead: str

    def __getattr__(cls, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__") or "instead" not in vars(cls):
            raise AttributeError(name)
        return refusing_function(f"{cls.place}.{name}", cls.instead)


class _Internal(metaclass=_Refusing):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kind = type(self)
        raise ServerInternal(kind.place, kind.instead)


def refusing_function(place: str, instead: str) -> Callable[..., NoReturn]:
    """A function of that dotted name, which raises ServerInternal."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ServerInternal(place, instead)

    refuse.__name__ = refuse.__qualname__ = place.rpartition(".")[2]
    return refuse


# ------------------------------------------------------------------------------------------------ running handlers

_TEST_A_HANDLER = (
    "To run a handler in a test, make a ts.context.Context, call initialize(context), then handle(data, context)."
)


class Service(_Internal):
    """Ran a handler in TorchServe's worker."""

    place, instead = "ts.service.Service", _TEST_A_HANDLER


class AsyncService(_Internal):
    """Ran an asynchronous handler in TorchServe's worker."""

    place, instead = "ts.async_service.AsyncService", _TEST_A_HANDLER


class ModelLoader(_Internal):
    """Loaded handlers in TorchServe's worker."""

    place, instead = "ts.model_loader.ModelLoader", _TEST_A_HANDLER


class TsModelLoader(ModelLoader):
    """Loaded handlers in TorchServe's worker."""

    place, instead = "ts.model_loader.TsModelLoader", _TEST_A_HANDLER


class ModelLoaderFactory(_Internal):
    """Chose a model loader in TorchServe's worker."""

    place, instead = "ts.model_loader.ModelLoaderFactory", _TEST_A_HANDLER


class TorchModelServiceWorker(_Internal):
    """TorchServe's worker process."""

    place = "ts.model_service_worker.TorchModelServiceWorker"
    instead = "marserve starts its workers itself; minWorkers and maxWorkers say how many."


predict = refusing_function("ts.async_service.predict", _TEST_A_HANDLER)

MAX_FAILURE_THRESHOLD = 5
SOCKET_ACCEPT_TIMEOUT = 30.0
DEBUG = False
BENCHMARK = os.getenv("TS_BENCHMARK") in ("True", "true", "TRUE")
LOCAL_RANK = int(os.getenv("LOCAL_RANK", "0"))
WORLD_SIZE = int(os.getenv("WORLD_SIZE", "0"))
WORLD_RANK = int(os.getenv("RANK", "0"))
LOCAL_WORLD_SIZE = int(os.getenv("LOCAL_WORLD_SIZE", "0"))


TS_NAMESPACE = "org.pytorch.serve.ModelServer"
"""What is looked for in command lines to find a server that runs."""


class ArgParser(_Internal):
    """Read the command line of TorchServe and of its workers."""

    place = "ts.arg_parser.ArgParser"
    instead = "`torchserve --help` lists the flags; ts.launcher.start starts a server from Python."


# ------------------------------------------------------------------------------------------------------- the wire

_SEND_PIECES = (
    "A handler answers by returning a list, and streams with ts.handler_utils.utils.send_intermediate_predict_response."
)

bool_size = 1
int_size = 4
END_OF_LIST = -1
LOAD_MSG = b"L"
PREDICT_MSG = b"I"
RESPONSE = 3

_WIRE = "ts.protocol.otf_message_handler"
retrieve_msg = refusing_function(f"{_WIRE}.retrieve_msg", _SEND_PIECES)
encode_response_headers = refusing_function(f"{_WIRE}.encode_response_headers", _SEND_PIECES)
create_predict_response = refusing_function(f"{_WIRE}.create_predict_response", _SEND_PIECES)
create_load_model_response = refusing_function(f"{_WIRE}.create_load_model_response", _SEND_PIECES)
_retrieve_buffer = refusing_function(f"{_WIRE}._retrieve_buffer", _SEND_PIECES)
_retrieve_int = refusing_function(f"{_WIRE}._retrieve_int", _SEND_PIECES)
_retrieve_bool = refusing_function(f"{_WIRE}._retrieve_bool", _SEND_PIECES)
_retrieve_load_msg = refusing_function(f"{_WIRE}._retrieve_load_msg", _SEND_PIECES)
_retrieve_inference_msg = refusing_function(f"{_WIRE}._retrieve_inference_msg", _SEND_PIECES)
_retrieve_request = refusing_function(f"{_WIRE}._retrieve_request", _SEND_PIECES)
_retrieve_reqest_header = refusing_function(f"{_WIRE}._retrieve_reqest_header", _SEND_PIECES)
_retrieve_input_data = refusing_function(f"{_WIRE}._retrieve_input_data", _SEND_PIECES)

# ------------------------------------------------------------------------------------------- figures of the machine

_FIGURES = "marserve measures the machine and its workers itself; the metrics API at port 8082 has the figures."

system_metrics: list[Any] = []
"""Where TorchServe gathered figures of the machine; always empty."""

_MACHINE = "ts.metrics.system_metrics"
cpu_utilization = refusing_function(f"{_MACHINE}.cpu_utilization", _FIGURES)
memory_used = refusing_function(f"{_MACHINE}.memory_used", _FIGURES)
memory_available = refusing_function(f"{_MACHINE}.memory_available", _FIGURES)
memory_utilization = refusing_function(f"{_MACHINE}.memory_utilization", _FIGURES)
disk_used = refusing_function(f"{_MACHINE}.disk_used", _FIGURES)
disk_utilization = refusing_function(f"{_MACHINE}.disk_utilization", _FIGURES)
disk_available = refusing_function(f"{_MACHINE}.disk_available", _FIGURES)
collect_gpu_metrics = refusing_function(f"{_MACHINE}.collect_gpu_metrics", _FIGURES)
collect_all = refusing_function(f"{_MACHINE}.collect_all", _FIGURES)
get_cpu_usage = refusing_function("ts.metrics.process_memory_metric.get_cpu_usage", _FIGURES)
check_process_mem_usage = refusing_function("ts.metrics.process_memory_metric.check_process_mem_usage", _FIGURES)

# --------------------------------------------------------------------------------------------------- environments

_ENVIRONMENTS = "marserve makes a model's environment itself where install_py_dep_per_model asks for it."

create_venv = refusing_function("ts.utils.setup_model_venv.create_venv", _ENVIRONMENTS)
inherit_site_packages = refusing_function("ts.utils.setup_model_venv.inherit_site_packages", _ENVIRONMENTS)
