"""The messages between the server and an agent on another machine, over one TCP connection. No I/O.

A connection belongs to one worker. It carries records, all integers little-endian:

    offset  size
    0       1     kind: 1 DATA, 2 CONTROL, 3 PAGE, 4 FILE
    1       4     n, bytes of the rest
    5       n     DATA: bytes of the worker's own wire (`wire.py`), unchanged; a frame may span records
                  CONTROL: one message of this module as msgpack
                  PAGE: 24 bytes of the worker's page (`shared_page.py`): the batch that it runs, since how many seconds
                  (a double; the machines' clocks differ), how many it has finished
                  FILE: bytes of an archive, in order

A DATA record is passed on as its bytes come, so that a large body is held once; other records are read whole. Every
length is checked against its bound before anything is kept: the reader gets `BadFrame` and closes.

Messages between the server and the process that speaks with Ray use frames of `wire.py`.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from marserve.errors import BadFrame
from marserve.messages import Load, pack
from marserve.wire import MAX_METADATA_BYTES

HEADER = struct.Struct("<BI")
PAGE = struct.Struct("<QdQ")
DATA_KIND, CONTROL_KIND, PAGE_KIND, FILE_KIND = 1, 2, 3, 4
MAX_DATA_BYTES = 2**32 - 1
MAX_FILE_PART_BYTES = 1 << 20
_BOUNDS = {
    DATA_KIND: MAX_DATA_BYTES,
    CONTROL_KIND: MAX_METADATA_BYTES,
    PAGE_KIND: PAGE.size,
    FILE_KIND: MAX_FILE_PART_BYTES,
}

# Each side sends a beat this often. After `SILENT_S` without a message the server gives the agent up. An agent waits
# longer for the server (`PATIENT_S`), since giving up costs it a loaded model.
BEAT_S = 0.7
SILENT_S = 2.1
PATIENT_S = 6.0
# How often each side checks when it last got a message.
LOOK_S = 0.25
# The name in the server's certificate: agents check this name, not the address that they connected to.
SERVER_NAME = "marserve-server"

M = TypeVar("M")

# ------------------------------------------------------------------------------------------- agent to server


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message. `token` identifies the place that this agent is for; the rest is for people."""

    token: str
    version: str
    node_id: str
    node: str
    pid: int


class WantArchive(msgspec.Struct, frozen=True, array_like=True, tag="want_archive"):
    """The archive is not on this node: send it, as FILE records."""

    sha256: str


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The worker's process was started. `needs_load` and `load_s` as in `pool.launchers.launched.Launched`.

    `model_dir`, `import_paths` and `metrics_file` are the paths on this machine for the order to load.
    """

    pid: int
    how: str
    needs_load: bool
    load_s: float
    model_dir: str
    import_paths: list[str]
    metrics_file: str | None
    warnings: list[str] = []


class NotStarted(msgspec.Struct, frozen=True, array_like=True, tag="not_started"):
    """The worker could not be started. `cause` is a name of `pool.worker_end.cause_of_death.Cause`."""

    cause: str
    detail: str
    traceback: str = ""
    exit_code: int | None = None


class Line(msgspec.Struct, frozen=True, array_like=True, tag="line"):
    """Records of one level that the worker printed for the same requests; a text of several lines is one record."""

    stream: str
    level: str
    texts: list[str]
    ids: str = ""


class WireClosed(msgspec.Struct, frozen=True, array_like=True, tag="wire_closed"):
    """The worker's own connection has ended; its process is about to end."""


class WorkerExited(msgspec.Struct, frozen=True, array_like=True, tag="worker_exited"):
    """The worker's process is reaped: its wait status, None if it could not be had.

    `was_killed_for_memory`: the kernel of its machine counted a kill for want of memory at that time.
    """

    status: int | None
    was_killed_for_memory: bool


class AgentBeat(msgspec.Struct, frozen=True, array_like=True, tag="agent_beat"):
    """The agent is alive; the worker holds so many bytes."""

    memory_bytes: int


# ------------------------------------------------------------------------------------------- server to agent


class ArchiveRef(msgspec.Struct, frozen=True, array_like=True):
    """An archive, by its digest. `path` is the server's file, `address` its origin; both may be empty.

    `is_trusted`: the operator allows any pickles in it. `max_entries` and `max_total_bytes` bound it.
    """

    sha256: str
    name: str
    path: str = ""
    address: str = ""
    is_trusted: bool = False
    max_entries: int = 0
    max_total_bytes: int = 0


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Start a worker. `load` has paths of the server's machine; `metrics` is the content of its metrics file.

    `environment` is added to that of the agent's worker. `devices` says how many accelerators it may use.
    """

    worker_id: str
    load: Load
    worker_start: str
    threads: int
    archive: ArchiveRef
    environment: dict[str, str]
    devices: int = 0
    metrics: str | None = None


class ArchiveEnd(msgspec.Struct, frozen=True, array_like=True, tag="archive_end"):
    """The whole archive was sent; with `reason` it was not."""

    reason: str = ""


class Signal(msgspec.Struct, frozen=True, array_like=True, tag="signal"):
    """Send this signal to the worker's process group."""

    number: int


class CancelItem(msgspec.Struct, frozen=True, array_like=True, tag="cancel_item"):
    """Item `index` of batch `number` is no longer wanted: mark it on the worker's page."""

    number: int
    index: int


class Hold(msgspec.Struct, frozen=True, array_like=True, tag="hold"):
    """Read nothing more from the worker."""


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """Read from the worker again."""


class ServerBeat(msgspec.Struct, frozen=True, array_like=True, tag="server_beat"):
    """The server is alive, and its monotonic clock shows `now`."""

    now: float


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """The agent has no more work; with `reason` the server refuses it."""

    reason: str = ""


