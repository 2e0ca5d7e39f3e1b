"""`/events/{source}` and `/watches` of the management API: notifications of object stores, and the state of watches.

An event only makes a watch look sooner; the watch loads what the store itself shows. So a forged event costs one
request to the store. A sender needs the management key or its source's secret.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import logging
import re
from asyncio import to_thread
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from marserve.answers.management import ErrorBody, EventsTaken, StatusMessage, WatchDescription, WatchList
from marserve.api.decoding import SHORT_BYTES
from marserve.api.rest.application import PrettyJson
from marserve.api.rest.late_routes import new_router
from marserve.api.rest.models.event_bodies import Body, read_body
from marserve.api.tokens import authorization_of
from marserve.arrivals.watches import Watches
from marserve.errors import BadInput, BadSettings, BodyTooLarge, InvalidToken, MissingKey, WrongKey
from marserve.settings.stores import Secret
from marserve.telemetry.logs.access_log import legible
from marserve.telemetry.logs.log_limit import caused_by

log = logging.getLogger("marserve.api")

MOST_EVENT_BYTES = 1 << 20
MOST_SHOWN = 100
SECRET_HEADERS = ("x-marserve-event-secret", "x-goog-channel-token", "aeg-sas-key")
SECRET_PARAMETER = "secret"
_SOURCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")

Source = Annotated[str, Path(description="who sends: a name of `event_secrets`, or any with the management key")]
Name = Annotated[str, Path(description="`name` in the list of watches")]


class EventSecrets:
    """Checks that a sender may send events.

    `secrets` are those of the settings, by source; a secret may stand in a variable of `environment` or in a file.
    `check_key` raises InvalidToken for anything but the management key; None if the management API needs no key. Then,
    and without any secret, every client of the management API may send.
    """

    def __init__(
        self,
        secrets: Mapping[str, Secret],
        check_key: Callable[[str | bytes | None], None] | None,
        environment: Mapping[str, str],
    ) -> None:
        self._secrets = secrets
        self._check_key = check_key
        self._environment = environment

    def check(self, source: str, request: Request) -> None:
        """Let a request of this source pass. Raises InvalidToken. Blocks."""
        authorization = authorization_of(request.scope["headers"])
        refusal: InvalidToken | None = None
        if self._check_key is not None:
            try:
                self._check_key(authorization)
            except InvalidToken as error:
                refusal = error
            else:
                return
        elif not self._secrets:
            return
        # Compared for a source without a secret too, so that the time does not show which sources there are.
        secret = self._reveal(source).encode()
        is_right = False
        all_offered = _offered(request, authorization)
        for offered in all_offered:
            is_right |= hmac.compare_digest(offered, secret)
        if not is_right or not secret:
            raise refusal or (WrongKey if any(all_offered) else MissingKey)(f"the secret of {source}")

    def _reveal(self, source: str) -> str:
        """The present secret of a source; empty if it has none or it cannot be read."""
        secret = self._secrets.get(source)
        if secret is None:
            return ""
        try:
            return secret.reveal(self._environment)
        except BadSettings as error:
            log.error("The secret of the event source %s cannot be read: %s", source, error, extra=caused_by(""))
            return ""


def _offered(request: Request, authorization: bytes | None) -> list[bytes]:
    """The secrets in a request: stores put one into a header, an address's password or its query."""
    found = [value.encode("latin-1") for name in SECRET_HEADERS for value in request.headers.getlist(name)]
    found += [value.encode() for value in request.query_params.getlist(SECRET_PARAMETER)]
    scheme, _, rest = (authorization or b"").strip().partition(b" ")
    if scheme.lower() == b"bearer":
        found.append(rest.strip())
    elif scheme.lower() == b"basic":
        with contextlib.suppress(binascii.Error):
            found.append(base64.b64decode(rest.strip(), validate=True).partition(b":")[2])
    elif scheme:
        found.append(scheme if not rest else authorization or b"")
    return found or [b""]


