"""Marking functions that will go away."""

from __future__ import annotations

import pytest

from marserve_handlers.support.torchserve.deprecation import deprecated


def test_each_call_warns_and_works() -> None:
    """With the version, the replacement, and the author's class of warning."""

    @deprecated("2.0", "other", DeprecationWarning)
    def old(x: int) -> int:
        return x + 1

    with pytest.warns(DeprecationWarning, match=r"old goes away in version 2\.0; use other instead"):
        assert old(1) == 2


def test_without_a_replacement_none_is_named() -> None:
    """And the class is the quietest."""

    @deprecated("2.0")
    def old() -> None:
        pass

    with pytest.warns(PendingDeprecationWarning, match=r"version 2\.0$"):
        old()
