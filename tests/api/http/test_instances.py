"""Tests for requests of KServe's V1: each instance is a request of its own, and their answers are one."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.api.errors import ErrorRules
from marserve.api.http import instances
from marserve.api.http.instances import MAX_INSTANCES, MOST_AT_ONCE, QUICK_BYTES, Instances, as_json, read_instances
from marserve.errors import BadInput, Draining, HandlerFailed, MarserveError, QueueFull, WorkerDied
from marserve.messages import Answer, Part, Request
from support.fake_data_plane import FakeDataPlane
from support.http_listener import listening

pytestmark = pytest.mark.anyio

JSON, BYTES = "application/json", "application/octet-stream"


# ------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b"{}",
        b'{"instances": 1}',
        b'{"instances": null}',
        b'{"instances": {"a": 1}}',
        b'{"instances": [1',
        b'{"instances": [1]} x',
        b'{"instances": ' + b"[" * 100_000,
        b"\xff",
        b'{"instances": ["\xff"]}',
        b"instances=1",
    ],
)
def test_a_body_that_is_no_list_of_instances_is_refused(body: bytes) -> None:
    """In one sentence."""
    with pytest.raises(BadInput, match=r'^The body must be a JSON object with a list "instances"'):
        read_instances(body)


def test_what_is_too_much_is_refused() -> None:
    """Instances, and numbers that only Python's reader takes."""
    with pytest.raises(BadInput, match=f"more than {MAX_INSTANCES} instances"):
        read_instances(b'{"instances": [' + b"1," * MAX_INSTANCES + b"1]}")
    with pytest.raises(BadInput, match="NaN and Infinity are read in bodies of at most"):
        read_instances(b'{"instances": [' + b"NaN," * 100_000 + b"1]}")


@pytest.mark.parametrize("text", ["é", "a===a=", "QQ"])
def test_bytes_that_are_no_base64_are_refused_by_their_index(text: str) -> None:
    """Before any instance is submitted."""
    body = json.dumps({"instances": [1, {"b64": text}]}).encode()

    with pytest.raises(BadInput, match=r'^instances\[1\]: the text of "b64" is no base64'):
        read_instances(body)


def test_an_instance_stays_the_text_that_it_is() -> None:
    """Or becomes the bytes that it stands for; other members of the body do not count."""
    encoded = base64.b64encode(b"\x00picture").decode()
    body = json.dumps(
        {"signature_name": "x", "instances": [1.50, "é", {"b64": encoded}, {"b64": 1}, {"a": {"b64": encoded}}]}
    )

    assert read_instances(bytearray(body.encode())) == [
        Part("body", b"1.5", JSON),
        Part("body", b'"\\u00e9"', JSON),
        Part("body", b"\x00picture", BYTES),
        Part("body", b'{"b64": 1}', JSON),
        Part("body", json.dumps({"a": {"b64": encoded}}).encode(), JSON),
    ]
    assert read_instances(b'{"instances": [[1, NaN], -Infinity]}') == [
        Part("body", b"[1, NaN]", JSON),
        Part("body", b"-Infinity", JSON),
    ]
    assert read_instances(b'{"instances": []}') == []


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"", b"null"),
        (b'{"a": [1, 2]}', b'{"a": [1, 2]}'),
        (b"[0.5, NaN, -Infinity]", b"[0.5, NaN, -Infinity]"),
        (b"cat", b'"cat"'),
        (b'say "NaN"', b'"say \\"NaN\\""'),
        (b"[1", b'"[1"'),
        (b"\x89PNG", b'{"b64": "iVBORw=="}'),
        (b"[" * 100_000, b'"' + b"[" * 100_000 + b'"'),
    ],
)
def test_an_answer_becomes_a_json_value(body: bytes, value: bytes) -> None:
    """Whatever a handler says."""
    assert as_json(body) == value


@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace")))
def test_any_answer_is_json_in_the_end(body: bytes) -> None:
    """As Python's reader, and clients', take it."""
    json.loads(as_json(body))


