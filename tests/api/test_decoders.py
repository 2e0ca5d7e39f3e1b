"""What decoding a body costs the event loop: every decoder, with the worst that a client can make of a body for it.

A step of the loop is to take 2 ms of its thread's time, and here three times that. `TABLE` names each place in the
server that decodes; a place that is not in it fails the first test.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import gc
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import marserve
from marserve.api.decoding import Decoding
from marserve.api.grpc.calls import Calls
from marserve.api.grpc.open_inference import fill_response, write_request
from marserve.api.grpc.schema import INFERENCE, OPEN_INFERENCE, Schema
from marserve.api.http import request_body
from marserve.api.http.inference import MAX_SEGMENTS, read_route
from marserve.api.http.instances import QUICK_BYTES as QUICK_INSTANCES
from marserve.api.http.request_body import FORM, is_quick, read_parts
from marserve.api.http.request_head import HttpLimits, read_head
from marserve.api.open_inference.regions import Regions
from marserve.api.open_inference.request_parameters import QUICK_BYTES, SEARCHED_BYTES
from marserve.api.open_inference.shared_tensors import LOOKED_AT_BYTES, SharedTensors
from marserve.api.parameters import read_parameters
from marserve.api.rest.application import split_path
from marserve.api.rest.models.events import read_events
from marserve.api.rest.models.traffic import read_object
from marserve.api.rest.platforms.open_inference_control import MAX_BODY, read_settings
from marserve.errors import MarserveError
from marserve.messages import Part, Request
from marserve.pool.dispatch.lengths.lengths import MAX_JSON_BYTES, SMALL_JSON_BYTES, read_rule
from marserve.settings.table import Settings
from marserve.telemetry.body_samples import READ_BYTES, Hiding
from support.http_listener import Counts, Lines, listening

pytestmark = pytest.mark.anyio

STEP_S = 0.002
# What a test allows: other work on the machine makes the caches cold.
LIMIT_S = 3 * STEP_S
MOST_BYTES = 6_553_500
BOUNDARY = b"b" * 70
MULTIPART = f"multipart/form-data; boundary={BOUNDARY.decode()}"

# ------------------------------------------------------------------------------------------- the table

# Calls that make objects of bytes, and the rooms that see clients' bodies.
DECODERS = {
    *("loads", "FromString", "load_yaml", "load_marked_yaml", "safe_load", "b64decode", "unquote", "unquote_plus"),
    *("unquote_to_bytes", "parse_qsl", "PushMultipartParser", "parse_options_header", "a2b_qp", "unhexlify", "unpack"),
    *("read_parts", "read_fields", "JsonParameters"),
}
ROOMS = (
    "api",
    "registry",
    "pool",
    "workflows",
    "rollout",
    "telemetry",
    "environments",
    "memory",
    "arrivals",
    "desired_state",
)

FORMS, HEADS, GRPC, MANAGEMENT, INSTANCES = "forms", "heads", "grpc", "management", "instances"
IN_A_THREAD = "always called in a thread"
NO_BODY = "reads no body: a file or a state of the server's own, or one short word"

TABLE = {
    "api/http/request_body.py:read_parts": FORMS,
    "api/http/request_body.py:_unescape": FORMS,
    "api/http/request_body.py:_read_multipart": FORMS,
    "api/http/exchange.py:_read_parts": FORMS,
    "api/http/instances.py:_part": INSTANCES,
    "api/http/instances.py:_read_python": INSTANCES,
    "api/http/inference.py:predict": FORMS,
    "api/rest/models/management.py:check": FORMS,
    "api/http/inference.py:read_route": HEADS,
    "api/rest/application.py:split_path": HEADS,
    "api/http/request_head.py:_hide": HEADS,
    "api/wishes.py:read_version": HEADS,
    "api/rest/schemas.py:": HEADS,
    "api/rest/models/events.py:_offered": HEADS,
    "api/rest/models/archives.py:_decode": HEADS,
    "api/grpc/calls.py:parse": GRPC,
    "api/grpc/open_inference.py:fill_response": GRPC,
    "api/grpc/open_inference.py:_read_raw": GRPC,
    "api/grpc/raw_tensors.py:fill_response": GRPC,
    "api/parameters.py:__init__": MANAGEMENT,
    "api/parameters.py:read_parameters": MANAGEMENT,
    "api/rest/models/traffic.py:_object_of": MANAGEMENT,
    "api/rest/logs.py:put_level": MANAGEMENT,
    "api/rest/platforms/open_inference_control.py:read_settings": MANAGEMENT,
    "api/rest/models/event_bodies.py:read_body": MANAGEMENT,
    "api/rest/models/event_bodies.py:_read_records": MANAGEMENT,
    "api/rest/models/event_bodies.py:_read_sns": MANAGEMENT,
    "api/rest/models/event_bodies.py:_read_pubsub": MANAGEMENT,
    "api/rest/models/event_bodies.py:_read_azure": MANAGEMENT,
    "api/rest/models/event_bodies.py:_read_own": MANAGEMENT,
    "pool/dispatch/lengths/lengths.py:length_of": "lengths",
    "pool/dispatch/lengths/lengths.py:_length_of_long": "lengths",
    "telemetry/body_samples.py:body": "samples",
    "telemetry/body_samples.py:text": "samples",
    "telemetry/body_samples.py:found_in": "samples, and longer bodies in a thread",
    "telemetry/body_samples.py:_found_in_text": "samples, and longer bodies in a thread",
    "telemetry/body_samples.py:_write": "a record of a few samples' length",
    "workflows/engine.py:_join": "short answers; tests/workflows/test_engine.py has long ones joined by a thread",
    "registry/catalogue/metadata_of_handler.py:read_metadata": IN_A_THREAD,
    "registry/changes/trial.py:_json_of": IN_A_THREAD,
    "desired_state/document.py:read": IN_A_THREAD,
    "workflows/spec.py:_load": IN_A_THREAD,
    "api/rest/pages/router.py:_write": IN_A_THREAD,
    "registry/intake/intake.py:unpack_as": IN_A_THREAD,
    "registry/intake/intake.py:judge": IN_A_THREAD,
    "registry/changes/registering.py:take_in": IN_A_THREAD,
    "telemetry/logs/records.py:_read_object": IN_A_THREAD,
    "telemetry/recorder_file.py:__init__": IN_A_THREAD,
    "arrivals/watches.py:take_in": IN_A_THREAD,
    "api/grpc/transport/head.py:_read_value": NO_BODY,
    "api/rest/logs.py:_event": NO_BODY,
    "api/rest/platforms/open_inference_models.py:_wants_ready": NO_BODY,
    "pool/slots/life.py:_declaration_of": NO_BODY,
    "api/grpc/schema.py:__init__": NO_BODY,
    "memory/learned_memory.py:read": NO_BODY,
    "registry/catalogue/snapshot.py:lies_as": NO_BODY,
    "registry/catalogue/snapshot.py:read_models": NO_BODY,
    "environments/interpreter_probe.py:judge": NO_BODY,
    "environments/environments.py:_read_hashes": NO_BODY,
    "environments/environments.py:_read_record": NO_BODY,
    "environments/environments.py:_bytes_of": NO_BODY,
    "environments/requirements.py:_without_file_scheme": NO_BODY,
    "desired_state/history.py:_read": NO_BODY,
    "rollout/records.py:read": NO_BODY,
    "arrivals/watches.py:_listed": NO_BODY,
    "telemetry/metrics/metric_definitions.py:read_metrics_file": NO_BODY,
}


def decoding_places() -> Iterator[str]:
    """Where the server decodes: `file:function`."""
    root = Path(marserve.__file__).parent

    def walk(node: ast.AST, place: str, function: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.Call):
                owner = ast.unparse(child.func.value) if isinstance(child.func, ast.Attribute) else ""
                name = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
                if name in DECODERS or (name == "decode" and owner.startswith(("msgspec", "skip_to"))):
                    yield f"{place}:{inner}"
            yield from walk(child, place, inner)

    for room in ROOMS:
        for file in (root / room).rglob("*.py"):
            yield from walk(ast.parse(file.read_text()), file.relative_to(root).as_posix(), "")


def test_every_decoder_stands_in_the_table() -> None:
    """A new one gets a row, and the worst body for it a test; one that is gone leaves the table."""
    assert set(decoding_places()) == set(TABLE)


# ------------------------------------------------------------------------------------------- measuring


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """A test's process has many objects; the server freezes its own."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def check_call(work: Callable[[], object]) -> None:
    """The call takes no longer than a step may, refused or not."""
    for tries_left in (2, 1, 0):
        begin = time.thread_time()
        with contextlib.suppress(MarserveError):
            work()
        taken_s = time.thread_time() - begin
        if taken_s < LIMIT_S or not tries_left:
            assert taken_s < LIMIT_S
            return


