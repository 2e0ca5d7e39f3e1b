"""Which certificate the listeners have, who is asked for a key, and what becomes of the file of keys."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from marserve.api.tls import Identity, make_up_identity
from marserve.app.access import listeners_identity, prepare_access
from marserve.app.cannot_start import CannotStart
from marserve.errors import BadSettings, InvalidToken
from marserve.settings import Settings, load_settings

HTTPS = "inference_address=https://127.0.0.1:8443\n"


@pytest.fixture(scope="module")
def identity() -> Identity:
    """A certificate and its key."""
    return make_up_identity(["localhost"])


def load(here: Path, lines: str) -> Settings:
    """Settings from these lines."""
    (here / "config.properties").write_text(f"model_store=.\n{lines}")
    return load_settings("marserve", {}, {}, here)


def test_a_certificate_is_looked_for_only_where_an_address_is_https(tmp_path: Path, identity: Identity) -> None:
    """Files that are named beside http addresses are not opened."""
    (tmp_path / "cert.pem").write_bytes(b"")
    (tmp_path / "key.pem").write_bytes(b"")

    assert listeners_identity(load(tmp_path, "certificate_file=cert.pem\nprivate_key_file=key.pem\n")) is None


def test_a_keystore_goes_before_files_and_files_before_a_made_up_certificate(
    tmp_path: Path, identity: Identity
) -> None:
    """As TorchServe has it."""
    (tmp_path / "cert.pem").write_bytes(identity.chain_pem)
    (tmp_path / "key.pem").write_bytes(identity.key_pem)
    (tmp_path / "keys.p12").write_bytes(b"no keystore")
    files = HTTPS + "certificate_file=cert.pem\nprivate_key_file=key.pem\n"

    assert listeners_identity(load(tmp_path, files)) == identity
    made_up = listeners_identity(load(tmp_path, HTTPS))
    assert made_up is not None
    assert made_up != identity
    with pytest.raises(BadSettings, match="no PKCS12 keystore"):
        listeners_identity(load(tmp_path, f"{files}keystore=keys.p12\n"))


@pytest.mark.anyio
async def test_with_tokens_off_nobody_is_asked(tmp_path: Path) -> None:
    """And no file of keys is written."""
    settings = load(tmp_path, "disable_token_authorization=true\n")
    access = await prepare_access(settings)

    async with contextlib.AsyncExitStack() as stack:
        await access.write_tokens(stack)
        assert not settings.token_file.exists()

    assert access.tls is None
    assert access.authorize("inference") is None
    assert access.guard([], "inference") is None


@pytest.mark.anyio
async def test_clients_find_their_keys_while_the_server_runs(tmp_path: Path) -> None:
    """A key opens what it is for and nothing else; the file goes with the server."""
    settings = load(tmp_path, "disable_token_authorization=false\n")
    access = await prepare_access(settings)
    check = access.authorize("management")
    assert check is not None

    async with contextlib.AsyncExitStack() as stack:
        assert not settings.token_file.exists()
        await access.write_tokens(stack)
        keys = {kind: held["key"] for kind, held in json.loads(settings.token_file.read_text()).items()}
        check(f"Bearer {keys['management']}")
        for wrong in (None, f"Bearer {keys['inference']}"):
            with pytest.raises(InvalidToken):
                check(wrong)

    assert not settings.token_file.exists()
    assert access.guard([], "inference") is not None


@pytest.mark.anyio
async def test_keys_that_nobody_could_find_keep_the_server_from_starting(tmp_path: Path) -> None:
    """A server that nobody can call is none."""
    settings = load(tmp_path, "disable_token_authorization=false\n")
    settings.token_file.mkdir()
    access = await prepare_access(settings)

    async with contextlib.AsyncExitStack() as stack:
        with pytest.raises(CannotStart, match=settings.token_file.name):
            await access.write_tokens(stack)


@pytest.mark.anyio
async def test_a_certificate_that_does_not_fit_keeps_the_server_from_starting(
    tmp_path: Path, identity: Identity
) -> None:
    """Before any port is taken."""
    (tmp_path / "cert.pem").write_bytes(identity.chain_pem)
    (tmp_path / "key.pem").write_bytes(make_up_identity(["localhost"]).key_pem)

    with pytest.raises(CannotStart):
        await prepare_access(load(tmp_path, HTTPS + "certificate_file=cert.pem\nprivate_key_file=key.pem\n"))
