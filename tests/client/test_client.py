"""Both clients against servers that are away, die, lie, are slow or full; and what they send when all is well."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from marserve_client import (
    NO_RETRIES,
    AsyncClient,
    BadAnswer,
    BadInput,
    CallFailed,
    Client,
    Conflict,
    ConnectionLost,
    DeadlinePassed,
    NoConnection,
    NotFound,
    Overloaded,
    Retries,
    Sending,
    Sent,
    ServerFailed,
    WrongKey,
    key_file,
)
from support.both_clients import Clients
from support.scripted_server import Act, ScriptedServer, answer, chunk, head, scripted
from support.server import free_ports

FAST = Retries(tries=3, first_pause_s=0.001, longest_pause_s=5)
FULL = json.dumps({"code": 503, "type": "ServiceUnavailableException", "message": "Full."}).encode()


def error(status: int, message: str, kind: str = "BadRequestException", **headers: str) -> Act:
    """An error as the server sends it."""
    body = json.dumps({"code": status, "type": kind, "message": message}).encode()
    return answer(status, body, x_request_id="r-1", content_type="application/json", **headers)


# ------------------------------------------------------------------------------------------------- no answer, or none


def test_a_server_that_is_away_is_named(clients: Clients) -> None:
    """After the tries that may be; the address stands in the message."""
    (port,) = free_ports(1)
    numbers: list[int] = []
    client = clients(f"http://127.0.0.1:{port}", retries=FAST, before=lambda sending: numbers.append(sending.number))

    with pytest.raises(NoConnection, match=f"No server answers at http://127.0.0.1:{port}/predictions/m"):
        client.predict("m", b"x")

    assert numbers == [1, 2, 3]


def test_a_server_that_comes_up_meanwhile_is_asked(clients: Clients) -> None:
    """Also by a call that must not be made twice: nothing of it had been sent."""
    (port,) = free_ports(1)
    with contextlib.ExitStack() as stack:

        def start(sending: Sending) -> None:
            if sending.number == 2:
                stack.enter_context(scripted(answer(200, b'{"status": "registered"}'), port=port))

        client = clients(management=f"http://127.0.0.1:{port}", retries=FAST, before=start)
        assert client.register("m.mar") == {"status": "registered"}


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (Act((), closes=True), ConnectionLost),
        (Act((b"HTTP/1.1 200 OK\r\ncontent-le",), closes=True), ConnectionLost),
        (Act((head(200, content_length="10") + b"half",), closes=True), ConnectionLost),
        (Act((b"SSH-2.0-OpenSSH_9.6\r\n",), closes=True), ConnectionLost),
        (Act((head(200, content_length="3", content_encoding="gzip") + b"abc",)), BadAnswer),
    ],
    ids=["nothing", "half a head", "half a body", "another protocol", "no gzip"],
)
def test_a_prediction_that_was_sent_is_not_sent_again(clients: Clients, act: Act, kind: type[CallFailed]) -> None:
    """Whether the model ran is not known."""
    with scripted(act, answer(200, b"second")) as server:
        with pytest.raises(kind, match=server.address):
            clients(server.address, retries=FAST).predict("m", b"x")

        assert len(server.asked) == 1


def test_a_call_that_reads_is_sent_again_until_an_answer_begins(clients: Clients) -> None:
    """A connection that broke before it is tried again; one that broke in it is not."""
    half = Act((head(200, content_length="10") + b"half",), closes=True)
    with scripted(Act((), closes=True), answer(200, b"[]"), half, answer(200, b"[]")) as server:
        client = clients(management=server.address, retries=FAST)
        assert client.describe("m") == []
        with pytest.raises(ConnectionLost) as lost:
            client.describe("m")

        assert lost.value.received_bytes == 4
        assert len(server.asked) == 3


@pytest.mark.parametrize("body", [b"<html>", b"", b"[3]", b'"text"', b"[" * 100_000])
def test_garbage_is_a_bad_answer(clients: Clients, body: bytes) -> None:
    """Of management, of metadata and of tensors; with the request's id."""
    with scripted(*[answer(200, body, x_request_id="r-1")] * 3) as server:
        client = clients(server.address, server.address, retries=FAST)
        for call in (
            lambda: client.describe("m"),
            lambda: client.metadata("m"),
            lambda: client.infer("m", {"x": [1]}),
        ):
            with pytest.raises(BadAnswer) as failed:
                call()
            assert failed.value.request_id == "r-1"


