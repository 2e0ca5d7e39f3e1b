"""The load generator against a server whose every answer is known."""

from __future__ import annotations

import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="the load generator needs Linux and a C compiler",
)

BODY_BYTES = 10
Answer = Callable[[int], bytes | None]


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The compiled load generator."""
    return import_module("load_generator").LoadGenerator.compile(tmp_path_factory.mktemp("load"))


@contextmanager
def serving(answer: Answer, requests: list[bytes] | None = None) -> Iterator[int]:
    """A server on a free port: `answer(n)` makes the answer to request n (from 1) of the whole run, None hangs up.

    `requests` is given what was asked.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    count = iter(range(1, 1_000_000))
    threads: list[threading.Thread] = []

    def converse(client: socket.socket) -> None:
        with closing(client), suppress(OSError):
            received = b""
            while data := client.recv(65536):
                received += data
                while (end := received.find(b"\r\n\r\n") + 4) > 3 and len(received) >= end + BODY_BYTES:
                    if requests is not None:
                        requests.append(received[: end + BODY_BYTES])
                    received = received[end + BODY_BYTES :]
                    said = answer(next(count))
                    if said is None:
                        return
                    client.sendall(said)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=converse, args=(client,))
            thread.start()
            threads.append(thread)

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for thread in threads:
            thread.join()


def run(generator: Any, port: int, *, connections: int = 2, seconds: float = 0.3) -> Any:
    """A short load."""
    return generator.run(port, "/", body_bytes=BODY_BYTES, connections=connections, seconds=seconds, warm_up_s=0.0)


def ok(number: int) -> bytes:
    """A good answer, with its header in two spellings in turn."""
    name = b"Content-Length" if number % 2 else b"content-length"
    return b"HTTP/1.1 200 OK\r\n" + name + b": 5\r\n\r\nhello"


def test_good_answers_are_counted_and_none_is_lost(generator: Any) -> None:
    """Every answer in the window is one request answered."""
    with serving(ok) as port:
        load = run(generator, port)

    assert load.answered > 10
    assert load.per_second == pytest.approx(load.answered / 0.3, rel=1e-3)
    assert (load.failed, load.lost) == (0, 0)
    assert 0 < load.p50_ms <= load.p90_ms <= load.p99_ms <= load.max_ms
    assert load.must_be_clean("it") is load


def test_other_statuses_are_failures(generator: Any) -> None:
    """An error's answer is no answer, and its status is told."""
    with serving(lambda n: b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n" if n == 7 else ok(n)) as port:
        load = run(generator, port)

    assert (load.failed, load.last_failure, load.lost) == (1, 503, 0)
    with pytest.raises(import_module("load_generator").CannotMeasure, match=r"failed 1 .the last with status 503"):
        load.must_be_clean("it")


def test_a_connection_that_breaks_loses_its_request_and_the_load_goes_on(generator: Any) -> None:
    """A hang-up in place of an answer is a lost request; a new connection takes over."""
    with serving(lambda n: None if n == 5 else ok(n)) as port:
        load = run(generator, port, connections=1)

    assert load.lost == 1
    assert load.answered > 5


def test_an_answer_that_closes_its_connection_loses_nothing(generator: Any) -> None:
    """`Connection: close` is followed by a new connection, as any client would."""
    with serving(lambda n: ok(n).replace(b" OK\r\n", b" OK\r\nConnection: close\r\n")) as port:
        load = run(generator, port, connections=1)

    assert load.answered > 2
    assert (load.failed, load.lost) == (0, 0)


def test_a_server_that_is_not_there_is_said_to_be_unreachable(generator: Any) -> None:
    """No figure is made of nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]

    with pytest.raises(import_module("load_generator").CannotMeasure, match="connect: Connection refused"):
        run(generator, port)


def test_without_a_compiler_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first thing that a machine may lack is named."""
    module = import_module("load_generator")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)

    with pytest.raises(module.CannotMeasure, match=r"no C compiler.*apt-get install gcc"):
        module.LoadGenerator.compile(tmp_path)


def test_a_file_is_posted_under_its_type(generator: Any, tmp_path: Path) -> None:
    """Models are asked with what they are made for."""
    requests: list[bytes] = []
    body = tmp_path / "body.json"
    body.write_bytes(b'{"a": 123}')
    assert len(body.read_bytes()) == BODY_BYTES

    with serving(ok, requests) as port:
        load = generator.run(
            port, "/", body_file=body, content_type="application/json", connections=1, seconds=0.1, warm_up_s=0.0
        )

    assert load.answered_in_all >= load.answered > 0
    head, _, rest = requests[0].partition(b"\r\n\r\n")
    assert b"Content-Type: application/json" in head.split(b"\r\n")
    assert rest == b'{"a": 123}'


def test_a_file_that_is_not_there_is_named(generator: Any, tmp_path: Path) -> None:
    """A benchmark that cannot be run says which file it lacks."""
    with serving(ok) as port, pytest.raises(import_module("load_generator").CannotMeasure, match=r"gone: No such file"):
        generator.run(port, "/", body_file=tmp_path / "gone", connections=1, seconds=0.1)
