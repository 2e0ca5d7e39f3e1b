"""A program for a network namespace of its own: a client whose handshake is half done when a listener turns away.

The client is packets on a TUN device, so that what is on its way when is not left to chance. Prints, as JSON, what the
listener's protocol saw of it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import select
import socket
import struct
import subprocess
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from marserve.app.listeners import Listener, bind
from marserve.settings import Address

SERVER, CLIENT = "192.0.2.1", "192.0.2.2"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SYN, ACK, PUSH = 0x02, 0x10, 0x08
SEEN: list[str] = []


class Noting(asyncio.Protocol):
    """Notes what comes."""

    def __init__(self, **_: Any) -> None:
        """What uvicorn gives its protocols is not needed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note it."""
        SEEN.append("connected")

    def data_received(self, data: bytes) -> None:
        """Note it."""
        SEEN.append(data.decode())


def checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packet(port: int, source_port: int, flags: int, sequence: int, acknowledged: int, data: bytes = b"") -> bytes:
    """One TCP segment of the client's in an IPv4 packet."""
    ends = socket.inet_aton(CLIENT) + socket.inet_aton(SERVER)

    def segment(check: int) -> bytes:
        head = (source_port, port, sequence, acknowledged, 5 << 4, flags, 65535, check, 0)
        return struct.pack("!HHIIBBHHH", *head) + data

    whole = segment(checksum(ends + struct.pack("!BBH", 0, 6, 20 + len(data)) + segment(0)))

    def header(check: int) -> bytes:
        return struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(whole), 1, 0, 64, 6, check) + ends

    return header(checksum(header(0))) + whole


def answer(tun: int) -> bytes:
    """The next TCP segment to the client, waited for."""
    while select.select([tun], [], [], 5.0)[0]:
        received = os.read(tun, 2000)
        if received[0] >> 4 == 4 and received[9] == 6:
            return received[20:]
    raise SystemExit("nothing came")


def make_tun() -> int:
    """The far end of a device that leads to the client."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"far", IFF_TUN | IFF_NO_PI))
    for words in (f"addr add {SERVER}/24 dev far", "link set far up"):
        subprocess.run(["ip", *words.split()], check=True)
    return tun


async def main() -> None:
    """Half a handshake, then `turn_away`, then the rest of it and a request, and another client's first packet."""
    tun = make_tun()
    config = uvicorn.Config("", http=Noting, ws="none", lifespan="off", log_config=None)  # type: ignore[arg-type]
    config.http_protocol_class, config.ssl = Noting, None
    address = Address("http", SERVER, 0)
    listener = Listener(address, ["Inference"], bind(address), config, ServerState())
    port = listener.sock.getsockname()[1]
    await listener.accept()
    os.write(tun, packet(port, 5555, SYN, 100, 0))
    theirs = int.from_bytes(answer(tun)[4:8], "big") + 1
    turning = asyncio.ensure_future(listener.turn_away())
    await asyncio.sleep(0)  # new ones are dropped from here on
    os.write(tun, packet(port, 5555, ACK, 101, theirs))
    os.write(tun, packet(port, 5555, ACK | PUSH, 101, theirs, b"a request"))
    os.write(tun, packet(port, 6666, SYN, 700, 0))
    await turning
    listener.close()
    await asyncio.sleep(0)
    print(json.dumps(SEEN))  # noqa: T201 - what the test reads


asyncio.run(main())
