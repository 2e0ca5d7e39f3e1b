"""What a client may ask for in headers of ours: a deadline and a priority; and what it is told when it asks wrongly."""

from __future__ import annotations

import asyncio
import json
from time import monotonic

import pytest

from marserve.api.errors import ErrorRules
from marserve.errors import DeadlinePassed, WaitTooLong
from support.http_listener import listening

pytestmark = pytest.mark.anyio


def post(*lines: str, target: str = "/predictions/m") -> bytes:
    """A request with these header lines."""
    return f"POST {target} HTTP/1.1\r\nHost: x\r\n{''.join(f'{line}{chr(13)}{chr(10)}' for line in lines)}".encode() + (
        b"Content-Length: 2\r\n\r\nhi"
    )


@pytest.mark.parametrize("name", ["x-marserve-timeout-ms", "X-Marserve-Timeout-Ms", "X-MARSERVE-TIMEOUT-MS"])
async def test_a_timeout_becomes_a_deadline_counted_from_the_request(name: str) -> None:
    """In milliseconds, in any spelling of its name; again when the same header comes again."""
    async with listening() as listener, listener.connect() as client:
        for count in (1, 2):
            before = monotonic()
            await client.send(post(f"{name}: 1500"))
            job = await listener.plane.wait_for(count)
            after = monotonic()
            job.answer(b"done")
            await client.read()

            assert job.request.deadline is not None
            assert before + 1.5 <= job.request.deadline <= after + 1.5


@pytest.mark.parametrize("priority", [0, 9])
async def test_a_priority_travels_with_the_request(priority: int) -> None:
    """0 to 9."""
    async with listening() as listener, listener.connect() as client:
        await client.send(post(f"X-Marserve-Priority: {priority}"))
        job = await listener.plane.wait_for(1)

    assert job.request.priority == priority


@pytest.mark.parametrize(
    "target",
    ["/predictions/m", "/predictions/m/1.0", "/predictions/m/1.0/a/b", "/explanations/m", "/m/predict",
     "/m/1.0/predict", "/models/m/invoke", "/invocations?model_name=m", "/v1/models/m:predict", "/v1/models/m:explain",
     "/v2/models/m/infer", "/v2/models/m/explain"],
)  # fmt: skip
async def test_the_wishes_hold_on_every_inference_route_and_so_does_hanging_up(target: str) -> None:
    """Deadline, priority, and a client that leaves: the same whatever the route is called."""
    async with listening() as listener, listener.connect() as client:
        before = monotonic()
        await client.send(post("x-marserve-timeout-ms: 1500", "x-marserve-priority: 2", target=target))
        job = await listener.plane.wait_for(1)
        assert job.request.deadline is not None
        assert before + 1.5 <= job.request.deadline <= monotonic() + 1.5
        assert job.request.priority == 2
        assert not job.is_cancelled

        client.hang_up()
        await listener.wait_until_empty()

    assert job.is_cancelled


async def test_without_the_headers_there_is_neither() -> None:
    """The model's own apply."""
    async with listening() as listener, listener.connect() as client:
        await client.send(post())
        job = await listener.plane.wait_for(1)

    assert (job.request.deadline, job.request.priority) == (None, None)


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "1e3", "soon", "", "2147483648", "99999999999999999999", "1 2"])
async def test_a_timeout_that_is_none_is_400_and_names_the_value(value: str) -> None:
    """The model does not see the request; the connection goes on."""
    async with listening() as listener, listener.connect() as client:
        answer = await client.ask(post(f"x-marserve-timeout-ms: {value}"))
        next_one = await client.ask(post(target="/predictions/echo"))

    document = json.loads(answer.body)
    assert (answer.status, document["code"], document["type"]) == (400, 400, "BadRequestException")
    assert "x-marserve-timeout-ms is " in document["message"]
    assert repr(value) in document["message"]
    assert "a whole number of milliseconds, 1 to 2147483647" in document["message"]
    assert next_one.status == 200
    assert len(listener.plane.submitted) == 1


@pytest.mark.parametrize("value", ["10", "-1", "high", "", "1.0", "\xb2"])
async def test_a_priority_that_is_none_is_400_and_names_the_value(value: str) -> None:
    """And says what is right."""
    async with listening() as listener, listener.connect() as client:
        await client.send(
            b"POST /predictions/m HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nx-marserve-priority: "
            + value.encode("latin-1")
            + b"\r\n\r\n"
        )
        answer = await client.read()

    assert answer.status == 400
    assert json.loads(answer.body)["message"] == (
        f"x-marserve-priority is {value!r}; it must be a whole number from 0 (most urgent) to 9."
    )
    assert not listener.plane.submitted


