"""The inference surface over HTTP: finds inference routes, and submits their requests to the data plane.

It knows no sockets. For each request `HttpConnection` calls `match`, which reads each distinct target once, and
`predict`, which makes one `Request` of header and body and submits it. The connection writes the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from marserve.api.http.instances import Instances
from marserve.api.http.request_body import is_form, read_fields, read_parts
from marserve.api.open_inference.mark import MARK
from marserve.api.open_inference.packed_bodies import PackedBodies, encoding_of
from marserve.api.open_inference.request_parameters import json_bytes
from marserve.api.open_inference.shared_tensors import SharedTensors
from marserve.errors import BadInput, WorkflowNotFound
from marserve.messages import Accepted, Part, Receiver, Request
from marserve.registry.data_plane import DataPlane
from marserve.registry.intake.call_modes import PLAIN_NAMES, SequenceHeaderNames
from marserve.telemetry.timeline import Timeline
from marserve.workflows.workflows import Workflows

# Clients choose targets, so the table of known ones is bounded.
MAX_KNOWN_TARGETS = 1024
MAX_KNOWN_TARGET_BYTES = 512
MAX_SEGMENTS = 256
# The length that a name in a path may have.
MAX_NAME_BYTES = 8 * 1024

Protocol = Literal["", "v1", "v2"]


@dataclass(frozen=True, slots=True)
class Route:
    """An inference route, read from a target. Equal targets share one.

    `model` is None on `/invocations` without `?model_name=`; with `is_workflow` it names a workflow. The handler gets
    `server_headers` in place of the client's headers of these names. `query_parts` are the query's parameters on routes
    that take them as input, else empty. `is_explain` marks an explanation. `protocol` is the one
    whose bodies the server looks into: the Open Inference Protocol (`v2`), KServe's V1 (`v1`), or none.
    """

    model: str | None
    version: str | None
    server_headers: list[tuple[str, str]]
    query_parts: list[Part]
    is_explain: bool = False
    is_workflow: bool = False
    protocol: Protocol = ""


class InferenceSurface:
    """Turns inference requests over HTTP into requests of the data plane. Without `workflows` no workflow is found.

    `further_route` is a path that predicts as `/invocations` does, but without input from its query. With
    `marks_open_inference` routes of that protocol may name a version, and their requests are marked for the worker.
    With `splits_instances` those of KServe's V1 are cut into their instances, unless the model has an envelope.
    `sequence` are the headers in which requests name their sequence.
    """

    def __init__(
        self,
        data_plane: DataPlane,
        workflows: Workflows | None = None,
        further_route: str | None = None,
        *,
        marks_open_inference: bool = False,
        splits_instances: bool = False,
        sequence: SequenceHeaderNames = PLAIN_NAMES,
        shared_tensors: SharedTensors | None = None,
        packed_bodies: PackedBodies | None = None,
    ) -> None:
        self._data_plane = data_plane
        self._workflows = workflows
        self._further_route = None if further_route is None else further_route.encode()
        self._marks_open_inference = marks_open_inference
        self._splits_instances = splits_instances
        self.sequence = sequence
        self._shared_tensors = shared_tensors
        self._packed_bodies = packed_bodies
        self._known: dict[bytes, Route | None] = {}

    def match(self, target: bytes) -> Route | None:
        """The inference route of a request target, or None. Raises BadInput for too many segments or parameters."""
        known = self._known
        try:
            return known[target]
        except KeyError:
            route = read_route(
                target, marks_open_inference=self._marks_open_inference, splits_instances=self._splits_instances
            )
        path = target.partition(b"?")[0]
        if path == self._further_route and (route is None or _is_bare(path)):
            route = Route(None, None, [("explain", "False")], [])
        if len(target) <= MAX_KNOWN_TARGET_BYTES:
            if len(known) >= MAX_KNOWN_TARGETS:
                known.clear()
            known[target] = route
        return route

    def takes_instances(self, route: Route) -> bool:
        """Whether the instances of a request on this route of KServe's V1 are requests of their own.

        Raises ModelNotFound.
        """
        return not self._data_plane.has_envelope(route.model or "", route.version)

    def predict(
        self,
        route: Route,
        request_id: str,
        headers: list[tuple[bytes, bytes]],
        content_type: str | None,
        body: bytes | bytearray,
        receiver: Receiver,
        deadline: float | None = None,
        priority: int | None = None,
        asked_version: str | None = None,
        parts: list[Part] | None = None,
        key: int = 0,
        client_id: str = "",
        instances: Sequence[Part] | None = None,
        timeline: Timeline | None = None,
        trace_ids: bytes = b"",
    ) -> Accepted:
        """Submit one request; the answer comes to `receiver`, possibly before this returns.

        `deadline` is in seconds on the monotonic clock, `priority` 0 to 9; None: the model's own. `asked_version` is a
        version or label that the client's header asks for; one in the path has precedence. `parts` is the decoded body,
        None if it is not decoded yet. `key`, `client_id`, `timeline` and `trace_ids` are those of the `Request`. With
        `instances` each of them is a request, and the answer has all of theirs.

        Raises BadInput for a body that cannot be read, and what the data plane raises.
        """
        added = self._packed(route, headers, asked_version) if route.protocol == "v2" else None
        if parts is not None:
            pass
        elif content_type is None or not is_form(content_type):
            parts = [Part("body", body, content_type)]
        else:
            parts = read_parts(bytes(body), content_type)
        if route.is_workflow:
            request = Request(
                request_id,
                parts,
                headers,
                [],
                deadline,
                priority=priority,
                key=key,
                client_id=client_id,
                timeline=timeline,
            )
            return self._run_workflow(route.model or "", request, receiver)
        server_headers = route.server_headers
        if added is None and self._shared_tensors is not None and route.protocol == "v2" and len(parts) == 1:
            body = parts[0].body
            end = json_bytes(headers, len(body))
            added = self._shared_tensors.header(route.model or "", route.version or asked_version, body, end)
        if added is not None:
            server_headers = [*server_headers, added]
        if route.query_parts:
            parts = route.query_parts + parts
        model, version = route.model or self._find_model(parts), route.version
        request = Request(
            request_id,
            parts,
            headers,
            server_headers,
            deadline,
            is_explain=route.is_explain,
            names_version=version is not None,
            priority=priority,
            asked_version=asked_version,
            key=key,
            client_id=client_id,
            timeline=timeline,
            trace_ids=trace_ids,
        )
        if instances is None:
            return self._data_plane.submit(model, version, request, receiver)

        def submit(one: Request, one_receiver: Receiver) -> Accepted:
            return self._data_plane.submit(model, version, one, one_receiver)

        word = "explanations" if route.is_explain else "predictions"
        return Instances(submit, request, instances, receiver, word).begin()

    def _packed(
        self, route: Route, headers: list[tuple[bytes, bytes]], asked_version: str | None
    ) -> tuple[str, str] | None:
        """The server's header for a compressed body; None for one that came as it is."""
        encoding = None if self._packed_bodies is None else encoding_of(headers)
        if encoding is None or self._packed_bodies is None:
            return None
        return self._packed_bodies.header(route.model or "", route.version or asked_version, encoding)

    def _run_workflow(self, workflow: str, request: Request, receiver: Receiver) -> Accepted:
        if self._workflows is None:
            raise WorkflowNotFound(workflow)
        return self._workflows.submit(workflow, request, receiver)

    def _find_model(self, parts: list[Part]) -> str:
        """The model of an `/invocations` that names none in its query (contract §1.2)."""
        model = self._data_plane.only_startup_model
        if model is None:
            named = [part.body for part in parts if part.name == "model_name"]
            if not named or not named[-1]:
                raise BadInput("Parameter model_name is required.")
            if len(named[-1]) > MAX_NAME_BYTES:
                raise BadInput(f"Parameter model_name has more than {MAX_NAME_BYTES} bytes.")
            model = named[-1].decode("utf-8", "replace")
        return model


