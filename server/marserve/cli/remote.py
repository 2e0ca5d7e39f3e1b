"""A running server as the commands see it: its address, and requests to it over HTTP.

It knows the paths of both APIs and TorchServe's error object. All failures are CommandFailed, with what was tried and
what may help.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import quote, urlsplit

import httpx
import msgspec
import typer

from marserve.cli.credentials import TOKEN_VARIABLE, Credentials, local_trust
from marserve.cli.output import CommandFailed
from marserve.cli.typed_settings import load_as_typed
from marserve.cli.versions import arriving_line
from marserve.errors import (
    AddressNotAllowed,
    ArchiveExists,
    BadSettings,
    DependencyFailed,
    NotInStore,
    without_stop,
)
from marserve.settings.table import Settings

ManagementAddress = Annotated[
    str | None,
    typer.Option("--management", metavar="URL", help="The server's management address; as configured if not given."),
]
InferenceAddress = Annotated[
    str | None,
    typer.Option("--inference", metavar="URL", help="The server's inference address; as configured if not given."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--ts-config", "--config", metavar="FILE", help="Settings to use instead of config.properties in this folder."
    ),
]

QUICK_S = 10.0
"""The time limit of a quick request, in seconds."""

MOST_ANSWER = 1 << 30
"""Most bytes of an answer that is read whole: no server has one, and what listens there may never end."""

_OF_TRANSFER = frozenset(("content-encoding", "content-length", "transfer-encoding"))
_LOOK_S = 1.0
"""How long a look whether a server is at another address may take, in seconds."""

STREAM_SILENCE_S = 60.0
"""How long a stream of the server may be silent, in seconds; the server sends a comment four times in that time."""


def find_address(which: Literal["inference", "management"], given: str | None, config: Path | None) -> str:
    """The given address, else that of the settings as `marserve start` reads them: `http://…`, `https://…`, `unix:/…`.

    Raises BadSettings if it is no address, or if the settings are needed and cannot be read.
    """
    if given is not None:
        return _checked(given, f"--{which}")
    flags: dict[str, object] = {} if config is None else {"ts_config": str(config)}
    settings = load_as_typed(flags)
    return str(settings.inference_address if which == "inference" else settings.management_address)


def known_roots(config: Path | None) -> tuple[Path, ...]:
    """The `model_roots` of this folder's settings; none if these cannot be read."""
    try:
        return load_as_typed({} if config is None else {"ts_config": str(config)}).model_roots
    except BadSettings:
        return ()


def asked_there(address: str) -> str:
    """What to do about a model that is not found at an inference address: another server may have been meant."""
    return f"{address} was asked: --inference names another server; `marserve models` lists what one has."


@dataclass(frozen=True, slots=True)
class Probe:
    """A health probe's answer: whether all is well, and the reasons as sentences."""

    is_well: bool
    reasons: list[str]


