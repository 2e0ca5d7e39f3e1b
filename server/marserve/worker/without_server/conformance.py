"""Whether a program speaks the wire as a worker must (docs/worker-wire.md), in any language.

    python -m marserve.worker.without_server.conformance --folder model/ --body request.json node model/worker.mjs

Starts the program as a server does, on a socket and a page, once for each group of checks, and prints a line for each
check. The folder is a model that answers the body. The status is 0 if all hold, 1 if one does not.
"""

from __future__ import annotations

import argparse
import contextlib
import mimetypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from marserve import wire
from marserve.documents import pack
from marserve.errors import BadFrame
from marserve.messages import (
    AskHealth,
    Batch,
    Batches,
    Check,
    Checked,
    Health,
    Hello,
    Item,
    Load,
    Loaded,
    Metrics,
    NotLoaded,
    Raised,
    Results,
    SetLevel,
    Stop,
    Warned,
    pack_head,
)
from marserve.option_values import Tolerance
from marserve.shared_page import Page, create_page

ANSWER_S = 60.0
# Of messages that may come at any time, and say nothing about the order.
_BESIDE = (Metrics, Warned)


class Broken(Exception):
    """A check does not hold; the message says what was seen."""


@dataclass
class Program:
    """The program under test: the words that start it, a model's folder, and a body that it answers."""

    words: Sequence[str]
    folder: Path
    body: bytes
    content_type: str | None

    @property
    def load(self) -> Load:
        """The order to load the folder."""
        config = self.folder / "model-config.yaml"
        document = yaml.safe_load(config.read_bytes()) if config.is_file() else {}
        manifest = {"model": {"modelName": "m", "modelVersion": "1.0"}}
        return Load("m", "1.0", str(self.folder.absolute()), "handler", pack(manifest), pack(document or {}), 8)

    def items(self, count: int, number: int = 0) -> tuple[list[Item], list[bytes]]:
        """That many requests with the body."""
        head = pack_head([(b"content-type", (self.content_type or "").encode())], [])
        items = [Item(f"r{number}-{at}", [("body", self.content_type)], head, None) for at in range(count)]
        return items, [self.body] * count


@dataclass
class Worker:
    """The program as it runs, with the server's end of its wire and its page."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    page: Page
    _decoder: Any = field(default_factory=wire.server_decoder)
    _heard: list[tuple[Any, list[Any]]] = field(default_factory=list)

    def say(self, message: Any, bodies: Sequence[bytes] = (), *, pieces: int = 0) -> None:
        """Send a message, at once or in pieces of so many bytes."""
        self.write(b"".join(wire.encode(message, bodies)), pieces=pieces)

    def write(self, data: bytes, *, pieces: int = 0) -> None:
        """Send bytes, and wait a little after each piece, so that it comes alone."""
        for at in range(0, len(data), pieces or len(data)):
            self.sock.sendall(data[at : at + (pieces or len(data))])
            if pieces:
                time.sleep(0.002)

    def hear(self, kind: type) -> tuple[Any, list[Any]]:
        """The next message, which must be of this kind. Raises Broken."""
        until = time.monotonic() + ANSWER_S
        while True:
            while self._heard:
                message, bodies = self._heard.pop(0)
                if not isinstance(message, _BESIDE):
                    if not isinstance(message, kind):
                        raise Broken(f"there came {message!r:.300}; wanted {kind.__name__}")
                    return message, bodies
            self.sock.settimeout(max(0.01, until - time.monotonic()))
            try:
                data = self.sock.recv(1 << 16)
            except TimeoutError:
                raise Broken(f"no {kind.__name__} within {ANSWER_S:g} s") from None
            if not data:
                raise Broken(f"it closed the wire; wanted {kind.__name__}")
            try:
                self._heard += self._decoder.feed(data)
            except BadFrame as error:
                raise Broken(f"it sent what is no frame: {error}") from None

    def has_ended(self) -> int:
        """Wait for its end; the status. Raises Broken."""
        try:
            return self.process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            raise Broken(f"it did not end within {ANSWER_S:g} s") from None


@contextlib.contextmanager
def running(program: Program) -> Iterator[Worker]:
    """Start it as a server does."""
    ours, theirs = socket.socketpair()
    descriptor = create_page()
    words = [*program.words, "worker", str(os.getpid()), str(theirs.fileno()), str(descriptor)]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), descriptor), start_new_session=True
    )
    theirs.close()
    page = Page(descriptor)
    os.close(descriptor)
    try:
        yield Worker(process, ours, page)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        ours.close()
        page.close()


@contextlib.contextmanager
def loaded(program: Program) -> Iterator[tuple[Worker, Loaded]]:
    """The worker with its model loaded."""
    with running(program) as worker:
        hello, _ = worker.hear(Hello)
        if hello.pid != worker.process.pid:
            raise Broken(f"hello says pid {hello.pid}; it is {worker.process.pid}")
        worker.say(program.load)
        yield worker, worker.hear(Loaded)[0]


def answers(worker: Worker, number: int, count: int) -> list[bytes]:
    """The bodies of the answers to a batch. Raises Broken for a batch that failed, or is another's."""
    results, bodies = worker.hear(Results)
    if results.number != number:
        raise Broken(f"the results are of batch {results.number}; wanted {number}")
    if len(results.results) != count or len(bodies) != count:
        raise Broken(f"{len(results.results)} results with {len(bodies)} bodies for {count} items")
    for result in results.results:
        if result.error is not None:
            raise Broken(f"an item failed: {result.error}, {result.reason}")
    if results.handler_s < 0:
        raise Broken(f"handler_s is {results.handler_s}")
    return [bytes(body) for body in bodies]


