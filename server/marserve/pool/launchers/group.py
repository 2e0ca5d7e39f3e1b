"""A worker that is a group of ranks: one process each, with the environment that torchrun gives, on one machine.

Rank 0 has the worker's own wire; each other rank has one of its own for its load and its failures. All have the
worker's page. The ranks find each other through a store that rank 0 opens (`worker/rank.py`) on a listening socket
that is made here: on loopback, on a port that the system chose, bound before its number is passed on.

When one rank ends the group ends. The rank that ended first gives the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import cast

import msgspec

from marserve import wire
from marserve.errors import BadFrame
from marserve.messages import DeviceLost, Hello, Load, Loaded, Metrics, NotLoaded, OutOfStep, Rank, SetLevel
from marserve.pool.launchers.endpoints import WorkerEnds
from marserve.pool.launchers.process import WorkerProcess
from marserve.pool.worker_end.cause_of_death import Cause, Death, death_of_load
from marserve.pool.worker_end.output import WorkerOutput

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
MAX_FRAME_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class GroupShape:
    """A group's shape: the number of ranks, whether all of them make every call, its devices' environment and number.

    `device_count` is 0 if it has no devices, or sees all: then `gpu_id` is the order's.
    """

    size: int
    is_mirrored: bool
    devices: Mapping[str, str] = dataclasses.field(default_factory=dict)
    device_count: int = 0


# Starts one rank: its number, its ends, its further descriptors and the seed of its random numbers.
StartRank = Callable[[int, WorkerEnds, Sequence[int], int], Coroutine[None, None, WorkerProcess]]


class RankGroup(WorkerProcess):
    """The processes of one worker as one: `pid` is rank 0's, `exited` is done when all of them are reaped.

    Its status is that of the rank that ended first. `load(order)` is rank 0's order to load.
    """

    def __init__(self, shape: GroupShape, store_port: int, run_id: str, output: WorkerOutput) -> None:
        super().__init__(-1, asyncio.get_running_loop().create_future())
        self._shape, self._store_port, self._run_id, self._output = shape, store_port, run_id, output
        self._ranks: list[WorkerProcess] = []
        self._followers: list[_Follower] = []
        self._left = 0
        self._ended_rank: int | None = None
        self._status: int | None = None
        self._said: dict[int, tuple[Death, str]] = {}
        self._unloaded = shape.size - 1
        self._whole: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in order."""
        return [process.pid for process in self._ranks]

    @property
    def lineages(self) -> list[str]:
        """The lineages of the ranks, by which processes that they leave behind are found."""
        return [process.lineage for process in self._ranks]

    def load(self, order: Load, rank: int = 0) -> Load:
        """The order to load for this rank."""
        place = Rank(rank, self._shape.size, self._shape.is_mirrored, self._store_port)
        environment = rank_environment(place, self._run_id) | dict(self._shape.devices)
        gpu_id = rank % self._shape.device_count if self._shape.device_count else order.gpu_id
        environment = {**order.environment, **environment}
        return msgspec.structs.replace(order, rank=place, environment=environment, gpu_id=gpu_id)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process groups of all ranks."""
        for process in self._ranks:
            process.signal_group(number)

    @property
    def reported_death(self) -> tuple[Death, str] | None:
        """Why the group ended, if the rank that ended first has said so, with the author's traceback."""
        return None if self._ended_rank is None else self._said.get(self._ended_rank)

    def explain(self, death: Death) -> Death:
        """The death of the group, with the number of the rank that ended first."""
        if self._ended_rank is None:
            return death
        return dataclasses.replace(death, detail=f"rank {self._ended_rank}: {death.detail}")

    async def is_whole(self) -> bool:
        """Wait until the other ranks have loaded the model; False if the group ended before."""
        return await asyncio.shield(self._whole)

    # ------------------------------------------------------------------------------------------- its making

    def add(self, process: WorkerProcess) -> None:
        """Add the next rank."""
        rank = len(self._ranks)
        if not rank:
            self.pid = process.pid
        self._ranks.append(process)
        self._left += 1
        process.exited.add_done_callback(partial(self._rank_ended, rank))

    def follow(self, follower: _Follower) -> None:
        """Add the connection to a further rank."""
        self._followers.append(follower)

    def formed(self, order: Load, level: str) -> None:
        """All ranks are there: have the further ones load the model, and log from this level on."""
        if self._ended_rank is not None:  # one has ended while the others were started
            self.signal_group(signal.SIGKILL)
        for follower in self._followers:
            follower.send(SetLevel(level.upper()))
            follower.send(self.load(order, follower.rank))
        if not self._unloaded and not self._whole.done():
            self._whole.set_result(True)

    # ------------------------------------------------------------------------------------------- its ranks' news

    def rank_loaded(self) -> None:
        """A further rank has loaded the model."""
        self._unloaded -= 1
        if not self._unloaded and not self._whole.done():
            self._whole.set_result(True)

    def rank_said(self, rank: int, death: Death, traceback: str) -> None:
        """A rank says why it is about to end; that counts if it is the first to end."""
        self._said.setdefault(rank, (self._named(rank, death), traceback))

    def give_up(self, rank: int, death: Death, traceback: str = "") -> None:
        """End the group, since this rank says that it cannot go on."""
        if self._ended_rank is None:
            self._begin_end(rank)
            self._said[rank] = (self._named(rank, death), traceback)
        self.signal_group(signal.SIGKILL)

    def _named(self, rank: int, death: Death) -> Death:
        if death.cause is Cause.OUT_OF_STEP:  # its detail names the ranks
            return death
        return dataclasses.replace(death, detail=f"rank {rank}: {death.detail}")

    def _rank_ended(self, rank: int, exited: asyncio.Future[int | None]) -> None:
        if self._ended_rank is None:
            self._begin_end(rank)
            self._status = exited.result()
            self.signal_group(signal.SIGKILL)
        elif self._ended_rank == rank:
            self._status = exited.result()
        self._left -= 1
        if self._left or len(self._ranks) < self._shape.size:
            return
        for follower in self._followers:
            follower.close()
        if not self.exited.done():
            self.exited.set_result(self._status)

    def _begin_end(self, rank: int) -> None:
        self._ended_rank = self._output.teller = rank
        if not self._whole.done():
            self._whole.set_result(False)

    def abandon(self) -> None:
        """End a group that could not be formed; the callers that started its ranks reap them."""
        for process in self._ranks:
            process.signal_group(signal.SIGKILL)
        for follower in self._followers:
            follower.close()


