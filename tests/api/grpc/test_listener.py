"""Tests for the gRPC ports: keys, TLS, health, reflection, limits, and how they end."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from google.protobuf import descriptor_pb2

from marserve.api.grpc import health
from marserve.api.grpc.health import SERVICE as HEALTH
from marserve.api.grpc.inference import SERVICE
from marserve.api.grpc.listener import GrpcAddress, GrpcPorts
from marserve.api.grpc.reflection import SERVICES as REFLECTION
from marserve.api.grpc.transport.limits import GrpcLimits
from marserve.api.tls import Identity
from marserve.errors import Draining, InvalidToken
from marserve.registry.intake.registration import RegisterParameters
from support.grpc_house import HERE, SCHEMA, Book, Client, FakeRegistry, client_of, inference_port, refusal
from support.management_house import House

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_grpc_loop")]

STATUSES = SCHEMA.pool.FindEnumTypeByName("grpc.health.v1.HealthCheckResponse.ServingStatus").values_by_name
SERVING, NOT_SERVING, SERVICE_UNKNOWN = (
    STATUSES[name].number for name in ("SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
)
REQUEST = SCHEMA.message("org.pytorch.serve.grpc.inference.PredictionsRequest")


def predict(client: Client, model: str = "echo", **options: Any) -> Any:
    """Begin one prediction."""
    return client.method(SERVICE, "Predictions")(model_name=model, input={"data": b"x"}, **options)


def only_with_the_key(value: str | bytes | None) -> None:
    """Lets one key pass."""
    if value != "Bearer good":
        raise InvalidToken("Authorization")


async def test_a_call_needs_the_ports_key() -> None:
    """Every method, known or not; what it wanted is not looked at before."""
    registry, book = FakeRegistry(), Book()
    async with inference_port(registry, book=book, authorize=only_with_the_key) as port, client_of(port) as client:
        refusals = [
            await refusal(predict(client)),
            await refusal(predict(client, metadata=[("authorization", "Bearer bad")])),
            await refusal(client.method(SERVICE, "Ping")()),
            await refusal(predict(client, metadata=[("x-marserve-timeout-ms", "soon")])),
            await refusal(client.channel.unary_unary(f"/{SERVICE}/NoSuchCall")(b"")),
        ]
        answer = await predict(client, metadata=[("authorization", "Bearer good"), ("protocol", "gRPC")])

    assert set(refusals) == {
        ("PERMISSION_DENIED", "Token Authorization failed. Token either incorrect, expired, or not provided correctly")
    }
    assert (answer.prediction, len(registry.submitted)) == (b"x", 1)
    assert book.codes == ["PERMISSION_DENIED"] * 5 + ["OK"]


async def test_a_stream_needs_the_key_too() -> None:
    """Before it is begun."""
    async with inference_port(authorize=only_with_the_key) as port, client_of(port) as client:
        call = client.method(SERVICE, "StreamPredictions")(model_name="echo", input={"data": b"x"})

        assert (await refusal(call.read()))[0] == "PERMISSION_DENIED"


async def test_tls_is_spoken_where_there_is_an_identity() -> None:
    """With the certificate's name checked; a client in the clear gets nothing."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    identity = Identity(
        b"".join(pem.bytes() for pem in certificate.cert_chain_pems), certificate.private_key_pem.bytes()
    )
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())

    async with inference_port(identity=identity) as port:
        async with client_of(port, credentials) as client:
            answer = await predict(client)
        async with client_of(port) as plain:
            code, _ = await refusal(predict(plain))

    assert (answer.prediction, code) == (b"x", "UNAVAILABLE")


async def test_health_is_readiness() -> None:
    """For the server, and for every service of the port; it needs no key."""
    registry = FakeRegistry()
    async with inference_port(registry, authorize=only_with_the_key) as port, client_of(port) as client:
        check = client.method(HEALTH, "Check")
        well = [(await check(service=name)).status for name in ("", SERVICE)]
        registry.is_well = False
        ill = (await check()).status
        unknown = await refusal(check(service="unheard"))

    assert (well, ill, unknown) == ([SERVING] * 2, NOT_SERVING, ("NOT_FOUND", "Service not found: unheard"))


async def test_a_watch_of_an_unknown_service_says_so_and_goes_on() -> None:
    """As the protocol has it: the service may come."""
    async with inference_port() as port, client_of(port) as client:
        watch = client.method(HEALTH, "Watch")(service="unheard")
        seen = (await watch.read()).status
        watch.cancel()

    assert seen == SERVICE_UNKNOWN


