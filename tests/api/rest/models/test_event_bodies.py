"""Claims of `marserve.api.rest.models.event_bodies`: what object stores send is understood, and nothing else is."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.api.rest.models.event_bodies import MOST_EVENTS, read_body
from marserve.arrivals.object_events import ObjectEvent, Sequencers
from marserve.errors import BadInput


def s3_record(name: str = "ObjectCreated:Put", key: str = "models/m.mar", **thing: Any) -> dict[str, Any]:
    """A record as S3's documentation shows it."""
    return {
        "eventVersion": "2.1",
        "eventSource": "aws:s3",
        "awsRegion": "us-west-2",
        "eventTime": "1970-01-01T00:00:00.000Z",
        "eventName": name,
        "userIdentity": {"principalId": "AIDAJDPLRKLG7UEXAMPLE"},
        "requestParameters": {"sourceIPAddress": "127.0.0.1"},
        "responseElements": {"x-amz-request-id": "C3D13FE58DE4C810"},
        "s3": {
            "s3SchemaVersion": "1.0",
            "configurationId": "testConfigRule",
            "bucket": {
                "name": "bucket",
                "ownerIdentity": {"principalId": "A3NL1KOZZKExample"},
                "arn": "arn:aws:s3:::b",
            },
            "object": {"key": key, "size": 1024, "eTag": "d41d8cd9", "sequencer": "0055AED6DCD90281E5", **thing},
        },
    }


def read(document: Any, **headers: str) -> list[ObjectEvent]:
    """The events of a document."""
    lines = {name.replace("_", "-"): value for name, value in headers.items()}
    return read_body(json.dumps(document).encode(), lines).events


CAME = ObjectEvent("there", "models/m.mar", "s3://bucket", etag="d41d8cd9", sequencer="0055AED6DCD90281E5")


def test_s3_records_are_read() -> None:
    """Created in every way, removed, expired; what is neither means nothing."""
    records = [
        s3_record(),
        s3_record("ObjectCreated:CompleteMultipartUpload"),
        s3_record("s3:ObjectCreated:Copy"),
        s3_record("ObjectRemoved:DeleteMarkerCreated"),
        s3_record("LifecycleExpiration:Delete"),
        s3_record("ObjectTagging:Put"),
    ]
    body = read_body(json.dumps({"Records": records}).encode(), {})

    assert body.events[0] == CAME
    assert [event.happened for event in body.events] == ["there", "there", "there", "gone", "gone"]
    assert body.unknown == ["ObjectTagging:Put"]


def test_keys_of_s3_are_decoded_as_forms_are_and_others_are_as_they_stand() -> None:
    """A space is a plus sign, a plus sign is escaped; EventBridge and Google do not encode."""
    assert read({"Records": [s3_record(key="my+models/a%2Bb%C3%A9.mar")]})[0].key == "my models/a+bé.mar"
    bridge = {
        "version": "0",
        "source": "aws.s3",
        "detail-type": "Object Created",
        "detail": {"bucket": {"name": "bucket"}, "object": {"key": "a+b.mar", "etag": "x", "sequencer": "01"}},
    }
    assert read(bridge) == [ObjectEvent("there", "a+b.mar", "s3://bucket", etag="x", sequencer="01")]
    bridge["detail-type"] = "Object Deleted"
    assert read(bridge)[0].happened == "gone"
    bridge["detail-type"] = "Object Tags Added"
    assert read(bridge) == []


def test_minio_s_webhook_is_read() -> None:
    """It has a key and an event's name of its own beside the records."""
    body = {"EventName": "s3:ObjectCreated:Put", "Key": "bucket/models/m.mar", "Records": [s3_record()]}

    assert read(body) == [CAME]


def test_sns_wraps_what_s3_says() -> None:
    """The message is JSON in a text; confirming a subscription is a person's to do."""
    message = json.dumps({"Records": [s3_record()]})
    assert read({"Type": "Notification", "MessageId": "1", "TopicArn": "arn", "Message": message}) == [CAME]
    assert read({"Records": [{"EventSource": "aws:sns", "Sns": {"Message": message}}]}) == [CAME]
    asked = {"Type": "SubscriptionConfirmation", "Message": "You have chosen", "SubscribeURL": "https://sns/?Token=x"}
    body = read_body(json.dumps(asked).encode(), {})
    assert (body.events, body.confirm) == ([], "https://sns/?Token=x")
    with pytest.raises(BadInput, match="Message of the SNS notification is no JSON"):
        read({"Type": "Notification", "Message": "hello"})


