"""Tests for TorchServe's inference service over gRPC, with real channels over a data plane without workers."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import time
import zlib
from typing import Any

import grpc
import pytest

from marserve.api.byte_ledger import ByteLedger
from marserve.api.grpc.inference import SERVICE, GrpcInference
from marserve.api.grpc.transport.limits import GrpcLimits
from marserve.api.request_ids import RequestIds
from marserve.errors import HandlerFailed, MarserveError, ModelNotFound, NoWorker, QueueFull, WorkerDied
from marserve.telemetry.logs.access_log import Sampling
from support.grpc_house import SCHEMA, Book, Client, FakeRegistry, client_of, inference_port, pour, refusal
from support.http2_client import framed, http2_client

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_grpc_loop")]

REQUEST = SCHEMA.message("org.pytorch.serve.grpc.inference.PredictionsRequest")


def predict(client: Client, model: str = "m", body: bytes = b"x", **options: Any) -> Any:
    """Begin one prediction."""
    return client.method(SERVICE, "Predictions")(model_name=model, input={"data": body}, **options)


async def test_a_prediction_is_one_request_and_one_answer() -> None:
    """An input is a part without content type; nothing else of the call reaches the handler."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        call = client.method(SERVICE, "Predictions")(
            model_name="m", model_version="2.0", input={"data": b"abc", "x": b"1"}, metadata=[("x-mine", "1")]
        )
        job = await registry.wait_for(1)
        job.answer(b"done", 400, "Bad dog", x_handler="1")
        answer = await call

    assert (answer.prediction, answer.HasField("sequence_id"), answer.HasField("status")) == (b"done", False, False)
    assert (job.model, job.version, job.request.names_version) == ("m", "2.0", True)
    assert sorted((part.name, part.body, part.content_type) for part in job.request.parts) == [
        ("data", b"abc", None),
        ("x", b"1", None),
    ]
    assert (job.request.headers, job.request.server_headers, job.request.deadline) == ([], [], None)


async def test_messages_and_answers_count_and_one_without_room_is_told_to_come_again() -> None:
    """As long as their calls run, and until answers are sent; then nothing is held."""
    registry, ledger = FakeRegistry(), ByteLedger(1024 * 1024)
    async with inference_port(registry, ledger=ledger) as port, client_of(port) as client:
        first = predict(client, body=b"x" * 700_000)
        job = await registry.wait_for(1)
        assert 700_000 < ledger.bodies < 701_000
        second = predict(client, "echo", b"x" * 700_000)
        code, text = await refusal(second)
        pushback = dict(tuple(await second.trailing_metadata()))["grpc-retry-pushback-ms"]
        small = await predict(client, "echo", b"hi")
        job.answer(b"y" * 900_000)
        assert (await first).prediction == b"y" * 900_000
        third = await predict(client, "echo", b"x" * 700_000)

    assert code == "UNAVAILABLE"
    assert "max_bytes_in_flight" in text
    assert int(pushback) > 0
    assert (small.prediction, len(third.prediction)) == (b"hi", 700_000)
    assert ledger.figures() == {"bodies": 0, "small_bodies": 0, "waiting": 0, "answers": 0}


