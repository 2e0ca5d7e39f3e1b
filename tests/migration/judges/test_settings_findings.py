"""Settings in a survey: the files that they name are read as the server reads them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from support.echo_archives import write_mar
from support.surveys import actions, look, write

HTTPS = "inference_address=https://127.0.0.1:8443\ndisable_token_authorization=true\n"
METRICS = "model_metrics:\n  counter:\n    - name: hits\n      unit: Count\n      dimensions: []\n"


def make_key(root: Path, bits: int) -> None:
    """A certificate that signs itself, and its RSA key, in PEM files."""
    key = rsa.generate_private_key(65537, bits)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=30))
        .sign(key, hashes.SHA256())
    )
    (root / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (root / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def settings_with_key(root: Path, bits: int, addresses: str) -> dict[str, str]:
    """What needs action in settings that name a key of so many bits."""
    make_key(root, bits)
    write(root, {"config.properties": addresses + "private_key_file=key.pem\ncertificate_file=cert.pem\n"})
    return actions(root)


def test_a_key_of_today_needs_nothing(tmp_path: Path) -> None:
    """2,048 bits."""
    assert settings_with_key(tmp_path, 2048, HTTPS) == {}


def test_a_key_that_is_too_short_needs_action(tmp_path: Path) -> None:
    """OpenSSL takes none below 2,048 bits."""
    assert list(settings_with_key(tmp_path, 1024, HTTPS)) == ["config.properties:3"]


def test_a_key_that_nothing_uses_is_not_judged(tmp_path: Path) -> None:
    """No address is https, and gRPC speaks in the clear."""
    assert settings_with_key(tmp_path, 1024, "disable_token_authorization=true\n") == {}


def test_all_files_are_judged_though_one_is_at_fault(tmp_path: Path) -> None:
    """Whoever mends the first does not have to ask again for the second."""
    write(tmp_path, {"m.yaml": "a: [", "config.properties": HTTPS + "keystore=/old/keys.jks\nmetrics_config=m.yaml\n"})

    found = actions(tmp_path)

    assert "there is no such file" in found["config.properties:3"]
    assert "is no YAML" in found["config.properties:4"]


def test_a_keystore_beside_the_settings_is_read(tmp_path: Path) -> None:
    """A JKS keystore under the default type."""
    (tmp_path / "keys.jks").write_bytes(b"\xfe\xed\xfe\xed\0\0\0\2")
    write(tmp_path, {"config.properties": HTTPS + "keystore=keys.jks\n"})

    assert "keytool -importkeystore" in actions(tmp_path)["config.properties:3"]


@pytest.mark.parametrize(
    ("text", "said"),
    [(METRICS, None), ("model_metrics: [", "is no YAML"), ("ts_metrics: {}\n", "has no section model_metrics")],
)
def test_a_file_of_metrics_is_read(tmp_path: Path, text: str, said: str | None) -> None:
    """As the start reads it, which fails for one that it cannot read."""
    write(tmp_path, {"metrics.yaml": text, "config.properties": "metrics_config=metrics.yaml\n"})

    found = actions(tmp_path)

    assert (said is None) == (found == {})
    assert said is None or said in found["config.properties:1"]


@pytest.mark.parametrize(
    ("patterns", "odd", "meant"),
    [
        ("https://models.example/*", "https://models.example/*", "https://models.example/.*"),
        ("file://.*,https://models.example/*.mar", "https://models.example/*.mar", "https://models.example/.*.mar"),
        ("s3://bucket/team-*", "s3://bucket/team-*", "s3://bucket/team-.*"),
        ("https?://.*,file://.*", None, None),
        (r"https://models\\.example/[a-z]*/\\w*,http(s)*://x/.*", None, None),
    ],
)
def test_a_glob_among_allowed_urls_needs_action(
    tmp_path: Path, patterns: str, odd: str | None, meant: str | None
) -> None:
    """As a regular expression it can be read, and allows nothing."""
    write(tmp_path, {"config.properties": f"allowed_urls={patterns}\n"})
    found = [each for each in look(tmp_path) if each.verdict == "action"]

    if odd is None:
        assert found == []
    else:
        assert [(each.place, each.fix) for each in found] == [("config.properties:1", f"write {meant}")]
        assert f"{odd!r} is a regular expression, not a glob" in found[0].what


def test_bounds_of_workers_the_wrong_way_round_need_action(tmp_path: Path) -> None:
    """In the settings, and in an archive's configuration."""
    models = '{"m": {"1.0": {"minWorkers": 4, "maxWorkers": 2}, "2.0": {"minWorkers": 2, "maxWorkers": 2}}}'
    write(tmp_path, {"config.properties": f"models={models}\n"})
    (tmp_path / "store").mkdir()
    write_mar(tmp_path / "store" / "m.mar", config="batchSize: 2\nminWorkers: 3\nmaxWorkers: 1\n")

    assert actions(tmp_path) == {
        "config.properties:1": "models: m 1.0 has minWorkers 4 above maxWorkers 2, of which 4 counts",
        "store/m.mar!model-config.yaml:2": "minWorkers 3 is above maxWorkers 1: neither is used",
    }


def test_a_warning_of_the_start_stands_at_the_line_that_it_names(tmp_path: Path) -> None:
    """Its sentence is whole, and the line is not said twice."""
    write(tmp_path, {"config.properties": "disable_token_authorization=true\njob_queue_size=3\njob_queue_size=4\n"})

    found = {each.what: each.place for each in look(tmp_path)}

    assert found["job_queue_size stands twice; the later counts"] == "config.properties:3"
