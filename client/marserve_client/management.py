"""The calls of the management API. Each function makes a call; none sends it.

Answers are the server's JSON objects, as docs/cli.md and the page at `/docs` show them. Calls that change something
take `dry_run=True`: the answer then says what would change. A key that is None is not sent.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from marserve_client.calls import DEFAULT, Blocking, Call, Reply, Session, Several, Steps, Timeout, path_of
from marserve_client.errors import BadAnswer, BadInput
from marserve_client.inference import read_json, read_object
from marserve_client.retries import Repeat

LOADING_S: Final = 600.0
"""How long calls may take that wait for a model to be loaded."""
UPLOAD_S: Final = 3600.0
_DIGEST_BYTES: Final = 1 << 20
_ACCEPTED, _PARTIAL = 202, 206


class Document(dict[str, Any]):
    """A JSON object of the server. `is_begun`: it goes on (202); `is_partial`: only a part was done (206)."""

    def __init__(self, values: Mapping[str, Any], status: int = 200, request_id: str | None = None) -> None:
        super().__init__(values)
        self.http_status = status
        self.request_id = request_id

    @property
    def is_begun(self) -> bool:
        """Whether the server has only begun, and goes on."""
        return self.http_status == _ACCEPTED

    @property
    def is_partial(self) -> bool:
        """Whether fewer workers came up than were asked for."""
        return self.http_status == _PARTIAL


def _document(reply: Reply) -> Document:
    return Document(read_object(reply), reply.status, reply.headers.get("x-request-id"))


def _call(
    method: str,
    path: str,
    *,
    query: Mapping[str, object] | None = None,
    body: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    model: str | None = None,
    timeout: Timeout = DEFAULT,
    repeat: Repeat = "if_refused",
) -> Call[Document]:
    """A management call. Values of the query are written as the server reads them."""
    given = {name: value for name, value in (query or {}).items() if value is not None}
    if dry_run:
        given["dry_run"] = True
    call = Call(
        method, path, _document, api="management", model=model, timeout=timeout, repeat="reads" if dry_run else repeat
    )
    if given:
        call.query = {name: _word(value) for name, value in given.items()}
    if body is not None:
        try:
            call.content = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"body: cannot be written as JSON ({error}).") from None
        call.headers = {"content-type": "application/json"}
    return call


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ----------------------------------------------------------------------------------------------------------- versions


def register(
    url: str,
    *,
    model_name: str | None = None,
    initial_workers: int | None = None,
    synchronous: bool = True,
    dry_run: bool = False,
    timeout: Timeout = LOADING_S,
    **options: str | int | float | bool | None,
) -> Call[Document]:
    """Register an archive as a version of a model: its name in the model store, or its address.

    `options` are those of a version that the API takes, in its names: `batch_size`, `max_batch_delay` (ms),
    `response_timeout` (s), `handler`, … Without `synchronous` the server answers before workers have loaded it.
    Never repeated once it was sent.
    """
    named = {"url": url, "model_name": model_name, "initial_workers": initial_workers, "synchronous": synchronous}
    body = {**options, **named}
    return _call("POST", "/models", body=body, dry_run=dry_run, model=model_name, timeout=timeout, repeat="if_unsent")


def swap(
    model: str,
    url: str,
    *,
    version: str | None = None,
    order: Literal["load_first", "unload_first"] | None = None,
    keep_old: bool = False,
    check: bool = True,
    dry_run: bool = False,
    timeout: Timeout = LOADING_S,
    **options: str | int | float | bool | None,
) -> Call[Document]:
    """Put an archive in the place of a version that serves, without a gap. `options` as for `register`."""
    named = {"url": url, "version": version, "order": order, "keep_old": keep_old, "check": check}
    path = path_of("models", model) + "/swap"
    body = {**options, **named}
    return _call("POST", path, body=body, dry_run=dry_run, model=model, timeout=timeout, repeat="if_unsent")


def unregister(
    model: str,
    *,
    version: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    timeout: Timeout = LOADING_S,
) -> Call[Document]:
    """Unregister a version, or a model's only one. `force` also takes one with a weight or a label."""
    query = {"force": True if force else None}
    return _call(
        "DELETE",
        _version(model, version),
        query=query,
        dry_run=dry_run,
        model=model,
        timeout=timeout,
        repeat="if_unsent",
    )


def scale(
    model: str,
    min_worker: int | None = None,
    max_worker: int | None = None,
    *,
    version: str | None = None,
    batch_size: int | None = None,
    max_batch_delay: int | None = None,
    synchronous: bool = True,
    dry_run: bool = False,
    timeout: Timeout = LOADING_S,
) -> Call[Document]:
    """Change how many workers a version has, or how its batches are formed (`max_batch_delay` in ms)."""
    numbers = {"min_worker": min_worker, "max_worker": max_worker}
    batches = {"batch_size": batch_size, "max_batch_delay": max_batch_delay}
    query = {**numbers, **batches, "synchronous": synchronous}
    if all(value is None for value in (*numbers.values(), *batches.values())):
        raise BadInput("scale: needs min_worker, max_worker, batch_size or max_batch_delay.")
    return _call("PUT", _version(model, version), query=query, dry_run=dry_run, model=model, timeout=timeout)


def set_default(model: str, version: str, *, dry_run: bool = False, timeout: Timeout = DEFAULT) -> Call[Document]:
    """Let a version answer requests that name none."""
    path = _version(model, version) + "/set-default"
    return _call("PUT", path, dry_run=dry_run, model=model, timeout=timeout)


