"""Management that nothing protects stays on this machine where the settings say so, and the log says how to open it."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.errors import BadSettings
from marserve.settings import Entry, Settings, load_settings
from marserve.settings.open_management import shares_its_port
from marserve.settings.snapshot_files import effective_properties

OPEN = {
    "inference_address": "http://0.0.0.0:8080",
    "management_address": "http://0.0.0.0:8081",
    "grpc_management_address": "0.0.0.0",
    "unprotected_management": "loopback",
    "disable_token_authorization": "true",
}


def load(here: Path, entry: Entry = "torchserve", environment: dict[str, str] | None = None, **keys: str) -> Settings:
    """Settings of a container that is open but for these keys."""
    lines = {"model_store": "."} | OPEN | keys
    (here / "config.properties").write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
    return load_settings(entry, {}, environment or {}, here)


@pytest.mark.parametrize("entry", ["torchserve", "marserve"])
def test_management_that_nothing_protects_listens_on_loopback(tmp_path: Path, entry: Entry) -> None:
    """Over HTTP and gRPC; predictions stay open."""
    settings = load(tmp_path, entry)

    assert str(settings.management_address) == "http://127.0.0.1:8081"
    assert settings.grpc_management_address == "127.0.0.1"
    assert str(settings.inference_address) == "http://0.0.0.0:8080"
    assert not settings.warnings


def test_the_log_names_both_ways_to_open_it(tmp_path: Path) -> None:
    """And what was asked for, and who switched tokens off."""
    notes = " ".join(load(tmp_path).notes)

    assert "listens on http://127.0.0.1:8081 and not on http://0.0.0.0:8081" in notes
    assert "listens on 127.0.0.1:7071 and not on 0.0.0.0:7071" in notes
    assert "set by config.properties, line " in notes
    assert "disable_token_authorization=false" in notes
    assert "MARSERVE_ALLOW_OPEN_MANAGEMENT=true" in notes


@pytest.mark.parametrize(
    ("keys", "environment"),
    [
        ({"disable_token_authorization": "false"}, {}),
        ({"allow_open_management": "true"}, {}),
        ({}, {"MARSERVE_ALLOW_OPEN_MANAGEMENT": "true"}),
    ],
)
def test_management_that_is_protected_listens_where_it_is_told(
    tmp_path: Path, keys: dict[str, str], environment: dict[str, str]
) -> None:
    """By keys, or by something else."""
    settings = load(tmp_path, environment=environment, **keys)

    assert str(settings.management_address) == "http://0.0.0.0:8081"
    assert settings.grpc_management_address == "0.0.0.0"
    assert not any("MARSERVE_ALLOW_OPEN_MANAGEMENT" in note for note in settings.notes)


def test_a_snapshot_remembers_where_management_was_to_listen(tmp_path: Path) -> None:
    """A start from it in a container that protects management opens it again."""
    written = effective_properties(load(tmp_path), {}, "1")

    assert written["management_address"] == "http://0.0.0.0:8081"


def test_an_address_of_ipv6_moves_to_loopback_of_ipv6(tmp_path: Path) -> None:
    """So that a machine without IPv4 starts."""
    settings = load(tmp_path, management_address="http://[::]:8081", grpc_management_address="::")

    assert str(settings.management_address) == "http://[::1]:8081"
    assert settings.grpc_management_address == "::1"


def test_what_is_on_loopback_already_needs_no_word(tmp_path: Path) -> None:
    """Nothing moves, nothing is said."""
    settings = load(tmp_path, management_address="unix:/run/management", grpc_management_address="127.0.0.1")

    assert str(settings.management_address) == "unix:/run/management"
    assert not any("MARSERVE_ALLOW_OPEN_MANAGEMENT" in note for note in settings.notes)


@pytest.mark.parametrize("other", ["inference_address", "metrics_address"])
def test_an_address_that_others_share_stays(tmp_path: Path, other: str) -> None:
    """Who calls is looked at there, request by request."""
    settings = load(tmp_path, management_address="http://0.0.0.0:8085", **{other: "http://0.0.0.0:8085"})

    assert str(settings.management_address) == "http://0.0.0.0:8085"
    assert settings.management_is_kept_here
    assert shares_its_port(settings)
    assert any("which other APIs share, answers callers on this machine alone" in n for n in settings.notes)


def test_without_the_key_an_open_management_refuses_the_start(tmp_path: Path) -> None:
    """As everywhere but in an image."""
    with pytest.raises(BadSettings, match="MARSERVE_ALLOW_OPEN_MANAGEMENT=true"):
        load(tmp_path, "marserve", unprotected_management="refuse")
