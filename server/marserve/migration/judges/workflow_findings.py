"""Judges one workflow's archive: reads it as the server does, and its graph by line and node. Runs nothing of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from marserve.archive.contents.workflow_manifest import read_workflow_manifest
from marserve.archive.reading.bounded_yaml import Marked, load_marked_yaml
from marserve.archive.reading.reader import Limits, unpack
from marserve.errors import BadDag, MarserveError
from marserve.migration.findings import Finding, Spot
from marserve.migration.judges.source_findings import judge_source
from marserve.migration.layout import Layout
from marserve.migration.overview import Overview, judge_location
from marserve.workflows.intake import WorkflowIntake


def judge_workflow(file: Path, scratch: Path, shown: str, overview: Overview, layout: Layout) -> Iterator[Finding]:
    """All findings about one workflow's archive; `scratch` is a folder that the caller deletes."""
    try:
        unpacked = WorkflowIntake(file.parent, scratch, Limits()).take_in(file.name)
    except BadDag as error:
        yield _place_in_graph(file, scratch / "graph", shown, error)
        return
    except MarserveError as error:
        yield Spot(shown).action(error.message, "mend the workflow's archive")
        return
    spec_file = unpacked.manifest.spec_file
    found = [Spot(shown).differs(warning) for warning in unpacked.warnings]
    lines = _lines(unpacked.folder / spec_file)
    for node in unpacked.spec.nodes.values():
        if node.url is not None:
            line = next((at for at, text in enumerate(lines, 1) if node.url in text), 0)
            spot = Spot(f"{shown}!{spec_file}", line)
            found += judge_location(node.url, f"node {node.name}", spot, layout, overview.allowed_urls)
    for path in sorted(unpacked.folder.rglob("*.py")):
        found += judge_source(path, unpacked.folder, shown, {})
    yield from found
    if not any(each.verdict == "action" for each in found):
        yield Spot(shown).works(f"workflow {unpacked.manifest.workflow_name or file.stem}")


def find_loop(edges: Mapping[str, Sequence[str]]) -> list[str]:
    """Nodes of a loop, in order; empty without a loop."""
    finished: set[str] = set()
    for start in edges:
        path: dict[str, None] = {}
        ahead = [iter([start])]
        while ahead:
            node = next(ahead[-1], None)
            if node is None:
                ahead.pop()
                if path:
                    finished.add(path.popitem()[0])
            elif node in path:
                return list(path)[list(path).index(node) :]
            elif node not in finished:
                path[node] = None
                ahead.append(iter(edges.get(node, ())))
    return []


def _place_in_graph(file: Path, folder: Path, shown: str, error: BadDag) -> Finding:
    """A finding on the line of the edge that closes a loop, with its nodes; else on the graph's first line."""
    unpack(file, folder)
    spec_file = read_workflow_manifest(folder).spec_file
    dag = _marked_dag(folder / spec_file)
    place, fix = f"{shown}!{spec_file}", "mend the graph"
    if dag is None:
        return Spot(place).action(error.message, fix)
    children = {name: node.value if isinstance(node.value, list) else [] for name, node in dag.value.items()}
    loop = find_loop({name: [str(child.value) for child in following] for name, following in children.items()})
    if not loop:
        return Spot(place, dag.key_line).action(f"{error.message}: {error.reason}", fix)
    line = next(child.line for child in children[loop[-1]] if str(child.value) == loop[0])
    said = f"there is a loop: {', then '.join([*loop, loop[0]])}"
    return Spot(place, line).action(said, f"take {loop[0]} out of what follows {loop[-1]}")


def _marked_dag(path: Path) -> Marked | None:
    try:
        document = load_marked_yaml(path.read_bytes(), path.name, [])
    except (yaml.YAMLError, MarserveError, ValueError, OSError):
        return None
    dag = document.value.get("dag") if document is not None and isinstance(document.value, dict) else None
    return dag if dag is not None and isinstance(dag.value, dict) else None


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8", "replace").splitlines()
