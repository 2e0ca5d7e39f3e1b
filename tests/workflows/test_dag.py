"""Graphs of workflows: which can be run, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.errors import BadDag
from marserve.workflows.dag import Dag, Walk


def run(dag: Dag) -> list[str]:
    """The nodes in an order in which they may run."""
    walk, order, ready = Walk(dag), [], [dag.start]
    while ready:
        node = ready.pop(0)
        order.append(node)
        ready += walk.complete(node)
    assert walk.is_complete
    return order


def test_a_diamond_has_a_start_a_leaf_and_parents_in_the_order_of_the_spec() -> None:
    """What follows from the edges."""
    dag = Dag({"pre": ["b", "a"], "a": ["post"], "b": ["post"]})

    assert (dag.start, dag.leaves, dag.nodes) == ("pre", ("post",), ("pre", "b", "a", "post"))
    assert dag.parents == {"pre": (), "b": ("pre",), "a": ("pre",), "post": ("b", "a")}
    assert dag.children == {"pre": ("b", "a"), "b": ("post",), "a": ("post",), "post": ()}


def test_leaves_and_parents_stand_in_the_order_in_which_the_spec_first_names_them() -> None:
    """Whether as a node or behind one: the first that is named comes first, not the first that has followers."""
    dag = Dag({"one": ["late", "early"], "early": ["leaf2", "join"], "late": ["leaf1", "join"]})

    assert dag.nodes == ("one", "late", "early", "leaf2", "join", "leaf1")
    assert dag.leaves == ("leaf2", "join", "leaf1")
    assert dag.parents["join"] == ("late", "early")
    assert run(dag) == ["one", "late", "early", "leaf1", "leaf2", "join"]


def test_a_node_runs_when_the_last_of_its_parents_has_answered() -> None:
    """Not before, and once."""
    walk = Walk(Dag({"pre": ["a", "b"], "a": ["post"], "b": ["post"]}))

    assert walk.complete("pre") == ["a", "b"]
    assert walk.complete("b") == []
    assert walk.complete("a") == ["post"]
    assert not walk.is_complete
    assert walk.complete("post") == []
    assert walk.is_complete


def test_a_graph_is_written_as_torchserve_writes_it() -> None:
    """Nodes with followers, in the order of the spec."""
    assert str(Dag({"prepare": ["add1", "add10"], "add1": ["join"], "add10": ["join"]})) == (
        "{prepare=[add1, add10], add1=[join], add10=[join]}"
    )


def test_a_graph_may_be_one_node() -> None:
    """It is start and leaf."""
    dag = Dag({"only": []})

    assert (dag.start, dag.leaves, run(dag)) == ("only", ("only",), ["only"])


@pytest.mark.parametrize(
    ("edges", "message", "reason"),
    [
        ({"a": ["a"]}, "Self loop exception", "a follows itself"),
        ({"a": ["b", "b"]}, "loop exception", "a leads to the same node twice"),
        ({}, "DAG should have only one start node", "there is none"),
        ({"a": ["c"], "b": ["c"]}, "DAG should have only one start node", "there are 2: a, b"),
        ({"a": ["b"], "b": ["a"]}, "DAG should have only one start node", "every node follows another"),
        ({"p": ["a"], "a": ["b"], "b": ["a"]}, "Not a valid DAG", "there is a loop: a, b wait for each other"),
        ({"p": ["a"], "a": ["b"], "b": ["c"], "c": ["a"]}, "Not a valid DAG", "a, b, c wait"),
    ],
)
def test_a_graph_that_cannot_be_run_is_refused(edges: dict[str, list[str]], message: str, reason: str) -> None:
    """In TorchServe's words, with the nodes beside them."""
    with pytest.raises(BadDag) as caught:
        Dag(edges)

    assert caught.value.message == message
    assert reason in caught.value.reason


@given(st.integers(1, 12).flatmap(lambda n: st.lists(st.tuples(st.integers(0, n), st.integers(0, n)), max_size=40)))
def test_every_graph_is_refused_or_runs_each_node_once_after_its_parents(pairs: list[tuple[int, int]]) -> None:
    """Whatever the edges are."""
    edges: dict[str, list[str]] = {}
    for one, other in pairs:
        edges.setdefault(f"n{one}", []).append(f"n{other}")
    try:
        dag = Dag(edges)
    except BadDag:
        return

    order = run(dag)

    assert sorted(order) == sorted(dag.nodes)
    place = {node: index for index, node in enumerate(order)}
    assert all(place[parent] < place[node] for node in dag.nodes for parent in dag.parents[node])