class Listener:
    """One listening address of a server. Close it after use, or use it as a context.

    `settings` are the server's, by default this folder's. `transport` replaces the network in tests.
    """

    flag = "--management or --inference"
    """The flag with which a command takes the address."""
    kind: ClassVar[Literal["inference", "management"]] = "management"
    """The kind of key that is sent, if the server needs one."""

    def __init__(
        self, address: str, transport: httpx.BaseTransport | None = None, settings: Settings | None = None
    ) -> None:
        self.address = address
        self._client = _client(address, transport, self.kind, settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def ask(
        self, method: str, path: str, *, timeout_s: float | None = QUICK_S, whole_s: float | None = None, **more: Any
    ) -> httpx.Response:
        """Send one request and return the whole answer, whatever its status. `timeout_s` None: no limit.

        `timeout_s` is for each piece of the answer, `whole_s` for all of them.
        `more` are further arguments of httpx's `request`. Raises CommandFailed if there is no answer, or one that has
        more than `MOST_ANSWER` bytes.
        """
        try:
            timeout, began = httpx.Timeout(timeout_s, connect=QUICK_S), time.monotonic()
            with self._client.stream(method, path, timeout=timeout, **more) as answer:
                body = self._read(answer, math.inf if whole_s is None else began + whole_s)
            # Without the headers that say how the body came: it is unpacked.
            headers = [(name, value) for name, value in answer.headers.multi_items() if name not in _OF_TRANSFER]
            whole = httpx.Response(answer.status_code, headers=headers, content=body, request=answer.request)
            whole.elapsed = timedelta(seconds=time.monotonic() - began)
            return whole
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self._unreachable(error) from error
        except httpx.TimeoutException as error:
            raise CommandFailed(
                f"The server at {self.address} did not answer {method} {path} within {whole_s or timeout_s:g} s.",
                "It may be busy: `marserve status` tells how it is.",
            ) from error
        except httpx.HTTPError as error:
            raise CommandFailed(
                f"The connection to {self.address} broke during {method} {path} ({_reason(error)}).",
                "Is it marserve that listens there, and http or https as configured?",
            ) from error

    def _read(self, answer: httpx.Response, ends: float) -> bytes:
        """The whole body, unpacked. Raises CommandFailed for one that may never end, ReadTimeout after `ends`."""
        body = bytearray()
        for piece in answer.iter_bytes():
            body += piece
            if time.monotonic() > ends:
                raise httpx.ReadTimeout("its pieces come too slowly", request=answer.request)
            if len(body) > MOST_ANSWER:
                raise CommandFailed(
                    f"The answer of {self.address} has more than {MOST_ANSWER} bytes.",
                    "Is it marserve that listens there?",
                )
        return bytes(body)

    def _unreachable(self, error: httpx.HTTPError) -> CommandFailed:
        where = f"say where it is with {self.flag}; `marserve run` shows its address"
        return CommandFailed(
            f"No server answers at {self.address} ({_reason(error)}).", f"Start one with `marserve start`, or {where}."
        )

    @contextlib.contextmanager
    def stream(self, path: str, parameters: Mapping[str, str]) -> Iterator[Iterator[str]]:
        """The lines of an answer that goes on, without their ends. Raises CommandFailed as `ask` and `refused` do."""
        try:
            timeout = httpx.Timeout(QUICK_S, read=STREAM_SILENCE_S)
            with self._client.stream("GET", path, params=parameters, timeout=timeout) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    raise refused(answer)
                yield answer.iter_lines()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self._unreachable(error) from error
        except httpx.HTTPError as error:
            raise CommandFailed(f"The connection to {self.address} broke ({_reason(error)}).") from error

    def readiness(self) -> Probe:
        """Whether requests should be sent to this server, and if not, why. Both listeners have this probe."""
        return self._probe("/readyz")

    def _probe(self, path: str) -> Probe:
        answer = self.ask("GET", path)
        document = _json(answer)
        if not isinstance(document, dict) or answer.status_code not in (200, 503):
            raise refused(answer)
        return Probe(answer.status_code == 200, [str(reason) for reason in document.get("reasons", [])])


class Inference(Listener):
    """The inference address of a server."""

    flag = "--inference"
    kind = "inference"

    def is_alive(self) -> bool:
        """Whether a server answers there."""
        try:
            return self.ask("GET", "/livez").status_code == 200
        except CommandFailed:
            return False

    def startup(self) -> Probe:
        """Whether all models of the start were tried, and which of them failed."""
        return self._probe("/startupz")

    def predict(
        self,
        model: str,
        version: str | None,
        body: bytes,
        content_type: str | None,
        timeout_s: float,
        whole_s: float | None = None,
    ) -> httpx.Response:
        """Send one body to a model and return the whole answer, whatever its status. The times are as in `ask`."""
        path = f"/predictions/{quote(model, safe='')}" + (f"/{quote(version, safe='')}" if version else "")
        headers = {"content-type": content_type} if content_type else {}
        return self.ask("POST", path, timeout_s=timeout_s, whole_s=whole_s, content=body, headers=headers)


class Management(Listener):
    """The management address of a server."""

    flag = "--management"

    def _unreachable(self, error: httpx.HTTPError) -> CommandFailed:
        """As `Listener`; it names the address of a `marserve run`, which serves all on the inference address."""
        failure = super()._unreachable(error)
        if (other := _address_of_run(self.address)) is not None:
            failure.next_step = f"A server answers at {other}: add --management {other} for that one."
        return failure

    def order(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str | int | float | bool] | None = None,
        *,
        timeout_s: float | None = QUICK_S,
        **body: Any,
    ) -> Any:
        """Send one request and return its JSON answer. `timeout_s` None: no limit.

        `body` is what httpx's `request` takes. Raises CommandFailed if no server answers, and with the server's words
        if it refuses.
        """
        answer = self.ask(method, path, timeout_s=timeout_s, params=parameters, **body)
        if answer.status_code >= 400:
            raise refused(answer)
        document = _json(answer)
        if document is None:
            raise self._is_another(f"{method} {path}, with status {answer.status_code}, is no JSON")
        return document

    def _is_another(self, what: str) -> CommandFailed:
        return CommandFailed(
            f"The answer of {self.address} to {without_stop(what)}.", "Is it marserve that listens there?"
        )

    def model_names(self) -> Iterator[str]:
        """The names of all registered models, in order."""
        token: str | None = None
        while True:
            said = self.order("GET", "/models", {"limit": 100, **({"next_page_token": token} if token else {})})
            try:
                page = msgspec.convert(said, _Page)
            except msgspec.ValidationError as error:
                raise self._is_another(f"GET /models is no list of models: {error}") from None
            for model in page.models:
                yield model.modelName
            token = page.nextPageToken
            if token is None:
                return

    def describe(self, model: str, version: str | None = "all") -> list[dict[str, Any]]:
        """The server's description of all versions of a model, of one, or (None) of the default version."""
        said = self.order("GET", path := model_path(model, version))
        try:
            if not msgspec.convert(said, list[_Described]):
                raise self._is_another(f"GET {path} describes no version")
        except msgspec.ValidationError as error:
            raise self._is_another(f"GET {path} describes no model: {error}") from None
        return list(said)

    def describe_all(self) -> list[dict[str, Any]]:
        """Every version of every model; models that are unregistered meanwhile are left out."""
        found: list[dict[str, Any]] = []
        for name in self.model_names():
            try:
                found.extend(self.describe(name))
            except CommandFailed as failure:
                if failure.detail.get("code") != 404:
                    raise
        return found


