"""Keeps what real clients send: `python -m clients.capture [NAME …]`, where `make test-clients` has made them.

Each client of `CAPTURED` asks a real server through a proxy that keeps the bytes it sends. They go to `captured/`, a
file for each client and way, with the client's packages and versions, and are played by
`tests/end_to_end/test_captured_clients.py` where no client is installed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from clients.environments import ENVIRONMENTS, SCRIPTS, Client
from support.pages import block
from support.server import Server, make_archive

FOLDER: Final = Path(__file__).parent / "captured"
SUMS: Final = "sums"
SHOUT: Final = "shout"


class Asked(NamedTuple):
    """A client, the words for its script (`HTTP`, `GRPC` stand for the proxies), and the protocol that it speaks."""

    client: str
    words: tuple[str, ...]
    protocol: str

    @property
    def name(self) -> str:
        """The name of its file."""
        return "-".join((self.client, self.words[0] if self.words[0].islower() else self.protocol))


CAPTURED: Final = (
    Asked("tritonclient", ("http", "HTTP", "GRPC", "metadata", "infer", "wanted", "json", "wrong_shape"), "http"),
    Asked("tritonclient", ("http.aio", "HTTP", "GRPC", "infer", "wishes"), "http"),
    Asked("tritonclient", ("grpc", "HTTP", "GRPC", "metadata", "infer", "gzip", "wrong_shape"), "grpc"),
    Asked("tritonclient", ("grpc.aio", "HTTP", "GRPC", "infer", "wishes"), "grpc"),
    Asked("kserve", ("http://HTTP", "GRPC"), "http"),
    Asked("kserve", ("http://HTTP", "GRPC"), "grpc"),
    Asked("mlserver", ("http://HTTP", "numpy", "string", "datetime", "wrong"), "http"),
)


def make_store(folder: Path) -> None:
    """The models that are asked, which the pages have: one of tensors, one of a text."""
    (folder / "store").mkdir()
    for page, name in (("declared-handlers", SUMS), ("open-inference", SHOUT)):
        text = block(f"docs/{page}.md", name)
        make_archive(folder / "store" / f"{name}.mar", text, config="minWorkers: 1\nmaxWorkers: 1\n")


def register(server: Server) -> None:
    """Have the server load them."""
    for name in (SUMS, SHOUT):
        server.register(f"{name}.mar").raise_for_status()


@contextlib.asynccontextmanager
async def proxy(address: str, kept: list[list[bytes]]) -> AsyncIterator[str]:
    """An address before another one; of each connection the bytes of its client are kept, turn by turn."""
    host, _, port = address.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        turns: list[bytes] = []
        kept.append(turns)
        has_answered = True
        there, back = await asyncio.open_connection(host, int(port))

        async def answer() -> None:
            nonlocal has_answered
            while data := await there.read(65_536):
                has_answered = True
                writer.write(data)
            writer.close()

        answering = asyncio.ensure_future(answer())
        while data := await reader.read(65_536):
            if has_answered:
                turns.append(b"")
                has_answered = False
            turns[-1] += data
            back.write(data)
        back.close()
        await answering

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield "{}:{}".format(*server.sockets[0].getsockname())


async def capture(server: Server, asked: Asked) -> list[list[bytes]]:
    """The turns of each connection that the client made."""
    kept: list[list[bytes]] = []
    addresses = {"HTTP": server.inference.removeprefix("http://"), "GRPC": server.grpc_inference}
    captured = asked.protocol.upper()
    async with proxy(addresses[captured], kept) as address:
        client = Client.of(asked.client)
        addresses[captured] = address
        words = [word.replace("HTTP", addresses["HTTP"]).replace("GRPC", addresses["GRPC"]) for word in asked.words]
        command = [client.program, str(SCRIPTS / client.environment.script), *words]
        await asyncio.to_thread(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
    return [turns for turns in kept if turns]


def main(names: Sequence[str]) -> None:
    """Capture those of these names anew, or all."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_store(folder)
        with Server(folder, entry="marserve", store=folder / "store") as server:
            register(server)
            for asked in CAPTURED:
                if names and asked.name not in names:
                    continue
                [packages] = [each.packages for each in ENVIRONMENTS if each.name == asked.client]
                turns = asyncio.run(capture(server, asked))
                shown = [[base64.b64encode(turn).decode() for turn in each] for each in turns]
                text = json.dumps({"packages": packages, "protocol": asked.protocol, "connections": shown}, indent=1)
                (FOLDER / f"{asked.name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
