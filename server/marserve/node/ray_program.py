"""`python -m marserve.node.ray_program DESCRIPTOR`: the only process that imports ray on the server's machine.

Ray's client library ends its process when the cluster is lost, and it brings threads and a hundred megabytes. This
process keeps them away from the server. It connects, asks Ray for a place for each agent (a placement group of one
bundle, with the resources that the model asks for), starts the agent there, and reports its state. It ends with the
server, and Ray then ends all that it had placed.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import select
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, cast

from marserve import __version__, wire
from marserve.agent_link import (
    Connect,
    FromCluster,
    GiveUp,
    Gone,
    Joined,
    PlaceAgent,
    Placed,
    Refused,
    ToCluster,
    Waits,
)
from marserve.errors import BadFrame
from marserve.node.placing import Needs, NodeView, Placement, choose_node, explain
from marserve.optional import trouble
from marserve.pool.worker_end.cause_of_death import Cause
from marserve.worker.process.parent import die_with_parent

# How often Ray is asked about a placement group that waits, or about its agent's end, seconds.
LOOK_S = 0.05
IDLE_LOOK_S = 0.25
# How often the reason for waiting is looked for anew; the server gets it when it has changed.
REASON_EVERY_S = 1.0
# How long other nodes are preferred to one on which no worker could start, seconds.
UNFIT_S = 60.0
# How long agents may clean up when the server ends.
LEAVE_S = 2.0
NO_MARSERVE = (
    "marserve {version} is not installed there for the Python that Ray runs; install it on every node (`pip install "
    '"marserve[ray]=={version}"`), or in the image of the nodes'
)


class AgentActor:
    """The actor that Ray starts on a node."""

    def run(self, order: bytes) -> str:
        """Run an agent until the server asks for its end; returns the reason why it ended."""
        # Late: this runs on the node, and the process that asks Ray has no use for what an agent needs.
        from marserve.node.agent import run_agent

        ray: Any = importlib.import_module("ray")
        context = ray.get_runtime_context()
        node_id = context.get_node_id()
        return run_agent(order, node_id, name_of(ray.util.get_node_ip_address(), node_id))


@dataclass
class Place:
    """One agent, its placement group and its actor."""

    order: PlaceAgent
    needs: Needs
    group: Any = None
    actor: Any = None
    running: Any = None
    node_id: str = ""
    reason: str = ""
    reason_at: float = 0.0
    ends_at: float = math.inf


class Program:
    """The loop that carries out the server's orders and reports Ray's events."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decoder: wire.Decoder[ToCluster] = wire.Decoder(ToCluster, bytes)
        self._places: dict[str, Place] = {}
        self._unfit_until: dict[str, float] = {}
        self._ray: Any = None

    def run(self) -> None:
        """Run until the server closes the connection."""
        while True:
            waits = any(place.running is None for place in self._places.values())
            pause = LOOK_S if waits else IDLE_LOOK_S if self._places else None
            if select.select([self._socket], [], [], pause)[0]:
                data = self._socket.recv(1 << 16)
                if not data:
                    self._leave()
                    return
                for message, _ in self._decoder.feed(data):
                    self._obey(message)
            self._look()

    def _leave(self) -> None:
        """The server has ordered its agents to end, or has gone. They end by themselves; later Ray ends them."""
        limit = time.monotonic() + LEAVE_S
        for place in self._places.values():
            place.ends_at = limit
        while any(place.running is not None for place in self._places.values()) and time.monotonic() < limit:
            time.sleep(LOOK_S)
            self._look()

    def say(self, message: FromCluster) -> None:
        """Send a message to the server."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server has gone; the next read sees it
            self._socket.sendall(b"".join(wire.encode(message)))

    def _obey(self, message: ToCluster) -> None:
        if isinstance(message, Connect):
            self._connect(message)
        elif isinstance(message, PlaceAgent):
            amounts = {"CPU": message.cpus, "GPU": message.gpus, "memory": float(message.memory_bytes)}
            needs = Needs({name: much for name, much in {**amounts, **message.resources}.items() if much})
            self._places[message.id] = Place(message, needs)
        elif isinstance(message, GiveUp):
            place = self._places.get(message.id)
            if place is not None:
                place.ends_at = time.monotonic() + (message.grace_s if place.running is not None else 0.0)
                if message.is_node_unfit:
                    self._is_unfit(place)

    def _is_unfit(self, place: Place) -> None:
        self._unfit_until[place.node_id] = time.monotonic() + UNFIT_S

    def _connect(self, order: Connect) -> None:
        try:
            ray: Any = importlib.import_module("ray")
        except Exception as error:  # a broken library raises any class
            self.say(Refused(f'{trouble("ray", error)}; install it with `pip install "marserve[ray]"`'))
            return
        try:
            ray.init(
                address=order.address,
                namespace=order.namespace,
                log_to_driver=False,
                configure_logging=False,
                ignore_reinit_error=False,
            )
        except (ConnectionError, ValueError, RuntimeError, TimeoutError, OSError) as error:
            self.say(Refused(" ".join(str(error).split())[:500] or repr(error)))
            return
        self._ray = ray
        living = [node for node in ray.nodes() if node["Alive"]]
        self.say(Joined(ray.util.get_node_ip_address(), len(living), ray.__version__))

    # ------------------------------------------------------------------------------------------- Ray's news

    def _look(self) -> None:
        if self._ray is None:
            return
        now = time.monotonic()
        for place in list(self._places.values()):
            if now >= place.ends_at:
                self._gone(place, Cause.STOPPED, "the server wants it no more")
                continue
            try:
                if place.group is None:
                    self._ask(place)
                if place.running is None:
                    self._settle(place)
            except Exception as error:  # Ray's errors have no common base
                self._gone(place, Cause.LOAD_FAILED, f"Ray refused: {_first_line(error)}")
        running = {place.running: place for place in self._places.values() if place.running is not None}
        while running:
            ended, _ = self._ray.wait(list(running), num_returns=1, timeout=0)
            if not ended:
                return
            self._ended(running.pop(ended[0]))

    def _ask(self, place: Place) -> None:
        """Ask Ray for a place on the node that suits best now; if no node has room, on any that gets it."""
        from ray.util.placement_group import placement_group

        node = choose_node(self._nodes(place), place.needs, cast("Placement", place.order.placement))
        bundle = dict(place.needs.amounts) or {"CPU": 0.001}
        hint = {"_soft_target_node_id": node} if node is not None else {}
        place.reason_at = time.monotonic() - (REASON_EVERY_S if node is None else 0.0)
        place.group = placement_group([bundle], strategy="STRICT_PACK", **hint)

    def _settle(self, place: Place) -> None:
        """Start the agent once it has a place."""
        if not place.group.wait(0.001):
            self._tell_reason(place)
            return
        from ray.util.placement_group import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        order = place.order
        place.node_id = placement_group_table(place.group)["bundles_to_node_id"][0]
        actor = self._ray.remote(AgentActor).options(
            num_cpus=order.cpus,
            num_gpus=order.gpus,
            memory=order.memory_bytes or None,
            resources=order.resources or None,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(place.group, 0),
        )
        place.actor = actor.remote()
        place.running = place.actor.run.remote(order.order)
        names = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        self.say(Placed(order.id, place.node_id, name_of(names.get(place.node_id, ""), place.node_id)))

    def _tell_reason(self, place: Place) -> None:
        now = time.monotonic()
        if now - place.reason_at < REASON_EVERY_S:
            return
        place.reason_at = now
        reason = explain(self._nodes(place), place.needs)
        if reason != place.reason:
            place.reason = reason
            self.say(Waits(place.order.id, reason))

    def _nodes(self, place: Place) -> list[NodeView]:
        state: Any = importlib.import_module("ray._private.state")  # Ray has no public call for this by node
        free = state.available_resources_per_node()
        now = time.monotonic()
        on = [each.node_id for each in self._places.values() if each.order.pool == place.order.pool]
        return [
            NodeView(
                node["NodeID"],
                name_of(node["NodeManagerAddress"], node["NodeID"]),
                node["Resources"],
                free.get(node["NodeID"], {}),
                on.count(node["NodeID"]),
                now < self._unfit_until.get(node["NodeID"], 0.0),
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def _ended(self, place: Place) -> None:
        cause = Cause.NODE_UNFIT
        try:
            reason = str(self._ray.get(place.running))
        except Exception as error:  # the actor or its node has ended; Ray's errors have no common base
            if "ModuleNotFoundError" in str(error) and "marserve" in str(error):
                reason = NO_MARSERVE.format(version=__version__)
            else:
                cause, reason = Cause.NODE_LOST, _first_line(error)
        if cause is Cause.NODE_UNFIT and place.ends_at == math.inf:
            self._is_unfit(place)
        self._gone(place, cause, reason)

    def _gone(self, place: Place, cause: Cause, reason: str) -> None:
        self._places.pop(place.order.id, None)
        self._end(place)
        self.say(Gone(place.order.id, cause.value, reason))

    def _end(self, place: Place) -> None:
        """Give the agent's actor and placement group back to Ray."""
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):  # it is gone with its node, or never existed
            if place.actor is not None:
                self._ray.kill(place.actor, no_restart=True)
        with contextlib.suppress(Exception):
            if place.group is not None:
                remove_placement_group(place.group)


def name_of(address: str, node_id: str) -> str:
    """A node's readable name: its address, and the beginning of Ray's id, as `ray list nodes` shows it."""
    return f"{address} ({node_id[:8]})"


def _first_line(error: BaseException) -> str:
    """An error of Ray's in one line: its sentence, not its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else repr(error))[:500]


def main() -> None:
    """Arguments: the server's process id, and the descriptor of the connection to it."""
    if len(sys.argv) != 3:
        sys.exit("marserve.node.ray_program is started by the server")
    die_with_parent(int(sys.argv[1]))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with socket.socket(fileno=int(sys.argv[2])) as sock, contextlib.suppress(BadFrame, OSError):
        Program(sock).run()


if __name__ == "__main__":
    # Under its own name: what Ray sends to nodes must say from where they import it.
    from marserve.node.ray_program import main as run

    run()