class _Named(msgspec.Struct):
    modelName: str


class _Page(msgspec.Struct):
    models: list[_Named]
    nextPageToken: str | None = None


class _Described(_Named):
    """What all commands read of a description; what else is there is for the one that asks."""

    modelVersion: str
    workers: list[dict[str, Any]]


def _address_of_run(tried: str) -> str | None:
    """This folder's inference address, if it has the management API; None unless the management address was `tried`."""
    try:
        settings = load_as_typed({})
    except BadSettings:
        return None
    address = str(settings.inference_address)
    if tried != str(settings.management_address) or address == tried:
        return None
    try:
        with Inference(address, settings=settings) as front:
            answer = front.ask("GET", "/models", timeout_s=_LOOK_S, params={"limit": 1})
    except CommandFailed:
        return None
    document = _json(answer)
    return address if isinstance(document, dict) and "models" in document else None


def model_path(model: str, version: str | None = None) -> str:
    """The management path of a model, or of one of its versions."""
    return f"/models/{quote(model, safe='')}" + (f"/{quote(version, safe='')}" if version else "")


def refused(answer: httpx.Response, next_step: str | None = None) -> CommandFailed:
    """A server's refusal in its own words, if any, with its reason.

    Its log says more only about a failure (5xx), under the request id; a refusal (4xx) is not logged.
    """
    document = _json(answer)
    said = document if isinstance(document, dict) else {}
    request_id = answer.headers.get("x-request-id")
    reason = answer.headers.get("x-marserve-reason")
    cause = answer.headers.get("x-marserve-cause")
    facts = {"code": answer.status_code, "type": said.get("type"), "reason": reason, "request_id": request_id}
    facts["arriving"] = said.get("arriving")
    return CommandFailed(
        _in_words_of_commands(
            str(said.get("message") or f"{answer.request.method} {answer.request.url.path} got {answer.status_code}.")
        ),
        next_step or _next_step(said, cause, reason, answer.status_code, request_id),
        **{key: value for key, value in facts.items() if value is not None},
    )


