"""What systemd is told, and what happens where nobody listens."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest

from marserve.app.service_manager import ServiceManager


@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_start_and_a_stop_are_a_datagram_each(is_abstract: bool, tmp_path: Path) -> None:
    """In the words of sd_notify(3), over a socket file or an abstract name."""
    name = f"@{tmp_path}/notify" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name.replace("@", "\0", 1) if is_abstract else name)
        listener.settimeout(5)
        manager = ServiceManager({"NOTIFY_SOCKET": name})

        manager.is_serving("http://127.0.0.1:8080")
        manager.is_stopping(65.5)

        assert listener.recv(4096) == b"READY=1\nSTATUS=Answers at http://127.0.0.1:8080"
        assert listener.recv(4096) == (b"STOPPING=1\nSTATUS=Answers what was accepted\nEXTEND_TIMEOUT_USEC=65500000")
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(4096)


def test_a_manager_that_reads_nothing_holds_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its full socket costs a warning each time, and neither a wait nor a descriptor."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        before = os.listdir("/dev/fd")

        for _ in range(10_000):
            manager.is_serving("http://127.0.0.1:8080")
            if caplog.records:
                break

        assert "which takes no message" in caplog.text
        assert os.listdir("/dev/fd") == before


def test_nothing_is_said_where_nobody_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No variable, no socket, no warning."""
    monkeypatch.setattr(socket, "socket", None)

    for environment in ({}, {"NOTIFY_SOCKET": ""}):
        ServiceManager(environment).is_serving("http://127.0.0.1:8080")

    assert not caplog.records


def test_a_manager_that_is_gone_does_not_end_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The variable is named with its value; serving goes on."""
    with caplog.at_level(logging.WARNING):
        ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")}).is_serving("http://127.0.0.1:8080")

    assert "NOTIFY_SOCKET" in caplog.text
    assert "gone" in caplog.text
