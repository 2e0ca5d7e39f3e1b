"""Every kind of call and every end of it leave nothing behind; and no bytes make the server stumble."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import grpc
import pytest

from marserve.answers.pages import OfferedModel
from marserve.api.grpc import inference, management
from marserve.api.grpc.listener import GrpcListener
from marserve.api.grpc.open_inference_control import ServerControl
from marserve.api.grpc.schema import OPEN_INFERENCE
from marserve.api.open_inference.regions import Regions
from marserve.api.open_inference.repository import Repository
from marserve.api.open_inference.server_settings import LogSettings
from marserve.desired_state.policies import Changes
from marserve.errors import WorkerDied
from marserve.telemetry.metrics.counts import VersionMetrics
from support.fake_data_plane import Submitted
from support.grpc_house import (
    SCHEMA,
    Book,
    Client,
    FakeRegistry,
    client_of,
    inference_port,
    management_port,
    repeats,
)
from support.management_house import House

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_grpc_loop")]

REQUEST = SCHEMA.message("org.pytorch.serve.grpc.inference.PredictionsRequest")
MESSAGE = REQUEST(model_name="m", sequence_id="s", input={"data": b"x"})

CONTROL = f"{OPEN_INFERENCE}.GRPCInferenceService"
CONTROLLING = {"RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "LogSettings", "TraceSetting"}

# What may be said of bytes that are no good request. INTERNAL and UNKNOWN would be defects.
GOOD_STATUSES = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "UNAVAILABLE"}


async def unary(client: Client, timeout: float | None) -> Any:
    """A call of one answer."""
    return client.method(inference.SERVICE, "Predictions")(MESSAGE, timeout=timeout)


async def streaming(client: Client, timeout: float | None) -> Any:
    """A call of many answers."""
    return client.method(inference.SERVICE, "StreamPredictions")(MESSAGE, timeout=timeout)


async def dialogue(client: Client, timeout: float | None) -> Any:
    """A call of many requests and answers, of which one is under way."""
    call = client.method(inference.SERVICE, "StreamPredictions2")(timeout=timeout)
    await call.write(MESSAGE)
    return call


async def inferring(client: Client, timeout: float | None) -> Any:
    """A stream of inferences, of which one is under way."""
    call = client.method(f"{OPEN_INFERENCE}.GRPCInferenceService", "ModelStreamInfer")(timeout=timeout)
    await call.write(SCHEMA.message("inference.ModelInferRequest")(model_name="m"))
    return call


Begin = Callable[[Client, float | None], Any]


async def end_of(call: Any) -> str:
    """The name of the status that a call ends with, once the client has heard all of it."""
    if isinstance(call, grpc.aio.StreamStreamCall) and not call.done():
        await call.done_writing()
    if not isinstance(call, grpc.aio.UnaryUnaryCall):
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while await call.read() is not grpc.aio.EOF:
                pass
    code: str = (await call.code()).name
    return code


async def answered(call: Any, job: Submitted, port: GrpcListener) -> set[str]:
    """It ends as it should."""
    job.answer(b"done")
    return {"OK"}


async def failed(call: Any, job: Submitted, port: GrpcListener) -> set[str]:
    """Its worker dies; a dialogue tells that inside."""
    job.fail(WorkerDied("killed"))
    return {"INTERNAL", "OK"}


async def cancelled(call: Any, job: Submitted, port: GrpcListener) -> set[str]:
    """Its client has had enough."""
    call.cancel()
    return {"CANCELLED"}


async def late(call: Any, job: Submitted, port: GrpcListener) -> set[str]:
    """Its deadline passes."""
    return {"DEADLINE_EXCEEDED"}


async def cut(call: Any, job: Submitted, port: GrpcListener) -> set[str]:
    """The server ends, and waits for nobody."""
    await port.stop()
    return {"UNAVAILABLE", "CANCELLED"}


@pytest.mark.parametrize("end", [answered, failed, cancelled, late, cut])
@pytest.mark.parametrize("begin", [unary, streaming, dialogue, inferring])
async def test_nothing_is_left_of_a_call(begin: Begin, end: Callable[..., Any]) -> None:
    """Its job has ended or is cancelled, it is counted once, and the port is silent."""
    registry, book = FakeRegistry(), Book()
    options = {"has_open_inference": True, "is_open_inference_whole": True}
    async with inference_port(registry, book=book, **options) as port, client_of(port) as client:
        call = await begin(client, 0.3 if end is late else None)
        job = await registry.wait_for(1)
        expected = await end(call, job, port)
        async with asyncio.timeout(20):
            code = await end_of(call)
            await port.calls.wait_until_silent()
            while not book.codes:
                await asyncio.sleep(0.001)

    assert code in expected
    assert len(book.codes) == 1
    assert job.is_cancelled == (end in (cancelled, late, cut))


@pytest.mark.parametrize("pieces", range(4))
async def test_a_stream_that_is_cut_after_any_of_its_pieces_frees_its_worker(pieces: int) -> None:
    """Before the first as after the last one that is known."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        call = await streaming(client, None)
        job = await registry.wait_for(1)
        for _ in range(pieces):
            job.piece(b"p")
            await call.read()
        call.cancel()
        async with asyncio.timeout(10):
            await port.calls.wait_until_silent()

        assert job.is_cancelled


