"""Starts, asks and ends the process that asks one object store (`object_program`), and reads its answers.

The first question starts it. It ends by itself after a while without questions, and the next question starts it again.
It is killed when everything that asks it is closed. Each question has a socket of its own, whose buffer bounds what is
read ahead; closing the socket abandons the answer. Everything here blocks, each step for at most `limit_s`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from marserve.errors import BadSettings
from marserve.store.sources.object_errors import NAMES
from marserve.store.sources.object_program import DOCUMENT, END, MEMORY_BYTES, MESSAGE_BYTES, PIECE, TROUBLE
from marserve.store.sources.object_settings import Connection
from marserve.store.sources.source import Broken, Failed, Missing, Replaced

# Credentials that expire sooner than this are looked up again before a question.
FRESH_FOR = timedelta(seconds=60)
END_LIMIT_S = 2.0
# The process ends after this time without a question.
IDLE_S = 10.0
_KINDS = {kind.__name__: kind for kind in (Broken, Replaced, Failed, Missing)}


class _EndedByItself(Exception):
    """The process had no questions for a while, and ended just as it got one."""


class StoreProcess:
    """The process of one store; starts it again when needed. `limit_s` bounds each step of an answer."""

    def __init__(
        self, scheme: str, bucket: str, connection: Connection, limit_s: float, *, idle_s: float = IDLE_S
    ) -> None:
        order = {
            "scheme": scheme,
            "bucket": bucket,
            "how": connection.how,
            "config": connection.config,
            "client": {
                name: value.total_seconds() if isinstance(value, timedelta) else value
                for name, value in connection.client.items()
            },
            "idle_s": idle_s,
            "has_provider": connection.provider is not None,
        }
        self.name = NAMES[scheme]
        self.limit_s = limit_s
        self._order = json.dumps(order).encode() + b"\n"
        self._provider = connection.provider
        self._known: dict[str, Any] | None = None
        self._asking_for_credentials = threading.Lock()
        self._lock = threading.Lock()
        self._holders = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The id of the running process, None without one."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def hold(self) -> None:
        """Keep it until `release`."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """End it if no other holder is left."""
        with self._lock:
            self._holders -= 1
            if self._holders <= 0:
                self._end()

    def send(self, question: dict[str, Any], answer: socket.socket) -> subprocess.Popen[bytes]:
        """Send a question; `answer` is the process's end of the answer's socket. Returns the process.

        Raises SourceError.
        """
        message = json.dumps({**question, "credentials": self._credentials()}).encode()
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                assert self._process is not None
                assert self._control is not None
                socket.send_fds(self._control, [message], [answer.fileno()])
                return self._process
            except OSError as error:
                ended = self._process is not None and self._process.poll() == 0
                self._end()
                if ended:
                    raise _EndedByItself from None
                raise Broken(f"{self.name}: no process could be started and asked ({error.strerror})") from None

    def _credentials(self) -> dict[str, Any] | None:
        """The credentials by the store's settings, looked up again before they expire. Blocks. Raises Failed."""
        if self._provider is None:
            return None
        with self._asking_for_credentials:
            expires = (self._known or {}).get("expires_at")
            if self._known is None or (expires is not None and expires - datetime.now(UTC) < FRESH_FOR):
                try:
                    self._known = self._provider()
                except BadSettings as error:
                    raise Failed(error.message) from None
            return {
                name: value.isoformat() if isinstance(value, datetime) else value for name, value in self._known.items()
            }

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "marserve.store.sources.object_program"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        ours.settimeout(self.limit_s)
        self._control = ours
        for begin in range(0, len(self._order), MESSAGE_BYTES):
            ours.sendall(self._order[begin : begin + MESSAGE_BYTES])

    def _end(self) -> None:
        process, self._process = self._process, None
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_LIMIT_S)


