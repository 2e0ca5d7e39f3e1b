"""The graph of a workflow, and how far one request has come through it. Pure: without models, clock or bytes.

A graph that can be run has one start node, from which every other is reached, and no loop. Nodes keep the order in
which the spec names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marserve.errors import BadDag


class Dag:
    """A checked graph. `children` and `parents` are of each node, in the spec's order; `leaves` have no children."""

    __slots__ = ("children", "leaves", "nodes", "parents", "start")

    def __init__(self, edges: Mapping[str, Sequence[str]]) -> None:
        """Take the graph whose `edges` lead from each node to the nodes that follow it.

        Raises BadDag, in TorchServe's words: a node that follows itself, an edge that stands twice, no start node or
        several, a loop.
        """
        named = dict.fromkeys(name for node, following in edges.items() for name in (node, *following))
        self.children = {node: tuple(dict.fromkeys(edges.get(node, ()))) for node in named}
        self.nodes = tuple(self.children)
        parents: dict[str, list[str]] = {node: [] for node in self.nodes}
        for node, following in self.children.items():
            if len(following) < len(edges.get(node, ())):
                raise BadDag("loop exception", f"{node} leads to the same node twice")
            if node in following:
                raise BadDag("Self loop exception", f"{node} follows itself")
            for child in following:
                parents[child].append(node)
        self.parents = {node: tuple(before) for node, before in parents.items()}
        self.leaves = tuple(node for node in self.nodes if not self.children[node])
        starts = [node for node in self.nodes if not self.parents[node]]
        if len(starts) != 1:
            none = "every node follows another" if self.nodes else "there is none"
            found = f"there are {len(starts)}: {', '.join(starts)}" if starts else none
            raise BadDag("DAG should have only one start node", found)
        self.start = starts[0]
        self._refuse_loops()

    def _refuse_loops(self) -> None:
        walk = Walk(self)
        ready = [self.start]
        while ready:
            ready += walk.complete(ready.pop())
        if not walk.is_complete:
            left = [node for node in self.nodes if walk.awaits(node)]
            raise BadDag("Not a valid DAG", f"there is a loop: {', '.join(left)} wait for each other")

    def __str__(self) -> str:
        """The graph as TorchServe's describe writes it: `{pre=[m1, m2], m1=[post], m2=[post]}`."""
        lines = (f"{node}=[{', '.join(after)}]" for node, after in self.children.items() if after)
        return "{" + ", ".join(lines) + "}"


class Walk:
    """How far one request has come: which nodes may run, and whether all have."""

    __slots__ = ("_dag", "_left", "_missing")

    def __init__(self, dag: Dag) -> None:
        self._dag = dag
        self._missing = {node: len(before) for node, before in dag.parents.items()}
        self._left = set(dag.nodes)

    def complete(self, node: str) -> list[str]:
        """Note that `node` has answered, once. Returns the nodes that may run now and could not before."""
        self._left.remove(node)
        ready = []
        for child in self._dag.children[node]:
            self._missing[child] -= 1
            if not self._missing[child]:
                ready.append(child)
        return ready

    def awaits(self, node: str) -> bool:
        """Whether `node` has not answered yet."""
        return node in self._left

    @property
    def is_complete(self) -> bool:
        """Whether every node has answered."""
        return not self._left