# ------------------------------------------------------------------------------------------------------ full and slow


def test_a_full_server_is_asked_again_when_it_says(clients: Clients) -> None:
    """The pause is the server's; the answer is that of the second try, which has less time."""
    with scripted(error(503, "Full.", retry_after="1"), answer(200, b"done")) as server:
        begun = time.monotonic()
        came = clients(server.address).predict("m", b"x", timeout=5)

    assert came.content == b"done"
    assert time.monotonic() - begun >= 1
    assert [asked.body for asked in server.asked] == [b"x", b"x"]
    told = [int(asked.headers["x-marserve-timeout-ms"]) for asked in server.asked]
    assert told[0] == 5000
    assert 2000 < told[1] <= 4000


def test_a_longer_wait_than_may_be_is_left_to_the_caller(clients: Clients) -> None:
    """At once, with the time; and so is one beyond the call's own time."""
    with scripted(error(429, "Full.", retry_after="60"), error(503, "Full.", retry_after="2")) as server:
        client = clients(server.address)
        with pytest.raises(Overloaded) as full:
            client.predict("m", b"x")
        with pytest.raises(Overloaded):
            client.predict("m", b"x", timeout=1.5)

    assert (full.value.retry_after_s, full.value.status, full.value.request_id) == (60, 429, "r-1")


def test_what_must_not_be_made_twice_is_not(clients: Clients) -> None:
    """Registering, swapping, unregistering, beginning a roll-out: a refusal is final."""
    with scripted(*[error(503, "Full.", retry_after="0")] * 8) as server:
        client = clients(management=server.address, retries=FAST)
        for number, call in enumerate(
            (
                lambda: client.register("m.mar"),
                lambda: client.swap("m", "m.mar"),
                lambda: client.unregister("m"),
                lambda: client.begin_rollout("m", "2.0"),
            ),
            start=1,
        ):
            with pytest.raises(Overloaded):
                call()
            assert len(server.asked) == number


def test_a_change_that_can_be_made_twice_waits_its_turn(clients: Clients) -> None:
    """As a prediction does."""
    with scripted(error(503, "Full.", retry_after="0"), answer(200, b'{"status": "scaled"}')) as server:
        assert clients(management=server.address).scale("m", 2) == {"status": "scaled"}

        assert server.asked[1].line == "PUT /models/m?min_worker=2&synchronous=true HTTP/1.1"


def test_a_handlers_own_503_is_final(clients: Clients) -> None:
    """Without Retry-After it may have run."""
    with scripted(error(503, "Prediction failed", x_marserve_cause="handler"), answer()) as server:
        with pytest.raises(Overloaded, match="Prediction failed"):
            clients(server.address, retries=FAST).predict("m", b"x")

        assert len(server.asked) == 1


@pytest.mark.parametrize(
    "act",
    [Act((), holds=True), Act((head(200, content_length="9") + b"slow",), holds=True)],
    ids=["no answer", "half an answer"],
)
def test_a_slow_server_is_not_waited_for(clients: Clients, act: Act) -> None:
    """The call's time bounds it, and the connection closes, so that the server sees it."""
    with scripted(act) as server:
        begun = time.monotonic()
        with pytest.raises(DeadlinePassed, match="longer timeout") as late:
            clients(server.address, retries=FAST).predict("m", b"x", timeout=0.5)

        assert time.monotonic() - begun < 3
        assert late.value.status is None
        assert server.gone.wait(10)


def test_an_answer_that_trickles_is_not_waited_for(clients: Clients) -> None:
    """Each byte comes in time, all of them do not."""
    ended = Act(_trickle(8), holds=True)
    with scripted(ended) as server:
        begun = time.monotonic()
        with pytest.raises(DeadlinePassed) as late:  # and keeps what the error holds
            clients(server.address).predict("m", b"x", timeout=0.6)

        assert time.monotonic() - begun < 2.5
        assert server.gone.wait(2)  # the server still sends
        assert late.value.status is None