class Asking:
    """The questions of one source or listing to a process. `close` ends them, from any thread."""

    def __init__(self, process: StoreProcess) -> None:
        self.process = process
        process.hold()
        self._release = weakref.finalize(self, process.release)
        self._lock = threading.Lock()
        self._running: set[socket.socket] = set()
        self._is_closed = False

    @contextmanager
    def ask(self, what: str, data: bytes = b"", **question: Any) -> Iterator[Answer]:
        """Ask, and wait for the answer's first message. The end of the block abandons it. Raises SourceError."""
        question["what"] = what
        try:
            answer = self._ask(question, data)
        except _EndedByItself:
            answer = self._ask(question, data)
        try:
            yield answer
        finally:
            self._leave(answer.socket)

    def _ask(self, question: dict[str, Any], data: bytes) -> Answer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                ours.settimeout(self.process.limit_s)
                with self._lock:
                    self._check()
                    self._running.add(ours)
                process = self.process.send(question, theirs)
            answer = Answer(self, ours, process)
            answer.begin(data)
            return answer
        except BaseException:
            self._leave(ours)
            raise

    def _leave(self, answer: socket.socket) -> None:
        with self._lock:
            self._running.discard(answer)
            answer.close()

    def _check(self) -> None:
        if self._is_closed:
            raise Failed("the server stops")

    def why_ended(self, process: subprocess.Popen[bytes], *, is_begun: bool) -> Exception:
        """Why an answer ended without its last message."""
        with self._lock:
            if self._is_closed:
                return Failed("the server stops")
        name = self.process.name
        try:
            status = process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return Broken(f"{name}: the process that asks it gave no answer")
        if status == 0 and not is_begun:
            return _EndedByItself()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return Broken(
            f"{name}: the process that asks it ended ({how}), as it does where an error or a listing is so long that "
            f"{MEMORY_BYTES >> 20} MiB do not hold it"
        )

    def close(self) -> None:
        """End all questions, and take no more. May be called twice."""
        with self._lock:
            self._is_closed = True
            for answer in self._running:
                with contextlib.suppress(OSError):
                    answer.shutdown(socket.SHUT_RDWR)
        self._release()


class Answer:
    """The answer to one question. `first` is its first message."""

    def __init__(self, asking: Asking, answer: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.socket = answer
        self.first: Any = None
        self._asking = asking
        self._process = process
        self._is_over = False
        self._buffer = memoryview(bytearray(MESSAGE_BYTES + 1))

    def begin(self, data: bytes) -> None:
        """Send the question's data, and wait for the answer's first message. Raises SourceError."""
        try:
            for begin in range(0, len(data), MESSAGE_BYTES):
                self.socket.sendall(data[begin : begin + MESSAGE_BYTES])
        except OSError:
            pass  # the answer says why
        found = self._next(is_begun=False)
        self.first = None if found is None else json.loads(bytes(found[1]))

    def pieces(self) -> Iterator[memoryview]:
        """Bytes, each piece valid until the next is asked for. Raises SourceError."""
        while (found := self._next()) is not None:
            assert found[0] == PIECE
            yield found[1]

    def rest(self) -> Iterator[Any]:
        """The messages after the first. Raises SourceError."""
        while (found := self._next()) is not None:
            yield json.loads(bytes(found[1]))

    def _next(self, *, is_begun: bool = True) -> tuple[bytes, memoryview] | None:
        """A message's kind and its data, None for the end."""
        if self._is_over:
            return None
        try:
            size = self.socket.recv_into(self._buffer)
        except TimeoutError:
            limit_s = self._asking.process.limit_s
            raise Broken(f"{'it said nothing' if is_begun else 'there was no answer'} for {limit_s:g} s") from None
        except OSError:
            size = 0
        if not size:
            raise self._asking.why_ended(self._process, is_begun=is_begun)
        kind, data = bytes(self._buffer[:1]), self._buffer[1:size]
        if kind == TROUBLE:
            name, sentence = json.loads(bytes(data))
            raise _KINDS.get(name, Failed)(sentence)
        assert kind in (DOCUMENT, PIECE, END)
        self._is_over = kind == END
        return None if self._is_over else (kind, data)
