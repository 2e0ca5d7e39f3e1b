"""Reads untrusted YAML: plain data only, bounded in depth and in what its anchors expand to.

Knows nothing of what the keys mean. The caller bounds the file's own size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import yaml

from marserve.errors import BadArchive
from marserve.remarks import Remark

_MAX_DEPTH = 64
_MAX_NODES = 50_000  # with every alias counted as what it stands for


def load_yaml(data: bytes, name: str, warnings: list[Remark] | list[str]) -> Any:
    """The one document in `data`; sentences about repeated keys go to `warnings`, with the file's `name`.

    Raises yaml.YAMLError, UnicodeError, ValueError or OverflowError if it is not YAML; BadArchive for tags that
    would build objects, anchors that contain themselves or expand beyond 50,000 values, more than 64 levels.
    """
    loader = _BoundedLoader(data, name, warnings)
    try:
        return loader.get_single_data()
    except RecursionError:
        raise BadArchive(f"{name} is nested too deeply.") from None
    finally:
        loader.dispose()


@dataclass(frozen=True, slots=True)
class Marked:
    """A value and its place: `line` and `column` of its first character, from 1; `end` is the column after it.

    `key_line` is the line of the key that it belongs to, 0 without one. The `value` of a map is `dict[str, Marked]`,
    its keys as they are written (`1.0` is the text, not a number), that of a list `list[Marked]`. `text` is a scalar as
    it is written, else empty. `is_plain`: without quotes, on one line.
    """

    value: Any
    line: int
    column: int = 1
    end: int = 1
    text: str = ""
    is_plain: bool = False
    key_line: int = 0

    def plain(self) -> Any:
        """The value without places, recursively."""
        if isinstance(self.value, dict):
            return {key: value.plain() for key, value in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


def load_marked_yaml(data: bytes, name: str, warnings: list[Remark] | list[str]) -> Marked | None:
    """As `load_yaml`, with each value's place; None for an empty document."""
    loader = _BoundedLoader(data, name, warnings)
    try:
        node = loader.get_single_node()
        return None if node is None else _mark(loader, node)
    except RecursionError:
        raise BadArchive(f"{name} is nested too deeply.") from None
    finally:
        loader.dispose()


def _mark(loader: _BoundedLoader, node: yaml.Node) -> Marked:
    line, column = node.start_mark.line + 1, node.start_mark.column + 1
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        members = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            members[str(key.value)] = replace(_mark(loader, value), key_line=key.start_mark.line + 1)
        return Marked(members, line, column)
    if isinstance(node, yaml.SequenceNode):
        return Marked([_mark(loader, item) for item in node.value], line, column)
    is_plain = (
        isinstance(node, yaml.ScalarNode)
        and not getattr(node, "style", None)  # of scalars alone, which the types of a loader hide
        and node.end_mark.line == node.start_mark.line
    )
    return Marked(loader.construct_object(node), line, column, node.end_mark.column + 1, str(node.value), is_plain)


class _BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader in Python (its C twin recurses on the C stack), with bounds on depth and on expansion."""

    def __init__(self, data: bytes, name: str, warnings: list[Remark] | list[str]) -> None:
        super().__init__(data)
        self._name, self._warnings = name, warnings
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise BadArchive(f"{self._name} is nested more than {_MAX_DEPTH} deep.")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            self._judge(node)
        return node

    def _judge(self, root: yaml.Node) -> None:
        """Refuse application tags, loops and bombs; note repeated keys. Each node is visited once."""
        sizes: dict[int, int] = {}
        open_nodes: set[int] = set()

        def measure(node: yaml.Node) -> int:
            if id(node) in sizes:
                return sizes[id(node)]
            if id(node) in open_nodes:
                raise BadArchive(f"{self._name} holds an anchor that contains itself.")
            if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
                line = node.start_mark.line + 1 if node.start_mark is not None else 0
                raise BadArchive(f"{self._name} holds the tag {node.tag!r} in line {line}; objects are not built.")
            open_nodes.add(id(node))
            total = 1
            if isinstance(node, yaml.MappingNode):
                self._note_repeated_keys(node)
                total += sum(measure(key) + measure(value) for key, value in node.value)
            elif isinstance(node, yaml.SequenceNode):
                total += sum(measure(item) for item in node.value)
            open_nodes.discard(id(node))
            if total > _MAX_NODES:
                raise BadArchive(f"{self._name} expands to more than {_MAX_NODES} values.")
            sizes[id(node)] = total
            return total

        measure(root)

    def _note_repeated_keys(self, node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    sentence = f"{key.value} stands in {self._name} more than once; the last one counts"
                    self._warnings.append(Remark(sentence, key=key.value))
                seen.add(key.value)