def some_bytes(dice: random.Random, kind: Any) -> bytes:
    """Bytes that are nearly a message of this kind, or not at all."""
    if dice.random() < 0.3:
        return dice.randbytes(dice.randrange(60))
    data = bytearray(some_message(dice, kind).SerializeToString())
    for _ in range(dice.choice((0, 0, 1, 3))):
        if data:
            data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data[: dice.randrange(len(data) + 1)] if dice.random() < 0.2 else data)


def some_message(dice: random.Random, kind: Any, depth: int = 0) -> Any:
    """A message with some of its fields filled, made from its description."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if dice.random() < 0.4:
            continue
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            value = field.message_type.fields_by_name["value"]
            if value.message_type is None:
                getattr(message, field.name)[dice.choice(("data", "body", ""))] = some_value(dice, value)
        elif field.message_type is not None:
            if depth < 3:
                inner = some_message(dice, SCHEMA.message(field.message_type.full_name), depth + 1)
                if repeats(field):
                    getattr(message, field.name).append(inner)
                else:
                    getattr(message, field.name).CopyFrom(inner)
        elif repeats(field):
            getattr(message, field.name).extend(some_value(dice, field) for _ in range(dice.randrange(3)))
        else:
            setattr(message, field.name, some_value(dice, field))
    return message


def some_value(dice: random.Random, field: Any) -> Any:
    """A value of a field's type: a likely one, an odd one, an extreme one."""
    if field.type == field.TYPE_STRING:
        return dice.choice(("m", "m-1.0.mar", "1.0", "", "FP32", "BYTES", "x" * 300, "\x00", "../m", "ä"))
    if field.type == field.TYPE_BYTES:
        return dice.randbytes(dice.randrange(20))
    if field.type == field.TYPE_BOOL:
        return dice.random() < 0.5
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return dice.choice((0.0, -1.5, float("nan"), float("inf")))
    if field.type in (field.TYPE_UINT32, field.TYPE_UINT64):
        return dice.choice((0, 1, 2**32 - 1))
    return dice.choice((0, 1, 2, -1, 2**31 - 1, -(2**31)))


async def throw_bytes(
    port: GrpcListener, services: list[str], times: int, seed: int, but: Collection[str] = ()
) -> dict[str, int]:
    """Call every method of these services, `but` some, with odd bytes; how often each status came."""
    dice, seen = random.Random(seed), dict.fromkeys(GOOD_STATUSES, 0)
    async with client_of(port) as client:
        for service in services:
            for name, described in SCHEMA.methods(service).items():
                if service == CONTROL and name in but:
                    continue
                kind = SCHEMA.message(described.input_type.full_name)
                for _ in range(times):
                    data = some_bytes(dice, kind)
                    if described.client_streaming:
                        call = client.channel.stream_stream(f"/{service}/{name}")()
                        await call.write(data)
                    elif described.server_streaming:
                        call = client.channel.unary_stream(f"/{service}/{name}")(data)
                    else:
                        call = client.channel.unary_unary(f"/{service}/{name}")(data)
                    async with asyncio.timeout(30):
                        code = await end_of(call)
                    assert code in GOOD_STATUSES, (service, name, data, await call.details())
                    seen[code] += 1
    return seen


