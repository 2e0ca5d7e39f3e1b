"""Who is compared takes turns, so that nobody has the noise alone."""

from __future__ import annotations

from importlib import import_module


def test_pieces_go_round_and_begin_with_another_each_time() -> None:
    """Whoever comes first after a pause would always be the same otherwise."""
    order: list[str] = []

    seen = import_module("turns").in_turns(["a", "b", "c"], 1, 3, lambda name: order.append(name) or len(order))

    assert order == ["b", "c", "a", "c", "a", "b", "a", "b", "c"]
    assert seen == {"a": [3, 5, 7], "b": [1, 6, 8], "c": [2, 4, 9]}
