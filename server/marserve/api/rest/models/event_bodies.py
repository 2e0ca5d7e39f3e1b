"""Reads the notifications of object stores that an object came or went. Pure: bytes to events.

    S3 and MinIO      {"Records": [{"eventName": "ObjectCreated:Put", "s3": {"bucket": …, "object": …}}]}; also inside
                      of an SNS message, and EventBridge's {"detail-type": "Object Created", "detail": …}
    Google Cloud      Pub/Sub's push {"message": {"attributes": …, "data": base64}}, or the object itself, as Pub/Sub
                      without its wrapper and Eventarc send it, with the kind of event in headers
    Azure             Event Grid's list of {"eventType": "Microsoft.Storage.BlobCreated", "data": {"url": …}}, and
                      CloudEvents of the same
    our own           {"url": "s3://bucket/key"}, {"urls": […]}, {"watch": "model_store", "key": "m.mar"}

Of a body only this much is trusted: something may have happened to an object of that name.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote, unquote_plus, urlsplit

from marserve.arrivals.object_events import ObjectEvent
from marserve.errors import BadInput

MOST_EVENTS = 1000
MOST_DEPTH = 3
LONGEST_KEY = 1024

_FORMS = (
    "an event of S3 or MinIO (Records), of SNS, EventBridge, Pub/Sub or Event Grid, or "
    '{"url": "s3://bucket/key"} or {"watch": "name", "key": "m.mar"}'
)
# Headers with the kind of event, for a body that is a bare object of Google's.
_GOOGLE_KINDS = ("ce-type", "x-goog-pubsub-message-attribute-eventtype", "eventtype", "x-goog-resource-state")


@dataclass(slots=True)
class Body:
    """The content of a body: events, kinds of events that are ignored, and what the sender must get back.

    `confirm` is an address that a person must open once before SNS sends more.
    """

    events: list[ObjectEvent] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    reply: dict[str, str] | None = None
    confirm: str = ""


def read_body(data: bytes, headers: Mapping[str, str]) -> Body:
    """The events in a request's body; names of `headers` are lower case. Raises BadInput, saying what was wrong."""
    try:
        document = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        where = (
            f"line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "as a whole"
        )
        raise BadInput(f"The body is not JSON ({where}); it must be {_FORMS}.") from None
    body = Body()
    try:
        _read(document, headers, body, 0)
    except RecursionError:
        raise BadInput("The body is nested too deeply.") from None
    return body


def _read(document: Any, headers: Mapping[str, str], body: Body, depth: int) -> None:
    if depth > MOST_DEPTH:
        raise BadInput(f"The body is a message in a message more than {MOST_DEPTH} deep.")
    if isinstance(document, list):
        _bound(document)
        for each in document:
            _read_azure(_object(each, "an entry of the list"), body)
    elif not isinstance(document, dict):
        raise BadInput(f"The body is {_kind(document)}; it must be {_FORMS}.")
    elif "Records" in document:
        _read_records(document["Records"], headers, body, depth)
    elif document.get("Event") == "s3:TestEvent":
        body.unknown.append("s3:TestEvent")
    elif "Type" in document and "Message" in document:
        _read_sns(document, headers, body, depth)
    elif "detail" in document and "detail-type" in document:
        _read_eventbridge(document, body)
    elif isinstance(document.get("message"), dict):
        _read_pubsub(document["message"], body)
    elif "bucket" in document and "name" in document:
        _read_google_object(document, _google_kind(headers), body)
    elif "eventType" in document or str(document.get("type", "")).startswith("Microsoft.Storage."):
        _read_azure(document, body)
    else:
        _read_own(document, body)


# ---------------------------------------------------------------------------------------------------- S3 and around it


def _read_records(records: Any, headers: Mapping[str, str], body: Body, depth: int) -> None:
    if not isinstance(records, list):
        raise BadInput(f"Records is {_kind(records)}; it must be a list.")
    _bound(records)
    for number, each in enumerate(records, 1):
        record = _object(each, f"record {number}")
        if isinstance(record.get("Sns"), dict):  # passed on by a function that SNS calls
            _read_sns({"Type": "Notification", **record["Sns"]}, headers, body, depth)
            continue
        name = _text(record, "eventName", f"record {number}")
        happened = _happened(name.removeprefix("s3:"), ("ObjectCreated:",), ("ObjectRemoved:", "LifecycleExpiration:"))
        if happened is None:
            body.unknown.append(name)
            continue
        s3 = _object(record.get("s3"), f"s3 of record {number}")
        bucket = _text(_object(s3.get("bucket"), f"s3.bucket of record {number}"), "name", f"bucket of record {number}")
        thing = _object(s3.get("object"), f"s3.object of record {number}")
        # Keys of these records are encoded like forms: a space is a plus sign.
        key = unquote_plus(_text(thing, "key", f"object of record {number}"))
        body.events.append(_event(happened, "s3", bucket, key, thing.get("eTag"), thing.get("sequencer")))


