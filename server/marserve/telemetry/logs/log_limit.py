"""Bounds the records that clients cause in the server log, so that no client can fill it. Pure.

A record costs its bytes in the log. Each call that logs is a kind of record. Each kind has an allowance for each
client's address, and one for all clients together. Records beyond either are counted, and a regular sentence for each
kind says how many were left out. The caller passes the time, in seconds on the monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from marserve.telemetry.logs.bucket import Bucket
from marserve.telemetry.logs.line_ids import belongs_to

HEAD_BYTES = 100
CLIENT_BYTES_PER_S, CLIENT_BURST_BYTES = 256, 8 << 10
KIND_BYTES_PER_S, KIND_BURST_BYTES = 4 << 10, 64 << 10
# How many clients' allowances are kept. One that was dropped is full when its client is seen again.
MAX_CLIENTS = 1024
# Seconds between two sentences about one kind.
TELL_EVERY_S = 10.0
# Loggers of libraries whose records clients cause, without naming the client.
LIBRARIES = ("asyncio", "grpc", "uvicorn", "starlette", "fastapi")


def caused_by(peer: str, ids: str = "") -> dict[str, str]:
    """For `extra` of a log call: a client causes this record. `peer` is `127.0.0.1:64003`, or empty if not known.

    `ids` are those of the requests that the record belongs to, as `messages.line_ids` writes them.
    """
    client = {"client": peer.removeprefix("/").rpartition(":")[0]}
    return client | belongs_to(ids) if ids else client


@dataclass(slots=True)
class _Kind:
    """The records of one kind that were left out. `last` is the newest of their clients."""

    bucket: Bucket
    label: str
    left_out: int = 0
    last: str = ""
    told_at: float | None = None


class LogLimit:
    """Decides whether each record is written."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._clients: OrderedDict[tuple[str, str], Bucket] = OrderedDict()

    def admit(self, kind: str, label: str, client: str, size: int, now: float) -> bool:
        """Whether a record of `size` bytes is written. `label` names its kind in the sentence about it."""
        cost = min(HEAD_BYTES + size, CLIENT_BURST_BYTES)
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = _Kind(Bucket(KIND_BYTES_PER_S, KIND_BURST_BYTES), label)
        if client and not self._client(kind, client).spend(now, cost):
            admitted = False
        else:
            admitted = known.bucket.spend(now, cost)
        if not admitted:
            known.left_out += 1
            known.last = client
            if known.told_at is None:
                known.told_at = now
        return admitted

    def sentences(self, now: float) -> list[str]:
        """The sentences that are due about left-out records; each record counts once. With `math.inf` all are due."""
        said = []
        for known in self._kinds.values():
            if known.left_out and known.told_at is not None and now - known.told_at >= TELL_EVERY_S:
                by = f"; the last was caused by {known.last}" if known.last else ""
                said.append(f"{known.left_out} more records like '{known.label}' were left out{by}")
                known.left_out = 0
                known.told_at = None
        return said

    def _client(self, kind: str, client: str) -> Bucket:
        key = kind, client
        bucket = self._clients.get(key)
        if bucket is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._clients.popitem(last=False)
            bucket = self._clients[key] = Bucket(CLIENT_BYTES_PER_S, CLIENT_BURST_BYTES)
        else:
            self._clients.move_to_end(key)
        return bucket
