"""Tests for the address of a listener."""

from __future__ import annotations

import pytest

from marserve.api.sockets import bind


def test_a_port_is_bound_to_the_address_that_was_given() -> None:
    """A number of 0 is chosen; one on which another listens is the system's error."""
    with bind("127.0.0.1", 0) as sock:
        host, number = sock.getsockname()
        sock.listen()
        with pytest.raises(OSError, match="in use"):
            bind(host, number)

    assert (host, number > 0) == ("127.0.0.1", True)