def _says_hello_and_loads(program: Program) -> None:
    with loaded(program):
        pass


def _answers_alone_and_together(program: Program) -> None:
    with loaded(program) as (worker, _):
        worker.say(Batch(1, program.items(1)[0]), program.items(1)[1])
        (alone,) = answers(worker, 1, 1)
        worker.say(Batch(2, program.items(3)[0]), program.items(3)[1])
        together = answers(worker, 2, 3)
        if together != [alone] * 3:
            raise Broken(f"together {together!r:.200}, alone {alone!r:.100}")


def _keeps_the_order_of_frames(program: Program) -> None:
    with loaded(program) as (worker, _):
        first, second = program.items(2, 1), program.items(1, 2)
        worker.say(Batches([Batch(1, first[0]), Batch(2, second[0])]), [*first[1], *second[1]])
        answers(worker, 1, 2)
        answers(worker, 2, 1)
        frames = [b"".join(wire.encode(Batch(number, first[0]), first[1])) for number in (3, 4, 5)]
        worker.write(b"".join(frames))
        for number in (3, 4, 5):
            answers(worker, number, 2)


def _takes_frames_in_pieces(program: Program) -> None:
    with loaded(program) as (worker, _):
        items, bodies = program.items(2)
        worker.say(Batch(1, items), bodies, pieces=7)
        answers(worker, 1, 2)
        worker.say(Batch(2, items), [b"x" * (1 << 20), *bodies[:1]])
        message, _ = worker.hear(object)
        if not isinstance(message, Results | Raised) or message.number != 2:
            raise Broken(f"after a body of 1 MiB there came {message!r:.200}; wanted the end of batch 2")
        worker.say(Batch(3, items), bodies)
        answers(worker, 3, 2)


def _writes_its_page(program: Program) -> None:
    with loaded(program) as (worker, _):
        for number in (1, 2):
            worker.say(Batch(number, program.items(1)[0]), program.items(1)[1])
            answers(worker, number, 1)
            if worker.page.running[0] != 0:
                raise Broken(f"word 0 of the page is {worker.page.running[0]} after the batch; wanted 0")
            if worker.page.finished != number:
                raise Broken(f"word 2 of the page is {worker.page.finished} after {number} batches")
        off = abs(worker.page.running[1] - time.monotonic())
        if off > ANSWER_S:
            raise Broken(f"word 1 of the page is {off:g} s off the monotonic clock")


def _answers_what_is_asked_beside(program: Program) -> None:
    with loaded(program) as (worker, told):
        worker.say(SetLevel("DEBUG"))
        if told.has_health:
            worker.say(AskHealth(0))
            worker.hear(Health)
        items, bodies = program.items(2)
        worker.say(Check(1, items, 2, Tolerance(), 10.0), bodies)
        checked, _ = worker.hear(Checked)
        if checked.number != 1:
            raise Broken(f"it checked number {checked.number}; wanted 1")
        worker.say(Batch(2, items), bodies)
        answers(worker, 2, 2)


def _ends_when_it_is_told(program: Program) -> None:
    with loaded(program) as (worker, _):
        items, bodies = program.items(1)
        worker.say(Batch(1, items), bodies)
        worker.say(Stop())
        answers(worker, 1, 1)
        if status := worker.has_ended():
            raise Broken(f"after Stop it ended with status {status}; wanted 0, after what was sent before")
    with loaded(program) as (worker, _):
        worker.sock.close()
        worker.has_ended()


def _says_why_it_does_not_load(program: Program) -> None:
    with tempfile.TemporaryDirectory() as folder, running(program) as worker:
        worker.hear(Hello)
        worker.say(Load("m", "1.0", folder, "handler", None, None, 1))
        told, _ = worker.hear(NotLoaded)
        if not told.kind or not told.message:
            raise Broken(f"an empty folder gave {told!r:.200}; wanted a kind, as load_failed, and a message")
        worker.has_ended()


CHECKS: dict[str, Callable[[Program], None]] = {
    "it says hello, and loads": _says_hello_and_loads,
    "it answers alone and in batches, one body an item, in order": _answers_alone_and_together,
    "it answers batches in the order in which they came": _keeps_the_order_of_frames,
    "it takes frames in pieces, and large bodies": _takes_frames_in_pieces,
    "it writes on its page which batch runs, and how many ended": _writes_its_page,
    "it answers checks, and goes on after words that are not for it": _answers_what_is_asked_beside,
    "it ends when it is told, and when the server is gone": _ends_when_it_is_told,
    "it says why it does not load": _says_why_it_does_not_load,
}


def check(program: Program) -> dict[str, str]:
    """Each check with what is wrong, empty where it holds."""
    found = {}
    for name, run in CHECKS.items():
        try:
            run(program)
            found[name] = ""
        except (Broken, OSError) as error:
            found[name] = str(error) or type(error).__name__
    return found


def main() -> None:
    """Check the program of the command line."""
    parser = argparse.ArgumentParser(prog="python -m marserve.worker.without_server.conformance")
    parser.add_argument("--folder", type=Path, required=True, help="a model that the program loads")
    parser.add_argument("--body", type=Path, required=True, help="a request body that the model answers")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the program and its words")
    given = parser.parse_args()
    if not given.program or not given.folder.is_dir() or not given.body.is_file():
        parser.error("name a folder, a body and a program")
    kind = mimetypes.guess_type(given.body.name)[0]
    found = check(Program(given.program, given.folder, given.body.read_bytes(), kind))
    for name, why in found.items():
        sys.stdout.write(f"{'failed' if why else 'ok    '}  {name}{why and f': {why}'}\n")
    sys.exit(1 if any(found.values()) else 0)


if __name__ == "__main__":
    main()
