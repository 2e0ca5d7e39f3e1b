"""Which process listens on a port."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from marserve.api.port_holder import holder_of


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_listening_process_is_found_with_its_command(family: socket.AddressFamily, host: str) -> None:
    """On IPv4 and IPv6."""
    with socket.socket(family) as sock:
        try:
            sock.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        sock.listen()

        found = holder_of(sock.getsockname()[1])

    assert found is not None
    assert found[0] == os.getpid()
    assert "python" in found[1] or "pytest" in found[1]


def test_a_free_port_has_no_holder() -> None:
    """A bound socket that does not listen holds none either."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))

        assert holder_of(sock.getsockname()[1]) is None