async def test_the_request_id_travels_behind_every_answer() -> None:
    """Good or bad, in the shape of a UUID, and it is the handler's."""
    registry = FakeRegistry(errors={"gone": ModelNotFound("gone")})
    async with inference_port(registry) as port, client_of(port) as client:
        good = predict(client, "echo")
        await good
        bad = predict(client, "gone")
        assert await refusal(bad) == (
            "NOT_FOUND",
            "Model not found: gone\norg.pytorch.serve.archive.model.ModelNotFoundException",
        )
        ids = [dict(tuple(await call.trailing_metadata()))["x-request-id"] for call in (good, bad)]

    assert ids == [job.request.id for job in registry.submitted]
    assert all(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", word) for word in ids)


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("given", ["order-17", "a b", "x" * 129])
async def test_a_clients_id_comes_with_the_metadata(given: str, takes: bool) -> None:
    """As over HTTP: it is the call's where the server takes it, and else stands beside it; other texts are no ids."""
    registry, book = FakeRegistry(), Book()
    ids = RequestIds(takes_clients=takes)
    async with inference_port(registry, book=book, request_ids=ids) as port, client_of(port) as client:
        call = predict(client, "echo", metadata=(("x-request-id", given),))
        await call
        back = dict(tuple(await call.trailing_metadata()))["x-request-id"]
        twice = predict(client, "echo", metadata=(("x-request-id", "a"), ("x-request-id", "b")))
        await twice
        own = dict(tuple(await twice.trailing_metadata()))["x-request-id"]

    request = registry.submitted[0].request
    is_id = given == "order-17"
    assert (back == given) is (takes and is_id)
    assert (request.id, request.client_id) == (back, given if is_id and not takes else "")
    assert (request.key != 0) is (takes and is_id)
    assert own not in ("a", "b")


async def test_a_call_without_a_model_is_refused() -> None:
    """Before the data plane is asked."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        code, description = await refusal(predict(client, ""))

    assert (code, description.split("\n")[0]) == ("INVALID_ARGUMENT", "Parameter model_name is required.")
    assert registry.submitted == []


async def test_bytes_that_are_no_message_are_refused() -> None:
    """As bad input, not as a defect."""
    async with inference_port() as port, client_of(port) as client:
        raw = client.channel.unary_unary(f"/{SERVICE}/Predictions")
        code, description = await refusal(raw(b"\x0a\xff\xff"))

    assert (code, description.split("\n")[0]) == (
        "INVALID_ARGUMENT",
        "The message cannot be read as org.pytorch.serve.grpc.inference.PredictionsRequest.",
    )


async def test_a_defect_of_ours_is_answered_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    """They stand in the log, under the request's id."""
    registry = FakeRegistry(errors={"odd": RuntimeError("secret")})
    async with inference_port(registry) as port, client_of(port) as client:
        code, description = await refusal(predict(client, "odd"))

    assert (code, "secret" in description) == ("INTERNAL", False)
    assert "secret" in caplog.text


async def test_an_unknown_method_is_answered_in_torchserves_words() -> None:
    """And counted like any call."""
    book = Book()
    async with inference_port(book=book) as port, client_of(port) as client:
        told = await refusal(client.channel.unary_unary(f"/{SERVICE}/NoSuchCall")(b""))

    assert told == ("UNIMPLEMENTED", f"Method not found: {SERVICE}/NoSuchCall")
    assert book.codes == ["UNIMPLEMENTED"]


async def test_an_error_of_the_worker_carries_its_cause() -> None:
    """In the trailing metadata."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        call = predict(client)
        (await registry.wait_for(1)).fail(WorkerDied("killed"))
        code, _ = await refusal(call)
        trailers = dict(tuple(await call.trailing_metadata()))

    assert (code, trailers["x-marserve-cause"]) == ("INTERNAL", "killed")


OPEN_INFERENCE = ["inference", "org.pytorch.serve.grpc.openinference"]
FORMS = [
    (SERVICE, "Predictions", {"input": {"data": b"x"}}),
    (SERVICE, "StreamPredictions", {"input": {"data": b"x"}}),
    *((f"{package}.GRPCInferenceService", "ModelInfer", {}) for package in OPEN_INFERENCE),
]


@pytest.mark.parametrize(("service", "method", "fields"), FORMS)
@pytest.mark.parametrize(
    ("error", "code", "most_attempts", "attempts"),
    [
        (HandlerFailed(), "UNAVAILABLE", 4, 1),
        (HandlerFailed("my own words", 500), "INTERNAL", 4, 1),
        (QueueFull("m", retry_after_s=0.001), "UNAVAILABLE", 2, 2),  # each one waits for seconds, as it was told
        (NoWorker("m"), "UNAVAILABLE", 4, 4),
    ],
)
async def test_a_client_that_retries_runs_a_failing_handler_once(
    service: str,
    method: str,
    fields: dict[str, Any],
    error: MarserveError,
    code: str,
    most_attempts: int,
    attempts: int,
) -> None:
    """gRPC's own retry policy heeds the trailer; what another try may help is tried as often as the policy says."""
    registry = FakeRegistry(errors={"m": error})
    async with (
        inference_port(registry, has_open_inference=True) as port,
        client_of(port, most_attempts=most_attempts) as client,
    ):
        call = client.method(service, method)(model_name="m", timeout=10, **fields)
        told = await refusal(call.read() if method == "StreamPredictions" else call)
        pushback = dict(tuple(await call.trailing_metadata())).get("grpc-retry-pushback-ms")

    assert (told[0], len(registry.submitted)) == (code, attempts)
    assert (pushback == "-1") is isinstance(error, HandlerFailed)


async def test_a_stream_that_its_handler_breaks_off_is_not_tried_again() -> None:
    """Neither before its first piece nor behind it."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port, most_attempts=4) as client:
        for count, pieces in enumerate(([], [b"one"]), start=1):
            call = client.method(SERVICE, "StreamPredictions")(model_name="m", input={"data": b"x"}, timeout=10)
            job = await registry.wait_for(count)
            for piece in pieces:
                job.piece(piece)
                assert (await call.read()).prediction == piece
            job.fail(HandlerFailed())

            assert (await refusal(call.read()))[0] == "UNAVAILABLE"
            assert dict(tuple(await call.trailing_metadata()))["grpc-retry-pushback-ms"] == "-1"

    assert len(registry.submitted) == 2


async def test_the_deadline_of_a_call_is_its_requests() -> None:
    """Of two that are named the nearer one counts; the priority comes along."""
    registry = FakeRegistry(echoes_all=True)
    wishes = [("x-marserve-timeout-ms", "500000"), ("x-marserve-priority", "2")]
    began = time.monotonic()
    async with inference_port(registry) as port, client_of(port) as client:
        await predict(client, timeout=1000)
        await predict(client, timeout=1000, metadata=wishes)
        await predict(client, metadata=[("x-marserve-timeout-ms", "200000")])
    took = time.monotonic() - began

    spans = [job.request.deadline - began for job in registry.submitted if job.request.deadline is not None]
    for span, wanted in zip(spans, (1000, 500, 200), strict=True):
        assert wanted - 1 <= span <= wanted * 1.1 + took  # gRPC sends a deadline with two digits or three
    assert [job.request.priority for job in registry.submitted] == [None, 2, None]


@pytest.mark.parametrize(
    "metadata",
    [
        [("x-marserve-timeout-ms", "soon")],
        [("x-marserve-priority", "10")],
        [("x-marserve-priority", "1"), ("x-marserve-priority", "2")],
    ],
)
async def test_a_wish_that_cannot_be_read_is_refused(metadata: list[tuple[str, str]]) -> None:
    """In the words of HTTP."""
    async with inference_port() as port, client_of(port) as client:
        code, description = await refusal(predict(client, "echo", metadata=metadata))

    assert (code, description.startswith(metadata[0][0])) == ("INVALID_ARGUMENT", True)


async def test_a_call_past_its_deadline_is_cancelled() -> None:
    """The job with it."""
    registry, book = FakeRegistry(), Book()
    async with inference_port(registry, book=book) as port, client_of(port) as client:
        code, _ = await refusal(predict(client, timeout=0.2))
        await cancelled(registry, 1)

    assert (code, book.codes) == ("DEADLINE_EXCEEDED", ["DEADLINE_EXCEEDED"])


async def cancelled(registry: FakeRegistry, count: int) -> None:
    """Wait until so many jobs were cancelled."""
    async with asyncio.timeout(10):
        while sum(job.is_cancelled for job in registry.submitted) < count:
            await asyncio.sleep(0.001)


async def test_a_client_that_cancels_cancels_its_job() -> None:
    """And the log says so."""
    registry, book = FakeRegistry(), Book()
    async with inference_port(registry, book=book) as port, client_of(port) as client:
        call = predict(client)
        await registry.wait_for(1)
        call.cancel()
        await cancelled(registry, 1)

    assert book.codes == ["CANCELLED"]


async def test_a_stream_is_one_message_a_piece() -> None:
    """As it is made."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        call = client.method(SERVICE, "StreamPredictions")(model_name="m", input={"data": b"x"})
        job = await registry.wait_for(1)
        job.piece(b"one")
        stream = aiter(call)
        first = await anext(stream)
        job.piece(b"two")
        job.piece(b"", last=True)
        rest = [answer.prediction async for answer in stream]

    assert (first.prediction, rest) == (b"one", [b"two", b""])


async def test_a_handler_that_does_not_stream_answers_a_stream_with_one_message() -> None:
    """And the call ends."""
    async with inference_port() as port, client_of(port) as client:
        call = client.method(SERVICE, "StreamPredictions")(model_name="echo", input={"data": b"x"})

        assert [answer.prediction async for answer in call] == [b"x"]


async def test_a_stream_that_breaks_off_ends_with_its_error() -> None:
    """After the pieces that were made."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        call = client.method(SERVICE, "StreamPredictions")(model_name="m", input={"data": b"x"})
        job = await registry.wait_for(1)
        job.piece(b"one")
        assert (await call.read()).prediction == b"one"
        job.fail(WorkerDied("killed"))

        assert (await refusal(call.read()))[0] == "INTERNAL"


async def test_a_stream_that_is_cancelled_cancels_its_job() -> None:
    """In its middle."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        call = client.method(SERVICE, "StreamPredictions")(model_name="m", input={"data": b"x"})
        job = await registry.wait_for(1)
        job.piece(b"one")
        await call.read()
        call.cancel()
        await cancelled(registry, 1)


async def test_a_stream_waits_for_a_client_that_does_not_read() -> None:
    """Its worker is held, and goes on when the client does."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        call = client.method(SERVICE, "StreamPredictions")(model_name="m", input={"data": b"x"})
        job = await registry.wait_for(1)
        sent = 0
        async with asyncio.timeout(30):
            while not job.is_held:
                job.piece(b"p" * 50_000)
                sent += 1
                await asyncio.sleep(0)
        read = [await call.read() for _ in range(sent)]
        async with asyncio.timeout(30):
            while job.is_held:
                await asyncio.sleep(0.001)
        job.piece(b"", last=True)

    assert all(len(answer.prediction) == 50_000 for answer in read)


async def test_a_client_that_reads_nothing_for_too_long_loses_its_stream() -> None:
    """Its worker is free again."""
    registry, book = FakeRegistry(), Book()
    async with inference_port(registry, book=book, stall_timeout_s=0.3) as port, client_of(port) as client:
        call = client.method(SERVICE, "StreamPredictions")(model_name="m", input={"data": b"x"})
        await pour(await registry.wait_for(1), b"p" * 50_000)
        async with asyncio.timeout(10):
            await port.calls.wait_until_silent()
        call.cancel()

    assert book.codes == ["RESOURCE_EXHAUSTED"]


async def test_a_client_that_reads_nothing_of_a_dialogue_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: that it does not read is not written where it would not read it either."""
    registry, book = FakeRegistry(), Book()
    monkeypatch.setattr(GrpcInference, "_refusal", lambda *_: pytest.fail("a refusal is written"))
    async with inference_port(registry, book=book, stall_timeout_s=0.3) as port, client_of(port) as client:
        call = client.method(SERVICE, "StreamPredictions2")()
        await call.write(REQUEST(model_name="m", sequence_id="s", input={"data": b"x"}))
        await pour(await registry.wait_for(1), b"p" * 50_000)
        async with asyncio.timeout(10):
            await port.calls.wait_until_silent()
            while not book.codes:
                await asyncio.sleep(0.001)
        call.cancel()

    assert book.codes == ["RESOURCE_EXHAUSTED"]


async def test_a_unary_call_of_a_handler_that_streams_gets_the_first_piece() -> None:
    """The rest is not made."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        call = predict(client)
        job = await registry.wait_for(1)
        job.piece(b"one")

        assert (await call).prediction == b"one"
        assert job.is_cancelled


async def test_large_messages_pass_both_ways() -> None:
    """Up to `max_request_size` in, and whatever a worker may answer out."""
    body = b"b" * 20_000_000
    async with (
        inference_port(limits=GrpcLimits(message_bytes=len(body) + 100)) as port,
        client_of(port) as client,
    ):
        answer = await predict(client, "echo", body)

    assert answer.prediction == body


async def test_a_message_over_the_limit_is_refused() -> None:
    """Before it is read; the next call is answered."""
    registry = FakeRegistry()
    async with inference_port(registry, limits=GrpcLimits(message_bytes=1000)) as port, client_of(port) as client:
        code, _ = await refusal(predict(client, "echo", b"b" * 2000))
        answer = await predict(client, "echo", b"b" * 500)

    assert (code, len(answer.prediction), len(registry.submitted)) == ("RESOURCE_EXHAUSTED", 500, 1)


async def test_a_hundred_calls_at_once_each_get_their_own_answer() -> None:
    """Answered in another order than they came."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        calls = [predict(client, body=b"%d" % number) for number in range(100)]
        await registry.wait_for(100)
        for job in reversed(registry.submitted):
            job.answer(b"answer to " + job.body)
        answers = [(await call).prediction for call in calls]

    assert answers == [b"answer to %d" % number for number in range(100)]


async def test_ping_says_how_the_server_is() -> None:
    """As text of JSON; the call itself succeeds either way."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        well = await client.method(SERVICE, "Ping")()
        registry.is_well = False
        ill = await client.method(SERVICE, "Ping")()

    assert (well.health, json.loads(ill.health)) == ('{\n  "status": "Healthy"\n}', {"status": "Unhealthy"})


async def test_every_call_is_a_line_of_the_access_log() -> None:
    """In TorchServe's form, with gRPC's number of the status."""
    registry, book = FakeRegistry(errors={"gone": ModelNotFound("gone")}), Book(has_ids=True)
    async with inference_port(registry, book=book) as port, client_of(port) as client:
        await predict(client, "echo")
        await refusal(predict(client, "gone"))

    told = [re.fullmatch(r'/127\.0\.0\.1:\d+ "gRPC (\S+) HTTP/2\.0" (\d+) (\d+) \S{36}', line) for line in book.lines]
    assert [found and found.groups()[:2] for found in told] == [(f"{SERVICE}/Predictions", word) for word in "05"]


async def test_a_call_that_is_not_sampled_is_counted_and_not_logged() -> None:
    """One that failed is always logged."""
    registry = FakeRegistry(errors={"gone": ModelNotFound("gone")})
    book = Book(has_ids=True, sampling=Sampling(0.0, slow_ms=60_000))
    async with inference_port(registry, book=book) as port, client_of(port) as client:
        await predict(client, "echo")
        await refusal(predict(client, "gone"))

    assert [line.split('"')[2].split()[0] for line in book.lines] == ["5"]
    assert book.codes == ["OK", "NOT_FOUND"]


# ------------------------------------------------------------------------------------------- dialogues


def header(job: Any, name: str) -> str | None:
    """The value of a request's header."""
    values = [value.decode() for key, value in job.request.headers if key.decode() == name]
    assert len(values) <= 1
    return values[0] if values else None


async def test_a_dialogue_answers_each_request_in_order() -> None:
    """Though the second was ready first; it ends when the client has said all and heard all."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        call = client.method(SERVICE, "StreamPredictions2")()
        for body in (b"one", b"two"):
            await call.write(REQUEST(model_name="m", sequence_id="s", input={"data": body}))
        await call.done_writing()
        second = await registry.wait_for(2)
        second.answer(b"answer two")
        registry.submitted[0].answer(b"answer one")
        answers = [answer.prediction async for answer in call]

    assert answers == [b"answer one", b"answer two"]
    assert [header(job, "ts_request_sequence_id") for job in registry.submitted] == ["s", "s"]
    assert len({job.request.id for job in registry.submitted}) == 2


async def test_a_request_ends_its_sequence_unless_it_says_otherwise() -> None:
    """TorchServe's wire ends it each time; inputs of the headers' names say better, and are no inputs of the model."""
    registry = FakeRegistry(echoes_all=True)
    async with inference_port(registry) as port, client_of(port) as client:
        call = client.method(SERVICE, "StreamPredictions2")()
        for more in ({}, {"ts_request_sequence_start": b"true", "ts_request_sequence_end": b"false"}):
            await call.write(REQUEST(model_name="m", sequence_id="s", input={"data": b"x", **more}))
        await call.done_writing()
        assert [answer.prediction async for answer in call] == [b"x", b"x"]

    told = [[header(job, f"ts_request_sequence_{word}") for word in ("start", "end")] for job in registry.submitted]
    assert told == [[None, "true"], ["true", None]]
    assert all([part.name for part in job.request.parts] == ["data"] for job in registry.submitted)


async def test_a_refusal_inside_a_dialogue_takes_its_answers_place() -> None:
    """As `google.rpc.Status`; the dialogue goes on."""
    registry = FakeRegistry(errors={"gone": ModelNotFound("gone"), "full": QueueFull("full")})
    async with inference_port(registry) as port, client_of(port) as client:
        call = client.method(SERVICE, "StreamPredictions2")()
        for model, sequence in (("gone", "s"), ("full", "s"), ("echo", None), ("echo", "s")):
            await call.write(REQUEST(model_name=model, sequence_id=sequence, input={"data": b"x"}))
        await call.done_writing()
        answers = [answer async for answer in call]

    assert [answer.status.code for answer in answers] == [
        code.value[0]
        for code in (
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.OK,
        )
    ]
    assert answers[0].status.message.startswith("Model not found: gone\n")
    detail = answers[1].status.details[0]
    told = SCHEMA.message("google.rpc.ErrorInfo").FromString(detail.value)
    assert detail.type_url == "type.googleapis.com/google.rpc.ErrorInfo"
    assert (told.reason, told.metadata["x-marserve-cause"]) == ("ServiceUnavailableException", "queue_full")
    assert answers[3].prediction == b"x"


async def test_a_worker_that_fails_inside_a_dialogue_is_told_there() -> None:
    """TorchServe loses these."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        call = client.method(SERVICE, "StreamPredictions2")()
        await call.write(REQUEST(model_name="m", sequence_id="s", input={"data": b"x"}))
        (await registry.wait_for(1)).fail(WorkerDied("killed"))
        answer = await call.read()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF

    assert answer.status.message.startswith("Worker died.")


async def test_a_dialogue_that_is_cancelled_cancels_all_its_jobs() -> None:
    """Those that wait behind the first too."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        call = client.method(SERVICE, "StreamPredictions2")()
        for _ in range(3):
            await call.write(REQUEST(model_name="m", sequence_id="s", input={"data": b"x"}))
        await registry.wait_for(3)
        call.cancel()
        await cancelled(registry, 3)
        async with asyncio.timeout(10):
            await port.calls.wait_until_silent()


async def test_bytes_that_are_no_message_end_a_dialogue() -> None:
    """With the error as the call's own."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        call = client.channel.stream_stream(f"/{SERVICE}/StreamPredictions2")()
        await call.write(REQUEST(model_name="m", sequence_id="s", input={"data": b"x"}).SerializeToString())
        await registry.wait_for(1)
        await call.write(b"\x0a\xff\xff")

        assert (await refusal(call.read()))[0] == "INVALID_ARGUMENT"
        await cancelled(registry, 1)


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_compressed_message_is_read(size: int, compression: grpc.Compression) -> None:
    """As grpcio's client sends it where it is told to compress."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        method = client.channel.unary_unary(f"/{SERVICE}/Predictions")
        message = REQUEST(model_name="echo", input={"data": b"x" * size})
        await method(message.SerializeToString(), compression=compression)

    assert registry.submitted[0].body == b"x" * size


@pytest.mark.parametrize("name", ["gzip", "deflate"])
@pytest.mark.parametrize("size", [100, 5000, 100_000])
async def test_an_answer_is_compressed_for_a_client_that_compresses(size: int, name: str) -> None:
    """Unary and in pieces, a short one aside: grpcio's client reads it, and it travels as a fraction."""
    compression = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}[name]
    message = REQUEST(model_name="echo", input={"data": b"x" * size})
    paths = [f"/{SERVICE}/{method}" for method in ("Predictions", "StreamPredictions")]
    async with inference_port() as port, client_of(port) as client:
        unary = await client.channel.unary_unary(paths[0])(message.SerializeToString(), compression=compression)
        pieces = client.channel.unary_stream(paths[1])(message.SerializeToString(), compression=compression)
        piece = await pieces.read()
        async with http2_client(port.address.host, port.address.port) as raw:
            options = {"grpc_encoding": name, "grpc_accept_encoding": f"identity, {name}"}
            packed = {"gzip": gzip.compress, "deflate": zlib.compress}[name](message.SerializeToString())
            numbers = [await raw.call(framed(packed, is_compressed=True), path, **options) for path in paths]
            for number in numbers:
                await raw.until_over(number)

    assert len(unary) == len(piece) > size
    for number in numbers:
        assert raw.fields(number)["grpc-encoding"] == name
        assert raw.data(number)[0] == (size > 1000)
        assert len(raw.data(number)) < max(200, size / 10)