ToLinkServer = Hello | WantArchive | Started | NotStarted | Line | WireClosed | WorkerExited | AgentBeat
ToAgent = Start | ArchiveEnd | Signal | CancelItem | Hold | Resume | ServerBeat | Leave

# ------------------------------------------------------------------------------------------- server and Ray


class StoreAt(msgspec.Struct, frozen=True, array_like=True):
    """An object store for addresses that begin with `prefix`; `options` are those of the setting `stores`.

    `has_secrets`: it needs the server's credentials, which are never sent to a node.
    """

    kind: str
    prefix: str
    options: dict[str, str | bool]
    has_secrets: bool


class AgentOrder(msgspec.Struct, frozen=True, array_like=True):
    """What an agent gets at its start: the server's address, its authority, and the agent's token and certificate.

    Without certificates (PEM) the connection is not encrypted. `cache` is the folder for archives, empty for its usual
    place.
    """

    host: str
    port: int
    token: str
    authority: str = ""
    certificate: str = ""
    key: str = ""
    cache: str = ""
    cache_bytes: int = 0
    stores: list[StoreAt] = []


class Connect(msgspec.Struct, frozen=True, array_like=True, tag="connect"):
    """Connect to the cluster at this address, under a namespace of the server's own."""

    address: str
    namespace: str


class PlaceAgent(msgspec.Struct, frozen=True, array_like=True, tag="place_agent"):
    """Start an agent on a node with the resources for it.

    Workers of one `pool` are spread over nodes, or packed onto few. `order` is an `AgentOrder` as msgpack.
    `memory_bytes` 0: none is reserved.
    """

    id: str
    pool: str
    cpus: float
    gpus: float
    memory_bytes: int
    resources: dict[str, float]
    placement: str
    order: bytes


class GiveUp(msgspec.Struct, frozen=True, array_like=True, tag="give_up"):
    """End this agent, after `grace_s` seconds by force, and give its resources back. Ignored if it has ended.

    `is_node_unfit`: no worker can start on its node; others are preferred for a while.
    """

    id: str
    grace_s: float = 0.0
    is_node_unfit: bool = False


class Joined(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    """Connected. `host` is the address of this machine that the cluster's nodes know."""

    host: str
    nodes: int
    version: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The cluster could not be joined, for this reason."""

    reason: str


class Waits(msgspec.Struct, frozen=True, array_like=True, tag="waits"):
    """An agent has no place yet, for this reason."""

    id: str
    reason: str


class Placed(msgspec.Struct, frozen=True, array_like=True, tag="placed"):
    """An agent has its place and is being started on this node."""

    id: str
    node_id: str
    node: str


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """An agent has ended, or could not be started. `cause` is a name of `pool.worker_end.cause_of_death.Cause`."""

    id: str
    cause: str
    reason: str


ToCluster = Connect | PlaceAgent | GiveUp
FromCluster = Joined | Refused | Waits | Placed | Gone

# ------------------------------------------------------------------------------------------- records


def control(message: Any) -> bytes:
    """One message as a record."""
    metadata = pack(message)
    return HEADER.pack(CONTROL_KIND, len(metadata)) + metadata


def page_record(running: int, since_s: float, finished: int) -> bytes:
    """The worker's part of its page, as a record."""
    return HEADER.pack(PAGE_KIND, PAGE.size) + PAGE.pack(running, since_s, finished)


class RecordDecoder(Generic[M]):
    """Takes bytes as they come, and gives (kind, content) in order: DATA in pieces, the others whole.

    `types` is the union of messages that may come from this peer: the content of a CONTROL record is decoded.
    """

    def __init__(self, types: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(types).decode
        self._kept = bytearray()
        self._needed = HEADER.size
        self._data_left = 0

    def feed(self, data: bytes) -> list[tuple[int, Any]]:
        """Take more bytes; returns what is complete now. Raises BadFrame; after that the connection must be closed."""
        found: list[tuple[int, Any]] = []
        if not self._kept and self._data_left >= len(data):
            self._data_left -= len(data)
            return [(DATA_KIND, data)] if data else []
        if self._kept:
            self._kept += data
            if len(self._kept) < self._needed:
                return found
            data = bytes(self._kept)
            self._kept.clear()
        at, end = 0, len(data)
        while at < end:
            if self._data_left:
                size = min(self._data_left, end - at)
                found.append((DATA_KIND, data[at : at + size]))
                self._data_left -= size
                at += size
                continue
            if end - at < HEADER.size:
                self._needed = HEADER.size
                break
            kind, size = HEADER.unpack_from(data, at)
            bound = _BOUNDS.get(kind)
            if bound is None or size > bound:
                raise BadFrame(f"a record of kind {kind} announces {size} bytes; the bound is {bound or 0}")
            if kind == DATA_KIND:
                at += HEADER.size
                self._data_left = size
                continue
            if end - at < HEADER.size + size:
                self._needed = HEADER.size + size
                break
            body = data[at + HEADER.size : at + HEADER.size + size]
            at += HEADER.size + size
            found.append((kind, self._read(kind, body)))
        self._kept += data[at:]
        return found

    def forget(self) -> None:
        """Drop what is kept of an incomplete record: the connection has ended."""
        self._kept = bytearray()

    def _read(self, kind: int, body: bytes) -> Any:
        if kind == CONTROL_KIND:
            try:
                return self._decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise BadFrame(f"a control record is no message: {error}") from error
        if kind == PAGE_KIND:
            if len(body) != PAGE.size:
                raise BadFrame(f"a page record has {len(body)} bytes, not {PAGE.size}")
            return PAGE.unpack(body)
        return body