async def form_group(
    shape: GroupShape,
    order: Load,
    level: str,
    worker_id: str,
    ends: WorkerEnds,
    output: WorkerOutput,
    start: StartRank,
) -> RankGroup:
    """Start the ranks of one worker, and have all but rank 0 load; rank 0 gets its order on the worker's own wire.

    `level` is that of their logging, as `debug`. Raises what `start` raises, and OSError if the system gives no more
    descriptors; nothing is left then.
    """
    # All ranks draw the same random numbers: samples that they draw together must be equal on each.
    seed = random.SystemRandom().getrandbits(63)
    with contextlib.ExitStack() as handed:  # the ranks have copies of their own by the time these are closed
        store = handed.enter_context(listen_on_loopback(backlog=4 * shape.size))
        port: int = store.getsockname()[1]
        pairs = []
        for _ in range(shape.size - 1):
            first, second = socket.socketpair()
            pairs.append((handed.enter_context(first), handed.enter_context(second)))
        group = RankGroup(shape, port, f"{order.model}_{worker_id}", output)
        try:
            group.add(await start(0, ends, [store.fileno(), *(first.fileno() for first, _ in pairs)], seed))
            for rank, (_, second) in enumerate(pairs, 1):
                await _start_follower(group, rank, ends.page, output, partial(start, rank), second.fileno(), seed)
        except BaseException:
            group.abandon()
            raise
    group.formed(order, level)
    return group


async def _start_follower(
    group: RankGroup,
    rank: int,
    page: int,
    output: WorkerOutput,
    start: Callable[[WorkerEnds, Sequence[int], int], Coroutine[None, None, WorkerProcess]],
    to_leader: int,
    seed: int,
) -> None:
    with contextlib.ExitStack() as handed:
        out, err = await output.open(rank)
        handed.callback(os.close, out)
        handed.callback(os.close, err)
        ours, theirs = socket.socketpair()
        handed.enter_context(theirs)
        follower = _Follower(rank, group)
        try:
            await asyncio.get_running_loop().create_connection(lambda: follower, sock=ours)
        except BaseException:
            ours.close()
            raise
        group.follow(follower)
        group.add(await start(WorkerEnds(theirs.fileno(), out, err, page), [to_leader], seed))


def rank_environment(place: Rank, run_id: str) -> dict[str, str]:
    """The variables that torchrun sets for a rank, and those that keep its sockets on loopback. No devices."""
    rank, size = str(place.rank), str(place.size)
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(place.store_port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "LOGLEVEL": "INFO",
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "TP_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
    }


def listen_on_loopback(*, backlog: int) -> socket.socket:
    """A listening socket that only this machine can reach, on a port that the system chooses."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind((LOOPBACK, 0))
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


class _Follower(asyncio.Protocol):
    """The server's end of the wire to a rank that is not the first."""

    def __init__(self, rank: int, group: RankGroup) -> None:
        self.rank = rank
        self._group = group
        self._decoder = wire.server_decoder(max_frame_bytes=MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._has_loaded = False

    def send(self, message: Load | SetLevel) -> None:
        """Send one message."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(wire.encode(message))

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready to send."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Handle the rank's messages; only rank 0 sends results."""
        try:
            for message, _ in self._decoder.feed(data):
                self._hear(message)
        except BadFrame as error:
            self._group.give_up(self.rank, Death(Cause.BAD_FRAME, f"it broke the protocol: {error}"))

    def _hear(self, message: object) -> None:
        if isinstance(message, Loaded) and not self._has_loaded:
            self._has_loaded = True
            self._group.rank_loaded()
        elif isinstance(message, NotLoaded):
            self._group.rank_said(self.rank, death_of_load(message), message.traceback)
        elif isinstance(message, OutOfStep):
            self._group.give_up(self.rank, Death(Cause.OUT_OF_STEP, message.detail), message.traceback)
        elif isinstance(message, DeviceLost):
            self._group.give_up(self.rank, Death(Cause.DEVICE_LOST, message.detail), message.traceback)
        elif not isinstance(message, Hello | Metrics):
            raise BadFrame(f"it sent {type(message).__name__}, which only rank 0 may")