def events_router(watches: Watches, secrets: EventSecrets, count: Callable[[str, int], None]) -> APIRouter:
    """The route that takes events. It checks keys and secrets itself. `count` counts outcomes, for metrics."""
    router = new_router(PrettyJson)

    @router.post(
        "/events/{source}",
        operation_id="takeEvents",
        summary="Tell that objects of a watched store came or went",
        responses={
            200: {"model": EventsTaken, "description": "nothing of it is watched"},
            202: {"model": EventsTaken, "description": "the store is looked at"},
            400: {"model": ErrorBody},
            413: {"model": ErrorBody},
        },
        openapi_extra={
            "requestBody": {
                "description": "an event of S3, MinIO, SNS, EventBridge, Pub/Sub or Event Grid, or `url` of an object",
                "content": {"application/json": {"schema": {"type": "object"}}},
            }
        },
    )
    async def take(request: Request, source: Source) -> Response:
        if not _SOURCE.fullmatch(source):
            raise BadInput("The name of a source is up to 64 letters, digits, _, . and -.")
        try:
            await to_thread(secrets.check, source, request)  # may read a file
        except InvalidToken:
            count("unauthorized", 1)
            raise
        try:
            data, headers = await _read(request), {key.lower(): value for key, value in request.headers.items()}
            body = await read_events(data, headers)
            verdicts = watches.announce(body.events)
        except BadInput:
            count("bad", 1)
            raise
        peer = caused_by("" if request.client is None else f"{request.client.host}:{request.client.port}")
        if body.confirm:
            log.warning(
                "Events of %s begin when somebody confirms the subscription: open %s",
                source,
                body.confirm.split("?")[0],
                extra=peer,
            )
        if body.reply is not None:
            return PrettyJson(body.reply)
        looks = [verdict for verdict in verdicts if verdict.action == "look"]
        count("look", len(looks))
        count("ignored", len(verdicts) - len(looks) + len(body.unknown))
        for verdict in verdicts[:MOST_SHOWN]:
            why = f" ({verdict.reason})" if verdict.reason else ""
            log.info("Event of %s: %s: %s%s", source, legible(verdict.event.shown), verdict.action, why, extra=peer)
        return PrettyJson(
            {
                "status": f"{len(looks)} of {len(verdicts) + len(body.unknown)} events make a watch look"
                if verdicts or body.unknown
                else "There was no event in it",
                "events": [verdict.document() for verdict in verdicts[:MOST_SHOWN]],
                "ignoredKinds": sorted({word[:80] for word in body.unknown})[:MOST_SHOWN],
            },
            status_code=202 if looks else 200,
        )

    return router


async def read_events(data: bytes, headers: Mapping[str, str]) -> Body:
    """The events in a body; a long one is read in a thread. Raises BadInput."""
    return read_body(data, headers) if len(data) <= SHORT_BYTES else await to_thread(read_body, data, headers)


async def _read(request: Request) -> bytes:
    """The body, bounded as it comes. Raises BodyTooLarge."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MOST_EVENT_BYTES:
            raise BodyTooLarge(MOST_EVENT_BYTES)
        pieces.append(piece)
    return b"".join(pieces)


def watches_router(watches: Watches) -> APIRouter:
    """The routes below `/watches`."""
    router = new_router(PrettyJson)

    @router.get(
        "/watches",
        operation_id="listWatches",
        summary="List the places that are watched, and how that goes",
        responses={200: {"model": WatchList}},
    )
    async def list_watches() -> Response:
        described = [watches.describe(name) for name in watches.names()]
        return PrettyJson({"watches": [_without_archives(each) for each in described]})

    @router.get(
        "/watches/{name}",
        operation_id="describeWatch",
        summary="Describe a watch, with what became of each archive",
        responses={200: {"model": WatchDescription}, 404: {"model": ErrorBody}},
    )
    async def describe_watch(name: Name) -> Response:
        return PrettyJson(watches.describe(name))

    @router.post(
        "/watches/{name}/look",
        operation_id="lookAtWatch",
        summary="Look at a watched place now",
        responses={202: {"model": StatusMessage}, 404: {"model": ErrorBody}},
    )
    async def look(name: Name) -> Response:
        watches.look(name)
        return PrettyJson({"status": f"Watch {name} looks now"}, status_code=202)

    return router


def _without_archives(described: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in described.items() if key not in ("archiveList", "archivesShown")}