def test_messages_in_messages_end_somewhere() -> None:
    """A body that wraps itself again and again is refused."""
    message: dict[str, Any] = {"Records": [s3_record()]}
    for _ in range(6):
        message = {"Type": "Notification", "Message": json.dumps(message)}

    with pytest.raises(BadInput, match="a message in a message"):
        read(message)


def test_the_test_event_of_s3_means_nothing() -> None:
    """Sent when notifications are set up."""
    body = read_body(b'{"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "bucket"}', {})

    assert (body.events, body.unknown) == ([], ["s3:TestEvent"])


def test_pubsub_pushes_what_google_cloud_storage_says() -> None:
    """By its attributes, by its data in base64, or both."""
    thing = {"kind": "storage#object", "bucket": "b", "name": "models/m.mar", "generation": "17", "etag": "CJ="}
    data = base64.b64encode(json.dumps(thing).encode()).decode()
    attributes = {"eventType": "OBJECT_FINALIZE", "bucketId": "b", "objectId": "models/m.mar", "objectGeneration": "17"}
    came = ObjectEvent("there", "models/m.mar", "gs://b", sequencer="17")

    for message in ({"attributes": attributes}, {"data": data}, {"attributes": attributes, "data": data}):
        assert read({"message": message, "subscription": "projects/p/subscriptions/s"}) == [came]
    gone = {"message": {"attributes": {**attributes, "eventType": "OBJECT_DELETE"}}}
    assert read(gone)[0].happened == "gone"
    assert read({"message": {"attributes": {**attributes, "eventType": "OBJECT_METADATA_UPDATE"}}}) == []
    with pytest.raises(BadInput, match=r"message.data is not JSON in base64"):
        read({"message": {"data": "!"}})


def test_google_s_object_alone_is_read_by_its_headers() -> None:
    """As Eventarc, Pub/Sub without its wrapper, and notification channels send it."""
    thing = {"kind": "storage#object", "bucket": "b", "name": "m.mar", "generation": "17"}

    assert read(thing, ce_type="google.cloud.storage.object.v1.finalized")[0].happened == "there"
    assert read(thing, ce_type="google.cloud.storage.object.v1.deleted")[0].happened == "gone"
    assert read(thing, x_goog_resource_state="not_exists")[0].happened == "gone"
    assert read(thing)[0].happened == "there"
    assert read(thing, ce_type="google.cloud.storage.object.v1.metadataUpdated") == []


def test_event_grid_is_read_and_answered() -> None:
    """Blobs by their addresses, with and without the account; its handshake gets its code back."""
    url = "https://acct.blob.core.windows.net/models/a%20b/m.mar"
    blob = {"eventType": "Microsoft.Storage.BlobCreated", "data": {"url": url, "eTag": "0x8D"}}
    events = read([blob])

    assert [event.place for event in events] == ["az://models", "az://models@acct"]
    assert {event.key for event in events} == {"a b/m.mar"}
    assert read([{**blob, "eventType": "Microsoft.Storage.BlobDeleted"}])[0].happened == "gone"
    assert read({"type": "Microsoft.Storage.BlobCreated", "source": "x", "data": blob["data"]}) == events
    asked = [{"eventType": "Microsoft.EventGrid.SubscriptionValidationEvent", "data": {"validationCode": "512d38b6"}}]
    assert read_body(json.dumps(asked).encode(), {}).reply == {"validationResponse": "512d38b6"}


