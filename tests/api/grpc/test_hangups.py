"""Tests for gRPC clients that hang up with an answer under way: what the log has of them."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import struct

import pytest

from marserve.api.grpc.health import SERVICE as HEALTH
from marserve.api.grpc.inference import SERVICE
from marserve.api.grpc.reflection import SERVICES as REFLECTION
from support.grpc_house import SCHEMA, inference_port
from support.processes import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_grpc_loop")]

REQUEST = SCHEMA.message("org.pytorch.serve.grpc.inference.PredictionsRequest")
PREDICTION = REQUEST(model_name="echo", sequence_id="s", input={"data": b"x"}).SerializeToString()
STREAMS = 50


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(path: str) -> bytes:
    """The header block of a call, no field of it compressed."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


@pytest.mark.parametrize(
    ("path", "message", "ends"),
    [
        (f"/{HEALTH}/Watch", b"", True),
        (f"/{HEALTH}/Check", b"", True),
        (
            f"/{REFLECTION[0]}/ServerReflectionInfo",
            SCHEMA.message("grpc.reflection.v1.ServerReflectionRequest")(list_services="").SerializeToString(),
            False,
        ),
        (f"/{SERVICE}/Predictions", PREDICTION, True),
        (f"/{SERVICE}/StreamPredictions", PREDICTION, True),
        (f"/{SERVICE}/StreamPredictions2", PREDICTION, False),
    ],
    ids=["watch", "check", "reflection", "unary", "stream", "dialogue"],
)
async def test_clients_that_take_nothing_and_hang_up_leave_no_traceback(
    path: str, message: bytes, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Their windows are shut, so that each answer waits to be written when the connection is reset."""
    data = b"\0" + struct.pack(">I", len(message)) + message
    async with inference_port() as port:
        _, writer = await asyncio.open_connection(port.address.host, port.address.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, struct.pack(">HI", 4, 0)))
        for number in range(1, 2 * STREAMS, 2):
            writer.write(frame(1, 4, number, headers(path)) + frame(0, int(ends), number, data))
        await writer.drain()
        # A port that stops while there are calls says that it aborts them.
        await until(lambda: port.port.open_calls == STREAMS, "all calls have come")
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        await until(lambda: not port.port.open_calls, "all calls have ended")
    gc.collect()

    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []
