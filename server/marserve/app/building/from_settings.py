"""Makes the parts' options of the settings. Each function is pure; nothing is started here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from marserve.api.byte_ledger import UNBOUNDED
from marserve.api.errors import ErrorRules
from marserve.api.http.request_head import HttpLimits
from marserve.api.rest.platforms.sagemaker import Endpoint
from marserve.archive.reading.reader import Limits
from marserve.machine.describe import Machine
from marserve.model_options import Said, said_in
from marserve.pool.launchers.remote.cluster import ClusterOptions
from marserve.registry.intake.call_modes import SequenceHeaderNames
from marserve.registry.intake.registration import RegistryOptions
from marserve.settings import KEYS, Address, Settings
from marserve.settings.report import workers_at_start
from marserve.telemetry.logs.access_log import Sampling

if TYPE_CHECKING:
    from marserve.api.grpc.transport.limits import GrpcLimits

# The key that commands send. Neither a server that inherits the variable nor its workers need it.
TOKEN_VARIABLE = "MARSERVE_TOKEN"


def worker_environment(settings: Settings) -> dict[str, str]:
    """The environment of workers: the server's, with what handlers look for, and without the variables that the
    operator hides and the server's own secrets.
    """
    hidden = settings.blacklist_env_vars
    secrets = {TOKEN_VARIABLE}.union(*((key.env, key.ts_env) for key in KEYS.values() if key.is_secret))
    secrets |= settings.stores.variables
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in secrets and (hidden is None or hidden.fullmatch(name) is None)
    }
    environment["TS_DECODE_INPUT_REQUEST"] = str(settings.decode_input_request).lower()
    environment["TS_IPEX_ENABLE"] = str(settings.ipex_enable).lower()
    environment["TS_IPEX_GPU_ENABLE"] = str(settings.ipex_gpu_enable).lower()
    # Without this onnxruntime reports its use to its makers as soon as it is imported.
    environment["ORT_DISABLE_TELEMETRY"] = "1"
    return environment


def environment_folder(settings: Settings) -> Path | None:
    """The folder for the packages of archives: by the setting, else in the user's cache; None without a home."""
    if settings.environment_folder is not None:
        return settings.environment_folder
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return cache / "marserve" / "environments"


def error_rules(settings: Settings, with_own_paths: Callable[[str], str] | None = None) -> ErrorRules:
    """What settings say of errors for clients. `with_own_paths` is that of the logs."""
    return ErrorRules(
        settings.unavailable_status,
        settings.handler_error_status,
        settings.expose_errors,
        as_recorded=settings.entry == "torchserve",
        with_own_paths=with_own_paths or str,
    )


def cluster_options(settings: Settings) -> ClusterOptions:
    """How to reach a Ray cluster, and how its nodes reach this server."""
    return ClusterOptions(
        settings.ray_address,
        settings.ray_connect_timeout,
        settings.ray_listen,
        settings.ray_advertise,
        settings.ray_tls,
        settings.ray_cache,
        settings.ray_cache_size,
        settings.stores,
    )


def takes_uploads(settings: Settings) -> bool:
    """Whether clients may upload archives: where they may also register them."""
    return settings.allow_uploads != "false" and settings.enable_model_api


def sampling_of(settings: Settings) -> Sampling | None:
    """Which requests have a line in the access log; None for all."""
    if settings.access_log_sample >= 1:
        return None
    return Sampling(settings.access_log_sample, settings.access_log_slow * 1000)


def http_limits(settings: Settings, *, has_management: bool = False) -> HttpLimits:
    """The limits of a client, from the settings. Only listeners with management take uploads."""
    return HttpLimits(
        header_bytes=settings.max_header_bytes,
        header_lines=settings.max_header_lines,
        request_line_bytes=settings.max_request_line,
        body_bytes=settings.max_request_size,
        upload_bytes=settings.max_upload_size if has_management and takes_uploads(settings) else 0,
        connections=settings.max_connections,
        connections_per_address=settings.max_connections_per_address,
        header_timeout_s=settings.header_timeout,
        body_timeout_s=settings.body_timeout,
        body_bytes_per_s=settings.min_body_rate,
        keep_alive_s=settings.keep_alive_timeout,
    )


def most_bytes_in_flight(settings: Settings, machine: Machine) -> int:
    """The most bytes of requests and answers that the server may hold; a quarter of the memory if not set."""
    if settings.max_bytes_in_flight == "auto":
        return machine.memory_bytes // 4 or UNBOUNDED
    return settings.max_bytes_in_flight or UNBOUNDED


