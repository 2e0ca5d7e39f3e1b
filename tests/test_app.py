"""What the assembly takes from the settings for its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.api.tls import Identity, make_up_identity
from marserve.app import cors_headers, listeners_identity, sagemaker_endpoint, worker_environment
from marserve.errors import BadSettings
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


def test_workers_inherit_none_of_the_servers_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key for the commands and a keystore's password are nothing that a handler needs; the rest it gets."""
    hidden = {"MARSERVE_TOKEN", "MARSERVE_KEYSTORE_PASS", "TS_KEYSTORE_PASS", "MARSERVE_STORES", "OF_A_STORE"}
    for name in (*hidden, "MODEL_SETTING"):
        monkeypatch.setenv(name, "value")

    environment = worker_environment(load(tmp_path, 'stores={"hf://": {"token": {"env": "OF_A_STORE"}}}\n'))

    assert environment["MODEL_SETTING"] == "value"
    assert not hidden & environment.keys()


def test_browsers_are_told_what_was_set_and_nothing_else(tmp_path: Path) -> None:
    """An empty value is none."""
    assert cors_headers(load(tmp_path, "")) == []
    assert cors_headers(load(tmp_path, "cors_allowed_origin=*\ncors_allowed_methods=\n")) == [
        ("Access-Control-Allow-Origin", "*")
    ]


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


@pytest.mark.parametrize(
    ("mode", "is_multi_model"), [(None, False), ("", False), ("false", False), ("true", True), ("1", True)]
)
def test_sagemaker_serves_many_models_where_its_variable_says_so(
    tmp_path: Path, mode: str | None, is_multi_model: bool
) -> None:
    """Anything but `false`."""
    settings = load(tmp_path, "NUM_WORKERS=0\ndefault_service_handler=service.py:handle\n")

    endpoint = sagemaker_endpoint(settings, {} if mode is None else {"SAGEMAKER_MULTI_MODE": mode})

    assert endpoint.is_multi_model == is_multi_model
    assert endpoint.service_file == tmp_path / "service.py"
    assert endpoint.concurrent_transforms == 1