def describe(
    model: str, *, version: str | None = "all", customized: bool = False, timeout: Timeout = DEFAULT
) -> Call[list[dict[str, Any]]]:
    """All versions of a model, one, or with None the default one. `customized` asks the handler too, of one version."""
    if customized and version == "all":
        raise BadInput("customized: asks the handler of one version; name it, or give None for the default one.")
    query = {"customized": "true"} if customized else None
    return Call(
        "GET",
        _version(model, version),
        _read_list,
        api="management",
        query=query,
        model=model,
        timeout=timeout,
        repeat="reads",
        tells_deadline=customized,
    )


def _read_list(reply: Reply) -> list[dict[str, Any]]:
    document = read_json(reply)
    if not isinstance(document, list) or not all(isinstance(each, dict) for each in document):
        raise BadAnswer(
            "The answer is no list of JSON objects.", status=reply.status, request_id=reply.headers.get("x-request-id")
        )
    return document


def models(*, timeout: Timeout = DEFAULT) -> Several[dict[str, str]]:
    """Each registered model and the address of its default version's archive, page by page."""
    return Several(partial(_all_pages, timeout))


def _all_pages(timeout: Timeout, session: Session) -> Steps[dict[str, str]]:
    found: dict[str, str] = {}
    token: object = None
    while True:
        call = _call("GET", "/models", query={"limit": 100, "next_page_token": token}, timeout=timeout, repeat="reads")
        page = yield from call.steps(session)
        try:
            found |= {str(each["modelName"]): str(each.get("modelUrl", "")) for each in page["models"]}
        except (KeyError, TypeError, AttributeError):
            raise BadAnswer("The answer is no list of models.", status=200, request_id=page.request_id) from None
        following = page.get("nextPageToken")
        if following is None or following == token:
            return found
        token = following


def _version(model: str, version: str | None) -> str:
    return path_of("models", model) if version is None else path_of("models", model, version)


# ------------------------------------------------------------------------------------------------------------ traffic


def traffic(model: str, *, timeout: Timeout = DEFAULT) -> Call[Document]:
    """How requests that name no version are shared out."""
    return _call("GET", path_of("models", model) + "/traffic", model=model, timeout=timeout, repeat="reads")


def set_traffic(
    model: str,
    weights: Mapping[str, float],
    *,
    sticky: Mapping[str, str] | None = None,
    dry_run: bool = False,
    timeout: Timeout = DEFAULT,
) -> Call[Document]:
    """Share requests that name no version out by weights: `{"1.0": 90, "2.0": 10}`.

    With `sticky` those alike in a `header` or a `cookie` stay together (docs/traffic.md).
    """
    body = {"weights": dict(weights), "sticky": None if sticky is None else dict(sticky)}
    path = path_of("models", model) + "/traffic"
    return _call("PUT", path, body=body, dry_run=dry_run, model=model, timeout=timeout)


def reset_traffic(model: str, *, dry_run: bool = False, timeout: Timeout = DEFAULT) -> Call[Document]:
    """Let the default version answer requests that name none."""
    return _call("DELETE", path_of("models", model) + "/traffic", dry_run=dry_run, model=model, timeout=timeout)


def rollout(model: str, *, timeout: Timeout = DEFAULT) -> Call[Document]:
    """The model's present or last roll-out: its state, its verdicts and their evidence."""
    return _call("GET", path_of("models", model) + "/rollout", model=model, timeout=timeout, repeat="reads")


def begin_rollout(
    model: str,
    version: str,
    *,
    url: str | None = None,
    dry_run: bool = False,
    timeout: Timeout = DEFAULT,
    **options: Any,
) -> Call[Document]:
    """Let a version take over step by step, as long as it is no worse. Never repeated once it was sent.

    `url` registers an archive first. `options` are those of docs/rollouts.md: `steps`, `hold`, `min_requests`, …
    """
    body = {**options, "version": version, "url": url}
    path = path_of("models", model) + "/rollout"
    return _call("POST", path, body=body, dry_run=dry_run, model=model, timeout=timeout, repeat="if_unsent")


def order_rollout(
    model: str,
    order: Literal["pause", "resume", "abort", "promote"],
    *,
    dry_run: bool = False,
    timeout: Timeout = DEFAULT,
) -> Call[Document]:
    """Let a roll-out pause, go on, or end: with the version before (`abort`) or the new one (`promote`)."""
    path = path_of("models", model, "rollout", order)
    return _call("PUT", path, dry_run=dry_run, model=model, timeout=timeout)


# ------------------------------------------------------------------------------------------------------------ archives


def upload(
    file: Path | str,
    *,
    name: str | None = None,
    replace: bool = False,
    dry_run: bool = False,
    timeout: Timeout = UPLOAD_S,
) -> Several[Document]:
    """Send an archive into the server's model store, under its own name or this one. It registers nothing.

    Its digest goes with it, so the store gets it whole or not at all. What the store has already with the same content
    is not written again; `replace` takes the place of other content that no version uses.
    """
    path = Path(file)
    target = path_of("archives", name or path.name)
    query = {"replace": True if replace else None}
    call = _call("PUT", target, query=query, dry_run=dry_run, timeout=timeout)
    return Several(partial(_upload, call, path))


def _upload(call: Call[Document], file: Path, session: Session) -> Steps[Document]:
    size, digest = yield Blocking(partial(_size_and_digest, file))
    call.headers = {
        "content-type": "application/octet-stream",
        "content-length": str(size),
        "digest": f"sha-256={base64.b64encode(digest).decode()}",
    }
    call.file = file
    return (yield from call.steps(session))


def _size_and_digest(file: Path) -> tuple[int, bytes]:
    """Raises BadInput for a file that cannot be read."""
    digest, size = hashlib.sha256(), 0
    try:
        with file.open("rb") as opened:
            while piece := opened.read(_DIGEST_BYTES):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        raise BadInput(f"file: {file} cannot be read ({error.strerror or error}).") from None
    return size, digest.digest()
