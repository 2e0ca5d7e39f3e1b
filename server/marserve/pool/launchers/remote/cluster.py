"""One server's connection to a Ray cluster: the process that speaks with Ray, and the port that agents connect to.

Nothing is started before a model asks for a place. ray is imported by a process of its own (`node/ray_program.py`),
since Ray's library may end its process, and does when the cluster is lost. Then all places are lost, and the next
worker that starts begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from marserve import __version__, agent_link, wire
from marserve.errors import BadFrame
from marserve.pool.launchers.forked import StartFailed
from marserve.pool.launchers.remote.authority import Authority
from marserve.pool.launchers.remote.remote import AgentLink
from marserve.pool.worker_end.cause_of_death import Cause, Death, read_cause
from marserve.settings.stores import NO_STORES, Stores

log = logging.getLogger("marserve.pool.launchers")

# How long an agent may take to connect after it was placed: a new interpreter, on a machine that may be busy.
AGENT_START_S = 60.0
END_GRACE_S = 5.0
# How long an agent may take to clear up after `Leave`.
LEAVE_GRACE_S = 3.0
MISSING = (
    'launcher is ray, and the packages ray and cryptography are not installed; `pip install "marserve[ray]"` does it'
)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How the cluster is reached, and how its nodes reach the server; see the settings `ray_…`.

    `listen` and `advertise` are HOST:PORT, empty for the address of this machine that the cluster knows and a port that
    the system chooses. `cache` is the folder on the nodes, empty for the usual one; `stores` is sent to them.
    """

    address: str = "auto"
    connect_timeout_s: float = 20.0
    listen: str = ""
    advertise: str = ""
    is_encrypted: bool = True
    cache: str = ""
    cache_bytes: int = 0
    stores: Stores = NO_STORES


@dataclass(frozen=True, slots=True)
class Wish:
    """The resources of one worker."""

    pool: str
    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    placement: str = "spread"


class Place:
    """A place for one worker at a time: it has an agent, or waits for resources (`waits_for`)."""

    def __init__(self, place_id: str, pool: str, cluster: Cluster) -> None:
        self.id = place_id
        self._pool = pool
        self.token = secrets.token_hex(16)
        self.waits_for = ""
        self.node = ""
        self.link: AgentLink | None = None
        self._cluster = cluster
        self._ready: asyncio.Future[AgentLink] = asyncio.get_running_loop().create_future()
        self._placed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether its agent is connected."""
        return self.link is not None and not self.link.is_lost

    async def ready(self) -> AgentLink:
        """Wait for resources, as long as that takes, then for the agent. Raises StartFailed."""
        placed = asyncio.ensure_future(self._placed.wait())
        either: list[asyncio.Future[Any]] = [placed, self._ready]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            placed.cancel()
        try:
            async with asyncio.timeout(AGENT_START_S):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            detail = f"the agent on node {self.node} did not connect to the server within {AGENT_START_S:g} s"
            raise StartFailed(Death(Cause.STARTUP_TIMEOUT, detail)) from None

    def give_up(self, *, is_node_unfit: bool = False) -> None:
        """Give the place's resources back; with `is_node_unfit` the next place is sought on another node."""
        self._cluster.give_up(self, is_node_unfit=is_node_unfit)

    # ------------------------------------------------------------------------------------------- the cluster's news

    def waits(self, reason: str) -> None:
        """There are no resources for the place now."""
        log.info("a worker of %s waits for resources of the Ray cluster: %s", self._pool, reason)
        self.waits_for = reason
        self._cluster.on_change()

    def placed(self, node: str) -> None:
        """The place has its resources."""
        self.waits_for, self.node = "", node
        self._placed.set()
        self._cluster.on_change()

    def connected(self, agent: AgentLink) -> None:
        """The place's agent has connected."""
        self.link, self.node, self.waits_for = agent, agent.node, ""
        self._placed.set()
        if not self._ready.done():
            self._ready.set_result(agent)

    def gone(self, cause: Cause, reason: str) -> None:
        """The place's agent has ended, or could not be started."""
        self.waits_for = ""
        if not self._ready.done():
            where = f"node {self.node}" if self.node else "the Ray cluster"
            self._ready.set_exception(StartFailed(Death(cause, f"{where}: {reason}")))
            self._ready.exception()  # retrieved here, so that asyncio does not log it
        if self.link is not None:
            self.link.lose(reason)


