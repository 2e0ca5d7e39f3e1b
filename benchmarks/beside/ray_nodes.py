"""A Ray cluster of some nodes on this machine, told by lines on standard input what to do; answers are lines of JSON.

`add CPUS [NAME=AMOUNT…] [$VARIABLE=VALUE…]` adds a node, `kill ID` ends one as a machine ends that loses its power; the
beginning of its id is enough. At the end of the input everything that was started is ended.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

OBJECT_STORE_BYTES = 80_000_000
# How long the parts of a node may take to find each other: Ray's 30 s are too few on a busy machine.
START_S = 90


def main() -> None:
    """Serve until standard input ends."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(START_S))
    os.environ.setdefault("RAY_worker_register_timeout_seconds", str(START_S))
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(START_S * 1000))
    from ray.cluster_utils import Cluster

    wait_longer_for_nodes()
    say_ports_before_agents_do()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "runtime_env_agent_port": free_port(),
        },
    )
    nodes: list[Any] = []
    say({"address": cluster.address})
    try:
        for line in sys.stdin:
            word, *more = line.split()
            if word == "add":
                named = dict(each.split("=", 1) for each in more[1:])
                node = cluster.add_node(
                    num_cpus=int(more[0]),
                    object_store_memory=OBJECT_STORE_BYTES,
                    resources={name: float(much) for name, much in named.items() if name[0] != "$"},
                    env_vars={name[1:]: value for name, value in named.items() if name[0] == "$"},
                    runtime_env_agent_port=free_port(),
                )
                nodes.append(node)
                say({"node": node.node_id})
            elif word == "kill":
                node = next(each for each in nodes if each.node_id.startswith(more[0]))
                pids = [each.process.pid for kind in node.all_processes.values() for each in kind]
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                say({"killed": pids})
                nodes.remove(node)
                cluster.remove_node(node, allow_graceful=False)
    finally:
        cluster.shutdown()


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def say_ports_before_agents_do() -> None:
    """Have a raylet find at once the files in which its agents name their ports.

    It waits 15 s for each and then aborts, and on a busy machine an agent imports for longer
    (https://github.com/ray-project/ray/issues/65983). -1 is what the agents of a Ray without its dashboard write.
    """
    from ray._private import services

    start_raylet, takes = services.start_raylet, inspect.signature(services.start_raylet)

    def start_raylet_at_once(*words: Any, **named: Any) -> Any:
        told = takes.bind(*words, **named).arguments
        for name in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
            Path(told["session_dir"], f"{name}_{told['node_id']}").write_text("-1")
        return start_raylet(*words, **named)

    services.start_raylet = start_raylet_at_once


def wait_longer_for_nodes() -> None:
    """Give a node `START_S` to appear: Ray has no setting for its two waits of 30 s."""
    from ray._private import services

    get_node, wait_for_node = services.get_node, services.wait_for_node

    def get_node_patiently(*words: Any, **named: Any) -> Any:
        end = time.monotonic() + START_S
        while True:
            try:
                return get_node(*words, **named)
            except RuntimeError:  # not there yet
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def wait_for_node_patiently(gcs_address: str, socket: str, _timeout: float = 0) -> None:
        wait_for_node(gcs_address, socket, START_S)

    services.get_node = get_node_patiently
    services.wait_for_node = wait_for_node_patiently


def say(document: object) -> None:
    """One line for whoever asked."""
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
