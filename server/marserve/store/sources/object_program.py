"""The program that asks one object store, by obstore (extra `cloud`), in a process of its own.

The library reads the whole body of an error's answer, and each page of a listing, into memory: a store decides how much
that takes. Here the system bounds it (`MEMORY_BYTES`); a process that reaches the bound ends, and the server goes on. A
process can also be ended in the middle of a call, which a thread cannot.

Standard input is a socket to the server. Its first message is the store's settings, and each further one is a question,
with the socket for its answer. The answer is a sequence of messages whose first byte says what they are. Every question
has a thread. After a while without questions the program ends by itself, with status 0.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from marserve.store.sources.object_errors import explain, status_of
from marserve.store.sources.source import Broken, Failed, Replaced, SourceError

# The memory that the process may take beyond that of its start. Eight readings of a fast store take some 10 MB.
MEMORY_BYTES = 128 * 1024 * 1024
STACK_BYTES = 512 * 1024
# Sockets take 200 kB in one message. Credentials are part of a question, and may have 64 KiB.
MESSAGE_BYTES = 64 * 1024
QUESTION_BYTES = 160 * 1024
# The keys of a listing in one answer of the library.
KEYS_AT_ONCE = 1000
# Names have 1,024 bytes at most in all stores.
MOST_NAME_CHARACTERS = 4096

DOCUMENT, PIECE, TROUBLE, END = b"t", b"p", b"x", b"."

Question = dict[str, Any]


def main() -> None:
    """Answer questions until the server has ended, or sends none for a while."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the server's whole group
    control = socket.socket(fileno=0)
    order = json.loads(_read_order(control))
    os.environ["TOKIO_WORKER_THREADS"] = "2"  # one for each processor takes more memory and is not faster
    threading.stack_size(STACK_BYTES)
    store = _Store(order)
    _bound_memory()
    running: set[threading.Thread] = set()
    control.settimeout(order["idle_s"])
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, QUESTION_BYTES, 1)
        except TimeoutError:
            running = {thread for thread in running if thread.is_alive()}
            if not running:
                os._exit(0)
            continue
        if not message or not descriptors:
            os._exit(0)  # threads may be in calls that do not end
        answer = socket.socket(fileno=descriptors[0])
        thread = threading.Thread(target=_answer, args=(store, json.loads(message), answer), daemon=True)
        running.add(thread)
        thread.start()


def _read_order(control: socket.socket) -> bytes:
    """The settings of the store: messages up to one that ends with a line feed."""
    order = b""
    while not order.endswith(b"\n"):
        piece = control.recv(QUESTION_BYTES)
        if not piece:
            os._exit(0)
        order += piece
    return order


def _bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/status") as file:
        begun = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (begun + MEMORY_BYTES, begun + MEMORY_BYTES))


def _answer(store: _Store, question: Question, answer: socket.socket) -> None:
    """Answer one question, until the server closes its socket."""
    with answer:
        try:
            for kind, data in store.ask(question, answer):
                answer.sendmsg([kind, data])
            answer.send(END)
        except OSError:
            return
        except MemoryError:
            os._exit(1)


