"""Tests for `ModelStreamInfer`, with real channels over a data plane without workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import grpc
import pytest

from marserve.api.byte_ledger import ByteLedger
from marserve.api.grpc.dialogues.infer_stream import MOST_AT_ONCE
from marserve.api.grpc.listener import GrpcLimits, GrpcListener
from marserve.errors import HandlerFailed, ModelNotFound, QueueFull
from support.fake_data_plane import Submitted
from support.grpc_house import SCHEMA, Book, FakeRegistry, client_of, inference_port, pour, refusal
from support.grpc_tensors import tensor
from support.http2_client import framed, head, http2_client

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_grpc_loop")]

SERVICE = "inference.GRPCInferenceService"
REQUEST, PARAMETER = SCHEMA.message("inference.ModelInferRequest"), SCHEMA.message("inference.InferParameter")
EMPTY_FINAL = {"triton_enable_empty_final_response": PARAMETER(bool_param=True)}
LIMIT_S = 20.0


class Stream:
    """A client's end of one stream."""

    def __init__(self, port: GrpcListener, call: Any) -> None:
        self.port, self.call = port, call

    async def ask(self, name: str, model: str = "m", **fields: Any) -> None:
        """Send one request of this id."""
        await self.call.write(REQUEST(model_name=model, id=name, **{"inputs": [number(1)], **fields}))

    async def hear(self) -> tuple[str, str, list[float], bool | None]:
        """The next answer: id, error, values, and whether it is its request's last."""
        async with asyncio.timeout(LIMIT_S):
            answer = await self.call.read()
        if answer is grpc.aio.EOF:
            raise EOFError
        response = answer.infer_response
        values = [value for output in response.outputs for value in output.contents.fp64_contents]
        final = response.parameters["triton_final_response"].bool_param if response.parameters else None
        return response.id, answer.error_message, values, final

    async def hear_all(self) -> list[tuple[str, str, list[float], bool | None]]:
        """All further answers, once the client has said that it asks no more."""
        await self.call.done_writing()
        heard = []
        while True:
            try:
                heard.append(await self.hear())
            except EOFError:
                return heard


def number(value: float) -> Any:
    """An input."""
    return tensor("FP64", contents={"fp64_contents": [value, value]})


def document(value: float) -> bytes:
    """A handler's answer."""
    return json.dumps({"outputs": [{"name": "o", "datatype": "FP64", "shape": [1], "data": [value]}]}).encode()


@asynccontextmanager
async def streaming(
    registry: FakeRegistry,
    metadata: list[tuple[str, str]] | None = None,
    compression: grpc.Compression | None = None,
    **options: Any,
) -> AsyncIterator[Stream]:
    """A port with a stream to it."""
    options = {"has_open_inference": True, "is_open_inference_whole": True, **options}
    async with inference_port(registry, **options) as port, client_of(port) as client:
        yield Stream(port, client.method(SERVICE, "ModelStreamInfer")(metadata=metadata, compression=compression))


async def until_cancelled(port: GrpcListener, jobs: list[Submitted]) -> None:
    """Wait until all these jobs are cancelled, and nothing of the stream counts any more."""
    async with asyncio.timeout(LIMIT_S):
        while not all(job.is_cancelled for job in jobs):
            await asyncio.sleep(0.001)
        await port.calls.wait_until_silent()


async def test_requests_of_one_stream_run_beside_each_other_and_are_answered_in_order() -> None:
    """As Triton has it for models of one answer; each carries its id, model and the word that it is the last."""
    registry = FakeRegistry()
    async with streaming(registry) as stream:
        for name in ("a", "b"):
            await stream.ask(name)
        second = await registry.wait_for(2)
        second.answer(document(2))
        registry.submitted[0].answer(document(1))

        assert await stream.hear_all() == [("a", "", [1.0], True), ("b", "", [2.0], True)]

    ids = [job.request.id for job in registry.submitted]
    assert len(set(ids)) == 2
    assert len({request_id.partition("~")[0] for request_id in ids}) == 1


async def test_what_a_request_asks_for_is_its_own() -> None:
    """Its deadline counts from when it came, and is not that of those after it; nor is its priority."""
    registry = FakeRegistry()
    asked = {"timeout": PARAMETER(int64_param=50_000_000), "priority": PARAMETER(uint64_param=1)}
    async with streaming(registry) as stream:
        await stream.ask("a")
        await registry.wait_for(1)
        now = monotonic()
        await stream.ask("b", parameters=asked)
        await stream.ask("c")
        await registry.wait_for(3)
        requests = [job.request for job in registry.submitted]
        stream.call.cancel()

    assert [each.priority for each in requests] == [None, 0, None]
    assert [each.deadline is None for each in requests] == [True, False, True]
    assert now + 50 <= (requests[1].deadline or 0) <= monotonic() + 50


