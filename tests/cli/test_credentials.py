"""Which key a command sends, and to whom."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from marserve.cli.credentials import Credentials
from marserve.cli.remote import Inference, Management


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a server's key file, and no key in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MARSERVE_TOKEN", raising=False)
    write_keys(tmp_path / "key_file.json")
    return tmp_path


def write_keys(file: Path, suffix: str = "") -> None:
    """Keys named for their kinds."""
    file.write_text(json.dumps({kind: {"key": f"{kind}{suffix}"} for kind in ("management", "inference", "API")}))


def sent(auth: httpx.Auth) -> str | None:
    """The header of a request."""
    request = next(auth.sync_auth_flow(httpx.Request("GET", "http://127.0.0.1/")))
    return request.headers.get("authorization")


def test_each_api_is_sent_its_key_of_the_folders_file(here: Path) -> None:
    """And the key of now, for they are renewed."""
    inference = Credentials("inference", is_local=True)

    assert sent(inference) == "Bearer inference"
    assert sent(Credentials("management", is_local=True)) == "Bearer management"
    write_keys(here / "key_file.json", "2")
    assert sent(inference) == "Bearer inference2"


def test_the_file_is_where_the_settings_say(here: Path) -> None:
    """Relative to the folder."""
    (here / "config.properties").write_text("token_file=run/keys.json\n")
    (here / "run").mkdir()
    write_keys(here / "run" / "keys.json", " of run")

    assert sent(Credentials("inference", is_local=True)) == "Bearer inference of run"


def test_the_variable_goes_before_the_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the server is."""
    monkeypatch.setenv("MARSERVE_TOKEN", "mine")

    assert sent(Credentials("inference", is_local=True)) == "Bearer mine"
    assert sent(Credentials("inference", is_local=False)) == "Bearer mine"


def test_another_machine_is_never_sent_a_key_of_this_folder(here: Path) -> None:
    """It may be anybody's."""
    assert sent(Credentials("management", is_local=False)) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"inference": 1}'])
def test_a_file_that_holds_no_key_is_as_none(here: Path, content: str) -> None:
    """The server then says what it needs."""
    (here / "key_file.json").write_text(content)

    assert sent(Credentials("inference", is_local=True)) is None


def test_each_listener_uses_its_own_kind(here: Path) -> None:
    """The inference address gets no management key."""
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(200, json={})

    for listener in (Inference, Management):
        with listener("http://127.0.0.1:1", httpx.MockTransport(answer)) as server:
            server.ask("GET", "/")

    assert seen == ["Bearer inference", "Bearer management"]