def grpc_limits(settings: Settings, age_ms: int | None, age_grace_ms: int | None, rest: Address) -> GrpcLimits:
    """The limits of a gRPC client, from the settings. `rest` is the address of the same API over HTTP/1.1."""
    from marserve.api.grpc.transport.limits import GrpcLimits

    return GrpcLimits(
        message_bytes=settings.max_request_size,
        header_bytes=settings.max_header_bytes,
        connections=settings.max_connections,
        calls_per_connection=settings.grpc_max_calls_per_connection,
        age_s=None if age_ms is None else age_ms / 1000,
        age_grace_s=None if age_grace_ms is None else age_grace_ms / 1000,
        idle_s=None if settings.grpc_max_connection_idle_ms is None else settings.grpc_max_connection_idle_ms / 1000,
        keepalive_s=settings.grpc_keepalive_time,
        keepalive_timeout_s=settings.grpc_keepalive_timeout,
        least_ping_interval_s=settings.grpc_min_ping_interval,
        rest=str(rest) if rest.port else "",
    )


def speaks_all_open_inference(settings: Settings) -> bool:
    """Whether the Open Inference Protocol is spoken in full; TorchServe's part of it may be without that."""
    return settings.ts_open_inference_protocol and settings.entry == "marserve"


def cors_headers(settings: Settings) -> tuple[list[tuple[str, str]], list[str]]:
    """The CORS headers of every answer, with the settings' values unchanged, and the origins if they are a list.

    Under `torchserve` a list is one value, as recorded.
    """
    origins = list(settings.cors_origins) if settings.entry == "marserve" else []
    one = "*" if "*" in origins else origins[0] if len(origins) == 1 else settings.cors_allowed_origin
    headers = {
        "Access-Control-Allow-Origin": one,
        "Access-Control-Allow-Methods": settings.cors_allowed_methods,
        "Access-Control-Allow-Headers": settings.cors_allowed_headers,
    }
    is_list = len(origins) > 1 and "*" not in origins
    return [(name, value) for name, value in headers.items() if value], origins if is_list else []


def sagemaker_endpoint(settings: Settings, environment: Mapping[str, str]) -> Endpoint:
    """The options of a SageMaker endpoint, among them whether it serves many models."""
    file = (settings.default_service_handler or "").partition(":")[0]
    return Endpoint(
        concurrent_transforms=settings.NUM_WORKERS or 1,
        max_request_bytes=settings.max_request_size,
        # The plug-in's variable, and SageMaker's own.
        is_multi_model=any(
            environment.get(name, "").lower() not in ("", "false")
            for name in ("SAGEMAKER_MULTI_MODE", "SAGEMAKER_MULTI_MODEL")
        ),
        service_file=settings.working_directory / file if file.endswith(".py") or "/" in file else None,
    )


def archive_limits(settings: Settings) -> Limits:
    """The bounds of an archive, from the settings."""
    return Limits(max_entries=settings.max_archive_entries, max_total_bytes=settings.max_archive_bytes)


def sequence_headers(settings: Settings) -> SequenceHeaderNames:
    """The names of the headers with which a request names its sequence."""
    return SequenceHeaderNames(
        settings.ts_header_key_sequence_id,
        settings.ts_header_key_sequence_start,
        settings.ts_header_key_sequence_end,
    )


def registry_options(settings: Settings, machine: Machine, devices: int) -> RegistryOptions:
    """The registry's options."""
    workers = settings.default_workers_per_model
    return RegistryOptions(
        workers_by_api=workers or 0,
        workers_at_startup=workers_at_start(settings, cores=machine.cores, accelerators=devices),
        defaults=Said({option.attribute: getattr(settings, option.setting or "") for option in said_in("server")}),
        unregister_timeout_s=settings.unregister_model_timeout,
        swap_order=settings.swap_order,
        undo_window_s=settings.undo_window,
        as_torchserve=settings.entry == "torchserve",
        default_handler=settings.default_service_handler,
        envelope=settings.service_envelope,
        decode_input=settings.decode_input_request,
        limit_max_image_pixels=settings.limit_max_image_pixels,
        max_answer_bytes=settings.max_response_size,
        threads=settings.worker_threads,
        gpu_count=devices,
        refuses_missing_devices=settings.entry == "marserve",
        mig_instances=frozenset(number for number, device in enumerate(machine.devices) if device.is_instance),
        models=settings.models,
        sequence_headers=sequence_headers(settings),
        installs_requirements=settings.install_py_dep_per_model,
        default_requirements=settings.default_requirements_file,
        allowed_urls=settings.allowed_urls,
    )