async def test_pieces_go_out_as_they_come() -> None:
    """A request that was asked before and has no answer yet keeps none of them back; pieces of two streams mix."""
    registry = FakeRegistry()
    async with streaming(registry) as stream:
        for name in ("slow", "a", "b"):
            await stream.ask(name)
        b = await registry.wait_for(3)
        slow, a = registry.submitted[:2]
        heard = []
        for job, value in ((a, 1), (b, 2), (a, 3)):
            job.piece(document(value))
            heard.append(await stream.hear())
        for job in (b, a):
            job.piece(b"", last=True)
        slow.answer(document(0))
        heard += await stream.hear_all()

    assert heard == [
        ("a", "", [1.0], False),
        ("b", "", [2.0], False),
        ("a", "", [3.0], False),
        ("slow", "", [0.0], True),
    ]


async def test_a_whole_answer_waits_for_no_stream_that_has_begun() -> None:
    """However long that goes on."""
    registry = FakeRegistry()
    async with streaming(registry) as stream:
        await stream.ask("long")
        await stream.ask("short")
        short = await registry.wait_for(2)
        long = registry.submitted[0]
        short.answer(document(2))
        long.piece(document(1))

        assert [(await stream.hear())[0] for _ in range(2)] == ["long", "short"]


@pytest.mark.parametrize("parameters", [{}, EMPTY_FINAL])
async def test_the_end_of_a_stream_is_an_answer_only_for_a_client_that_wants_it(parameters: dict[str, Any]) -> None:
    """Without tensors, with the id and the model's name; the handler never sees the parameter."""
    registry = FakeRegistry()
    async with streaming(registry) as stream:
        await stream.ask("a", parameters=parameters)
        job = await registry.wait_for(1)
        job.piece(document(1))
        job.piece(b"")
        job.piece(b"", last=True)
        heard = await stream.hear_all()

    assert heard == [("a", "", [1.0], False), *([("a", "", [], True)] if parameters else [])]
    assert "parameters" not in json.loads(job.body)


async def test_a_last_piece_with_tensors_is_marked_as_the_last() -> None:
    """An empty answer behind it would tell nothing."""
    registry = FakeRegistry()
    async with streaming(registry) as stream:
        await stream.ask("a", parameters=EMPTY_FINAL)
        job = await registry.wait_for(1)
        job.piece(document(1))
        assert await stream.hear() == ("a", "", [1.0], False)
        job.piece(document(2), last=True)

        assert await stream.hear_all() == [("a", "", [2.0], True)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "gone"}, "Model not found: gone"),
        ({"model": "full"}, "has no worker"),
        ({"model": ""}, "Parameter model_name is required."),
        ({"raw_input_contents": [b"abc", b""]}, "There are 1 inputs and 2 raw_input_contents"),
        (
            {"parameters": {"triton_enable_empty_final_response": PARAMETER(string_param="yes")}},
            "Parameter triton_enable_empty_final_response has no bool_param",
        ),
    ],
)
async def test_a_refusal_is_an_answer_and_the_stream_goes_on(fields: dict[str, Any], words: str) -> None:
    """In REST's sentence, under the id of its request; the requests before and after it are answered."""
    registry = FakeRegistry(errors={"gone": ModelNotFound("gone"), "full": QueueFull("full")})
    async with streaming(registry) as stream:
        await stream.ask("before")
        await registry.wait_for(1)
        await stream.ask("bad", **fields)
        await stream.ask("after")
        while len([job for job in registry.submitted if job.model == "m"]) < 2:
            await asyncio.sleep(0.001)
        for job in registry.submitted:
            if job.model == "m":
                job.answer(document(1))
        before, refused, after = await stream.hear_all()

    assert (before, after) == (("before", "", [1.0], True), ("after", "", [1.0], True))
    assert (refused[0], refused[2:]) == ("bad", ([], True))
    assert words in refused[1]
    assert "org.pytorch" not in refused[1]


