"""Binds the gRPC ports, if their libraries are installed. These are imported only here, and only if needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from marserve.app.building.access import grpc_identity
from marserve.app.building.cannot_start import CannotStart, cannot_bind
from marserve.app.building.from_settings import error_rules, grpc_limits, sequence_headers, speaks_all_open_inference
from marserve.app.building.parts import Parts
from marserve.optional import is_the_packages, trouble
from marserve.settings import Settings

if TYPE_CHECKING:
    from marserve.api.grpc.listener import GrpcListener

log = logging.getLogger("marserve.app")


def bind_grpc(parts: Parts) -> list[GrpcListener]:
    """Bind the gRPC ports. Without their libraries it binds none and logs a line. Raises CannotStart, BadSettings."""
    settings = parts.settings
    try:
        from marserve.api.grpc.listener import GrpcAddress, GrpcPorts
        from marserve.api.grpc.open_inference_control import ServerControl
    except BaseException as error:  # packages that are broken, or do not fit each other, raise whatever they like
        if isinstance(error, KeyboardInterrupt) or not is_the_packages("grpc", error):
            raise
        log.warning(
            "gRPC ports %d and %d stay closed: %s; pip install 'marserve[grpc]' opens them",
            settings.grpc_inference_port,
            settings.grpc_management_port,
            trouble("grpc", error),
        )
        return []
    listeners: list[GrpcListener] = []
    control = None
    is_whole = speaks_all_open_inference(settings)
    if is_whole:
        control = ServerControl(
            parts.repository,
            parts.log_settings,
            parts.registry.data_plane.check_exists,
            parts.regions,
            parts.trace_settings,
        )
    address, name = GrpcAddress(settings.grpc_inference_address, settings.grpc_inference_port), "grpc_inference"
    try:
        ports = GrpcPorts(
            parts.registry,
            parts.logs.access,
            parts.metrics,
            identity=grpc_identity(settings),
            error_rules=error_rules(settings, parts.logs.with_own_paths),
            decoding=parts.decoding,
            ledger=parts.connections.ledger,
            request_ids=parts.request_ids,
            recorder=parts.ended,
            tracing=parts.tracing,
        )
        listeners.append(
            ports.bind_inference(
                address,
                grpc_limits(
                    settings,
                    settings.grpc_inference_max_connection_age_ms,
                    settings.grpc_inference_max_connection_age_grace_ms,
                    settings.inference_address,
                ),
                parts.access.authorize("inference"),
                has_open_inference=settings.ts_open_inference_protocol,
                is_open_inference_whole=is_whole,
                sequence=sequence_headers(settings),
                shared_tensors=parts.shared_tensors,
                control=control,
                authorize_control=parts.access.authorize("management"),
                # A caller's machine is not looked at over gRPC.
                is_control_open=settings.open_inference_control and not settings.management_is_kept_here,
            )
        )
        address = GrpcAddress(settings.grpc_management_address, settings.grpc_management_port)
        name = "grpc_management"
        listeners.append(
            ports.bind_management(
                address,
                grpc_limits(
                    settings,
                    settings.grpc_management_max_connection_age_ms,
                    settings.grpc_management_max_connection_age_grace_ms,
                    settings.management_address,
                ),
                parts.access.authorize("management"),
                enable_model_api=settings.enable_model_api,
                changes=parts.desired.changes(parts.registry),
                control=control,
            )
        )
    except OSError as error:
        raise cannot_bind(address, error, f"{name}_port", f"{name}_address") from error
    return listeners


async def accept_grpc(listener: GrpcListener) -> None:
    """Accept calls from now on. Raises CannotStart if another has listened on the port since it was bound."""
    try:
        await listener.accept()
    except OSError as error:
        key = listener.name.lower().replace(" ", "_")
        raise cannot_bind(listener.address, error, f"{key}_port", f"{key}_address") from error


def taken_grpc_ports(settings: Settings) -> Iterator[CannotStart]:
    """The errors that binding the gRPC ports would raise now; empty without their libraries."""
    try:
        from marserve.api.grpc.listener import GrpcAddress, check_free
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or not is_the_packages("grpc", error):
            raise
        return
    for name, address in {
        "grpc_inference": GrpcAddress(settings.grpc_inference_address, settings.grpc_inference_port),
        "grpc_management": GrpcAddress(settings.grpc_management_address, settings.grpc_management_port),
    }.items():
        try:
            check_free(address)
        except OSError as error:
            yield cannot_bind(address, error, f"{name}_port", f"{name}_address")
