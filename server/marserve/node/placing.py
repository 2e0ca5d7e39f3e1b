"""Chooses the node for one more worker, or explains why no node has room. Pure.

The choice is a hint, and Ray decides: Ray knows neither which workers belong to one pool nor whether they should be
spread over many nodes or packed onto few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Placement = Literal["spread", "pack"]

_UNITS = {"CPU": "CPU", "GPU": "GPU", "memory": "bytes of memory"}


@dataclass(frozen=True, slots=True)
class NodeView:
    """One living node: what it has, what of that is free, and how many workers of the pool are on it.

    `is_unfit`: a worker could not start there a moment ago, and the node was the cause.
    """

    id: str
    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    workers: int = 0
    is_unfit: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources reserved for one worker, by Ray's names: `CPU`, `GPU`, `memory` in bytes, and others."""

    amounts: Mapping[str, float] = field(default_factory=dict)

    def fit(self, has: Mapping[str, float]) -> bool:
        """Whether `has` is enough of everything."""
        return all(has.get(name, 0.0) >= amount for name, amount in self.amounts.items())

    def __str__(self) -> str:
        return ", ".join(f"{amount:g} {_UNITS.get(name, name)}" for name, amount in self.amounts.items()) or "nothing"


def choose_node(nodes: Sequence[NodeView], needs: Needs, placement: Placement) -> str | None:
    """The node for the next worker; None if no node has room now.

    `spread`: the one with the fewest workers of the pool, of these the one with the most free CPUs. `pack`: the one
    with the most, of these the one with the fewest free CPUs, so that the others stay free for something large. Nodes
    that are unfit come last.
    """
    fitting = [node for node in nodes if needs.fit(node.free)]
    if not fitting:
        return None
    sign = 1 if placement == "spread" else -1

    def rank(node: NodeView) -> tuple[bool, float, float, str]:
        return node.is_unfit, sign * node.workers, -sign * node.free.get("CPU", 0.0), node.id

    return min(fitting, key=rank).id


def explain(nodes: Sequence[NodeView], needs: Needs) -> str:
    """Why no node has room: what the worker needs, and the node that comes nearest to it."""
    if not nodes:
        return f"it needs {needs}, and the cluster has no living node"
    able = [node for node in nodes if needs.fit(node.total)]
    if not able:
        most = {name: max(node.total.get(name, 0.0) for node in nodes) for name in needs.amounts}
        return f"it needs {needs}; no node has that, the largest of {len(nodes)} has {Needs(most)}"
    if any(needs.fit(node.free) for node in able):
        return f"it needs {needs}, and Ray has not placed it yet"
    free = [f"{node.name} {Needs({name: node.free.get(name, 0.0) for name in needs.amounts})}" for node in able[:3]]
    more = f" and {len(able) - 3} more" if len(able) > 3 else ""
    return f"it needs {needs}; free now: {'; '.join(free)}{more}"