def _read_sns(document: dict[str, Any], headers: Mapping[str, str], body: Body, depth: int) -> None:
    kind = document.get("Type")
    if kind == "SubscriptionConfirmation":
        body.unknown.append("SubscriptionConfirmation")
        body.confirm = str(document.get("SubscribeURL", ""))[:2048]
        return
    if kind != "Notification":
        body.unknown.append(str(kind)[:80])
        return
    message = document.get("Message")
    try:
        inner = json.loads(message) if isinstance(message, str) else message
    except (ValueError, RecursionError):
        raise BadInput("Message of the SNS notification is no JSON; it must be an event of S3.") from None
    _read(inner, headers, body, depth + 1)


def _read_eventbridge(document: dict[str, Any], body: Body) -> None:
    name = str(document["detail-type"])
    happened = _happened(name, ("Object Created",), ("Object Deleted",))
    if happened is None or document.get("source") != "aws.s3":
        body.unknown.append(name[:80])
        return
    detail = _object(document["detail"], "detail")
    bucket = _text(_object(detail.get("bucket"), "detail.bucket"), "name", "detail.bucket")
    thing = _object(detail.get("object"), "detail.object")
    # Unlike S3's own records, these do not encode keys.
    key = _text(thing, "key", "detail.object")
    body.events.append(_event(happened, "s3", bucket, key, thing.get("etag"), thing.get("sequencer")))


# ------------------------------------------------------------------------------------------------------ Google Cloud


def _google_kind(headers: Mapping[str, str]) -> str:
    return next((headers[name] for name in _GOOGLE_KINDS if headers.get(name)), "OBJECT_FINALIZE")


def _read_pubsub(message: dict[str, Any], body: Body) -> None:
    attributes = message.get("attributes") or {}
    attributes = _object(attributes, "message.attributes")
    payload: dict[str, Any] = {}
    data = message.get("data")
    if data:
        try:
            decoded = json.loads(base64.b64decode(str(data), validate=True))
        except (binascii.Error, ValueError, RecursionError):
            raise BadInput("message.data is not JSON in base64, as Pub/Sub sends it.") from None
        payload = _object(decoded, "message.data")
    kind = attributes.get("eventType") or ("OBJECT_FINALIZE" if "bucket" in payload else "")
    named = {"bucket": attributes.get("bucketId"), "name": attributes.get("objectId")}
    payload |= {key: value for key, value in named.items() if value}
    if attributes.get("objectGeneration"):
        payload["generation"] = attributes["objectGeneration"]
    _read_google_object(payload, str(kind), body)


def _read_google_object(thing: dict[str, Any], kind: str, body: Body) -> None:
    happened = _happened(
        kind,
        ("OBJECT_FINALIZE", "google.cloud.storage.object.v1.finalized", "google.storage.object.finalize", "exists"),
        (
            "OBJECT_DELETE",
            "OBJECT_ARCHIVE",
            "google.cloud.storage.object.v1.deleted",
            "google.cloud.storage.object.v1.archived",
            "google.storage.object.delete",
            "not_exists",
        ),
    )
    if happened is None:
        body.unknown.append(kind[:80] or "an event without a kind")
        return
    bucket, key = _text(thing, "bucket", "the object"), _text(thing, "name", "the object")
    generation = thing.get("generation")
    # The ETag of these messages covers the metadata too, and is not the one that the store shows.
    body.events.append(_event(happened, "gs", bucket, key, None, None if generation is None else str(generation)))


# ------------------------------------------------------------------------------------------------------ Azure


