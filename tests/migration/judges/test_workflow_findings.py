"""Workflows in a survey: where a graph is at fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marserve.migration.judges.workflow_findings import find_loop
from support.archives import zip_of
from support.surveys import actions

MANIFEST = {
    "createdOn": "02/01/2020 03:04:06",
    "archiverVersion": "0.2.15",
    "workflow": {"workflowName": "chain", "specFile": "workflow.yaml", "handler": "f.py"},
}


def make_workflow(root: Path, graph: str) -> None:
    """An archive with this graph of functions."""
    functions = b"def a(d, c): ...\ndef b(d, c): ...\ndef c(d, c): ...\n"
    content = {
        "workflow.yaml": f"dag:\n{graph}".encode(),
        "f.py": functions,
        "WAR-INF/MANIFEST.json": json.dumps(MANIFEST).encode(),
    }
    (root / "chain.war").write_bytes(zip_of(content))


@pytest.mark.parametrize(
    ("graph", "line", "said"),
    [
        ("  a: [b]\n  b:\n    - c\n  c:\n    - b\n", 6, "there is a loop: b, then c, then b"),
        ("  a: [b]\n  b: [b]\n", 3, "there is a loop: b, then b"),
        ("  a: [b]\n  b: [a]\n", 3, "there is a loop: a, then b, then a"),
        ("  a: [c]\n  b: [c]\n", 1, "there are 2: a, b"),
    ],
)
def test_a_graph_at_fault_is_found_by_line_and_node(tmp_path: Path, graph: str, line: int, said: str) -> None:
    """The edge that closes a loop; where there is none, the graph."""
    make_workflow(tmp_path, graph)

    ((place, what),) = actions(tmp_path).items()

    assert place == f"chain.war!workflow.yaml:{line}"
    assert said in what


def test_a_graph_without_a_loop_has_none() -> None:
    """Two ways to one node are no loop, and a long chain is walked without recursion."""
    chain = {str(at): [str(at + 1)] for at in range(5000)}

    assert find_loop({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}) == []
    assert find_loop(chain) == []
    assert find_loop({**chain, "5000": ["4998"]}) == ["4998", "4999", "5000"]
