"""Where a load is sent, with which key and trust."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marserve.cli.measuring.load_target import target_at


def test_an_address_becomes_a_host_a_port_and_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that listens on all addresses is called on loopback; a socket is a file."""
    monkeypatch.chdir(tmp_path)

    everywhere = target_at("http://0.0.0.0:8080", "my model", "1.0/2")
    prefixed = target_at("http://models.example/marserve/", "m", None)
    socket = target_at("unix:/run/m.sock", "m", None)

    assert (everywhere.host, everywhere.port, everywhere.tls) == ("127.0.0.1", 8080, None)
    assert everywhere.path == "/predictions/my%20model/1.0%2F2"
    assert (prefixed.host, prefixed.port, prefixed.path) == ("models.example", 80, "/marserve/predictions/m")
    assert (socket.socket, socket.path, socket.tls) == ("/run/m.sock", "/predictions/m", None)


def test_the_key_of_this_folder_is_for_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for every command; the variable's key is for all."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key_file.json").write_text(json.dumps({"inference": {"key": "local"}}))

    assert target_at("http://127.0.0.1:8080", "m", None).headers == (("authorization", "Bearer local"),)
    assert target_at("http://[::1]:8080", "m", None).headers == (("authorization", "Bearer local"),)
    assert target_at("http://models.example", "m", None).headers == ()
    monkeypatch.setenv("MARSERVE_TOKEN", "all")
    assert target_at("http://models.example", "m", None).headers == (("authorization", "Bearer all"),)


def test_https_is_verified_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the system trusts."""
    monkeypatch.chdir(tmp_path)

    target = target_at("https://models.example", "m", None)

    assert target.port == 443
    assert target.tls is not None
    assert target.tls.check_hostname