class _Store:
    """The library's store by the settings; turns its answers into messages."""

    def __init__(self, order: Question) -> None:
        import obstore
        import obstore.store as kinds

        self._library: Any = obstore
        self._scheme: str = order["scheme"]
        self._bucket: str = order["bucket"]
        self._how: str = order["how"]
        self._credentials: dict[str, Any] = {}
        client = {
            name: timedelta(seconds=value) if name.endswith("timeout") else value
            for name, value in order["client"].items()
        }
        maker: Any = {"s3": kinds.S3Store, "gs": kinds.GCSStore, "az": kinds.AzureStore}[self._scheme]
        self._store: Any = maker(
            config=order["config"],
            client_options=client,
            # `download` tries again by itself, within bounds of its own.
            retry_config={"max_retries": 0},
            **({"credential_provider": lambda: self._credentials} if order["has_provider"] else {}),
        )

    def ask(self, question: Question, answer: socket.socket) -> Iterator[tuple[bytes, Any]]:
        """Ask the store, and yield its answer as messages; an error is the last one."""
        self._take_credentials(question)
        try:
            yield from getattr(self, f"_{question['what']}")(question, answer)
            return
        except (MemoryError, GeneratorExit):
            raise
        except SourceError as error:
            trouble = error
        except Exception as error:
            trouble = explain(error, self._scheme, self._bucket, self._how)
        except BaseException as error:  # a panic of the Rust library
            trouble = Failed(f"the object store's library failed ({type(error).__name__})")
        yield TROUBLE, _json([type(trouble).__name__, str(trouble)])

    def _take_credentials(self, question: Question) -> None:
        fresh = question.get("credentials")
        if fresh is not None:
            expires = fresh.get("expires_at")
            self._credentials = {**fresh, "expires_at": datetime.fromisoformat(expires) if expires else None}

    def _stat(self, question: Question, _: socket.socket) -> Iterator[tuple[bytes, Any]]:
        options = {"head": True, **_version(question)}
        meta = self._library.get(self._store, question["key"], options=options).meta
        yield DOCUMENT, _json({"entry": _entry(meta, question["key"])})

    def _read(self, question: Question, _: socket.socket) -> Iterator[tuple[bytes, Any]]:
        begin, end, of = question["begin"], question["end"], question["of"]
        options: Question = _version(question)
        if end is not None:
            options["range"] = (begin, end)
        elif begin:
            options["range"] = {"offset": begin}
        if of is not None and of[2] is not None:
            options["if_match"] = of[2]
        try:
            answer = self._library.get(self._store, question["key"], options=options)
        except Exception as error:
            # For an empty object every range is refused.
            if begin or status_of(error) != 416:
                raise
            options.pop("range", None)
            answer = self._library.get(self._store, question["key"], options=options)
        found = _entry(answer.meta, question["key"])
        if of is not None and not _is_same(found, of):
            raise Replaced("it was replaced while it was fetched")
        have, behind = answer.range
        yield DOCUMENT, _json({"entry": found, "begin": have})
        # As it comes: gathered bytes would be lost with the connection.
        for piece in answer.stream(min_chunk_size=1):
            view = memoryview(piece)
            have += len(view)
            for first in range(0, len(view), MESSAGE_BYTES):
                yield PIECE, view[first : first + MESSAGE_BYTES]
        if have != behind:
            raise Broken(f"it ended after {have} of {behind} bytes")

    def _write(self, question: Question, answer: socket.socket) -> Iterator[tuple[bytes, Any]]:
        data = bytearray()
        while len(data) < question["bytes"]:
            piece = answer.recv(MESSAGE_BYTES)
            if not piece:
                return
            data += piece
        try:
            done = self._library.put(
                self._store, question["key"], bytes(data), mode=question["mode"], use_multipart=False
            )
        except Exception as error:
            if type(error).__name__ == "AlreadyExistsError":
                raise Replaced("it is there already") from None
            raise
        yield DOCUMENT, _json({"entry": [question["key"], len(data), _strong(done["e_tag"]), None]})

    def _list(self, question: Question, _: socket.socket) -> Iterator[tuple[bytes, Any]]:
        for page in self._library.list(self._store, question["folder"] or None, chunk_size=KEYS_AT_ONCE):
            entries = [_json(_entry(meta, meta["path"])) for meta in page]
            first = size = 0
            for number, entry in enumerate(entries):
                size += len(entry) + 1
                if size > MESSAGE_BYTES:
                    yield DOCUMENT, b"[" + b",".join(entries[first:number]) + b"]"
                    first, size = number, len(entry) + 1
            yield DOCUMENT, b"[" + b",".join(entries[first:]) + b"]"


def _json(what: Any) -> bytes:
    return json.dumps(what, ensure_ascii=False).encode()


def _version(question: Question) -> dict[str, Any]:
    return {"version": question["version"]} if question["version"] else {}


def _entry(meta: Any, key: str) -> list[Any]:
    """The fields of an `Entry`: key, size, strong ETag, time of its last change."""
    tag, modified = _strong(meta["e_tag"]), meta["last_modified"]
    if len(key) > MOST_NAME_CHARACTERS or len(tag or "") > MOST_NAME_CHARACTERS:
        raise Failed("the store names a key or an ETag that is longer than any can be")
    return [key, meta["size"], tag, modified.timestamp() if modified is not None else None]


def _strong(tag: str | None) -> str | None:
    """An ETag with quotes, which Azure's listings leave out; None for a weak one, which may stand for other bytes."""
    if not tag or tag.startswith("W/"):
        return None
    return tag if tag.startswith('"') else f'"{tag}"'


def _is_same(found: list[Any], of: list[Any]) -> bool:
    """Whether both are the same content: by size and ETag, or without an ETag by size alone."""
    return found[1:3] == of[1:3] if of[2] is not None else of[1] is None or found[1] == of[1]


if __name__ == "__main__":
    main()
