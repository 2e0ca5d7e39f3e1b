"""Where `bench` sends calls over gRPC, and how a request body becomes one.

It needs grpcio, which the server does not: `needed` says so where it is missing.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from marserve.cli.credentials import TOKEN_VARIABLE, local_trust
from marserve.cli.output import CommandFailed, WrongArguments
from marserve.cli.remote import QUICK_S
from marserve.errors import BadSettings, without_stop
from marserve.optional import reason
from marserve.tuning.payloads import Payload

if TYPE_CHECKING:
    from marserve.tuning.grpc_line import Call, GrpcTarget

SCHEMES: Final = ("grpc", "grpcs")
DATA: Final = "data"
_PREDICTIONS: Final = "org.pytorch.serve.grpc.inference"
_OPEN_INFERENCE: Final = "inference"
_PORT: Final = "Is it its grpc_inference_port (7070 by default), and grpc or grpcs as its enable_grpc_ssl says?"


def is_grpc(address: str) -> bool:
    """Whether an address is one of gRPC."""
    return address.partition("://")[0] in SCHEMES


def checked(address: str, flag: str) -> str:
    """The address as `grpc://HOST:PORT`. Raises BadSettings if it is none, CommandFailed without grpcio."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port or parts.path.strip("/") or parts.query:
        raise BadSettings(
            f"{address!r} is no address of gRPC; it must look like grpc://127.0.0.1:7070 or grpcs://models.example:7070",
            source=flag,
        )
    needed()
    return f"{parts.scheme}://{parts.netloc}"