async def test_the_room_of_a_compressed_message_is_that_of_what_it_holds() -> None:
    """From when it was made long again until its call is over."""
    registry, ledger = FakeRegistry(), ByteLedger(1024 * 1024)
    message = REQUEST(model_name="m", input={"data": b"x" * 700_000}).SerializeToString()
    async with inference_port(registry, ledger=ledger) as port, client_of(port) as client:
        method = client.channel.unary_unary(f"/{SERVICE}/Predictions")
        first = method(message, compression=grpc.Compression.Gzip)
        job = await registry.wait_for(1)
        held = ledger.bodies
        second = await refusal(method(message, compression=grpc.Compression.Gzip))
        job.answer(b"done")
        await first

    assert held > 700_000
    assert (second[0], "max_bytes_in_flight" in second[1]) == ("UNAVAILABLE", True)
    assert ledger.figures() == {"bodies": 0, "small_bodies": 0, "waiting": 0, "answers": 0}


async def test_a_compressed_message_is_bounded_by_what_it_holds() -> None:
    """A thousandth of it travels; and a compression that is not known is named."""
    registry = FakeRegistry()
    async with inference_port(registry, limits=GrpcLimits(message_bytes=100_000)) as port, client_of(port) as client:
        method = client.channel.unary_unary(f"/{SERVICE}/Predictions")
        message = REQUEST(model_name="echo", input={"data": b"x" * 200_000}).SerializeToString()
        bomb = await refusal(method(message, compression=grpc.Compression.Gzip))
    async with inference_port(registry) as port, http2_client(port.address.host, port.address.port) as raw:
        number = await raw.call(
            framed(b"whatever", is_compressed=True), f"/{SERVICE}/Predictions", grpc_encoding="snappy"
        )
        await raw.until_over(number)

    assert (bomb[0], "max_request_size, 100000 bytes" in bomb[1]) == ("RESOURCE_EXHAUSTED", True)
    assert raw.fields(number)["grpc-status"] == "3"
    assert "'snappy', and this server reads identity, gzip, deflate" in raw.fields(number)["grpc-message"]
    assert not registry.submitted