def _next_step(
    said: Mapping[str, Any], cause: str | None, reason: str | None, status: int, request_id: str | None
) -> str | None:
    """What may help after a refusal; None if its own words say so. TorchServe's sentences do not."""
    kind, message = said.get("type"), str(said.get("message"))
    if arriving := said.get("arriving"):
        return f"It is on its way: {'; '.join(arriving_line(each) for each in arriving)}."
    if reason:
        return f"{shown_by(request_id)} more, with the traceback where there is one."
    if kind == "InvalidKeyException":
        return f"Run this in the server's folder, where its key file is, or set {TOKEN_VARIABLE} to a key."
    if kind == "MethodNotAllowedException":
        return "The server keeps to the models of its start; enable_model_api=true in its settings lets others come."
    if registered := _IS_REGISTERED(message):
        model = registered["model"] or registered["of"]
        return (
            f"`marserve swap {model} ARCHIVE` puts the archive in that version's place; "
            "`marserve archive … --version 2.0` makes one of another version."
        )
    if weighted := _HAS_WEIGHT(message):
        return f"`marserve traffic {weighted[1]} --reset` takes the weights from all its versions."
    if cause in _AFTER:
        return _AFTER[cause]
    if request_id and status >= 500:
        return (
            f"{shown_by(request_id)} what its logs say about this request, `marserve explain {request_id}` where its "
            "time went."
        )
    return None


def _in_words_of_commands(message: str) -> str:
    """A server's sentence with the options of commands in the place of its API's parameters."""
    for parameter, option in _OPTIONS_OF.items():
        message = message.replace(parameter, option)
    return message


def shown_by(request_id: str | None) -> str:
    """The begin of a sentence: the command that shows what the server's logs have of a request."""
    return f"`marserve logs --request {request_id}` shows" if request_id else "`marserve logs` shows"


# In marserve's words, or in TorchServe's.
_IS_REGISTERED = re.compile(
    r"Model (?P<model>.+) has a version \S+ already\.|Model version \S+ is already registered for model (?P<of>.+)"
).match
_HAS_WEIGHT = re.compile(r"Version \S+ of model (.+) has a weight in the model's traffic").match
# Parameters that the sentences of refusals name, and the options that set them.
_OPTIONS_OF = {"with force=true": "with --force", "with replace=true": "with --replace"}
# What may help, by the cause in the answer's header.
_AFTER = {
    AddressNotAllowed.cause: (
        "Name a pattern for it in the server's setting allowed_urls, or copy the archive into its model store."
    ),
    ArchiveExists.cause: (
        "`marserve models` shows whether it is served already; unregistering its last version deletes what was "
        "fetched. A file that you put into the store is registered by its name, or removed first."
    ),
    NotInStore.cause: (
        "Copy the archive into the server's model store, or name an address that its allowed_urls let through."
    ),
    DependencyFailed.cause: "`marserve logs --level warning` shows what pip said last.",
}


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except (ValueError, RecursionError):
        return None


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _checked(address: str, flag: str) -> str:
    parts = urlsplit(address)
    if (parts.scheme in ("http", "https") and parts.hostname) or (parts.scheme == "unix" and parts.path):
        return address.rstrip("/")
    raise BadSettings(
        f"{address!r} is no address; it must look like http://127.0.0.1:8081 or unix:/run/marserve.sock", source=flag
    )


def _client(
    address: str,
    transport: httpx.BaseTransport | None,
    kind: Literal["inference", "management"],
    settings: Settings | None,
) -> httpx.Client:
    parts = urlsplit(address)
    key_file = None if settings is None else settings.token_file
    if parts.scheme == "unix":
        auth = Credentials(kind, is_local=True, key_file=key_file)
        socket = transport or httpx.HTTPTransport(uds=parts.path, verify=False)
        return httpx.Client(base_url="http://localhost", transport=socket, auth=auth)
    # A server that listens on all addresses is called on loopback.
    base = address.replace("//0.0.0.0", "//127.0.0.1", 1).replace("//[::]", "//[::1]", 1)
    # A proxy of the environment does not lead to this machine.
    is_local = is_loopback(urlsplit(base).hostname or "")
    auth = Credentials(kind, is_local=is_local, key_file=key_file)
    # Plain HTTP to this machine needs no trusted certificates; reading them takes 30 ms.
    trust = (local_trust(settings) if parts.scheme == "https" else False) if is_local else True
    return httpx.Client(base_url=base, transport=transport, trust_env=not is_local, auth=auth, verify=trust)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