def _trickle(seconds: float) -> Any:
    yield head(200, content_length="1000")
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(0.05)
        yield b"x"


def test_the_server_is_told_the_time_that_is_left(clients: Clients) -> None:
    """In its header; none without a bound, and none about models."""
    with scripted(answer(), answer(), answer(200, b"[]")) as server:
        client = clients(server.address, server.address, timeout=None)
        client.predict("m", b"x", timeout=5)
        client.predict("m", b"x")
        client.describe("m", timeout=5)

    told = [asked.headers.get("x-marserve-timeout-ms") for asked in server.asked]
    assert told == ["5000", None, None]


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_no_time_is_no_call(clients: Clients, timeout: float) -> None:
    """Refused here."""
    with pytest.raises(BadInput, match="timeout: is"):
        clients().predict("m", b"x", timeout=timeout)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (error(400, "pair: expected float32 [2], got [3]"), BadInput),
        (error(401, "Token is missing.", "InvalidKeyException"), WrongKey),
        (error(404, "Model not found: m; did you mean n?", "ModelNotFoundException"), NotFound),
        (error(409, "It is there.", "ConflictStatusException"), Conflict),
        (error(500, "Prediction failed", "InternalServerException"), ServerFailed),
        (error(504, "Too late.", "RequestTimeoutException"), DeadlinePassed),
        (answer(302, b"", location="http://elsewhere/"), CallFailed),
    ],
)
def test_the_servers_word_is_the_error(clients: Clients, act: Act, kind: type[CallFailed]) -> None:
    """Of whole answers, and of streams that do not begin."""
    with scripted(act, act) as server:
        client = clients(server.address)
        with pytest.raises(kind) as failed:
            client.predict("m", b"x")
        with pytest.raises(kind) as of_stream:
            client.items("stream", "m", b"x")

    assert str(failed.value) == str(of_stream.value)
    assert failed.value.status in (400, 401, 404, 409, 500, 504, 302)


# ------------------------------------------------------------------------------------------------------------- streams


STREAM = head(200, transfer_encoding="chunked", x_request_id="r-1")


def test_pieces_come_as_they_are_sent(clients: Clients) -> None:
    """The first one before the last is there; none is lost or joined to another in time."""
    with scripted(Act((STREAM, chunk(b"one "), chunk(b"two"), b"0\r\n\r\n"))) as server:
        came = clients(server.address).items("stream", "m", b"x")

    assert b"".join(came) == b"one two"
    assert "x-marserve-timeout-ms" not in server.asked[0].headers


def test_closing_a_stream_ends_it_at_the_server(clients: Clients) -> None:
    """The server sees the connection go, and can end the work."""
    with scripted(Act((STREAM, chunk(b"one")), holds=True)) as server:
        assert clients(server.address).items("stream", "m", b"x", most=1) == [b"one"]

        assert server.gone.wait(10)


def test_a_loop_that_is_left_ends_the_stream() -> None:
    """Dropping the iterator is closing it."""
    with scripted(Act((STREAM, chunk(b"one")), holds=True)) as server, Client(server.address) as client:
        for _ in client.stream("m", b"x"):
            break

        assert server.gone.wait(10)


def test_a_stream_that_breaks_off_says_so_behind_what_came(clients: Clients) -> None:
    """Nothing that came is lost, nothing is sent again."""
    with scripted(Act((STREAM, chunk(b"data: one\n\n")), closes=True), answer()) as server:
        with pytest.raises(ConnectionLost, match="broke after 11 bytes") as lost:
            clients(server.address, retries=FAST).items("events", "m", b"x")

        assert [event.data for event in lost.value.came] == ["one"]  # type: ignore[attr-defined]
        assert lost.value.request_id == "r-1"
        assert len(server.asked) == 1


