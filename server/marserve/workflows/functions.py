"""Finds the functions of a graph that its handler file lacks, by its source. Does not run it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence


def missing_functions(names: Sequence[str], source: bytes) -> list[str]:
    """The `names` that a module with this source does not define, import or assign at its top.

    Empty if that cannot be known without running it: source that is not Python of this version, `import *`, a module's
    `__getattr__`, and names that are put into `globals()`.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = set(_bound(tree.body))
    if found & {"*", "__getattr__"} or b"globals" in source or b"exec" in source:
        return []
    return [name for name in names if name not in found]


def _bound(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that these statements bind in a module, those of its branches included."""
    for statement in statements:
        yield from _bound_by(statement)
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for node in ast.walk(statement):
                yield from _bound_by(node)


def _bound_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
