"""What the parameters of an Open Inference request do at a listener; what is wrong with them reaches no model."""

from __future__ import annotations

import json
import zlib
from time import monotonic
from typing import Any

import pytest

from marserve.api.errors import ErrorRules
from marserve.api.open_inference.packed_bodies import PackedBodies
from marserve.api.open_inference.request_parameters import QUICK_BYTES, SEARCHED_BYTES
from marserve.messages import PACKED_BODY, Part
from support.http_listener import listening

pytestmark = pytest.mark.anyio

ROUTE = "/v2/models/m/infer"
# Read on the loop; read by a thread, as it is long; not even searched on the loop.
SIZES = [0, QUICK_BYTES, SEARCHED_BYTES]


def post(body: bytes, *lines: str, target: str = ROUTE) -> bytes:
    """A request with this body."""
    head = "\r\n".join([f"POST {target} HTTP/1.1", "Host: x", *lines, f"Content-Length: {len(body)}"])
    return head.encode() + b"\r\n\r\n" + body


def asking(size: int = 0, **parameters: Any) -> bytes:
    """A body with these parameters behind inputs of this length."""
    return json.dumps({"inputs": ["x" * size], "parameters": parameters}).encode()


@pytest.mark.parametrize("size", SIZES)
async def test_parameters_become_deadline_priority_and_sequence(size: int) -> None:
    """The body and its content type go on unchanged."""
    body = asking(size, timeout=1_500_000, priority=3, sequence_id=7, sequence_end=True, own=1)
    async with listening(marks_open_inference=True) as listener, listener.connect() as client:
        before = monotonic()
        await client.send(post(body, "Content-Type: application/json", "TS_REQUEST_SEQUENCE_ID: 8"))
        request = (await listener.plane.wait_for(1)).request

    assert request.deadline is not None
    assert before + 1.5 <= request.deadline <= monotonic() + 1.5
    assert request.priority == 2
    assert request.parts == [Part("body", body, "application/json")]
    assert [line for line in request.headers if line[0].lower().startswith(b"ts_")] == [
        (b"ts_request_sequence_id", b"7"),
        (b"ts_request_sequence_end", b"true"),
    ]


class Declaring:
    """All models declare their tensors."""

    def takes_tensors(self, model: str, version: str | None = None) -> bool:
        """Whether one does."""
        return True


@pytest.mark.parametrize("size", SIZES)
async def test_a_compressed_body_is_its_workers_to_read(size: int) -> None:
    """Though it spells out what it asks for: it goes on as it came, with the server's word for how to read it."""
    body = zlib.compress(asking(size, priority=3), 0)
    assert b'"priority"' in body
    async with (
        listening(marks_open_inference=True, packed_bodies=PackedBodies(Declaring(), 1000)) as listener,
        listener.connect() as client,
    ):
        await client.send(post(body, "Content-Encoding: Deflate", "open_inference_packed_body: gzip 1"))
        request = (await listener.plane.wait_for(1)).request

    assert (request.priority, request.parts) == (None, [Part("body", body)])
    assert [each for each in request.server_headers if each[0] == PACKED_BODY] == [(PACKED_BODY, "deflate 1000")]


async def test_an_encoding_that_is_not_known_reaches_no_model() -> None:
    """415 with its name, and the connection goes on."""
    async with (
        listening(marks_open_inference=True, packed_bodies=PackedBodies(Declaring(), 1000)) as listener,
        listener.connect() as client,
    ):
        answer = await client.ask(post(b"x", "Content-Encoding: gzip", "Content-Encoding: gzip"))
        next_one = await client.ask(post(b"{}", target="/v2/models/echo/infer"))

    assert (answer.status, "Content-Encoding: 'gzip, gzip'" in json.loads(answer.body)["message"]) == (415, True)
    assert next_one.status == 200
    assert len(listener.plane.submitted) == 1


async def test_headers_have_precedence_where_they_ask_for_more() -> None:
    """The earlier deadline, and the header's priority."""
    body = asking(timeout=60_000_000, priority=3)
    async with listening(marks_open_inference=True) as listener, listener.connect() as client:
        await client.send(post(body, "x-marserve-timeout-ms: 1000", "x-marserve-priority: 9"))
        request = (await listener.plane.wait_for(1)).request

    assert request.deadline is not None
    assert request.deadline < monotonic() + 2
    assert request.priority == 9


async def test_only_the_json_of_a_body_with_raw_tensors_is_read() -> None:
    """Values behind it may spell anything."""
    head = json.dumps({"parameters": {"priority": 1}}).encode()
    body = head + b'"priority"' + b"x" * SEARCHED_BYTES
    async with listening(marks_open_inference=True) as listener, listener.connect() as client:
        await client.send(post(body, f"Inference-Header-Content-Length: {len(head)}"))
        request = (await listener.plane.wait_for(1)).request

    assert (request.priority, request.parts[0].body) == (0, body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["priority", "timeout", "sequence_id", "sequence_start", "sequence_end"])
async def test_a_wrong_parameter_is_400_names_itself_and_reaches_no_model(name: str, size: int) -> None:
    """Under the protocol's key; the connection goes on."""
    rules = ErrorRules(as_recorded=False)
    async with listening(marks_open_inference=True, error_rules=rules) as listener, listener.connect() as client:
        answer = await client.ask(post(asking(size, **{name: -1})))
        next_one = await client.ask(post(asking(size), target="/v2/models/echo/infer"))

    assert (answer.status, next_one.status) == (400, 200)
    assert json.loads(answer.body)["error"].startswith(f"Parameter {name} is -1; it must be ")
    assert [job.model for job in listener.plane.submitted] == ["echo"]


@pytest.mark.parametrize("target", ["/predictions/m", "/v1/models/m:predict"])
async def test_other_routes_read_no_parameters(target: str) -> None:
    """There they are the model's own words."""
    async with listening(marks_open_inference=True) as listener, listener.connect() as client:
        await client.send(post(asking(priority=-1), target=target))
        assert (await listener.plane.wait_for(1)).request.priority is None


async def test_as_torchserve_the_parameters_are_the_handlers() -> None:
    """Where the protocol is not spoken in full."""
    async with listening() as listener, listener.connect() as client:
        await client.send(post(asking(priority=-1)))
        assert (await listener.plane.wait_for(1)).request.priority is None


async def test_a_client_that_leaves_while_its_parameters_are_read_costs_nothing() -> None:
    """Nothing of it reaches a model, and its connection is forgotten."""
    async with listening(marks_open_inference=True) as listener:
        for _ in range(20):
            async with listener.connect() as client:
                await client.send(post(asking(SEARCHED_BYTES, priority=1)))
                client.hang_up()
        await listener.wait_until_empty()
        for job in listener.plane.submitted:
            assert job.is_cancelled