async def test_a_watch_tells_every_change() -> None:
    """And nothing twice."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        watch = client.method(HEALTH, "Watch")()
        seen = [(await watch.read()).status]
        registry.states.tell()
        registry.is_well = False
        registry.states.tell()
        seen.append((await watch.read()).status)
        watch.cancel()

    assert seen == [SERVING, NOT_SERVING]


async def test_a_models_name_has_the_health_of_the_model() -> None:
    """It is asked like a service, and needs no key; a name that is no model's tells nothing of other models."""
    registry = FakeRegistry(serving={"up": True, "down": False})
    async with inference_port(registry, authorize=only_with_the_key) as port, client_of(port) as client:
        check = client.method(HEALTH, "Check")
        seen = [(await check(service=name)).status for name in ("up", "down")]
        unknown = await refusal(check(service="u"))

    assert (seen, unknown) == ([SERVING, NOT_SERVING], ("NOT_FOUND", "Service not found: u"))


async def test_a_watch_of_a_model_follows_it_from_before_it_is_there_to_after_it_has_gone(tmp_path: Path) -> None:
    """Registered, scaled down and up, unregistered, and there again, as a real registry tells it."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    house.put()
    registry, seen = house.registry, []
    async with inference_port(registry) as port, client_of(port) as client:
        watch = client.method(HEALTH, "Watch")(service="m")
        changes: list[Callable[[], Awaitable[Any]]] = [
            lambda: asyncio.sleep(0),
            lambda: registry.register(RegisterParameters("m-1.0.mar", initial_workers=1, synchronous=True)),
            lambda: registry.scale("m", None, min_workers=0, max_workers=0, synchronous=True),
            lambda: registry.scale("m", None, min_workers=1, max_workers=1, synchronous=True),
            lambda: registry.unregister("m"),
            lambda: registry.register(RegisterParameters("m-1.0.mar", initial_workers=1, synchronous=True)),
        ]
        for change in changes:
            await change()
            async with asyncio.timeout(10):
                seen.append((await watch.read()).status)
        registry.begin_drain()
        seen.append((await watch.read()).status)
        watch.cancel()
    await registry.stop()

    assert seen == [SERVICE_UNKNOWN, SERVING, NOT_SERVING, SERVING, SERVICE_UNKNOWN, SERVING, NOT_SERVING]


async def test_no_more_watches_are_open_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends makes room for another; of those that ended nothing is left."""
    monkeypatch.setattr(health, "MOST_WATCHES", 2)
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        watches = [client.method(HEALTH, "Watch")() for _ in range(2)]
        for watch in watches:
            await watch.read()
        refused = await refusal(client.method(HEALTH, "Watch")().read())
        watches[0].cancel()
        async with asyncio.timeout(10):
            while port.port.open_calls > 1:
                await asyncio.sleep(0.001)
        again = client.method(HEALTH, "Watch")()
        assert (await again.read()).status == SERVING
        for watch in (watches[1], again):
            watch.cancel()
        async with asyncio.timeout(10):
            while port.port.open_calls:
                await asyncio.sleep(0.001)

    assert refused == (
        "RESOURCE_EXHAUSTED",
        "2 watches are open at this port, and there may be no more; ask Check, or come again.",
    )
    assert registry.states.waiting == 0


async def reflect(client: Client, service: str, *questions: dict[str, Any]) -> list[Any]:
    """The answers to these questions, asked one after the other in one call."""
    call, answers = client.method(service, "ServerReflectionInfo")(), []
    request = SCHEMA.message(f"{service.rpartition('.')[0]}.ServerReflectionRequest")
    for question in questions:
        await call.write(request(**question))
        answers.append(await call.read())
        assert answers[-1].original_request == request(**question)
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    return answers


