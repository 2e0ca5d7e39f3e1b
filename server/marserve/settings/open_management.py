"""Keeps management on this machine if nothing authenticates its callers (`unprotected_management=loopback`).

A client that reaches the management API can run code. An image listens on all addresses by default, because
predictions cannot use a container's loopback. For images this rule moves management to loopback instead of refusing the
start.
"""

from __future__ import annotations

from dataclasses import replace

from marserve.errors import without_stop
from marserve.settings.table import Settings
from marserve.settings.values import Address

TWO_WAYS = (
    "Two ways open it: keys for management (disable_token_authorization=false, or the variable "
    "MARSERVE_DISABLE_TOKEN_AUTHORIZATION=false where no file or flag says otherwise), or "
    "MARSERVE_ALLOW_OPEN_MANAGEMENT=true if something in front protects it"
)


def keep_management_here(settings: Settings) -> tuple[Settings, list[str]]:
    """The settings with management on loopback, if nothing protects it, and a sentence for the log.

    An address that management shares with other APIs stays: there the server checks the caller's address.
    """
    if not settings.management_is_kept_here:
        return settings, []
    address = settings.management_address
    grpc = Address("http", settings.grpc_management_address, settings.grpc_management_port)
    sentences, closed = [], settings
    if shares_its_port(settings):
        if not address.is_loopback:
            sentences.append(f"Management at {address}, which other APIs share, answers callers on this machine alone")
    elif not address.is_loopback:
        closed = _move(closed, "management_address", replace(address, host=_loopback(address.host)))
        sentences.append(f"Management listens on {closed.management_address} and not on {address}")
    if not grpc.is_loopback:
        closed = _move(closed, "grpc_management_address", _loopback(grpc.host))
        here = replace(grpc, host=closed.grpc_management_address)
        sentences.append(f"Management over gRPC listens on {_host_port(here)} and not on {_host_port(grpc)}")
    if not sentences:
        return settings, []
    why = f"tokens are off ({_why(settings)}), and any client that reaches it can run code here"
    return closed, [f"{'; '.join(sentences)}: {without_stop(why)}. {TWO_WAYS}"]


def _move(settings: Settings, name: str, place: object) -> Settings:
    """The settings with another value for this address; its origin has the change, and the given text for snapshots."""
    moved = tuple(
        replace(origin, where=f"{origin.where}, kept here by unprotected_management")
        for origin in settings.origins.get(name, ())
    )
    return replace(settings, origins={**settings.origins, name: moved}, **{name: place})  # type: ignore[arg-type]


def _host_port(address: Address) -> str:
    return str(address).removeprefix("http://")


def shares_its_port(settings: Settings) -> bool:
    """Whether inference or metrics share management's port, so that management alone cannot be moved."""
    others = [settings.inference_address]
    if settings.enable_metrics_api:
        others.append(settings.metrics_address)
    management = settings.management_address
    return any(other.scheme != "unix" and other.port == management.port for other in others)


def _loopback(host: str) -> str:
    return "::1" if ":" in host else "127.0.0.1"


def _why(settings: Settings) -> str:
    origins = settings.origins.get("disable_token_authorization")
    return f"set by {origins[-1].where}" if origins else "the default"
