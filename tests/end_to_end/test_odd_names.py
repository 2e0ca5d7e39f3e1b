"""Names that clients make up: they make no series, cost no memory, and say little in the log (RELIABILITY A12)."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import psutil
import pytest

from support.server import Server, make_archive

ECHO = "def handle(data, context):\n    return [bytes(row['body']) for row in data] if data else None\n"
AT_ONCE = 50
MOST_MORE_SERIES = 5
MOST_MORE_BYTES = 16 << 20
MOST_LOGGED_BYTES = 256 << 10

Odd = Callable[[str], tuple[str, str, dict[str, str]]]
M = "/predictions/m"
ODD: tuple[Odd, ...] = (
    lambda word: ("POST", f"/predictions/{word}", {}),
    lambda word: ("POST", f"/predictions/m/{word}", {}),
    lambda word: ("POST", M, {"x-marserve-version": word}),
    lambda word: ("POST", f"/v2/models/{word}/infer", {}),
    lambda word: ("POST", f"/{word}/{word}?{word}={word}", {}),
    lambda word: (word.upper(), M, {}),
    lambda word: ("POST", M, {"Host": f"{word}.example"}),
    lambda word: ("POST", M, {"Content-Type": f"{word}/{word}"}),
    lambda word: ("POST", M, {"Content-Encoding": word}),
    lambda word: ("POST", M, {"X-Request-Id": word, "User-Agent": word, word: word, "Cookie": f"{word}={word}"}),
    lambda word: ("POST", M, {"traceparent": f"00-{word}-{word}-01", "baggage": f"{word}={word}"}),
    lambda word: ("POST", M, {"x-marserve-timeout-ms": word, "x-marserve-priority": word}),
)
"""What a client can put a name into: method, target and headers of a request."""
MANAGED = (
    *("/models/{}", "/models/{}/1.0", "/models/{}/stats", "/models/{}/traffic", "/models/{}/rollout"),
    *("/requests/{}", "/requests?model={}", "/workflows/{}", "/{}"),
)


def words(seed: int) -> Iterator[str]:
    """Names that were never said before, without end."""
    dice = random.Random(seed)
    return (f"x{dice.getrandbits(64):016x}" for _ in iter(int, 1))


def request(method: str, target: str, headers: dict[str, str]) -> bytes:
    """A request with a body of one byte, as it is on the wire."""
    lines = {"Host": "h", "Content-Length": "1", **headers}
    return "\r\n".join([f"{method} {target} HTTP/1.1", *map(": ".join, lines.items()), "", "x"]).encode()


def ask(address: str, requests: Iterable[bytes]) -> int:
    """How many answers came. Some are sent at once; those behind one that closed the connection are sent again."""
    place = urlsplit(address)
    answers, left = 0, list(requests)
    while left:
        some = left[:AT_ONCE]
        with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
            connection.sendall(b"".join(some))
            page = b""
            while page.count(b"HTTP/1.1 ") < len(some) and (more := connection.recv(1 << 16)):
                page += more
        told = page.count(b"HTTP/1.1 ")
        assert told, f"no answer to {some[0]!r}"
        answers, left = answers + told, left[told:]
    return answers


def make_up(server: Server, count: int, seed: int) -> None:
    """About so many requests with names of all kinds, on all ports."""
    names = words(seed)
    inference = [request(*odd(name)) for odd in ODD for name in islice(names, count // len(ODD))]
    management = [
        request(method, target.format(next(names)), {})
        for target in MANAGED
        for method in ("GET", "DELETE", "PUT")
        for _ in range(count // 200)
    ]
    assert ask(server.inference, inference) == len(inference)
    assert ask(server.management, management) == len(management)
    with grpc.insecure_channel(server.grpc_inference) as channel:
        for name in islice(names, count // 100):
            for method in (f"/{name}/{name}", f"/org.pytorch.serve.grpc.inference.InferenceAPIsService/{name}"):
                with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
                    channel.unary_unary(method)(b"x", metadata=[(name, name)], timeout=30)


def series(server: Server) -> set[str]:
    """What stands before the value, of each line of the page."""
    page = server.client.get(f"{server.metrics}/metrics").text
    return {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}


@pytest.mark.parametrize("count", [1_200, pytest.param(10_000, marks=pytest.mark.system)])
def test_names_that_clients_make_up_make_no_series_and_cost_no_memory(count: int, tmp_path: Path) -> None:
    """Models, versions, paths, methods, hosts, media types, codings, ids, headers, traces, calls of gRPC."""
    logs = tmp_path / "logs"
    with Server(
        tmp_path, entry="marserve", settings={"log_location": str(logs), "flight_recorder_size": "1MiB"}
    ) as server:
        make_archive(server.store / "m.mar", ECHO)
        assert server.register("m.mar").status_code == 200
        make_up(server, 1_200, seed=1)
        before, process = series(server), psutil.Process(server.process.pid)
        resident, logged = process.memory_info().rss, (logs / "ts_log.log").stat().st_size

        make_up(server, count, seed=2)

        more = series(server) - before
        assert len(more) <= MOST_MORE_SERIES, more
        assert process.memory_info().rss - resident < MOST_MORE_BYTES
        assert (logs / "ts_log.log").stat().st_size - logged < MOST_LOGGED_BYTES
        assert server.predict("m", b"x").text == "x"
