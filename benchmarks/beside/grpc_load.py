"""Calls a model over gRPC as fast as answers come, and prints what it saw as JSON: `load_generator.Load`.

    python grpc_load.py PORT MODEL BODY_BYTES CALLS SECONDS WARM_UP_S

grpcio's own client in a process of its own, `CALLS` at once on one connection, with the bytes made once. It costs about
what the server does, so rates say little on few cores: compare the server's CPU time a call.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import grpc
import uvloop

PATH = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"


def field(number: int, content: bytes) -> bytes:
    """A field of a message: number and wire type, length, content."""
    length, size = b"", len(content)
    while size >= 0x80:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


async def main(port: int, model: str, body_bytes: int, calls: int, seconds: float, warm_up_s: float) -> None:
    """Call, count, print."""
    body = b"x" * body_bytes
    request = field(1, model.encode()) + field(3, field(1, b"body") + field(2, body))
    times: list[float] = []
    errors = in_all = 0
    begun = time.perf_counter() + warm_up_s
    end = begun + seconds
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(PATH)

        async def caller() -> None:
            nonlocal errors, in_all
            while (sent := time.perf_counter()) < end:
                try:
                    is_right = (await call(request)).endswith(body)
                except grpc.aio.AioRpcError:
                    is_right = False
                now = time.perf_counter()
                in_all += 1
                if not is_right:
                    errors += 1
                elif begun <= now < end:
                    times.append(now - sent)

        await asyncio.gather(*(caller() for _ in range(calls)))
    times.sort()
    seen = {"calls": len(times), "in_all": in_all, "errors": errors, "seconds": seconds}
    print(json.dumps({**seen, "p50_ms": times[len(times) // 2] * 1e3 if times else 0.0}))


if __name__ == "__main__":
    number, name, size, at_once, span, before = sys.argv[1:]
    uvloop.run(main(int(number), name, int(size), int(at_once), float(span), float(before)))