def needed() -> None:
    """Raise CommandFailed unless grpcio and protobuf can be used."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it writes lines of its own about each connection that ends
    try:
        # Here, for they import optional packages, which take a tenth of a second.
        import marserve.api.grpc.schema
        import marserve.tuning.grpc_line  # noqa: F401
    except ImportError as error:
        raise CommandFailed(
            f"Calls over gRPC are sent by grpcio, which cannot be used here ({reason(error)}).",
            "pip install 'marserve[grpc]' grpcio brings it; or name the HTTP address.",
        ) from error


def grpc_target(
    address: str, host: str, key: str | None, is_local: bool, model: str, version: str | None, name: str = DATA
) -> GrpcTarget:
    """The model at an address of gRPC. `name` is that of the input in `Predictions`.

    The server has to answer, and its certificate to be trusted as at an address of HTTP. Raises CommandFailed.
    """
    from marserve.tuning.grpc_line import GrpcTarget  # here, as it imports grpcio

    parts = urlsplit(address)
    assert parts.port is not None
    roots, server_name = _meet(address, host, parts.port, is_local)
    at = f"[{host}]:{parts.port}" if ":" in host else f"{host}:{parts.port}"
    metadata = (("authorization", key),) if key else ()
    return GrpcTarget(at, Messages(model, version, name).call_of, roots, server_name, metadata)


def _meet(address: str, host: str, port: int, is_local: bool) -> tuple[bytes | None, str]:
    """Connect once. Returns the certificate that was trusted, as PEM, and a name that it has; None without TLS.

    grpcio knows neither the system's certificates nor one that is trusted whatever its host, and does not say what was
    wrong: so Python's TLS decides, and grpcio is told to trust what was seen.
    """
    try:
        with socket.create_connection((host, port), timeout=QUICK_S) as plain:
            if not address.startswith("grpcs:"):
                return None, ""
            trust = local_trust() if is_local else ssl.create_default_context()
            trust.set_alpn_protocols(["h2"])
            with trust.wrap_socket(plain, server_hostname=host) as wrapped:
                seen = wrapped.getpeercert(binary_form=True)
                protocol, described = wrapped.selected_alpn_protocol(), wrapped.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        raise CommandFailed(
            f"The certificate of {address} is not trusted: {without_stop(error.verify_message)}.",
            "Run this in the server's folder, whose settings name the certificate; or let SSL_CERT_FILE name what "
            "signed it.",
        ) from error
    except ssl.SSLError as error:
        raise CommandFailed(f"{address} speaks no TLS ({error.reason or error}).", _PORT) from error
    except OSError as error:
        why = without_stop(error.strerror or str(error) or type(error).__name__)
        raise CommandFailed(
            f"No server answers at {address} ({why}).", f"`marserve start` starts one. {_PORT}"
        ) from error
    if protocol != "h2":
        raise CommandFailed(f"{address} does not speak HTTP/2, and so no gRPC.", _PORT)
    return ssl.DER_cert_to_PEM_cert(seen or b"").encode(), _a_name(described) if is_local else ""


def _a_name(certificate: Any) -> str:
    """A name that a certificate is for; empty if it has none."""
    names = [name for kind, name in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    names += [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    return str(names[0]).replace("*", "any") if names else ""


class Messages:
    """Makes calls of request bodies, for one model.

    A body of the Open Inference Protocol (JSON with `inputs`) is a `ModelInfer`. Any other is a `Predictions` with one
    input, as handlers find it in their row.
    """

    def __init__(self, model: str, version: str | None, name: str = DATA) -> None:
        from marserve.api.grpc.schema import Schema  # here, as it imports protobuf

        self._model, self._version, self._name = model, version or "", name
        schema = Schema()
        self._predictions = schema.message(f"{_PREDICTIONS}.PredictionsRequest")
        self._infer = schema.message(f"{_OPEN_INFERENCE}.ModelInferRequest")

    def call_of(self, payload: Payload) -> Call:
        """The call that sends a payload. Raises WrongArguments for a tensor that gRPC's message cannot have."""
        from marserve.tuning.grpc_line import Call  # here, as it imports grpcio

        document = _open_inference(payload)
        if document is not None:
            return Call(f"/{_OPEN_INFERENCE}.GRPCInferenceService/ModelInfer", self._tensors(document, payload.name))
        message = self._predictions(
            model_name=self._model, model_version=self._version, input={self._name: payload.body}
        )
        return Call(f"/{_PREDICTIONS}.InferenceAPIsService/Predictions", message.SerializeToString())

    def _tensors(self, document: dict[str, Any], file: str) -> bytes:
        from marserve.api.grpc.data_types import DATA_TYPES, write_parameters  # here, as the schema

        message = self._infer(model_name=self._model, model_version=self._version, id=str(document.get("id") or ""))
        write_parameters(message.parameters, document.get("parameters"))
        try:
            for each in document["inputs"]:
                tensor = message.inputs.add(name=each["name"], datatype=each["datatype"], shape=each["shape"])
                write_parameters(tensor.parameters, each.get("parameters"))
                values: list[Any] = list(_flat(each["data"]))
                if each["datatype"] == "BYTES":
                    values = [str(value).encode() for value in values]
                getattr(tensor.contents, DATA_TYPES[each["datatype"]].field).extend(values)
            for each in document.get("outputs") or ():
                write_parameters(message.outputs.add(name=each["name"]).parameters, each.get("parameters"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WrongArguments(
                f"{file}: its tensors cannot be sent over gRPC ({without_stop(error)}).",
                "An input has name, datatype, shape and data; FP16 and BF16 have no form there.",
            ) from error
        return bytes(message.SerializeToString())


def _open_inference(payload: Payload) -> dict[str, Any] | None:
    """The JSON of a payload if it is an inference of the Open Inference Protocol."""
    if "json" not in payload.content_type:
        return None
    try:
        document = json.loads(payload.body)
    except ValueError:
        return None
    inputs = document.get("inputs") if isinstance(document, dict) else None
    is_one = (
        isinstance(inputs, list) and inputs and all(isinstance(each, dict) and "datatype" in each for each in inputs)
    )
    return document if is_one else None


def _flat(data: Any) -> Iterator[Any]:
    if isinstance(data, list):
        for each in data:
            yield from _flat(each)
    else:
        yield data


def try_call(address: str, target: GrpcTarget, payload: Payload, timeout_s: float) -> None:
    """Send one call. Raises CommandFailed if no server answers, there is no such model, or it may not be asked."""
    from marserve.tuning.grpc_line import call_once  # here, as it imports grpcio

    failed = call_once(target, payload, timeout_s)
    if failed is not None:
        _raise(address, *failed)


def _raise(address: str, method: str, code: str, details: str, is_answer: bool) -> None:
    """Raise CommandFailed for a failure that all further calls would share."""
    said = details or "no reason given"
    if not is_answer:
        if code == "DEADLINE_EXCEEDED":
            raise CommandFailed(f"The server at {address} did not answer {method} in time.", "--timeout gives more.")
        if "Failed parsing HTTP/2" in said:
            said = "what listens there speaks no HTTP/2"
        raise CommandFailed(f"No gRPC server answers at {address} ({without_stop(said)}).", _PORT)
    key = f"Run this in the server's folder, where its key file is, or set {TOKEN_VARIABLE} to a key."
    steps = {
        "UNAUTHENTICATED": key,
        "PERMISSION_DENIED": key,
        "NOT_FOUND": "`marserve models` lists what is registered.",
        "UNIMPLEMENTED": "Is it the inference port, which has grpc_inference_port? ModelInfer, for bodies with inputs, "
        "needs ts_open_inference_protocol=true.",
    }
    if code in steps:
        raise CommandFailed(f"{address} answered {method} with {code}: {without_stop(said)}.", steps[code], code=code)