def test_a_stream_that_falls_silent_is_given_up(clients: Clients) -> None:
    """After `silence`; and after `timeout` as a whole, which the server is told."""
    act = Act((STREAM, chunk(b"one")), holds=True)
    with scripted(act, act) as server:
        client = clients(server.address)
        with pytest.raises(DeadlinePassed) as silent:
            client.items("stream", "m", b"x", silence=0.1)
        with pytest.raises(DeadlinePassed):
            client.items("stream", "m", b"x", timeout=0.5)

    assert silent.value.came == [b"one"]  # type: ignore[attr-defined]
    assert server.asked[1].headers["x-marserve-timeout-ms"] == "500"


def test_events_are_asked_for_and_read(clients: Clients) -> None:
    """The error of a stream comes behind its events."""
    failed = b'data: one\n\nevent: error\ndata: {"code": 400, "message": "age: no"}\n\n'
    with scripted(Act((STREAM, chunk(failed), b"0\r\n\r\n"))) as server:
        with pytest.raises(BadInput) as refused:
            clients(server.address).items("events", "m", "prompt")

        assert [event.data for event in refused.value.came] == ["one"]  # type: ignore[attr-defined]
        assert (refused.value.field, refused.value.request_id) == ("age", "r-1")
        assert server.asked[0].headers["accept"] == "text/event-stream"


def test_a_stream_is_begun_again_while_it_is_refused(clients: Clients) -> None:
    """Before its first byte it is a call like others."""
    whole = Act((STREAM, chunk(b"one"), b"0\r\n\r\n"))
    with scripted(error(503, "Full.", retry_after="0"), whole) as server:
        assert clients(server.address).items("stream", "m", b"x") == [b"one"]


# ------------------------------------------------------------------------------------------------- keys, hooks, pools


def test_the_key_goes_with_each_request(clients: Clients, tmp_path: Path) -> None:
    """One for both APIs, one of a file for each, read anew when the file changes; a call's own header goes before."""
    file = tmp_path / "key_file.json"

    def write(word: str) -> None:
        keys = {api: {"key": f"{api}-{word}"} for api in ("inference", "management")}
        file.write_text(json.dumps(keys))

    with scripted(*[answer(200, b"[]")] * 5) as server:
        clients(server.address, key="one").predict("m", b"x")
        client = clients(server.address, server.address, key=key_file(file))
        client.predict("m", b"x")
        write("first")
        client.predict("m", b"x")
        write("second, longer")
        client.describe("m")
        client.predict("m", b"x", headers={"Authorization": "Bearer mine"})

    sent = [asked.headers.get("authorization") for asked in server.asked]
    assert sent == ["Bearer one", None, "Bearer inference-first", "Bearer management-second, longer", "Bearer mine"]


def test_a_cookie_is_not_kept_for_other_callers(clients: Clients) -> None:
    """One client asks for many; a cookie that a call names itself is sent."""
    with scripted(answer(set_cookie="user=ada; path=/"), answer(), answer()) as server:
        client = clients(server.address)
        for headers in (None, None, {"Cookie": "user=grace"}):
            client.predict("m", b"x", headers=headers)

    assert [asked.headers.get("cookie") for asked in server.asked] == [None, None, "user=grace"]


def test_hooks_see_each_try(clients: Clients) -> None:
    """Before it, and may add headers; after it, with status, seconds and error."""
    seen: list[tuple[Sending, Sent]] = []

    def trace(sending: Sending) -> None:
        sending.headers["traceparent"] = f"00-{sending.number}"

    acts = [error(503, "Full.", retry_after="0"), answer(200, b"done", x_request_id="r-2"), Act((), closes=True)]
    with scripted(*acts) as server:
        client = clients(server.address, before=trace, after=lambda sending, sent: seen.append((sending, sent)))
        client.predict("m", b"x")
        with pytest.raises(ConnectionLost):
            client.predict("m", b"x")

    assert [asked.headers["traceparent"] for asked in server.asked] == ["00-1", "00-2", "00-1"]
    assert [(sending.model, sending.method, sent.status, sent.request_id) for sending, sent in seen] == [
        ("m", "POST", 503, "r-1"),
        ("m", "POST", 200, "r-2"),
        ("m", "POST", None, None),
    ]
    assert [type(sent.error) for _, sent in seen] == [Overloaded, type(None), ConnectionLost]
    assert all(0 <= sent.seconds < 5 for _, sent in seen)
    assert seen[0][0].url == f"{server.address}/predictions/m"


