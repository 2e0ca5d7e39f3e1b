"""Tests for the choice of a node, and for the sentence when there is none."""

from __future__ import annotations

from dataclasses import replace

from marserve.node.placing import Needs, NodeView, choose_node, explain


def node(name: str, cpus: float, free: float, workers: int = 0, **more: float) -> NodeView:
    """A node with so many CPUs, of which some are free."""
    return NodeView(name, name, {"CPU": cpus, **more}, {"CPU": free, **more}, workers)


ONE = Needs({"CPU": 1.0})


def test_spread_takes_the_node_with_the_fewest_workers_of_the_pool() -> None:
    """However much is free elsewhere."""
    nodes = [node("a", 64, 60, workers=2), node("b", 4, 1, workers=1), node("c", 64, 0)]

    assert choose_node(nodes, ONE, "spread") == "b"


def test_spread_takes_the_emptiest_of_those_alike() -> None:
    """Most free CPUs."""
    assert choose_node([node("a", 8, 2), node("b", 8, 6)], ONE, "spread") == "b"


def test_pack_takes_the_fullest_that_has_room() -> None:
    """First where the pool is already, then where the least is free."""
    nodes = [node("a", 8, 2), node("b", 8, 6), node("c", 8, 7, workers=1), node("d", 8, 0, workers=9)]

    assert choose_node(nodes, ONE, "pack") == "c"
    assert choose_node(nodes[:2], ONE, "pack") == "a"


def test_a_node_on_which_none_could_start_comes_last() -> None:
    """Whatever speaks for it; where there is no other, it is tried again."""
    nodes = [replace(node("a", 64, 60), is_unfit=True), node("b", 4, 1, workers=9)]

    assert choose_node(nodes, ONE, "spread") == "b"
    assert choose_node(nodes, ONE, "pack") == "b"
    assert choose_node(nodes[:1], ONE, "spread") == "a"


def test_nothing_is_chosen_where_anything_is_missing() -> None:
    """Each resource counts."""
    needs = Needs({"CPU": 1.0, "GPU": 1.0})

    assert choose_node([node("a", 8, 8)], needs, "spread") is None
    assert choose_node([node("a", 8, 8, GPU=0.5), node("b", 8, 0.5, GPU=1)], needs, "pack") is None
    assert choose_node([node("a", 8, 8, GPU=1)], needs, "pack") == "a"


def test_the_reason_says_what_is_asked_for_and_what_there_is() -> None:
    """Whoever reads it knows whether to wait or to ask for less."""
    needs = Needs({"CPU": 4.0, "GPU": 1.0})
    small, busy = node("a", 2, 2), node("b", 8, 1, GPU=1)

    assert explain([], ONE) == "it needs 1 CPU, and the cluster has no living node"
    assert explain([small], needs) == "it needs 4 CPU, 1 GPU; no node has that, the largest of 1 has 2 CPU, 0 GPU"
    assert explain([small, busy], needs) == "it needs 4 CPU, 1 GPU; free now: b 1 CPU, 1 GPU"
    assert explain([node("a", 2, 2)], ONE) == "it needs 1 CPU, and Ray has not placed it yet"
