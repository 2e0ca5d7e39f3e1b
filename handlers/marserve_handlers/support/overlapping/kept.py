"""What the steps of a handler share, found in the source of its class."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from marserve_handlers.base import BaseHandler

# What runs after `preprocess`, and so for another batch than it at the same time.
LATER_STEPS = ("inference", "postprocess", "explain_handle", "get_insights", "describe_handle")
# Calls that change what an attribute holds.
_CHANGES = frozenset(
    (
        "append",
        "add",
        "appendleft",
        "clear",
        "extend",
        "insert",
        "pop",
        "popitem",
        "put",
        "remove",
        "setdefault",
        "update",
    )
)


def kept_between(cls: type[Any]) -> list[str] | None:
    """The attributes that `preprocess` changes and a later step uses, or the other way round, sorted.

    Found in the source of the class and of its bases below `BaseHandler`, with the methods that the steps call; names
    of a module are `global NAME`. What other objects hold, and what they change in each other, is not seen. None if a
    source cannot be read.
    """
    methods: dict[str, list[_Method]] = {}
    for each in cls.__mro__:
        if each is BaseHandler or not issubclass(each, BaseHandler):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError, SyntaxError):
            return None
        for node in tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.args:
                methods.setdefault(node.name, []).append(_Method(node))
    first, later = _used_by(methods, ("preprocess",)), _used_by(methods, LATER_STEPS)
    return sorted((first.written & (later.read | later.written)) | (later.written & (first.read | first.written)))


class _Method:
    """The attributes of its own object that a method reads, writes and calls."""

    def __init__(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()
        own, names = node.args.args[0].arg, set[str]()
        for each in ast.walk(node):
            if isinstance(each, ast.Global):
                names.update(each.names)
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == own:
                if isinstance(each.ctx, ast.Load):
                    self.read.add(each.attr)
                elif each.attr != "context":  # one context serves both threads
                    self.written.add(each.attr)
            elif isinstance(each, ast.Subscript | ast.Attribute) and not isinstance(each.ctx, ast.Load):
                self.written.update(_root(each, own))
            elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in _CHANGES:
                self.written.update(_root(each.func.value, own))
            elif isinstance(each, ast.Name) and each.id in names:
                (self.read if isinstance(each.ctx, ast.Load) else self.written).add(f"global {each.id}")


def _root(node: ast.expr, own: str) -> list[str]:
    """The attribute of the object that an expression like `self.a[0].b` begins with."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        inner = node.value
        if isinstance(node, ast.Attribute) and isinstance(inner, ast.Name):
            return [node.attr] if inner.id == own else []
        node = inner
    return []


class _Used:
    """What some methods use, with all that they call."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()


def _used_by(methods: Mapping[str, list[_Method]], steps: Sequence[str]) -> _Used:
    used, waiting, seen = _Used(), list(steps), set(steps)
    while waiting:
        for method in methods.get(waiting.pop(), ()):
            used.read |= method.read
            used.written |= method.written
            found = method.read & methods.keys() - seen
            seen |= found
            waiting += found
    return used