def _read_azure(event: dict[str, Any], body: Body) -> None:
    kind = str(event.get("eventType") or event.get("type") or "")
    data = event.get("data")
    if kind == "Microsoft.EventGrid.SubscriptionValidationEvent":
        code = _text(_object(data, "data"), "validationCode", "data")
        body.reply = {"validationResponse": code[:200]}
        body.unknown.append(kind)
        return
    happened = _happened(
        kind,
        ("Microsoft.Storage.BlobCreated", "Microsoft.Storage.BlobRenamed"),
        ("Microsoft.Storage.BlobDeleted",),
    )
    if happened is None:
        body.unknown.append(kind[:80] or "an event without a kind")
        return
    thing = _object(data, "data")
    address = _text(thing, "destinationUrl" if kind.endswith("BlobRenamed") else "url", "data")
    try:
        url = urlsplit(address)
    except ValueError:  # brackets without an address in them
        url = urlsplit("")
    container, _, key = unquote(url.path).lstrip("/").partition("/")
    account = (url.hostname or "").partition(".")[0]
    if not container or not key:
        raise BadInput("data.url of the event names no blob; it must be https://account.blob.core.windows.net/…/…")
    # A watch may name the account or leave it to its settings; both are meant.
    etag = thing.get("eTag")
    for host in (container, f"{container}@{account}"):
        body.events.append(_event(happened, "az", host, key, etag, thing.get("sequencer")))


# ------------------------------------------------------------------------------------------------------ our own


def _read_own(document: dict[str, Any], body: Body) -> None:
    happened: Literal["there", "gone"] = "there"
    if "event" in document:
        word = document["event"]
        if word not in ("created", "removed"):
            raise BadInput(f"event is {json.dumps(word)[:80]}; it must be created or removed.")
        happened = "there" if word == "created" else "gone"
    etag = document.get("etag")
    if "watch" in document:
        key = document.get("key", "")
        if not isinstance(document["watch"], str) or not isinstance(key, str):
            raise BadInput('watch and key must be texts, as in {"watch": "model_store", "key": "m.mar"}.')
        body.events.append(ObjectEvent(happened, key[:LONGEST_KEY], watch=document["watch"], etag=_etag(etag)))
        return
    urls = document.get("urls", [document["url"]] if "url" in document else None)
    if not isinstance(urls, list) or not urls or not all(isinstance(url, str) for url in urls):
        raise BadInput(f"The body is an object with {_words(document)}; it must be {_FORMS}.")
    _bound(urls)
    for url in urls:
        scheme, separator, rest = url.partition("://")
        host, slash, key = rest.partition("/")
        if not separator or not host or not slash or not key:
            raise BadInput(f"The url {url[:200]!r} names no object; it must be as s3://bucket/key.")
        scheme = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az"}.get(scheme, scheme)
        body.events.append(_event(happened, scheme, host, unquote(key), etag, None))


# ------------------------------------------------------------------------------------------------------ small parts


def _event(
    happened: Literal["there", "gone"], scheme: str, host: str, key: str, etag: Any, sequencer: Any
) -> ObjectEvent:
    if len(key) > LONGEST_KEY * 3:
        raise BadInput(f"A key has {len(key)} characters; stores have at most {LONGEST_KEY} bytes.")
    number = str(sequencer)[:64] if isinstance(sequencer, str | int) and not isinstance(sequencer, bool) else None
    return ObjectEvent(happened, key, place=f"{scheme}://{host[:300]}", etag=_etag(etag), sequencer=number)


def _etag(value: Any) -> str | None:
    return value[:200] if isinstance(value, str) and value else None


def _happened(name: str, there: tuple[str, ...], gone: tuple[str, ...]) -> Literal["there", "gone"] | None:
    if name.startswith(there):
        return "there"
    return "gone" if name.startswith(gone) else None


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadInput(f"{what} is {_kind(value)}; it must be an object.")
    return value


def _text(holder: dict[str, Any], key: str, what: str) -> str:
    value = holder.get(key)
    if not isinstance(value, str) or not value:
        raise BadInput(f"{key} of {what} is {_kind(value)}; it must be a text.")
    return value


def _bound(entries: list[Any]) -> None:
    if len(entries) > MOST_EVENTS:
        raise BadInput(f"The body has {len(entries)} events; at most {MOST_EVENTS} are taken at a time.")


def _kind(value: Any) -> str:
    names: tuple[tuple[type, str], ...] = (
        (bool, "true or false"),
        (dict, "an object"),
        (list, "a list"),
        (str, "a text" if value else "an empty text"),
        (int, "a number"),
        (float, "a number"),
    )
    return next((name for kind, name in names if isinstance(value, kind)), "missing or null")


def _words(document: dict[str, Any]) -> str:
    return ", ".join(sorted(str(key)[:40] for key in document)[:10]) or "nothing in it"
