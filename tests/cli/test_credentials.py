"""Which key a command sends, and to whom."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import httpx
import pytest

from marserve.api.tls import Identity, make_up_identity, server_context
from marserve.cli.credentials import Credentials, local_trust
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


def agree(identity: Identity) -> str | None:
    """Let a command shake hands with this server; returns why it does not believe it, None if it does."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context(identity).wrap_bio(to_server, to_client, server_side=True)
    client = local_trust().wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return str(error.verify_message)
    return None


def write_keystore(file: Path, identity: Identity) -> None:
    """The identity as a PKCS12 keystore with the password `changeit`."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    pkcs12 = pytest.importorskip("cryptography.hazmat.primitives.serialization.pkcs12")
    x509 = pytest.importorskip("cryptography.x509")
    key = serialization.load_pem_private_key(identity.key_pem, None)
    certificate = x509.load_pem_x509_certificate(identity.chain_pem)
    secret = serialization.BestAvailableEncryption(b"changeit")
    file.write_bytes(pkcs12.serialize_key_and_certificates(b"server", key, certificate, None, secret))


def test_the_certificate_that_the_settings_name_is_believed_and_no_other(here: Path) -> None:
    """In PEM or in a keystore, which goes first, as in the server."""
    named, other = make_up_identity(["127.0.0.1"]), make_up_identity(["127.0.0.1"])
    (here / "cert.pem").write_bytes(named.chain_pem)
    (here / "key.pem").write_bytes(named.key_pem)
    write_keystore(here / "other.p12", other)
    lines = "inference_address=https://127.0.0.1:8080\ncertificate_file=cert.pem\nprivate_key_file=key.pem\n"

    (here / "config.properties").write_text(lines)
    assert agree(named) is None
    assert agree(other) is not None

    (here / "config.properties").write_text(lines + "keystore=other.p12\n")
    assert agree(other) is None
    assert agree(named) is not None


def test_a_certificate_that_the_server_makes_up_is_believed(here: Path) -> None:
    """Nobody can know it, and without it `marserve start` would wait for a server that is there."""
    made_up = make_up_identity(["127.0.0.1"])

    assert agree(made_up) is not None
    (here / "config.properties").write_text("inference_address=https://127.0.0.1:8080\n")
    assert agree(made_up) is None