class Levels:
    """The level of a log."""

    server = "info"

    def set(self, level: str, model: str | None) -> None:
        """Change it."""
        self.server = level


def control_of(house: House) -> ServerControl:
    """What changes a registry by the calls of the Open Inference Protocol."""
    repository = Repository(house.registry, Changes(house.registry), enable_model_api=True)
    check_exists = house.registry.data_plane.check_exists
    regions = Regions(house.store, most_bytes=200, most_regions=2)
    return ServerControl(repository, LogSettings(Levels(), "", "default"), check_exists, regions)


class Echoing(FakeRegistry):
    """A registry whose one model answers what the Open Inference Protocol asks, and nothing else."""

    def submit(self, model: str, version: str | None, request: Any, receiver: Any) -> Submitted:
        """Answer at once."""
        job = super().submit(model, version, request, receiver)
        job.answer(b'{"outputs": []}')
        return job

    def is_model_ready(self, model: str, version: str | None = None) -> bool:
        """It is."""
        return True

    def check_exists(self, model: str, version: str | None = None) -> None:
        """It does."""

    def version_names(self, model: str) -> list[str]:
        """One version."""
        return ["1.0"]

    def declaration_of(self, model: str, version: str | None = None) -> dict[str, Any]:
        """Tensors, so that those of a request are carried as bytes."""
        return {"kind": "tensors", "inputs": [], "outputs": []}

    def takes_tensors(self, model: str, version: str | None = None) -> bool:
        """It does."""
        return True

    def describe(self, model: str, version: str | None = None) -> dict[str, Any]:
        """What a configuration is made of."""
        numbers = {"batchSize": 1, "maxBatchDelay": 0, "minWorkers": 1}
        return {"modelName": "m", "modelVersion": "1.0", "deviceType": "cpu", **numbers}

    def version_metrics(self, model: str | None = None, version: str | None = None) -> list[VersionMetrics]:
        """Nothing was counted."""
        return [VersionMetrics("m", "1.0")]

    def all_offered(self) -> list[OfferedModel]:
        """No model is listed."""
        return []


@pytest.mark.parametrize("times", [30, pytest.param(500, marks=pytest.mark.long)])
async def test_no_bytes_make_an_inference_call_stumble(tmp_path: Path, times: int) -> None:
    """Of any method; the next call is answered."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    (house.store / house.put("m")).rename(house.store / "m.mar")
    whole = {"has_open_inference": True, "is_open_inference_whole": True}
    services = [inference.SERVICE, CONTROL]
    async with inference_port(Echoing(), **whole, control=control_of(house), is_control_open=True) as port:
        seen = await throw_bytes(port, services, times, seed=1)
        async with client_of(port) as client:
            answer = await client.method(inference.SERVICE, "Ping")()

    assert seen["OK"] > 0
    assert seen["INVALID_ARGUMENT"] > 0
    assert "Healthy" in answer.health


@pytest.mark.parametrize("times", [30, pytest.param(500, marks=pytest.mark.long)])
async def test_no_bytes_make_a_management_call_stumble(tmp_path: Path, times: int) -> None:
    """Whatever they register, scale and unregister."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    house.put()
    try:
        async with management_port(house.registry, control=control_of(house)) as port:
            others = set(SCHEMA.methods(CONTROL)) - CONTROLLING
            seen = await throw_bytes(port, [management.SERVICE, CONTROL], times, seed=2, but=others)
    finally:
        await house.registry.stop()

    assert seen["OK"] > 0
    assert seen["NOT_FOUND"] > 0