async def test_a_handler_that_fails_amid_its_pieces_fails_its_request_alone() -> None:
    """Behind the pieces that came; another request of the stream goes on."""
    registry = FakeRegistry()
    async with streaming(registry) as stream:
        await stream.ask("bad")
        await stream.ask("good")
        good = await registry.wait_for(2)
        bad = registry.submitted[0]
        bad.piece(document(1))
        bad.fail(HandlerFailed("No more."))
        heard = [await stream.hear(), await stream.hear()]
        good.answer(document(2))
        heard += await stream.hear_all()

    assert heard[0] == ("bad", "", [1.0], False)
    assert (heard[1][0], heard[1][2:]) == ("bad", ([], True))
    assert "No more." in heard[1][1]
    assert heard[2] == ("good", "", [2.0], True)


async def test_an_answer_that_is_no_tensors_is_its_requests_error() -> None:
    """The stream goes on, and the job of the rest is cancelled."""
    registry = FakeRegistry()
    async with streaming(registry) as stream:
        await stream.ask("a")
        job = await registry.wait_for(1)
        job.piece(b"no json")
        heard = await stream.hear()
        await until_cancelled(stream.port, [job])
        await stream.ask("b")
        (await registry.wait_for(2)).answer(document(1))

        assert await stream.hear_all() == [("b", "", [1.0], True)]
    assert "no answer of the Open Inference Protocol" in heard[1]