TEXTS = st.text(alphabet='a[]{},":\\\\é b6', max_size=6)
VALUES = st.recursive(
    st.none() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(st.binary(max_size=60) | VALUES.map(lambda value: json.dumps({"instances": value}).encode()))
def test_any_body_is_cut_as_pythons_reader_reads_it_or_refused(body: bytes) -> None:
    """Nothing else is raised, and nothing of it is lost."""
    try:
        parts = read_instances(body)
    except BadInput:
        return

    assert repr([json.loads(part.body) for part in parts]) == repr(json.loads(body)["instances"])


# ------------------------------------------------------------------------------------------- running


@dataclass
class Waiting:
    """A receiver that keeps what it got."""

    answers: list[Answer] = field(default_factory=list)
    errors: list[MarserveError] = field(default_factory=list)

    def on_answer(self, answer: Answer) -> None:
        """Keep it."""
        self.answers.append(answer)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """Nothing here streams."""
        raise AssertionError

    def on_error(self, error: MarserveError) -> None:
        """Keep it."""
        self.errors.append(error)

    @property
    def document(self) -> Any:
        """The one answer."""
        [answer] = self.answers
        return json.loads(answer.body)


class Queue(FakeDataPlane):
    """A data plane that has `places`, and counts what it refuses."""

    places = 10**9
    refused = 0

    def submit(self, model: str, version: str | None, request: Request, receiver: Any) -> Any:
        """Take a request if there is a place."""
        if sum(1 for job in self.submitted if not job.is_cancelled) >= self.places:
            self.refused += 1
            raise QueueFull(model, version)
        return super().submit(model, version, request, receiver)


def begin(plane: FakeDataPlane, count: int, receiver: Waiting, model: str = "m", **more: Any) -> Instances:
    """Begin a request of so many instances."""
    parts = [Part("body", str(number).encode(), JSON) for number in range(count)]
    submit: Callable[..., Any] = lambda request, one: plane.submit(model, None, request, one)  # noqa: E731
    return Instances(submit, Request("id", [], **more), parts, receiver, "predictions").begin()


async def test_answers_stand_in_the_order_of_the_instances() -> None:
    """Whatever the order in which they come; each request has a key of its own, and the whole one's id."""
    plane, receiver = FakeDataPlane(), Waiting()
    begin(plane, 3, receiver, deadline=5.0, priority=2)
    for number in (2, 0, 1):
        assert receiver.answers == []
        plane.submitted[number].answer(plane.submitted[number].body + b"1")

    assert receiver.document == {"predictions": ["01", 11, 21]}
    assert {(job.request.id, job.request.deadline, job.request.priority) for job in plane.submitted} == {("id", 5.0, 2)}
    assert len({job.request.key for job in plane.submitted} - {0}) == 3
    assert [job.request.is_inner for job in plane.submitted] == [False, True, True]


async def test_no_instances_have_no_predictions() -> None:
    """And reach no model."""
    plane, receiver = FakeDataPlane(), Waiting()
    begin(plane, 0, receiver)

    assert (receiver.document, plane.submitted) == ({"predictions": []}, [])


async def test_answers_that_come_at_once_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before `submit` returns, and more of them than go in a step."""
    monkeypatch.setattr(instances, "MOST_IN_A_STEP", 2)
    plane, receiver = FakeDataPlane(echoes_all=True), Waiting()
    begin(plane, 7, receiver)
    while not receiver.answers:
        await asyncio.sleep(0)

    assert receiver.document == {"predictions": list(range(7))}


async def test_a_bad_instance_is_the_requests_error_by_its_index_and_the_others_are_cancelled() -> None:
    """With the status of its own; what comes later is dropped."""
    plane, receiver = FakeDataPlane(), Waiting()
    begin(plane, 3, receiver)
    plane.submitted[0].answer(b"1")
    plane.submitted[2].fail(HandlerFailed("x: is no number", 400))
    plane.submitted[1].receiver.on_answer(Answer(b"2"))
    plane.submitted[1].receiver.on_error(HandlerFailed())

    [error] = receiver.errors
    assert isinstance(error, HandlerFailed)
    assert (error.message, error.code) == ("instances[2]: x: is no number", 400)
    assert (receiver.answers, plane.submitted[1].is_cancelled) == ([], True)


async def test_a_status_that_the_handler_set_is_an_error_too() -> None:
    """Its words are the answer's."""
    plane, receiver = FakeDataPlane(), Waiting()
    begin(plane, 2, receiver)
    plane.submitted[1].answer(b"too dark", status=422)

    [error] = receiver.errors
    assert isinstance(error, HandlerFailed)
    assert (error.message, error.code) == ("instances[1]: too dark", 422)


async def test_an_error_that_is_no_instances_has_no_index() -> None:
    """It is the server's state."""
    plane, receiver, died = FakeDataPlane(), Waiting(), WorkerDied("killed")
    begin(plane, 2, receiver)
    plane.submitted[0].fail(died)

    assert receiver.errors == [died]


async def test_what_refuses_the_first_refuses_all() -> None:
    """As any request."""
    plane, receiver = FakeDataPlane(errors={"m": Draining()}), Waiting()

    with pytest.raises(Draining):
        begin(plane, 3, receiver)
    assert (len(plane.submitted), receiver) == (1, Waiting())


async def test_more_instances_than_the_queue_has_places_wait_here() -> None:
    """One refusal is enough to learn how many places there are."""
    plane, receiver = Queue(), Waiting()
    plane.places = 3
    begin(plane, 10, receiver)
    for number in range(10):
        assert sum(1 for job in plane.submitted if not job.is_cancelled) <= 3
        job = plane.submitted[number]
        job.is_cancelled = True  # its place is free
        job.answer(job.body)
        await asyncio.sleep(0)

    assert receiver.document == {"predictions": list(range(10))}
    assert plane.refused == 1


async def test_a_queue_that_others_fill_refuses_all() -> None:
    """Before the first instance, as it refuses any request."""
    plane, receiver = Queue(), Waiting()
    plane.places = 0

    with pytest.raises(QueueFull):
        begin(plane, 3, receiver)


async def test_no_more_than_a_bound_are_under_way() -> None:
    """Whatever room there is."""
    plane, receiver = FakeDataPlane(), Waiting()
    begin(plane, 2 * MOST_AT_ONCE, receiver)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(plane.submitted) == MOST_AT_ONCE

    plane.submitted[5].answer(b"1")
    assert len(plane.submitted) == MOST_AT_ONCE + 1


async def test_a_client_that_goes_takes_all_instances_with_it() -> None:
    """Those that were not submitted yet never are."""
    plane, receiver = FakeDataPlane(), Waiting()
    whole = begin(plane, 2 * MOST_AT_ONCE, receiver)
    whole.hold()
    whole.resume()
    whole.cancel()
    whole.cancel()
    for _ in range(100):
        await asyncio.sleep(0)

    assert all(job.is_cancelled for job in plane.submitted)
    assert len(plane.submitted) == instances.MOST_IN_A_STEP
    assert receiver == Waiting()


async def test_the_pieces_of_a_stream_are_one_value() -> None:
    """V1 has no streams."""
    plane, receiver = FakeDataPlane(), Waiting()
    begin(plane, 1, receiver)
    plane.submitted[0].piece(b"on")
    plane.submitted[0].piece(b"ce", last=True)

    assert receiver.document == {"predictions": ["once"]}


async def test_what_all_answers_have_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole or in pieces."""
    monkeypatch.setattr(instances, "MAX_ANSWER_BYTES", 10)
    for send in (
        lambda job: job.answer(b"1" * 11),
        lambda job: (job.piece(b"1" * 6), job.piece(b"1" * 6)),
    ):
        plane, receiver = FakeDataPlane(), Waiting()
        begin(plane, 2, receiver)
        send(plane.submitted[0])

        assert isinstance(receiver.errors[0], BadInput)
        assert plane.submitted[1].is_cancelled


# ------------------------------------------------------------------------------------------- at a listener


def post(body: bytes, kind: str = JSON, target: str = "/v1/models/m:predict") -> bytes:
    """A request with this body."""
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("size", [0, QUICK_BYTES])
@pytest.mark.parametrize("kind", [JSON, "application/x-www-form-urlencoded"])
async def test_a_request_is_cut_into_its_instances_whatever_its_content_type(size: int, kind: str) -> None:
    """curl says that its bodies are forms; long bodies are read by a thread."""
    body = json.dumps({"instances": [1, "x" * size]}).encode()
    async with listening(splits_instances=True) as listener, listener.connect() as client:
        answer = await client.ask(post(body, kind, "/v1/models/echo:predict"))
        explained = await client.ask(post(body, kind, "/v1/models/echo:explain"))

    assert (answer.status, answer.header("content-type")) == (200, "application/json")
    assert json.loads(answer.body) == {"predictions": [1, "x" * size]}
    assert json.loads(explained.body) == {"explanations": [1, "x" * size]}
    assert [job.request.is_explain for job in listener.plane.submitted] == [False, False, True, True]


@pytest.mark.parametrize("body", [b"{}", b"[" * 20_000, b'{"instances": [{"b64": "a"}]}'])
async def test_a_bad_body_is_400_and_reaches_no_model(body: bytes) -> None:
    """The connection goes on."""
    rules = ErrorRules(as_recorded=False)
    async with listening(splits_instances=True, error_rules=rules) as listener, listener.connect() as client:
        answer = await client.ask(post(body))
        next_one = await client.ask(post(b'{"instances": [1]}', target="/v1/models/echo:predict"))

    assert (answer.status, next_one.status) == (400, 200)
    assert json.loads(answer.body)["error"] == json.loads(answer.body)["message"]
    assert [job.model for job in listener.plane.submitted] == ["echo"]


async def test_a_model_with_an_envelope_gets_the_body_whole() -> None:
    """The envelope cuts it, for the handler that it is around; as under `torchserve`."""
    body = b'{"instances": [1, 2]}'
    async with listening(splits_instances=True) as listener, listener.connect() as client:
        listener.plane.enveloped.add("echo")
        enveloped = await client.ask(post(body, target="/v1/models/echo:predict"))
    async with listening() as listener, listener.connect() as client:
        recorded = await client.ask(post(body, target="/v1/models/echo:predict"))

    assert enveloped.body == recorded.body == body


async def test_a_client_that_hangs_up_cancels_its_instances() -> None:
    """All that were submitted."""
    async with listening(splits_instances=True) as listener:
        async with listener.connect() as client:
            await client.send(post(b'{"instances": [1, 2, 3]}'))
            await listener.plane.wait_for(3)
            client.hang_up()
        await listener.wait_until_empty()

        assert [job.is_cancelled for job in listener.plane.submitted] == [True] * 3