def test_hooks_see_a_streams_end_once(clients: Clients) -> None:
    """When its last piece has come, or it was closed."""
    seen: list[Sent] = []
    whole = Act((STREAM, chunk(b"one"), b"0\r\n\r\n"))
    with scripted(whole, Act((STREAM, chunk(b"one")), holds=True)) as server:
        client = clients(server.address, after=lambda sending, sent: seen.append(sent))
        client.items("stream", "m", b"x")
        client.items("stream", "m", b"x", most=1)

    assert [(sent.status, sent.error) for sent in seen] == [(200, None), (200, None)]


def test_a_connection_is_used_again(clients: Clients) -> None:
    """Also after an error, and after a stream that was read to its end."""
    whole = Act((STREAM, chunk(b"one"), b"0\r\n\r\n"))
    with scripted(answer(), error(404, "No."), whole, answer()) as server:
        client = clients(server.address)
        client.predict("m", b"x")
        with pytest.raises(NotFound):
            client.predict("m", b"x")
        client.items("stream", "m", b"x")
        client.predict("m", b"x")

        assert len(server.connections) == 1


def test_a_full_pool_is_waited_for_no_longer_than_the_call_may_take() -> None:
    """The message says which argument bounds it."""
    with (
        scripted(Act((STREAM, chunk(b"one")), holds=True)) as server,
        Client(server.address, max_connections=1, retries=NO_RETRIES) as client,
        client.stream("m", b"x"),
        pytest.raises(DeadlinePassed, match="raise max_connections"),
    ):
        client.predict("m", b"x", timeout=0.1)


# --------------------------------------------------------------------------------------------------------- use of both


def test_both_clients_have_the_same_methods() -> None:
    """Names, parameters and texts; only what closes them differs."""
    sync, other = ({n: m for n, m in vars(kind).items() if n[0] != "_"} for kind in (Client, AsyncClient))
    assert set(sync) - {"close"} == set(other) - {"aclose"}
    for name in set(sync) - {"close"}:
        assert inspect.signature(sync[name]) == inspect.signature(other[name])
        assert sync[name].__doc__ == other[name].__doc__
        assert sync[name].__doc__
    assert list(inspect.signature(Client.predict).parameters)[:3] == ["self", "model", "data"]
    assert list(inspect.signature(Client().predict).parameters)[:2] == ["model", "data"]


def test_a_connection_that_takes_all_the_calls_time_is_too_late(clients: Clients) -> None:
    """It is the call's time that is over; with more of it, it is the server that is away."""

    def refuse(request: httpx.Request) -> httpx.Response:
        if request.extensions["timeout"]["connect"] < 1:
            time.sleep(request.extensions["timeout"]["connect"])
        raise httpx.ConnectTimeout("timed out", request=request)

    client = clients(retries=FAST, transport=httpx.MockTransport(refuse))

    with pytest.raises(DeadlinePassed):
        client.predict("m", timeout=0.05)
    with pytest.raises(NoConnection):
        client.predict("m", timeout=5)


@pytest.mark.parametrize("name", ["predict", "events"])
def test_a_call_that_is_cancelled_closes_its_connection(name: str) -> None:
    """The server sees it and ends the work; hooks hear of its end."""
    seen: list[Sent] = []
    act = Act((), holds=True) if name == "predict" else Act((STREAM, chunk(b"data: one\n\n")), holds=True)

    async def ask(address: str) -> None:
        async with AsyncClient(address, after=lambda sending, sent: seen.append(sent)) as client:
            if name == "predict":
                await client.predict("m", b"x")
            async for event in await client.events("m"):
                assert event.data == "one"

    async def cancel(server: ScriptedServer) -> None:
        task = asyncio.create_task(ask(server.address))
        while not server.asked:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with scripted(act) as server:
        asyncio.run(cancel(server))

        assert server.gone.wait(10)
    assert [sent.error for sent in seen] == [None]