def read_route(target: bytes, *, marks_open_inference: bool = False, splits_instances: bool = False) -> Route | None:
    """Read a target in origin or absolute form; None when it is no inference route (contract §1.2).

    Segments are split before they are decoded, so that `%2F` is part of a name (contract, Q48). Raises BadInput for
    more segments, or parameters, than there can be.
    """
    path, _, query = target.partition(b"?")
    if path[:1] != b"/":
        scheme, _, rest = path.partition(b"://")
        if scheme.lower() not in (b"http", b"https"):
            return None
        path = b"/" + rest.partition(b"/")[2]
    if path.count(b"/") > MAX_SEGMENTS:
        raise BadInput(f"The path has more than {MAX_SEGMENTS} segments.")
    segments = [unquote(segment) for segment in path.decode("latin-1").rstrip("/").split("/")[1:]]
    if not segments or not segments[0]:
        return None
    first = segments[0]
    if first in _VERSIONED:
        return _versioned(segments, _VERSIONED[first])
    if first in ("v1", "v2"):
        return _kserve(segments, marks_open_inference=marks_open_inference, splits_instances=splits_instances)
    if first.lower() == "wfpredict":
        is_named = len(segments) > 1 and segments[1] != ""  # what follows the name is ignored
        return Route(segments[1], None, [], [], is_workflow=True) if is_named else None
    match segments:
        case ["invocations"]:
            parts = read_fields(query)
            named = [part.body for part in parts if part.name == "model_name"]
            return Route(named[-1].decode("utf-8", "replace") or None if named else None, None, [], parts)
        case ["models", str(model), "invoke"] if model:
            return Route(model, None, [], read_fields(query))
        case ["models" | "ping" | "api-description", *_]:
            return None
        case [str(model), "predict"]:
            return Route(model, None, [], read_fields(query))
        case [str(model), str(version), "predict"] if version:
            return Route(model, version, [], read_fields(query))
    return None


