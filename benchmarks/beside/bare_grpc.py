"""grpcio's own server, asyncio under uvloop, that gives each call its bytes back: the limit of the gRPC layer alone.

    python bare_grpc.py PORT

No messages are read, nothing is logged or counted, no other process is asked.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import grpc
import uvloop


class Echo(grpc.GenericRpcHandler):
    """Every method gives back what it got."""

    def service(self, details: Any) -> Any:
        """The same handler for all."""
        return _HANDLER


async def echo(request: bytes, context: Any) -> bytes:
    """The bytes that came."""
    return request


_HANDLER = grpc.unary_unary_rpc_method_handler(echo)


async def main(port: int) -> None:
    """Serve until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready", flush=True)
    await stop.wait()
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
