"""Reads a workflow's spec (contract 4.2): which models and functions it is made of, their values, and the graph. Pure.

    models:                   the six keys here are for all models that are written after them
      timeout-ms: 5000
      detect:
        url: detect.mar       an archive, as a registration names it
        batch-size: 4         any of the six once more
    dag:
      prepare: [detect]       a node, and the nodes that get its answer
      detect: [finish]

A node that is not a model is a function of the workflow's handler file. What TorchServe takes is taken, with a warning
if it is odd. For a value that cannot be used TorchServe answers 500; here it is the author's mistake, and is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from marserve.archive.reading.bounded_yaml import load_yaml
from marserve.errors import BadArchive, BadWorkflow
from marserve.workflows.dag import Dag

MAX_BYTES = 1 << 18
# Every function node is a process of its own, every model node at least one.
MAX_NODES = 128
MAX_RETRY_ATTEMPTS = 100
_LARGEST = 2**31 - 1
TOP_KEYS = ("models", "dag")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The six values of a node; times in seconds. `timeout_s` is for each attempt."""

    min_workers: int = 1
    max_workers: int = 1
    batch_size: int = 1
    max_batch_delay_s: float = 0.05
    retry_attempts: int = 1
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the graph. `url` names the archive of a model, None for a function of the handler file."""

    name: str
    url: str | None
    options: NodeOptions

    @property
    def is_function(self) -> bool:
        """Whether it is a function of the handler file."""
        return self.url is None


@dataclass(frozen=True, slots=True)
class WorkflowSpec:
    """A checked spec. `nodes` are those of the graph, in its order; `defaults` are the values for all models."""

    dag: Dag
    nodes: Mapping[str, Node]
    defaults: NodeOptions
    warnings: tuple[str, ...] = ()


# Name in the file, attribute, least and most, how many of the unit make one of ours (0: a count).
OPTION_KEYS: dict[str, tuple[str, int, int, int]] = {
    "min-workers": ("min_workers", 0, 4096, 0),
    "max-workers": ("max_workers", 0, 4096, 0),
    "batch-size": ("batch_size", 1, 65_536, 0),
    "max-batch-delay": ("max_batch_delay_s", 0, 3_600_000, 1000),
    "retry-attempts": ("retry_attempts", 0, MAX_RETRY_ATTEMPTS, 0),
    "timeout-ms": ("timeout_s", 1, _LARGEST, 1000),
}


def parse_spec(data: bytes, name: str = "workflow.yaml") -> WorkflowSpec:
    """The spec in the YAML text `data`; `name` stands in messages.

    Raises BadWorkflow for text that is not YAML or has impossible values, BadDag for a graph that cannot be run.
    """
    if len(data) > MAX_BYTES:
        raise BadWorkflow(f"{name} has more than {MAX_BYTES} bytes.")
    warnings: list[str] = []
    document = _load(data, name, warnings)
    if not isinstance(document, dict):
        raise BadWorkflow(f"{name} must hold the keys models and dag.")
    warnings += [f"{key} is no key of a workflow's spec" for key in document if key not in TOP_KEYS]
    models, defaults = _read_models(document.get("models"), name, warnings)
    dag = Dag(_read_edges(document.get("dag"), name))
    if len(dag.nodes) > MAX_NODES:
        raise BadWorkflow(f"{name} has {len(dag.nodes)} nodes; at most {MAX_NODES} are allowed.")
    function = dataclasses.replace(defaults, min_workers=1, max_workers=1, batch_size=1, max_batch_delay_s=0.0)
    nodes = {node: models.get(node) or Node(node, None, function) for node in dag.nodes}
    for node in nodes.values():
        if node.is_function and not node.name.isidentifier():
            raise BadWorkflow(
                f"Node {node.name!r} of {name} is neither a model nor the name of a function: declare it under models, "
                "or name a function of the handler file."
            )
    unused = [model for model in models if model not in nodes]
    warnings += [f"model {model} is in no edge of the graph, and is not registered" for model in unused]
    return WorkflowSpec(dag, nodes, defaults, tuple(warnings))


def _load(data: bytes, name: str, warnings: list[str]) -> Any:
    try:
        return load_yaml(data, name, warnings)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise BadWorkflow("Failed to parse yaml.", f"{name} is no YAML{where}") from None
    except (UnicodeError, ValueError, OverflowError):
        raise BadWorkflow("Failed to parse yaml.", f"{name} is no YAML") from None
    except BadArchive as error:
        raise BadWorkflow("Failed to parse yaml.", error.message) from None


def _read_models(section: object, name: str, warnings: list[str]) -> tuple[dict[str, Node], NodeOptions]:
    """The models, and the values for all of them; those apply only to models that are written after them."""
    models: dict[str, Node] = {}
    defaults = NodeOptions()
    if section is None:
        return models, defaults
    if not isinstance(section, dict):
        raise BadWorkflow(f"models of {name} must hold models by their names, not {_shown(section)}.")
    for key, value in section.items():
        if key in OPTION_KEYS:
            defaults = _set(defaults, key, value, f"models of {name}", warnings)
        else:
            model = _name(key, f"models of {name}")
            models[model] = _read_model(model, value, defaults, name, warnings)
    return models, defaults


def _read_model(model: str, section: object, defaults: NodeOptions, name: str, warnings: list[str]) -> Node:
    where = f"model {model} of {name}"
    if not isinstance(section, dict):
        raise BadWorkflow(f"{where} is {_shown(section)}; it must hold the key url, and may hold {_KEYS}.")
    url = section.get("url")
    if not isinstance(url, str) or not url:
        raise BadWorkflow(f"{where} needs the key url, the name of its archive.")
    options = defaults
    for key, value in section.items():
        if key in OPTION_KEYS:
            options = _set(options, key, value, where, warnings)
        elif key != "url":
            warnings.append(f"{where} has the key {_shown(key)}, which is not used; it may hold url, {_KEYS}")
    if options.max_workers < options.min_workers:
        warnings.append(
            f"min-workers of {where} is {options.min_workers} and max-workers {options.max_workers}, which is how many "
            "there are"
        )
    return Node(model, url, options)


_KEYS = ", ".join(OPTION_KEYS)


def _set(options: NodeOptions, key: str, value: object, where: str, warnings: list[str]) -> NodeOptions:
    """The options with one more value. One that is too small becomes the least, as far as TorchServe takes it."""
    attribute, least, most, per_unit = OPTION_KEYS[key]
    if type(value) is int and value < least and key != "timeout-ms":
        warnings.append(f"{key} in {where} is {value}, which counts as {least}")
        value = least
    if type(value) is not int or not least <= value <= most:
        raise BadWorkflow(f"{key} in {where} is {_shown(value)}; it must be a whole number from {least} to {most}.")
    changed: dict[str, Any] = {attribute: value / per_unit if per_unit else value}
    return dataclasses.replace(options, **changed)


def _read_edges(section: object, name: str) -> dict[str, list[str]]:
    if not isinstance(section, dict):
        raise BadWorkflow(f"{name} has no graph: dag must hold nodes, each with the list of those that follow it.")
    edges: dict[str, list[str]] = {}
    for key, following in section.items():
        node = _name(key, f"dag of {name}")
        if following is None:
            following = []
        if not isinstance(following, list):
            raise BadWorkflow(f"Node {node} in dag of {name} is {_shown(following)}; it must be a list of nodes.")
        edges[node] = [_name(child, f"dag of {name}") for child in following]
    return edges


def _name(key: object, where: str) -> str:
    if not isinstance(key, str) or not key:
        raise BadWorkflow(f"{_shown(key)} in {where} is no name; write it as text.")
    return key


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
