"""The process that asks a store: what a store answers costs the server nothing, and the process is there when needed.

Questions go to endpoints that answer oddly; the processes are real.
"""

from __future__ import annotations

import errno
import gc
import os
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import BadSettings
from marserve.store.addresses.fetch_guard import parse_target
from marserve.store.sources.object_process import Asking, StoreProcess
from marserve.store.sources.object_program import MEMORY_BYTES, MESSAGE_BYTES
from marserve.store.sources.object_settings import Connection
from marserve.store.sources.object_store import ObjectListing, ObjectSource, ObjectStores
from marserve.store.sources.source import Broken, Failed
from support.object_stores import StoreProgram
from support.odd_store import OddStore, an_object, odd_store
from support.server import poll

pytest.importorskip("obstore")

TARGET = parse_target("s3://bucket/m/m.mar")


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are forked, and hear of no store by this process's variables."""
    for name in os.environ:
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(subprocess, "Popen", StoreProgram)


@pytest.fixture
def store() -> Iterator[OddStore]:
    """A store with one object."""
    with odd_store(an_object(b"hello")) as store:
        yield store


def stores_at(store: OddStore) -> ObjectStores:
    """What asks this store."""
    environment = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": store.url}
    return ObjectStores(environment=environment)


def process_at(store: OddStore, provider: Any = None, *, idle_s: float = 60.0) -> StoreProcess:
    """The process that asks it, not yet started."""
    config = {"bucket": "bucket", "aws_endpoint_url_s3": store.url, "skip_signature": provider is None}
    return StoreProcess("s3", "bucket", Connection(config, {"allow_http": True}, provider, "", ""), 30.0, idle_s=idle_s)


def size_of(asking: Asking) -> int:
    """The size of the object, asked of the store."""
    with asking.ask("stat", key="m.mar", version=None) as answer:
        return int(answer.first["entry"][1])


def is_gone(pid: int | None) -> bool:
    """Whether there is no such process any more."""
    return pid is not None and not Path(f"/proc/{pid}").exists()


def endless(status: int, head: bytes) -> Any:
    """An answer that begins so and has no end."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("content-length", str(10**12))
        handler.end_headers()
        piece = b" " * 4_000_000
        try:
            handler.wfile.write(head)
            while True:
                handler.wfile.write(piece)
        except OSError:
            return

    return answer


def own_memory() -> int:
    """The most memory that this process ever held, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def test_an_error_or_a_listing_without_end_costs_a_process_and_no_memory_of_the_server(store: OddStore) -> None:
    """The process ends at its bound; it is told, and the next question has another process."""
    listing = stores_at(store).list_at(TARGET)
    source = listing.open(next(iter([source_entry(store)])))
    size = source.stat().size
    before = own_memory()

    for answer, ask in (
        (endless(500, b"<Error>"), lambda: reading_of(source)),
        (endless(200, b"<ListBucketResult>"), lambda: list(listing.list("m/"))),
    ):
        store.answer = answer
        with pytest.raises(
            Broken, match=r"S3: the process that asks it ended .*, as it does where an error or a listing"
        ):
            ask()

    assert own_memory() - before < MEMORY_BYTES / 4
    store.answer = an_object(b"hello")
    assert (source.stat().size, reading_of(source)) == (size, b"hello")
    source.close()
    listing.close()


def source_entry(store: OddStore) -> Any:
    """The object as a listing would tell it."""
    source = stores_at(store).open(TARGET)
    try:
        return source.stat()
    finally:
        source.close()


def reading_of(source: ObjectSource) -> bytes:
    """All of the object."""
    with source.read(0, None) as reading:
        return b"".join(bytes(piece) for piece in reading)


def test_a_process_that_was_asked_nothing_ends_and_the_next_question_starts_another(store: OddStore) -> None:
    """A watch that looks twice a minute keeps none."""
    asking = Asking(process_at(store, idle_s=0.02))
    size_of(asking)
    for _ in poll(10, "the process ends by itself"):
        if asking.process.pid is None:
            break

    assert size_of(asking) == 5
    asking.close()