async def test_a_message_that_cannot_be_read_ends_nothing_but_itself() -> None:
    """Its id is not known. What was asked before is answered, and what is asked after it."""
    registry = FakeRegistry()
    readers = {
        "request_serializer": lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
        "response_deserializer": SCHEMA.message("inference.ModelStreamInferResponse").FromString,
    }
    async with (
        inference_port(registry, has_open_inference=True, is_open_inference_whole=True) as port,
        client_of(port) as client,
    ):
        stream = Stream(port, client.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer", **readers)())
        await stream.ask("a")
        await stream.call.write(b"\x0a\xff\xff")
        await stream.ask("b")
        await registry.wait_for(2)
        for job in registry.submitted:
            job.answer(document(1))
        first, bad, last = await stream.hear_all()

    assert [first[0], bad[0], last[0]] == ["a", "", "b"]
    assert bad[1] == "The message cannot be read as inference.ModelInferRequest."


async def test_a_compressed_message_that_holds_too_much_ends_nothing_but_itself() -> None:
    """It is measured as it is made long again, and counts among the bytes in flight with that length."""
    registry, ledger = FakeRegistry(), ByteLedger(1024 * 1024)
    fields = {"inputs": [tensor("UINT8")]}
    options = {"ledger": ledger, "compression": grpc.Compression.Gzip, "limits": GrpcLimits(message_bytes=600_000)}
    async with streaming(registry, **options) as stream:
        await stream.ask("a", raw_input_contents=[b"x" * 500_000], **fields)
        first = await registry.wait_for(1)
        held = ledger.bodies
        first.piece(document(1))
        await stream.ask("b", raw_input_contents=[b"x" * 50_000_000], **fields)
        await stream.ask("c", raw_input_contents=[b"x" * 590_000], **fields)
        heard = [await stream.hear() for _ in range(3)]
        first.piece(b"", last=True)
        await stream.ask("d", raw_input_contents=[b"x" * 590_000], **fields)
        (await registry.wait_for(2)).answer(document(1))
        [last] = await stream.hear_all()

    assert held > 500_000
    assert [(each[0], bool(each[1])) for each in (*heard, last)] == [("a", False), ("", True), ("", True), ("d", False)]
    assert "600000" in heard[1][1]
    assert "max_bytes_in_flight" in heard[2][1]
    assert ledger.figures() == {"bodies": 0, "small_bodies": 0, "waiting": 0, "answers": 0}


async def test_a_client_may_ask_for_the_first_error_as_the_status_of_the_call() -> None:
    """By Triton's `triton_grpc_error`: the stream ends, and with it what else runs."""
    registry = FakeRegistry(errors={"gone": ModelNotFound("gone")})
    async with streaming(registry, [("triton_grpc_error", "true")]) as stream:
        await stream.ask("a")
        job = await registry.wait_for(1)
        await stream.ask("bad", model="gone")

        assert (await refusal(stream.call.read()))[0] == "NOT_FOUND"
        await until_cancelled(stream.port, [job])


async def test_no_more_requests_run_at_once_than_may() -> None:
    """The next is read when one has ended: nothing is refused."""
    registry = FakeRegistry()
    async with streaming(registry) as stream:
        asking = asyncio.ensure_future(ask_many(stream, MOST_AT_ONCE + 5))
        await registry.wait_for(MOST_AT_ONCE)
        await asking
        registry.submitted[0].answer(document(0))
        assert (await stream.hear())[0] == "0"
        await registry.wait_for(MOST_AT_ONCE + 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(registry.submitted) == MOST_AT_ONCE + 1
        stream.call.cancel()
        await until_cancelled(stream.port, registry.submitted[1:])


async def ask_many(stream: Stream, count: int) -> None:
    """Send so many requests."""
    for each in range(count):
        await stream.ask(str(each))


async def test_a_client_that_goes_cancels_all_that_it_asked_for() -> None:
    """What runs, what waits for its turn, and what is in the middle of its pieces; the room of all comes back."""
    registry, book, ledger = FakeRegistry(), Book(), ByteLedger(1024 * 1024)
    async with streaming(registry, book=book, ledger=ledger) as stream:
        for name in ("a", "b", "c"):
            await stream.ask(name)
        third = await registry.wait_for(3)
        first, second = registry.submitted[:2]
        second.answer(document(2))
        third.piece(document(3))
        await stream.hear()
        assert ledger.small > 0
        stream.call.cancel()
        await until_cancelled(stream.port, [first, third])
        async with asyncio.timeout(LIMIT_S):
            while not book.codes:
                await asyncio.sleep(0.001)

    assert book.codes == ["CANCELLED"]
    assert ledger.figures() == {"bodies": 0, "small_bodies": 0, "waiting": 0, "answers": 0}


async def test_a_message_without_room_ends_the_stream() -> None:
    """The messages of all requests under way count. What came of one that has no room is not kept."""
    registry, ledger = FakeRegistry(), ByteLedger(1024 * 1024)
    large = {"inputs": [tensor("UINT8")], "raw_input_contents": [b"x" * 700_000]}
    async with streaming(registry, ledger=ledger) as stream:
        await stream.ask("a", **large)
        first = await registry.wait_for(1)
        await stream.ask("b", **large)
        code, text = await refusal(stream.call.read())
        await until_cancelled(stream.port, [first])

    assert (code, "max_bytes_in_flight" in text) == ("UNAVAILABLE", True)
    assert ledger.figures() == {"bodies": 0, "small_bodies": 0, "waiting": 0, "answers": 0}


async def test_a_client_that_reads_nothing_for_too_long_loses_its_stream() -> None:
    """And all that it asked for; the first worker is held before that."""
    registry, book = FakeRegistry(), Book()
    async with streaming(registry, book=book, stall_timeout_s=0.3) as stream:
        await stream.ask("a")
        await stream.ask("b")
        b = await registry.wait_for(2)
        a = registry.submitted[0]
        text = {"name": "o", "datatype": "BYTES", "shape": [1], "data": ["x" * 50_000]}
        await pour(a, json.dumps({"outputs": [text]}).encode())
        assert a.is_held
        await until_cancelled(stream.port, [a, b])
        stream.call.cancel()

    assert book.codes == ["RESOURCE_EXHAUSTED"]


async def test_a_message_over_the_limit_ends_the_stream() -> None:
    """gRPC's library ends the call; what was asked before is cancelled, and the server goes on."""
    registry = FakeRegistry()
    async with streaming(registry, limits=GrpcLimits(message_bytes=1000)) as stream:
        await stream.ask("a")
        job = await registry.wait_for(1)
        await stream.ask("b", inputs=[tensor("UINT8")], raw_input_contents=[b"x" * 2000])

        assert (await refusal(stream.call.read()))[0] == "RESOURCE_EXHAUSTED"
        await until_cancelled(stream.port, [job])


async def test_a_request_that_comes_with_what_ends_the_stream_is_cancelled_too() -> None:
    """Though nobody has begun to wait for its answer."""
    registry = FakeRegistry()
    options = {"has_open_inference": True, "is_open_inference_whole": True, "limits": GrpcLimits(message_bytes=1000)}
    too_long = b"\0" + (2000).to_bytes(4, "big")
    async with (
        inference_port(registry, **options) as port,
        http2_client(port.address.host, port.address.port) as client,
    ):
        number = client.http2.get_next_available_stream_id()
        client.http2.send_headers(number, head(f"/{SERVICE}/ModelStreamInfer"))
        for data in (framed(REQUEST(model_name="m").SerializeToString()), too_long):
            client.http2.send_data(number, data)
        await client.send()
        await until_cancelled(port, [await registry.wait_for(1)])
        await client.until_over(number)

    assert client.fields(number)["grpc-status"] == "8"


async def test_torchserves_service_has_no_such_method() -> None:
    """Nor has the standard's under `torchserve`."""
    async with inference_port(FakeRegistry(), has_open_inference=True) as port, client_of(port) as client:
        call = client.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()

        assert (await refusal(call.read()))[0] == "UNIMPLEMENTED"