@pytest.mark.parametrize("name", ["x-marserve-timeout-ms", "x-marserve-priority"])
async def test_a_wish_that_is_said_twice_is_400(name: str) -> None:
    """Two servers might take different ones."""
    async with listening() as listener, listener.connect() as client:
        answer = await client.ask(post(f"{name}: 5", f"{name}: 6"))

    assert answer.status == 400
    assert "more than once" in json.loads(answer.body)["message"]


async def test_an_endless_value_is_not_repeated() -> None:
    """An error's message stays short."""
    async with listening() as listener, listener.connect() as client:
        answer = await client.ask(post(f"x-marserve-timeout-ms: {'9' * 5000}"))

    assert answer.status == 400
    assert len(answer.body) < 300


async def test_refused_for_its_deadline_is_503_with_retry_after_and_past_it_504() -> None:
    """By setting 429 instead of 503; each names its class of cause."""
    refusal = WaitTooLong(2.5, 0.1, retry_after_s=3.0)
    answers = []
    for status in (503, 429):
        async with listening(error_rules=ErrorRules(status)) as listener, listener.connect() as client:
            listener.plane.errors = {"busy": refusal, "late": DeadlinePassed("queue")}
            answers.append(await client.ask(post(target="/predictions/busy")))
            late = await client.ask(post(target="/predictions/late"))

    assert [answer.status for answer in answers] == [503, 429]
    for answer in answers:
        assert answer.header("retry-after") in {"3", "4", "5"}
        assert answer.header("x-marserve-cause") == "predicted_wait"
        assert json.loads(answer.body)["type"] == "ServiceUnavailableException"
    assert (late.status, late.header("x-marserve-cause")) == (504, "deadline")


async def test_a_stream_is_held_while_its_client_does_not_read_and_goes_on_when_it_does() -> None:
    """From 64 KiB on that wait for the client; nothing is lost, and the connection stays."""
    piece = b"p" * 8192
    async with listening() as listener, listener.connect(read_ahead=4096) as client:
        await client.send(post())
        job = await listener.plane.wait_for(1)

        count = 0
        while not job.is_held:
            job.piece(piece)
            count += 1
            assert count < 5000
        reading = asyncio.ensure_future(client.read())
        async with asyncio.timeout(10):
            while job.is_held:
                await asyncio.sleep(0.001)
        job.piece(b"end", last=True)
        answer = await reading

        assert answer.body == piece * count + b"end"
        assert not job.is_cancelled
        assert (await client.ask(post(target="/predictions/echo"))).status == 200


# ------------------------------------------------------------------------------------------- a version


@pytest.mark.parametrize(
    ("value", "version"), [("2.0", "2.0"), (" canary ", "canary"), ("%CE%B2%201%25", "β 1%"), ("a+b", "a+b")]
)
async def test_a_version_travels_with_the_request(value: str, version: str) -> None:
    """On every route, in any spelling of its name, again when the same header comes again; it is no version of the
    path."""
    async with listening() as listener, listener.connect() as client:
        for count in (1, 2):
            await client.send(post(f"X-MARSERVE-Version: {value}", target="/v2/models/m/infer"))
            job = await listener.plane.wait_for(count)
            job.answer(b"done")
            await client.read()

            assert (job.version, job.request.asked_version, job.request.names_version) == (None, version, False)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["x-marserve-version: 1.0", "X-Marserve-Version: 2.0"], "stands in the request more than once"),
        (["x-marserve-version:"], "x-marserve-version is empty; it must name a version of the model, or a label."),
    ],
)
async def test_a_version_that_cannot_be_meant_is_refused(lines: list[str], words: str) -> None:
    """The connection is none the worse."""
    async with listening() as listener, listener.connect() as client:
        await client.send(post(*lines))
        refused = await client.read()
        await client.send(post("x-marserve-version: 1.0"))
        job = await listener.plane.wait_for(1)

    assert refused.status == 400
    assert words in json.loads(refused.body)["message"]
    assert job.request.asked_version == "1.0"