def test_a_question_that_meets_the_end_of_an_idle_process_is_asked_again(store: OddStore) -> None:
    """The process takes a socket with it that it has not looked at."""
    process = process_at(store)
    asking, other = Asking(process), subprocess.Popen(["true"])
    other.wait()
    send, sent = process.send, []

    def lose_the_first(question: Any, answer: Any) -> Any:
        sent.append(question)
        return other if len(sent) == 1 else send(question, answer)

    process.send = lose_the_first  # type: ignore[method-assign]

    assert size_of(asking) == 5
    assert len(sent) == 2
    asking.close()


def test_the_process_ends_with_the_last_that_asks_it(store: OddStore) -> None:
    """What was opened from a listing shares its process, and what was forgotten holds none."""
    listing: ObjectListing = stores_at(store).list_at(TARGET)
    entry = source_entry(store)
    first, second = listing.open(entry), listing.open(entry)
    first.stat()
    pid = first._asking.process.pid

    first.close()
    assert second.stat().size == 5
    assert second._asking.process.pid == pid
    listing.close()
    assert not is_gone(pid)
    del second
    gc.collect()
    assert is_gone(pid)
    with pytest.raises(Failed, match="the server stops"):
        first.stat()


def test_a_process_that_cannot_be_started_is_broken(store: OddStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of processes may be met for a moment only."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    asking = Asking(process_at(store))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(Broken, match=r"no process could be started and asked \(Resource"):
            size_of(asking)

    assert size_of(asking) == 5
    asking.close()


def keys_used(store: OddStore) -> list[str]:
    """The id of the key that each request was signed with."""
    return [asked.headers["authorization"].partition("Credential=")[2].partition("/")[0] for asked in store.asked]


def test_credentials_are_looked_up_again_before_they_expire(store: OddStore) -> None:
    """Each request is signed with what counts at its question; a secret that has gone is told."""
    ages = [30.0, 3600.0]
    keys: list[str] = []

    def provide() -> dict[str, Any]:
        if not ages:
            raise BadSettings("stores names the variable NO, which is not set")
        keys.append(f"KEY{len(keys)}")
        expires = datetime.now(UTC) + timedelta(seconds=ages.pop(0))
        return {"access_key_id": keys[-1], "secret_access_key": "s", "token": None, "expires_at": expires}

    asking = Asking(process_at(store, provide))
    for _ in poll(10, "the library has forgotten what it was told a moment ago"):
        size_of(asking)
        if keys_used(store)[-1] == "KEY1":
            break
    asking.process._known = None
    with pytest.raises(Failed, match="which is not set"):
        size_of(asking)
    asking.close()

    assert keys_used(store)[0] == "KEY0"
    assert keys == ["KEY0", "KEY1"]


def test_a_listing_without_objects_is_empty(store: OddStore) -> None:
    """As of a bucket that is watched before its first archive is there."""

    def empty(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "37")
        handler.end_headers()
        handler.wfile.write(b"<ListBucketResult></ListBucketResult>")

    store.answer = empty
    listing = stores_at(store).list_at(TARGET)

    assert list(listing.list("m/")) == []
    listing.close()


def test_a_page_of_long_keys_is_told_whole_and_one_that_is_too_long_is_refused(store: OddStore) -> None:
    """In messages of what a socket takes at once."""
    keys = [f"m/{'k' * 1000}{number:04d}" for number in range(200)]

    def page(handler: BaseHTTPRequestHandler) -> None:
        body = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
            for key in keys
        )
        data = f"<ListBucketResult>{body}</ListBucketResult>".encode()
        handler.send_response(200)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    store.answer = page
    listing = stores_at(store).list_at(TARGET)

    assert sum(map(len, keys)) > 3 * MESSAGE_BYTES
    assert [entry.key for entry in listing.list("m/")] == keys
    keys[1:] = ["m/" + "k" * 5000]
    with pytest.raises(Failed, match="longer than any can be"):
        list(listing.list("m/"))
    listing.close()