class Cluster:
    """The connection to one cluster. The process that imports ray inherits `environment`."""

    def __init__(self, options: ClusterOptions, environment: Mapping[str, str]) -> None:
        self.options = options
        self.on_change: Callable[[], None] = lambda: None
        self._environment = dict(environment)
        self._places: dict[str, Place] = {}
        self._links: set[AgentLink] = set()
        self._opening: asyncio.Task[None] | None = None
        self._program: _Program | None = None
        self._server: asyncio.Server | None = None
        self._authority: Authority | None = None
        self._address = ("", 0)
        self._beats: asyncio.Task[None] | None = None
        self._numbers = 0
        self.listens_on = ("", 0)
        """The address at which agents connect, once the server listens."""

    @property
    def places(self) -> int:
        """How many places there are, those that wait for resources included."""
        return len(self._places)

    async def place(self, wish: Wish) -> Place:
        """Ask for a place; `Place.ready` waits for it. Raises StartFailed without a cluster."""
        await self._open()
        assert self._program is not None
        self._numbers += 1
        place = Place(str(self._numbers), wish.pool, self)
        certificate, key, authority = "", "", ""
        if self._authority is not None:
            certificate, key = self._authority.issue(f"agent-{place.id}")
            authority = self._authority.certificate
        options = self.options
        order = agent_link.AgentOrder(
            self._address[0],
            self._address[1],
            place.token,
            authority,
            certificate,
            key,
            options.cache,
            options.cache_bytes,
            [
                agent_link.StoreAt(each.kind, each.prefix, each.public, each.is_private)
                for each in options.stores.options
            ],
        )
        self._places[place.id] = place
        self._program.send(
            agent_link.PlaceAgent(
                place.id,
                wish.pool,
                wish.cpus,
                wish.gpus,
                wish.memory_bytes,
                dict(wish.resources),
                wish.placement,
                msgspec.msgpack.encode(order),
            )
        )
        return place

    def give_up(self, place: Place, *, is_node_unfit: bool = False) -> None:
        """As `Place.give_up`."""
        if self._places.pop(place.id, None) is None:
            return
        is_open = place.link is not None and not place.link.is_lost
        if place.link is not None and is_open:
            place.link.leave()
        if self._program is not None:
            self._program.send(agent_link.GiveUp(place.id, LEAVE_GRACE_S if is_open else 0.0, is_node_unfit))

    async def close(self) -> None:
        """End this server's agents, the listener and the process that speaks with Ray. The cluster itself goes on."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])
        for place in list(self._places.values()):
            self.give_up(place)
        if self._beats is not None:
            self._beats.cancel()
        for each in list(self._links):
            each.lose("the server ends")
        if self._server is not None:
            self._server.close()
            self._server = None
        program, self._program = self._program, None
        if program is not None:
            await program.close()

    # ------------------------------------------------------------------------------------------- opening

    async def _open(self) -> None:
        """Connect and listen, once for all callers at about the same time. Raises StartFailed."""
        if self._program is not None and self._program.is_open:
            return
        if self._opening is None:
            self._opening = asyncio.create_task(self._begin())
            self._opening.add_done_callback(self._opened)
        await asyncio.shield(self._opening)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()

    async def _begin(self) -> None:
        if importlib.util.find_spec("ray") is None or importlib.util.find_spec("cryptography") is None:
            raise StartFailed(Death(Cause.LOAD_FAILED, MISSING))
        options = self.options
        program = _Program(self)
        try:
            await program.open(self._environment)
            program.send(agent_link.Connect(options.address, f"marserve-{secrets.token_hex(8)}"))
            try:
                async with asyncio.timeout(options.connect_timeout_s):
                    joined = await asyncio.shield(program.joined)
            except TimeoutError:
                raise _no_cluster(options, f"it did not answer within {options.connect_timeout_s:g} s") from None
            if isinstance(joined, agent_link.Refused):
                raise _no_cluster(options, joined.reason)
            if self._server is None:
                await self._listen(joined.host)
        except BaseException:
            await program.close(0.0)  # nothing was placed
            raise
        log.info(
            "joined the Ray %s cluster at %s with %d nodes; agents connect to %s:%d, %s",
            joined.version,
            options.address,
            joined.nodes,
            *self._address,
            "with mutual TLS" if self._authority is not None else "without TLS (ray_tls is false)",
        )
        self._program = program

    async def _listen(self, host: str) -> None:
        options = self.options
        context: ssl.SSLContext | None = None
        if options.is_encrypted and self._authority is None:
            self._authority = await asyncio.to_thread(Authority)
        if self._authority is not None:
            context = self._authority.server_context()
        at, port = split_address(options.listen, host)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: AgentLink(self._links.add, self._greet, self._lost), at, port, ssl=context
            )
        except OSError as error:
            detail = (
                f"agents cannot connect to the server: ray_listen is {options.listen or 'not given'}, and {at}:{port} "
                f"cannot be listened on ({error.strerror}). Set ray_listen to HOST:PORT of this machine."
            )
            raise StartFailed(Death(Cause.LOAD_FAILED, detail)) from error
        chosen = self._server.sockets[0].getsockname()[1]
        self.listens_on = (at, chosen)
        advertised, advertised_port = split_address(options.advertise, host if at in ("", "0.0.0.0", "::") else at)
        self._address = (advertised, advertised_port or chosen)
        self._beats = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        """Send all agents a beat, and lose those that are silent for too long."""
        said_at = looked_at = time.monotonic()
        while True:
            await asyncio.sleep(agent_link.LOOK_S)
            now = time.monotonic()
            was_away = (
                now - looked_at > agent_link.BEAT_S
            )  # the server itself was held up: the agents' beats are still unread
            looked_at = now
            is_due = now - said_at >= agent_link.BEAT_S
            if is_due:
                said_at = now
            for each in list(self._links):
                if is_due:
                    each.beat(now)
                if not was_away:
                    each.look(now)

    def _greet(self, agent: AgentLink, hello: agent_link.Hello) -> str | None:
        place = next((each for each in self._places.values() if secrets.compare_digest(each.token, hello.token)), None)
        if place is None or place.link is not None:
            return "the server that answers has not asked for it; ray_advertise is another server's address"
        if hello.version != __version__:
            refusal = f"it has marserve {hello.version}, and the server {__version__}; install the same on both"
            place.gone(Cause.NODE_UNFIT, refusal)
            self.give_up(place, is_node_unfit=True)
            return refusal
        place.connected(agent)
        return None

    def _lost(self, agent: AgentLink) -> None:
        self._links.discard(agent)
        for place in [each for each in self._places.values() if each.link is agent]:
            self.give_up(place)

    # ------------------------------------------------------------------------------------------- Ray's news

    def hear(self, message: object) -> None:
        """Handle a message from the process that speaks with Ray."""
        if isinstance(message, agent_link.Waits):
            if message.id in self._places:
                self._places[message.id].waits(message.reason)
        elif isinstance(message, agent_link.Placed):
            if message.id in self._places:
                self._places[message.id].placed(message.node)
        elif isinstance(message, agent_link.Gone):
            place = self._places.pop(message.id, None)
            if place is not None:
                place.gone(read_cause(message.cause), message.reason)

    def program_ended(self, program: _Program) -> None:
        """The process that speaks with Ray has ended; Ray ends all agents with it."""
        if self._program is not program:
            return
        self._program = None
        log.warning("the process that speaks with the Ray cluster has ended; its workers end, and are started anew")
        places, self._places = list(self._places.values()), {}
        for place in places:
            place.gone(Cause.NODE_LOST, "the connection to the Ray cluster is lost")


class _Program(asyncio.Protocol):
    """The server's end of the process that imports ray."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._decoder: wire.Decoder[agent_link.FromCluster] = wire.Decoder(agent_link.FromCluster, bytes)
        self._transport: asyncio.Transport | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self.joined: asyncio.Future[agent_link.Joined | agent_link.Refused] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        """Whether the process is connected."""
        return self._transport is not None and not self._transport.is_closing()

    async def open(self, environment: Mapping[str, str]) -> None:
        """Start the process, on the event loop's thread, to which the kernel ties its life."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._popen = _spawn(theirs.fileno(), environment)
                transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
            except BaseException:
                ours.close()
                raise
        self._transport = transport

    def send(self, message: agent_link.ToCluster) -> None:
        """Send a message; dropped once the process has gone."""
        if self.is_open:
            assert self._transport is not None
            self._transport.write(b"".join(wire.encode(message)))

    def data_received(self, data: bytes) -> None:
        """Handle the process's messages."""
        try:
            for message, _ in self._decoder.feed(data):
                if isinstance(message, agent_link.Joined | agent_link.Refused):
                    if not self.joined.done():
                        self.joined.set_result(message)
                else:
                    self._cluster.hear(message)
        except BadFrame as error:
            log.error("the process that speaks with Ray broke the protocol: %s", error)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """The process has ended, or is about to."""
        self._transport = None
        if not self.joined.done():
            self.joined.set_result(agent_link.Refused("the process that speaks with Ray ended while it connected"))
        self._cluster.program_ended(self)
        if self._popen is not None:
            _reap_later(self._popen)

    async def close(self, grace_s: float = END_GRACE_S) -> None:
        """End the process by closing its connection, and by force after `grace_s`."""
        if self._transport is not None:
            self._transport.close()
        if self._popen is not None:
            await asyncio.to_thread(_reap, self._popen, grace_s)


