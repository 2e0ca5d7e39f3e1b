"""Keys as terminals send them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.cli.top.terminal import keys_in


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B", ["up", "down"]),
        (b"\x1bOA", ["up"]),
        (b"\x1b", ["escape"]),
        (b"e\x1b[Bq", ["e", "down", "q"]),
        (b"\x1b[5~y", ["y"]),  # page up
        (b"\x1b[1;5A", []),  # with Ctrl
        (b"\x1b[", []),  # cut off
        (b"\r\n\t\x00", []),
        ("ü".encode(), ["ü"]),
        (b"\xff", []),
    ],
)
def test_keys_are_read_from_what_the_terminal_sent(data: bytes, keys: list[str]) -> None:
    """Those without a meaning are left out, and never taken for letters."""
    assert keys_in(data) == keys


@given(st.binary(max_size=50))
def test_anything_that_is_typed_can_be_read(data: bytes) -> None:
    """It ends, and gives printable keys."""
    assert all(key.isprintable() and key for key in keys_in(data))
