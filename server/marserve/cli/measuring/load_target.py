"""Where `bench` and `tune` send their requests, and what: the address with its key and trust, and the payloads."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlsplit

import httpx

from marserve.cli.credentials import Credentials, local_trust
from marserve.cli.measuring.grpc_target import DATA, checked, grpc_target, is_grpc, try_call
from marserve.cli.output import CommandFailed, WrongArguments
from marserve.cli.remote import Inference, Management, asked_there, find_address, is_loopback, refused
from marserve.optimise.inputs import BadInputs, content_type_of, find_inputs
from marserve.registry.intake.drawn_samples import draw_samples
from marserve.tuning.http_line import HttpTarget
from marserve.tuning.load import Target
from marserve.tuning.payloads import NoPayloads, Payload, read_payloads

if TYPE_CHECKING:
    from marserve.tuning.grpc_line import GrpcTarget

_NAME_THEM = "Name a file, or a folder of request bodies, one a file, with --inputs."


def find_place(given: str | None, config: Path | None, flag: str = "--inference") -> str:
    """The inference address, which may be one of gRPC. Raises as `find_address`, and CommandFailed without grpcio."""
    if given is not None and is_grpc(given):
        return checked(given, flag)
    return find_address("inference", given, config)


def target_at(address: str, model: str, version: str | None, input_name: str = DATA) -> Target:
    """The model at an inference address, with the key that a command sends there. Raises CommandFailed.

    `input_name` is what gRPC's `Predictions` calls a body.
    """
    parts = urlsplit(address)
    host = _host(parts.hostname)
    is_local = parts.scheme == "unix" or is_loopback(host)
    asked = next(Credentials("inference", is_local=is_local).auth_flow(httpx.Request("POST", "http://localhost")))
    key = asked.headers.get("authorization")
    if is_grpc(address):
        return grpc_target(address, host, key, is_local, model, version, input_name)
    path = f"/predictions/{quote(model, safe='')}" + (f"/{quote(version, safe='')}" if version else "")
    headers = (("authorization", key),) if key else ()
    if parts.scheme == "unix":
        return HttpTarget(path, socket=parts.path, headers=headers)
    trust = None
    if parts.scheme == "https":
        trust = local_trust() if is_local else ssl.create_default_context()
    port = parts.port or (443 if trust else 80)
    return HttpTarget(parts.path.rstrip("/") + path, host, port, tls=trust, headers=headers)


def _host(host: str | None) -> str:
    """A server that listens on all addresses is called on loopback."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", None: "localhost"}.get(host, host or "localhost")


def find_payloads(inputs: Path | None, described: dict[str, Any] | None) -> list[Payload]:
    """The payloads: users' files, else what fits the declaration in a description. Raises WrongArguments."""
    if inputs is None:
        payloads = _declared((described or {}).get("declaration"))
        if not payloads:
            raise WrongArguments("There is nothing to send: the model declares no tensors.", _NAME_THEM)
        return payloads
    try:
        if inputs.is_dir():
            return read_payloads((each.path, each.content_type) for each in find_inputs(inputs))
        return read_payloads([(inputs, content_type_of(inputs))])
    except (BadInputs, NoPayloads) as error:
        raise WrongArguments(error.message.replace("are compared", "are sent"), _NAME_THEM) from error


def _declared(declaration: dict[str, Any] | None) -> list[Payload]:
    return [
        Payload(sample.body, sample.content_type or "", f"declared {number}")
        for number, sample in enumerate(draw_samples(declaration), 1)
    ]


def described(server: Management, model: str, version: str | None) -> dict[str, Any]:
    """The description of a version, of the default one without. Raises CommandFailed for one that is not there."""
    return server.describe(model, version)[0]


def try_once(
    address: str, target: Target, model: str, version: str | None, payloads: Sequence[Payload], timeout_s: float
) -> None:
    """Send one request. Raises CommandFailed if no server answers, there is no such model, or it may not be asked."""
    first = payloads[0]
    if is_grpc(address):
        try_call(address, cast("GrpcTarget", target), first, timeout_s)
        return
    with Inference(address) as server:
        answer = server.predict(model, version, first.body, first.content_type or None, timeout_s, timeout_s)
    if answer.status_code in (401, 403, 404):
        step = asked_there(address) if answer.status_code == 404 else None
        failure = refused(answer, step)
        raise CommandFailed(failure.message, failure.next_step, **failure.detail)