class Steps:
    """The longest step of the running loop, in seconds of its thread's time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest_s = 0.0
        run = asyncio.events.Handle._run  # type: ignore[attr-defined]

        def measured(handle: Any) -> None:
            begin = time.thread_time()
            try:
                run(handle)
            finally:
                self.longest_s = max(self.longest_s, time.thread_time() - begin)

        monkeypatch.setattr(asyncio.events.Handle, "_run", measured)

    async def check(self, work: Callable[[], Awaitable[Any]]) -> None:
        """No step that the work takes is longer than a step may be, refused or not."""
        for tries_left in (2, 1, 0):
            await asyncio.sleep(0)
            self.longest_s = 0.0
            with contextlib.suppress(MarserveError):
                await asyncio.create_task(work())  # type: ignore[arg-type]
            if self.longest_s < LIMIT_S or not tries_left:
                assert self.longest_s < LIMIT_S
                return


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """What measures the loop of this test."""
    return Steps(monkeypatch)


def fill(pattern: bytes, size: int) -> bytes:
    """The pattern, as often as it fits."""
    return pattern * (size // len(pattern))


# ------------------------------------------------------------------------------------------- forms

PART = b"--" + BOUNDARY + b"\r\nContent-Disposition: form-data; name=a"
END = b"--" + BOUNDARY + b"--\r\n"


def urlencoded(size: int) -> dict[str, bytes]:
    """The worst bodies for a urlencoded form."""
    return {
        "escapes": b"a=" + fill(b"%41", size),
        "scattered escapes": b"a=" + fill(b"%41a", size),
        "percent signs": b"a=" + fill(b"%", size),
        "equal signs": b"a=%41" + fill(b"=", size),
        "spaces": b"a=" + fill(b"+", size),
        "fields": fill(b"a=%4&", min(size, 5000)) + b"b=" + fill(b"%4", size),
        "no UTF-8": fill(b"%ff", size) + b"=1",
    }


def multipart(size: int) -> dict[str, bytes]:
    """The worst bodies for a multipart form."""
    part, headers = PART + b"\r\n\r\n\r\n", PART + b"\r\n" + fill(b"a:b\r\n", 70) + b"\r\n\r\n"
    parameters, quoted = PART + fill(b"; a=b", 8000), b"--" + BOUNDARY + b'\r\nContent-Disposition: x; name="'
    return {
        "parts": fill(part, min(size, 1000 * len(part))) + END,
        "headers": fill(headers, min(size, 1000 * len(headers))) + END,
        "parameters": fill(parameters + b"\r\n\r\n\r\n", size) + END,
        "parameters of one": parameters + b"\r\n\r\n" + fill(b"x", size) + b"\r\n" + END,
        "quotes": fill(quoted + fill(b'\\"', 8000) + b'"\r\n\r\n\r\n', size) + END,
        "near boundaries": PART + b"\r\n\r\n" + fill(b"\r\n--" + BOUNDARY[:-1] + b"c", size) + b"\r\n" + END,
        "line ends": PART + b"\r\n\r\n" + fill(b"\r\n-", size) + b"\r\n" + END,
        "no boundary": fill(b"x", size),
    }


@pytest.mark.parametrize("size", [2000, 8000, 20_000, 64_000, 250_000])
@pytest.mark.parametrize("kind", [FORM, MULTIPART])
def test_a_form_that_is_called_quick_is_decoded_within_a_step(kind: str, size: int) -> None:
    """Whatever it holds; and telling which are quick is."""
    for body in (urlencoded(size) if kind == FORM else multipart(size)).values():
        check_call(lambda body=body: is_quick(body, kind) and read_parts(body, kind))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"a=1&b=two+words&c=%C3%A9", FORM),
        (b"data=" + b"%7B" * 2000, FORM),
        (PART + b"\r\n\r\nvalue\r\n" + END, MULTIPART),
        (
            PART + b"; filename=k.jpg\r\nContent-Type: image/jpeg\r\n\r\n" + bytes(range(256)) * 400 + b"\r\n" + END,
            MULTIPART,
        ),
    ],
)
def test_what_clients_send_is_quick(body: bytes, kind: str) -> None:
    """A small form, and a picture of 100 KB in one."""
    assert is_quick(body, kind)


async def post(
    port: int, kind: str, body: bytes, *, chunk_bytes: int = 0, target: bytes = b"/predictions/echo"
) -> bytes:
    """Send a form from another thread, which has a clock of its own; the answer's first line."""

    def send() -> bytes:
        framing = b"Transfer-Encoding: chunked" if chunk_bytes else b"Content-Length: %d" % len(body)
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: %b\r\n%b\r\n\r\n" % (
            target,
            kind.encode(),
            framing,
        )
        if chunk_bytes:
            piece = b"%x\r\n%b\r\n" % (chunk_bytes, body[:chunk_bytes])
            sent = piece * (len(body) // chunk_bytes) + b"0\r\n\r\n"
        else:
            sent = body
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(head + sent)
            return sock.makefile("rb").readline().strip()

    return await asyncio.to_thread(send)


@pytest.mark.parametrize("kind", [FORM, MULTIPART])
async def test_a_long_form_takes_no_long_step_from_socket_to_handler(steps: Steps, kind: str) -> None:
    """6.5 MB of the worst, through a real connection."""
    bodies = urlencoded(MOST_BYTES - 5200) if kind == FORM else multipart(MOST_BYTES - 9000)
    async with listening() as listener:
        for name in ("scattered escapes", "fields", "no UTF-8") if kind == FORM else ("parameters", "near boundaries"):
            seen = []

            async def work(body: bytes = bodies[name], seen: list[bytes] = seen) -> None:
                seen.append(await post(listener.port, kind, body))

            await steps.check(work)
            assert set(seen) <= {b"HTTP/1.1 200", b"HTTP/1.1 400"}


async def test_a_body_of_tiny_chunks_takes_no_long_step(steps: Steps) -> None:
    """40,000 chunks of a byte, which come in a few reads."""
    async with listening(HttpLimits(body_chunks=100_000)) as listener:

        async def work() -> None:
            assert await post(listener.port, "text/plain", b"x" * 40_000, chunk_bytes=1) == b"HTTP/1.1 200"

        await steps.check(work)


async def test_small_bodies_are_decoded_without_a_change_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is begun in a thread for them."""
    monkeypatch.setattr(Decoding, "begin", None)
    async with listening() as listener:
        for body, kind in ((b"a=%41&b=2", FORM), (PART + b"\r\n\r\n" + b"v" * 5000 + b"\r\n" + END, MULTIPART)):
            assert await post(listener.port, kind, body) == b"HTTP/1.1 200"


async def test_a_form_of_a_client_that_goes_is_not_submitted() -> None:
    """Its decoding may go on; nothing is made of it."""
    async with listening() as listener:
        async with listener.connect() as client:
            body = b"a=" + b"%41" * 300_000
            await client.send(
                b"POST /predictions/slow HTTP/1.1\r\nHost: x\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
                % (FORM.encode(), len(body), body)
            )
        await listener.wait_until_empty()
        async with listener.connect() as client:
            await client.ask(b"GET /predictions/echo HTTP/1.1\r\nHost: x\r\n\r\n")

        assert all(one.is_cancelled or one.model == "echo" for one in listener.plane.submitted)


ESCAPED = st.lists(
    st.sampled_from(
        [b"%", b"%41", b"%3d", b"=", b"=41", b"%0A", b"\n", b"\r\n", b" ", b"\t", b"_", b"\xff", b"4", b"g"]
    )
).map(b"".join)


@given(ESCAPED, st.integers(3, 9))
@example(b"%4", 3)
def test_escapes_are_decoded_as_the_standard_library_does(text: bytes, slice_bytes: int) -> None:
    """At once and in slices, whatever stands between them."""
    whole = request_body._decode(text)
    before, request_body.SLICE_BYTES = request_body.SLICE_BYTES, slice_bytes  # type: ignore[misc]
    try:
        sliced = request_body._decode(text)
    finally:
        request_body.SLICE_BYTES = before  # type: ignore[misc]

    assert whole == sliced == unquote_to_bytes(text)


# ------------------------------------------------------------------------------------------- heads and queries

LONG = 8 * 1024 - 100


@pytest.mark.parametrize(
    "query", [fill(b"a=%4&", LONG), fill(b"%41", LONG), fill(b"&", LONG), fill(b"a&", 2000) + fill(b"%41", 6000)]
)
def test_a_query_of_an_inference_route_is_read_within_a_step(query: bytes) -> None:
    """As long as a request line may be."""
    check_call(lambda: read_route(b"/invocations?" + query))


def test_a_path_is_split_within_a_step() -> None:
    """Of escapes and of slashes."""
    for path in (fill(b"/%41", LONG), fill(b"/", LONG)):
        check_call(lambda path=path: read_route(b"/" + path))  # type: ignore[misc]
    for path in (fill(b"/%41", 4 * MAX_SEGMENTS) + fill(b"%41", LONG - 4 * MAX_SEGMENTS), fill(b"%2F", LONG)):
        check_call(lambda path=path: split_path(b"/" + path))  # type: ignore[misc]
        check_call(lambda path=path: read_route(b"/" + path))  # type: ignore[misc]


@pytest.mark.parametrize(
    "line",
    [
        (b"x-marserve-version", fill(b"%41", 60_000)),
        (b"content-type", b"multipart/form-data" + fill(b"; a=b", 60_000)),
        (b"content-type", b'multipart/form-data; boundary="' + fill(b'\\"', 60_000)),
        (b"host", fill(b"%25", 60_000)),
    ],
)
def test_a_header_line_is_read_within_a_step(line: tuple[bytes, bytes]) -> None:
    """With what is made of it for the body."""

    def read() -> None:
        target = b"/predictions/m?url=" + fill(b"%3Fa", LONG)
        lines = [line] if line[0] == b"host" else [(b"host", b"x"), line]
        head = read_head(b"POST", target, "1.1", True, lines, HttpLimits(), read_route)
        read_parts(b"x", head.content_type)

    check_call(read)


# ------------------------------------------------------------------------------------------- parameters


def asking(unit: bytes, size: int) -> bytes:
    """A request of the Open Inference Protocol that asks for something, with so many of these values."""
    return b'{"parameters": {"priority": 1}, "inputs": [' + fill(unit, size) + b"1]}"


@pytest.mark.parametrize("unit", [b"NaN,", b"1,", b'"p",', b"[],", b'{"timeout":1},'])
async def test_a_requests_parameters_take_no_long_step_whatever_its_length(steps: Steps, unit: bytes) -> None:
    """On the loop where it is short, else in a thread."""
    async with listening(marks_open_inference=True) as listener:
        for size in (QUICK_BYTES - 64, SEARCHED_BYTES - 64, MOST_BYTES - 64):

            async def work(body: bytes = asking(unit, size)) -> None:
                target = b"/v2/models/echo/infer"
                assert await post(listener.port, "application/json", body, target=target) == b"HTTP/1.1 200"

            await steps.check(work)


# ------------------------------------------------------------------------------------------- instances


@pytest.mark.parametrize("unit", [b"1,", b"[],", b'{"b64":"QUJD"},', b'{"":0},', b'"\\n",', b"NaN,", b"[[[1,2],[3]]],"])
async def test_instances_take_no_long_step_however_many_there_are(steps: Steps, unit: bytes) -> None:
    """Cut on the loop where they are few, else in a thread; and submitted in slices."""
    async with listening(splits_instances=True) as listener:
        for size in (QUICK_INSTANCES - 32, 100_000, MOST_BYTES - 64):

            async def work(body: bytes = b'{"instances":[' + fill(unit, size) + b"1]}") -> None:
                target = b"/v1/models/echo:predict"
                answer = await post(listener.port, "application/json", body, target=target)
                assert answer[:12] in (b"HTTP/1.1 200", b"HTTP/1.1 400")

            await steps.check(work)


@pytest.mark.parametrize(
    "unit", [b"{},", b'{"parameters":{"shared_memory_region":"r","shared_memory_byte_size":0},"name":"x"},', b"[[]],"]
)
def test_the_shared_memory_that_a_request_names_is_found_within_a_step(tmp_path: Path, unit: bytes) -> None:
    """In the longest JSON that is looked at."""
    (tmp_path / "a").write_bytes(bytes(100))
    regions = Regions(tmp_path, most_bytes=100, most_regions=1)
    regions.register("r", "a", 0, 100)
    body = (
        b'{"inputs":[' + fill(unit, LOOKED_AT_BYTES - 100) + b'{"name":"x","parameters":{"shared_memory_offset":0}}]}'
    )
    assert len(body) <= LOOKED_AT_BYTES
    registry: Any = None

    check_call(lambda: SharedTensors(regions, registry).header("m", None, body, len(body)))


# ------------------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize("size", [SMALL_JSON_BYTES, MAX_JSON_BYTES, MOST_BYTES])
@pytest.mark.parametrize(
    "element", [b"0,", b"[],", b"{},", b'"",', b"1e9,", b'"\\u0041",', b"[", b'{"a":', b"1", b"[[[[]]]],"]
)
def test_a_length_in_json_is_found_within_a_step(element: bytes, size: int) -> None:
    """Many elements, deep ones, long numbers, escapes: looked for in them and behind them."""
    values = fill(element, size - 40)
    for body in (b'{"a": [%b0]}' % values, b'{"b": [%b0], "a": 1}' % values, values):
        request = Request("r", [Part("body", body[:size])])
        for rule in ("json:a", "json:a.b.c", "json:b.0"):
            check_call(lambda rule=rule, request=request: read_rule(rule)(request))  # type: ignore[misc]


# ------------------------------------------------------------------------------------------- gRPC


def varint(number: int) -> bytes:
    """A number as the wire has it."""
    made = b""
    while number > 127:
        made += bytes([number & 127 | 128])
        number >>= 7
    return made + bytes([number])


def field(number: int, content: bytes) -> bytes:
    """A field of bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


@pytest.mark.parametrize("size", [8000, 100_000, MOST_BYTES])
async def test_a_message_is_read_within_a_step(steps: Steps, size: int) -> None:
    """Many inputs, many tensors, many fields inside of one, fields that nobody knows, one long value."""
    schema = Schema()
    calls = Calls(schema, Lines(), Counts())  # type: ignore[arg-type]
    bodies = {
        "PredictionsRequest": [
            fill(b"\x1a\0", size),
            b"".join(field(3, field(1, b"%d" % number)) for number in range(min(size, 200_000) // 12)),
            field(3, fill(b"\x12\0", size - 20)),
            fill(b"\x78\0", size),
            fill(b"\x1a\x01\xff", size),
            field(3, field(1, b"a") + field(2, bytes(size - 20))),
        ],
        "ModelInferRequest": [
            fill(b"\x2a\0", size),
            fill(b"\x3a\0", size),
            field(5, field(5, fill(b"\x42\0", size - 30))),
        ],
    }
    for name, messages in bodies.items():
        message = schema.message(f"{INFERENCE if name == 'PredictionsRequest' else OPEN_INFERENCE}.{name}")
        for data in messages:
            await steps.check(lambda message=message, data=data: calls._parse(message, data))  # type: ignore[misc]


@pytest.mark.parametrize("size", [8000, 1_000_000])
async def test_tensors_are_read_and_written_within_a_step(steps: Steps, size: int) -> None:
    """Numbers and texts, typed and raw, and an answer of as many numbers."""
    schema, decoding = Schema(), Decoding()
    kind = schema.message(f"{OPEN_INFERENCE}.ModelInferRequest")
    response = schema.message(f"{OPEN_INFERENCE}.ModelInferResponse")
    for datatype, field_name, values, raw in (
        ("FP32", "fp32_contents", [1.5] * (size // 4), b""),
        ("BYTES", "bytes_contents", [b""] * (size // 2), b""),
        ("UINT8", "", [], bytes(size)),
        ("BYTES", "", [], bytes(size // 4 * 4)),
    ):
        message = kind(model_name="m")
        tensor = message.inputs.add(name="a", datatype=datatype, shape=[1])
        if field_name:
            getattr(tensor.contents, field_name).extend(values)
        else:
            message.raw_input_contents.append(raw)
        await steps.check(lambda message=message: decoding.run(size, write_request, message))  # type: ignore[misc]
    data = [1] * (size // 3)
    body = json.dumps({"outputs": [{"name": "a", "datatype": "INT64", "shape": [1], "data": data}]}).encode()[:size]
    await steps.check(lambda: decoding.run(len(body), fill_response_of, response, kind(), body))
    decoding.close()


def fill_response_of(response: Any, message: Any, body: bytes) -> None:
    """Into a fresh response each time."""
    fill_response(response(), message, body)


# ------------------------------------------------------------------------------------------- management


class Asked:
    """A request as far as a body's reader looks at it."""

    def __init__(self, body: bytes) -> None:
        self.headers = {"content-type": "application/json"}
        self._body = body

    async def body(self) -> bytes:
        """The body."""
        return self._body

    async def stream(self) -> AsyncIterator[bytes]:
        """The body at once."""
        yield self._body


JSON_BODIES = {
    "unknown names": b"{" + b",".join(b'"%d":0' % number for number in range(20_000)) + b"}",
    "a long name": b'{"' + b"model_nam" * 20_000 + b'": 1}',
    "numbers": b"[" + fill(b"1e9,", 250_000) + b"0]",
    "lists": b"[" + fill(b"[],", 250_000) + b"0]",
    "depth": fill(b"[", 250_000),
    "escapes": b'{"a":"' + fill(b"\\ud800", 250_000) + b'"}',
    "repeated": b"{" + fill(b'"a":0,', 60_000) + b'"a":1}',
    "pairs": b"{" + b",".join(b'"%d":0' % number for number in range(800)) + b',"799":1}',
    "short and dear": b"[" + fill(b"[],", 8000) + b"0]",
}


@pytest.mark.parametrize("name", JSON_BODIES)
async def test_parameters_and_documents_in_json_are_read_within_a_step(steps: Steps, name: str) -> None:
    """Those of registrations, of weights and of roll-outs."""
    request: Any = Asked(JSON_BODIES[name])

    await steps.check(lambda: read_parameters(request, ["model_name", "url", "batch_size"]))
    await steps.check(lambda: read_object(request))
    short: Any = Asked(JSON_BODIES[name][:MAX_BODY])
    await steps.check(lambda: read_settings(short, "a test"))


@pytest.mark.parametrize(
    "body",
    [
        b'{"Records":[' + fill(b"{},", 1 << 20) + b"{}]}",
        b'{"message":{"data":"' + base64.b64encode(fill(b"[", 700_000)) + b'"}}',
        b'{"urls":[' + fill(b'"s3://b/%41",', 1 << 20) + b'"s3://b/k"]}',
    ],
)
async def test_events_are_read_within_a_step(steps: Steps, body: bytes) -> None:
    """A megabyte of them, as much as one call may have."""
    await steps.check(lambda: read_events(body[: 1 << 20], {}))


# ------------------------------------------------------------------------------------------- samples of bodies


HIDDEN_NAMES = Settings(entry="marserve", working_directory=Path()).body_sample_hide


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"0," * (READ_BYTES // 2 - 2) + b"0]",
        b"[" * (READ_BYTES // 2) + b"]" * (READ_BYTES // 2),
        b"[" + b'"[",' * (READ_BYTES // 4 - 2) + b"0]",
        json.dumps({f"{number:x}": 0 for number in range(READ_BYTES // 12)}).encode(),
        json.dumps("[" + "0," * (READ_BYTES // 2 - 4) + "0]").encode(),
    ],
)
def test_a_sample_of_a_body_is_made_within_a_step(body: bytes) -> None:
    """By the names that are hidden without a setting."""
    hiding = Hiding(HIDDEN_NAMES)
    assert len(body) <= READ_BYTES
    check_call(lambda: hiding.body(body, "application/json", 4096))
    check_call(lambda: hiding.found_in(Part("body", body, "application/json")))
    check_call(lambda: hiding.found_in(Part("body", body[:-1] + b"\xff", "application/json")))


@pytest.mark.parametrize("unit", [b"a:", b"a ", b"token:", b'token="', b"token\\", b"token", b'"', b"a\\:\n"])
def test_a_sample_of_a_text_is_made_within_a_step(unit: bytes) -> None:
    """Names and values are looked for in it."""
    hiding = Hiding(HIDDEN_NAMES)
    check_call(lambda: hiding.body(unit * (MOST_BYTES // len(unit)), "text/plain", 4096))


@pytest.mark.parametrize("unit", [b"&", b"a&", b"a=%41&", b"token=1&"])
def test_a_sample_of_a_form_is_made_within_a_step(unit: bytes) -> None:
    """However long it is."""
    hiding = Hiding(HIDDEN_NAMES)
    check_call(lambda: hiding.body(unit * (MOST_BYTES // len(unit)), "application/x-www-form-urlencoded", 4096))