def test_our_own_form_names_objects_or_watches() -> None:
    """For who has no store's events: a pipeline, a person with curl."""
    assert read({"url": "s3://bucket/a%20b/m.mar"}) == [ObjectEvent("there", "a b/m.mar", "s3://bucket")]
    assert len(read({"urls": ["s3://b/a.mar", "gcs://b/b.mar"]})) == 2
    assert read({"urls": ["gcs://b/b.mar"]})[0].place == "gs://b"
    assert read({"watch": "w", "key": "m.mar", "event": "removed"}) == [ObjectEvent("gone", "m.mar", watch="w")]
    assert read({"watch": "w"}) == [ObjectEvent("there", "", watch="w")]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "The body is not JSON (line 1, column 1)"),
        (b"\xff\xfe", "The body is not JSON (as a whole)"),
        (b"[1]", "an entry of the list is a number; it must be an object"),
        (b"3", "The body is a number; it must be an event of S3"),
        (b"null", "The body is missing or null"),
        (b"{}", "The body is an object with nothing in it"),
        (b'{"hello": 1}', "The body is an object with hello"),
        (b'{"Records": {}}', "Records is an object; it must be a list"),
        (b'{"Records": [{}]}', "eventName of record 1 is missing or null"),
        (b'{"Records": [{"eventName": "ObjectCreated:Put"}]}', "s3 of record 1 is missing or null"),
        (b'{"Records": [{"eventName": "ObjectCreated:Put", "s3": {"bucket": {"name": ""}}}]}', "an empty text"),
        (b'{"url": "bucket/key"}', "The url 'bucket/key' names no object"),
        (b'{"url": "s3://bucket"}', "names no object"),
        (b'{"urls": [1]}', "The body is an object with urls"),
        (b'{"url": "s3://b/k", "event": "moved"}', 'event is "moved"; it must be created or removed'),
        (b'{"watch": 1}', "watch and key must be texts"),
        (b'{"message": {"attributes": {"eventType": "OBJECT_FINALIZE"}}}', "bucket of the object is missing or null"),
        (b'[{"eventType": "Microsoft.Storage.BlobCreated", "data": {"url": "https://a/b"}}]', "names no blob"),
        (b'[{"eventType": "Microsoft.Storage.BlobCreated", "data": {"url": "https://[a/b/c"}}]', "names no blob"),
        (b"[" * 100_000, "The body is not JSON"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_was_wrong(body: bytes, said: str) -> None:
    """And never with a traceback."""
    with pytest.raises(BadInput) as raised:
        read_body(body, {})

    assert said in str(raised.value)


def test_a_body_has_a_bounded_number_of_events() -> None:
    """More are refused as a whole."""
    with pytest.raises(BadInput, match=f"at most {MOST_EVENTS}"):
        read({"urls": ["s3://b/k.mar"] * (MOST_EVENTS + 1)})
    with pytest.raises(BadInput, match="A key has 5000 characters"):
        read({"url": "s3://b/" + "k" * 5000})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "Records",
                    "eventName",
                    "s3",
                    "bucket",
                    "object",
                    "key",
                    "name",
                    "message",
                    "attributes",
                    "data",
                    "Type",
                    "Message",
                    "detail",
                    "detail-type",
                    "source",
                    "url",
                    "urls",
                    "watch",
                    "eventType",
                    "type",
                    "Sns",
                    "Event",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(_JSON)
def test_whatever_comes_is_read_or_refused(document: Any) -> None:
    """No body raises anything but BadInput."""
    try:
        body = read_body(json.dumps(document).encode(), {})
    except BadInput:
        return
    assert all(isinstance(event.key, str) for event in body.events)


def test_events_that_come_late_are_told_by_their_numbers() -> None:
    """As S3 compares them: the shorter one is padded on the right; of other objects they say nothing."""
    numbers = Sequencers(most=2)

    def is_stale(sequencer: str | None, key: str = "k") -> bool:
        return numbers.is_stale(ObjectEvent("there", key, "s3://b", sequencer=sequencer))

    assert not is_stale("0055AED6DCD90281E5")
    assert not is_stale("0055AED6DCD90281E6")
    assert is_stale("0055AED6DCD90281E5")
    assert not is_stale("0055AED6DCD90281E6")  # the same again
    assert is_stale("0055")
    assert not is_stale("0056")
    assert not is_stale("0001", "other")
    assert not is_stale(None)
    assert not is_stale("01", "third")
    assert not is_stale("0000")  # "k" is forgotten by now