def _spawn(connection: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "marserve.node.ray_program", str(os.getpid()), str(connection)],
        env={**environment, "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(connection,),
        start_new_session=True,
    )


def _reap_later(popen: subprocess.Popen[bytes]) -> None:
    """Reap the process without waiting for it here."""
    with contextlib.suppress(RuntimeError):  # the loop is closing: `close` does it
        asyncio.get_running_loop().run_in_executor(None, _reap, popen)


def _reap(popen: subprocess.Popen[bytes], grace_s: float = END_GRACE_S) -> None:
    try:
        popen.wait(grace_s)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()


def split_address(address: str, host: str) -> tuple[str, int]:
    """HOST:PORT in two parts, with `host` and port 0 for missing ones. The settings have checked it."""
    if not address:
        return host, 0
    name, colon, port = address.rpartition(":")
    if not colon:
        return address.strip("[]"), 0
    return name.strip("[]") or host, int(port or 0)


def _no_cluster(options: ClusterOptions, reason: str) -> StartFailed:
    detail = (
        f"no Ray cluster could be joined: ray_address is {options.address} and {reason.rstrip('.')}. Start a node of "
        "it on this machine (`ray start --head`, or `ray start --address=HEAD:6379`), or correct ray_address."
    )
    return StartFailed(Death(Cause.LOAD_FAILED, detail))
