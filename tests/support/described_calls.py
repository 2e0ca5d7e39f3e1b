"""Requests drawn by schemathesis from the API description of a server's port, and what is wrong with their answers.

Needs schemathesis (`make test-long` installs it). A drawn request asks for few workers and no endless answer; otherwise
it is sent as it was drawn.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

Document = dict[str, Any]

DESIRED_STATE = "/desired-state"
LIMIT_S = 10.0
MOST_WORKERS = 2
MOST_PROFILE_S = 0.2
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW")
# Sent on purpose, where the description has them: not offered, cannot answer now, too late, no room.
MEANT = frozenset({501, 503, 504, 507})
COUNTS_OF_WORKERS = ("initial_workers", "min_worker", "max_worker", "minWorkers", "maxWorkers", "workers", "min", "max")
_QUIET = hypothesis.settings(
    database=None,
    deadline=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


@dataclass
class Calls:
    """Requests to one server, how many there were, the first of each 5xx that is meant, and of each fault.

    `known` are names that exist there, by the parameter that takes them, and `members` values of members of bodies:
    lists, or schemas. `restore` is called before each operation. `is_recorded`: a server that answers as TorchServe
    did, which names no methods in a 405.
    """

    known: Mapping[str, list[str]]
    members: Mapping[str, list[Any] | Document]
    restore: Callable[[], None]
    seed: int
    is_recorded: bool = False
    statuses: Counter[int] = field(default_factory=Counter)
    seen: dict[str, Counter[int]] = field(default_factory=dict)
    operations: int = 0
    meant: dict[tuple[str, int], str] = field(default_factory=dict)
    faults: dict[tuple[str, str], str] = field(default_factory=dict)
    session: requests.Session = field(default_factory=requests.Session)

    def never_well(self) -> list[str]:
        """The operations that were never answered with success, so that little of them was tried."""
        return [label for label, seen in self.seen.items() if not any(status < 300 for status in seen)]

    def play(self, address: str, document: Document, examples: int) -> None:
        """So many requests of each operation: as described and not, with any names and with those that exist."""
        sendable = _sendable(document)
        for described in (sendable, _with_known(sendable, self.known, self.members)):
            for operation in _operations(described):
                self.operations += 1
                self.restore()
                for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                    self._play_operation(address, operation, mode, examples)
        self.play_methods(address, document)

    def play_methods(self, address: str, document: Document) -> None:
        """Each path of the document by methods that it does not describe."""
        for path, item in document["paths"].items():
            filled = path
            for name, values in self.known.items():
                filled = filled.replace("{" + name + "}", values[0])
            for method in METHODS:
                if method.lower() not in item:
                    self._judge(f"{method} {path}", lambda: self._send(method, address + filled), None)  # noqa: B023

    def _send(self, method: str, url: str) -> requests.Response:
        return self.session.request(method, url, timeout=LIMIT_S, allow_redirects=False)

    def _play_operation(self, address: str, operation: Any, mode: GenerationMode, examples: int) -> None:
        label = f"{operation.method.upper()} {operation.path}"
        documented = {str(status) for status in operation.definition.raw.get("responses", {})}

        @hypothesis.seed(self.seed)
        @hypothesis.settings(_QUIET, max_examples=examples)
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            tame(case)
            self._judge(
                label,
                lambda: case.call(base_url=address, session=self.session, timeout=LIMIT_S, allow_redirects=False),
                documented,
                lambda: case.as_curl_command(),
            )

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ask()
        except Unsatisfiable:
            pass  # such as negative data for an operation that takes none

    def _judge(
        self,
        label: str,
        send: Callable[[], Any],
        documented: set[str] | None,
        shown: Callable[[], str] = lambda: "",
    ) -> None:
        def fault(kind: str, words: str) -> None:
            self.faults.setdefault((label, kind), f"{label}: {kind}: {words} {shown()[:1500]}")

        try:
            answer = send()
        except requests.exceptions.Timeout:
            fault("hang", f"no answer in {LIMIT_S} s")
            return
        except requests.exceptions.InvalidHeader:
            return  # the client's library does not send it
        except requests.exceptions.RequestException as error:
            fault("no answer", repr(error))
            return
        status, text = answer.status_code, answer.content[:400].decode("utf-8", "replace")
        self.statuses[status] += 1
        if documented is not None:
            self.seen.setdefault(label, Counter())[status] += 1
        headers = {name.lower(): value for name, value in answer.headers.items()}
        is_documented = documented is None or str(status) in documented
        # Such as workers that could not load a model; a defect of the server's own has no cause.
        is_meant = status in MEANT or "x-marserve-cause" in headers
        if status >= 500 and not (is_meant and is_documented):
            fault(f"status {status}", text)
        elif status >= 500:
            self.meant.setdefault((label, status), f"{label}: {status}: {' '.join(text.split())}")
        elif not is_documented:
            fault(f"status {status} is not described", text)
        kind = headers.get("content-type", [""])
        kind = kind[0] if isinstance(kind, list) else kind
        if answer.content and not kind and status != 200:  # of its answer a handler may say nothing
            fault("no content type", text)
        if status >= 400 and answer.content:
            try:
                document = json.loads(answer.content)
                assert {"code", "type", "message"} <= set(document), document
                assert kind.startswith("application/json"), kind
            except (ValueError, AssertionError, TypeError):
                fault("no error document", f"{status} {kind} {text}")
        if status == 405 and "allow" not in headers and not self.is_recorded:
            fault("405 without Allow", text)


def tame(case: Any) -> None:
    """Few workers, no log that is followed without an end, and no profile that is answered after minutes."""
    for place in (case.query, case.body):
        _few_workers(place)
    if isinstance(case.query, dict):
        case.query.pop("follow", None)
        if case.operation.path.endswith("/profile"):
            case.query["seconds"] = MOST_PROFILE_S


def _few_workers(value: Any) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in COUNTS_OF_WORKERS and not isinstance(inner, dict | list):
                try:
                    number = float(inner)
                except (TypeError, ValueError):
                    continue
                value[name] = min(number, MOST_WORKERS) if number > MOST_WORKERS else inner
            else:
                _few_workers(inner)
    elif isinstance(value, list):
        for inner in value:
            _few_workers(inner)


def _operations(document: Document) -> Iterator[Any]:
    """The operations of a document, those last that remove things."""
    found = [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]
    yield from sorted(found, key=lambda each: each.method == "delete")


def _sendable(document: Document) -> Document:
    """With the usual types in place of any type for a body."""
    changed = copy.deepcopy(document)
    for item in changed["paths"].values():
        for operation in item.values():
            content = operation.get("requestBody", {}).get("content", {})
            if "*/*" in content:
                schema = content.pop("*/*")
                content.setdefault("application/json", {"schema": {}})
                content["application/octet-stream"] = schema
                content["text/plain"] = {"schema": {"type": "string"}}
    return changed


def with_desired_state(document: Document, schema: Document) -> Document:
    """The calls of the desired state alone, with the server's own schema of it for a body."""
    described = json.loads(json.dumps(schema).replace("#/$defs/", "#/components/schemas/"))
    changed = copy.deepcopy(document)
    changed["paths"] = {path: item for path, item in changed["paths"].items() if path.startswith(DESIRED_STATE)}
    changed["components"]["schemas"] |= described.pop("$defs")
    for item in changed["paths"].values():
        for operation in item.values():
            if "requestBody" in operation:
                operation["requestBody"]["content"] = {"application/json": {"schema": described}}
    return changed


def without_desired_state(document: Document) -> Document:
    """All other calls: once a desired state is in force, it refuses most of them."""
    paths = {path: item for path, item in document["paths"].items() if not path.startswith(DESIRED_STATE)}
    return {**document, "paths": paths}


def _with_known(
    document: Document, known: Mapping[str, list[str]], members: Mapping[str, list[Any] | Document]
) -> Document:
    """With names that exist in the place of any names: of parameters, and of members of bodies."""
    changed = copy.deepcopy(document)

    def walk(value: Any) -> None:
        if isinstance(value, list):
            for inner in value:
                walk(inner)
        elif isinstance(value, dict):
            name = value.get("name")
            if isinstance(name, str) and name in known and isinstance(value.get("schema"), dict):
                value["schema"] = {"enum": known[name]}
            properties = value.get("properties")
            for name in properties if isinstance(properties, dict) else ():
                if name in members:
                    given = members[name]
                    properties[name] = {"enum": given} if isinstance(given, list) else given
            for inner in value.values():
                walk(inner)

    walk(changed)
    return changed
