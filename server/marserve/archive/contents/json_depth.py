"""How deep a JSON document is nested. Pure."""

from __future__ import annotations


def is_deeper(document: object, most: int) -> bool:
    """Whether lists and objects of a document lie more than `most` deep in each other. It does not recurse."""
    level = [document]
    for _ in range(most):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
