"""A Ray cluster of some nodes on this machine, told by lines on standard input what to do; answers are lines of JSON.

`add CPUS [NAME=AMOUNT…] [$VARIABLE=VALUE…]` adds a node, `kill ID` ends one as a machine ends that loses its power; the
beginning of its id is enough. At the end of the input everything that was started is ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

OBJECT_STORE_BYTES = 80_000_000


def main() -> None:
    """Serve until standard input ends."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False},
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


def say(document: object) -> None:
    """One line for whoever asked."""
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