_VERSIONED = {"predictions": "False", "explanations": "True"}
_FIXED_BEGINNINGS = (b"predictions", b"explanations", b"wfpredict")


def _is_bare(path: bytes) -> bool:
    """Whether a path has the form `/{m}/predict`, TorchServe's oldest route. `further_route` has precedence over it."""
    return path.endswith(b"/predict") and path.split(b"/")[1].lower() not in _FIXED_BEGINNINGS


def _versioned(segments: list[str], explain: str) -> Route | None:
    """`/predictions/{m}[/{v}[/any/more]]` and `/explanations/…`."""
    if len(segments) < 2 or not segments[1] or (len(segments) > 2 and not segments[2]):
        return None
    version = segments[2] if len(segments) > 2 else None
    url_path = "/".join(segments[3:])
    return Route(segments[1], version, [("url_path", url_path), ("explain", explain)], [], explain == "True")


def _kserve(segments: list[str], *, marks_open_inference: bool, splits_instances: bool) -> Route | None:
    """`/v1/models/{m}:predict`, `/v2/models/{m}/infer` and their `explain`.

    The default version, but where the Open Inference Protocol is spoken in full: `/v2/models/{m}/versions/{v}/infer`.
    """
    version = None
    match segments:
        case ["v1", "models", str(word)] if ":predict" in word or ":explain" in word:
            model, _, verb = word.partition(":")
            explains = verb.startswith("explain")
        case ["v2", "models", str(model), ("infer" | "explain") as verb]:
            explains = verb == "explain"
        case ["v2", "models", str(model), "versions", str(named), ("infer" | "explain") as verb] if named:
            if not marks_open_inference:
                return None
            version, explains = named, verb == "explain"
        case _:
            return None
    if not model:
        return None
    protocol: Protocol = ""
    if segments[0] == "v1":
        protocol = "v1" if splits_instances else ""
    elif marks_open_inference:
        protocol = "v2"
    marks = [MARK] if protocol == "v2" else []
    return Route(model, version, [("explain", str(explains)), *marks], [], explains, protocol=protocol)