@pytest.mark.parametrize("service", REFLECTION)
async def test_reflection_shows_services_and_their_messages(service: str) -> None:
    """So that tools need no files; a file comes first, and then all that it needs, each once."""
    async with inference_port(has_open_inference=True) as port, client_of(port) as client:
        listed, described = await reflect(client, service, {"list_services": "*"}, {"file_containing_symbol": SERVICE})
        [named] = await reflect(client, service, {"file_by_filename": "google/rpc/status.proto"})

    assert [each.name for each in listed.list_services_response.service] == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
        "org.pytorch.serve.grpc.inference.InferenceAPIsService",
        "org.pytorch.serve.grpc.openinference.GRPCInferenceService",
    ]
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(raw)
        for raw in described.file_descriptor_response.file_descriptor_proto
    ]
    assert [message.name for message in files[0].message_type][:2] == ["PredictionsRequest", "PredictionResponse"]
    assert [file.name for file in files] == [
        "org/pytorch/serve/grpc/inference.proto",
        "google/protobuf/empty.proto",
        "google/rpc/status.proto",
        "google/protobuf/any.proto",
    ]
    assert list(named.file_descriptor_response.file_descriptor_proto) == [
        file.SerializeToString() for file in files[2:]
    ]


@pytest.mark.parametrize("service", REFLECTION)
async def test_reflection_answers_what_it_cannot_show_and_goes_on(service: str) -> None:
    """With gRPC's number of the error. No message of these can be extended, so that there are no numbers."""
    unheard = {"containing_type": "unheard", "extension_number": 1}
    not_extended = {"containing_type": "inference.InferParameter", "extension_number": 1001}
    async with inference_port() as port, client_of(port) as client:
        *answers, numbers = await reflect(
            client,
            service,
            {"host": "me"},
            {"file_by_filename": "unheard.proto"},
            {"file_containing_symbol": "unheard"},
            {"file_containing_extension": unheard},
            {"file_containing_extension": not_extended},
            {"all_extension_numbers_of_type": "unheard"},
            {"all_extension_numbers_of_type": "inference.InferParameter"},
        )

    told = [(answer.error_response.error_code, answer.error_response.error_message) for answer in answers]
    assert told == [(3, "invalid argument"), *[(5, "not found")] * 5]
    assert numbers.all_extension_numbers_response.base_type_name == "inference.InferParameter"
    assert list(numbers.all_extension_numbers_response.extension_number) == []


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("unary_unary", "/grpc.health.v1.Health/Check"),
        ("unary_stream", "/grpc.health.v1.Health/Watch"),
        *[("stream_stream", f"/{service}/ServerReflectionInfo") for service in REFLECTION],
    ],
)
async def test_bytes_that_are_no_message_are_the_clients_fault(
    kind: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """INVALID_ARGUMENT, and no traceback in the log: whoever reaches the port can send them."""
    unreadable = b"\x0a\xff"
    async with inference_port() as port, client_of(port) as client:
        method = getattr(client.channel, kind)(path)
        call = method(iter([unreadable])) if kind == "stream_stream" else method(unreadable)

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (call if kind == "unary_unary" else call.read())

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be read as grpc." in refused.value.details()
    assert not caplog.records


async def test_a_method_that_no_service_has_is_unimplemented(caplog: pytest.LogCaptureFixture) -> None:
    """`List` of the health service is one; grpcio's own answer to it is a traceback."""
    async with inference_port() as port, client_of(port) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.channel.unary_unary("/grpc.health.v1.Health/List")(b"")

    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not caplog.records


async def test_a_taken_port_is_found_at_once() -> None:
    """With the system's own reason."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = GrpcAddress("127.0.0.1", taken.getsockname()[1])

        with pytest.raises(OSError) as caught:
            GrpcPorts(FakeRegistry(), Book(), Book()).bind_inference(address, GrpcLimits())  # type: ignore[arg-type]

    assert caught.value.errno == errno.EADDRINUSE


async def test_too_many_header_bytes_are_refused() -> None:
    """Before the call reaches anybody."""
    registry = FakeRegistry()
    async with inference_port(registry, limits=GrpcLimits(header_bytes=2000)) as port, client_of(port) as client:
        code, _ = await refusal(predict(client, metadata=[("x-long", "a" * 4000)]))

    assert (code, registry.submitted) == ("RESOURCE_EXHAUSTED", [])


async def test_an_old_connection_is_asked_to_go_and_its_calls_end() -> None:
    """Its client comes back on another one, unasked."""
    registry, book = FakeRegistry(), Book()
    limits = GrpcLimits(age_s=0.3, age_grace_s=30)
    async with inference_port(registry, book=book, limits=limits) as port, client_of(port) as client:
        old = predict(client, "m")
        job = await registry.wait_for(1)
        async with asyncio.timeout(20):
            while True:
                await predict(client)
                if len({line.split(" ")[0] for line in book.lines}) > 1:
                    break
        job.answer(b"in time")

        assert (await old).prediction == b"in time"


async def test_a_client_that_was_sent_away_for_having_no_call_comes_back() -> None:
    """Its next call goes over another connection, and is answered."""
    book = Book()
    async with (
        inference_port(book=book, limits=GrpcLimits(idle_s=0.2)) as port,
        client_of(port) as client,
    ):
        await predict(client)
        async with asyncio.timeout(20):
            while client.channel.get_state() is grpc.ChannelConnectivity.READY:
                await asyncio.sleep(0.01)
        await predict(client)

    assert book.codes == ["OK", "OK"]
    assert len({line.split(" ")[0] for line in book.lines}) == 2


async def test_a_client_that_asks_too_often_whether_the_server_is_there_is_sent_away() -> None:
    """With its calls, whose work is cancelled; one that asks as often as it may is not."""
    registry = FakeRegistry()
    limits = GrpcLimits(least_ping_interval_s=10)
    often = [
        ("grpc.keepalive_time_ms", 50),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with (
        inference_port(registry, limits=limits) as port,
        client_of(port) as good,
        grpc.aio.insecure_channel(str(port.address), often) as channel,
    ):
        kept = predict(good, "m")
        first = await registry.wait_for(1)
        cut = predict(Client(channel), "m")
        second = await registry.wait_for(2)
        async with asyncio.timeout(20):
            code, _ = await refusal(cut)
            while not second.is_cancelled:
                await asyncio.sleep(0.001)
        first.answer(b"in time")

        assert (code, (await kept).prediction) == ("UNAVAILABLE", b"in time")


async def test_a_stopping_port_lets_answers_end_and_cuts_what_is_idle() -> None:
    """Watches and silent dialogues would hold it for as long as they like."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        watch = client.method(HEALTH, "Watch")()
        await watch.read()
        dialogue = client.method(SERVICE, "StreamPredictions2")()
        await dialogue.write(REQUEST(model_name="echo", sequence_id="s", input={"data": b"x"}))
        await dialogue.read()
        call = predict(client, "m")
        job = await registry.wait_for(2)

        stopping = asyncio.create_task(port.stop(60.0))
        await asyncio.sleep(0)
        job.answer(b"in time")
        answer = await call
        async with asyncio.timeout(20):
            await stopping

        assert answer.prediction == b"in time"
        assert (await refusal(watch.read()))[0] in ("UNAVAILABLE", "CANCELLED")
        assert (await refusal(dialogue.read()))[0] in ("UNAVAILABLE", "CANCELLED")
        assert (await refusal(predict(client)))[0] == "UNAVAILABLE"
    with socket.socket() as sock:
        assert sock.connect_ex((port.address.host, port.address.port)) != 0


async def test_a_port_that_is_not_waited_for_cancels_what_runs() -> None:
    """Nothing is left of it."""
    registry = FakeRegistry()
    async with inference_port(registry) as port, client_of(port) as client:
        call = predict(client, "m")
        job = await registry.wait_for(1)
        await port.stop()

        assert (await refusal(call))[0] in ("UNAVAILABLE", "CANCELLED")
        assert job.is_cancelled


async def test_a_port_that_never_accepted_is_given_back() -> None:
    """A start that fails later leaves nothing."""
    book = Book()
    port = GrpcPorts(FakeRegistry(), book, book).bind_inference(HERE, GrpcLimits())  # type: ignore[arg-type]

    await port.stop()

    with socket.socket() as sock:
        sock.bind((port.address.host, port.address.port))


async def test_a_draining_server_says_so() -> None:
    """UNAVAILABLE is what balancers look elsewhere on."""
    registry = FakeRegistry(errors={"m": Draining()})
    async with inference_port(registry) as port, client_of(port) as client:
        call = predict(client, "m")
        code, _ = await refusal(call)
        trailers = dict(tuple(await call.trailing_metadata()))

    assert (code, trailers["x-marserve-cause"]) == ("UNAVAILABLE", "draining")
    assert trailers["retry-after"] in {"1", "2", "3"}


def test_an_address_is_written_as_urls_have_it() -> None:
    """IPv6 in brackets."""
    assert (str(GrpcAddress("::1", 7070)), str(GrpcAddress("localhost", 7071))) == ("[::1]:7070", "localhost:7071")
