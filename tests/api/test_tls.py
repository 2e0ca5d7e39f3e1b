"""Certificates and keys: from PEM files, from keystores, made up; and the TLS that is spoken with them."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    pkcs12,
)
from cryptography.x509 import load_pem_x509_certificate

from marserve.api.tls import Identity, make_up_identity, read_keystore, read_pem_files, server_context
from marserve.errors import BadSettings


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Who certifies."""
    return trustme.CA()


@pytest.fixture(scope="module")
def pem(authority: trustme.CA) -> Identity:
    """A certificate for `localhost`, and its key."""
    issued = authority.issue_cert("localhost")
    return Identity(b"".join(one.bytes() for one in issued.cert_chain_pems), issued.private_key_pem.bytes())


def self_signed(bits: int) -> Identity:
    """A certificate for `localhost` that its own RSA key signs."""
    key = rsa.generate_private_key(65537, bits)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    return Identity(
        builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str, bytes | None]:
    """Let both agree over a pair of sockets; returns the version, and the certificate that the client saw."""
    ours, theirs = socket.socketpair()
    failed: list[Exception] = []

    def serve() -> None:
        try:
            with server.wrap_socket(ours, server_side=True) as connection:
                connection.recv(1)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with theirs, client.wrap_socket(theirs, server_hostname="localhost") as connection:
            version, certificate = connection.version(), connection.getpeercert(binary_form=True)
            connection.send(b"x")
            return str(version), certificate
    finally:
        theirs.close()
        thread.join(10)
        ours.close()


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    """A client that trusts this authority."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def make_keystore(pem: Identity, password: bytes) -> bytes:
    """The same as PKCS#12."""
    key = load_pem_private_key(pem.key_pem, None)
    return pkcs12.serialize_key_and_certificates(
        b"server",
        key,  # type: ignore[arg-type]
        load_pem_x509_certificate(pem.chain_pem),
        None,
        BestAvailableEncryption(password),
    )


def test_pem_files_are_spoken_with(tmp_path: Path, authority: trustme.CA, pem: Identity) -> None:
    """A client that trusts who certified them connects."""
    (tmp_path / "cert.pem").write_bytes(pem.chain_pem)
    (tmp_path / "key.pem").write_bytes(pem.key_pem)

    context = server_context(read_pem_files(tmp_path / "cert.pem", tmp_path / "key.pem"))

    assert shake_hands(context, trusting(authority))[0] == "TLSv1.3"


def test_a_keystore_of_java_is_read(tmp_path: Path, authority: trustme.CA, pem: Identity) -> None:
    """Key and certificate come out as they went in."""
    (tmp_path / "keys.p12").write_bytes(make_keystore(pem, b"changeit"))

    identity = read_keystore(tmp_path / "keys.p12", "changeit", "pkcs12")

    assert shake_hands(server_context(identity), trusting(authority))[0] == "TLSv1.3"


@pytest.mark.parametrize(
    ("content", "password", "kind", "said"),
    [
        (None, "changeit", "PKCS12", "cannot be read"),
        (b"no keystore", "changeit", "PKCS12", "no PKCS12 keystore, or keystore_pass is not its password"),
        (b"", "wrong", "PKCS12", "no PKCS12 keystore, or keystore_pass is not its password"),
        (b"", "changeit", "JKS", "keytool -importkeystore"),
        (b"\xfe\xed\xfe\xed\0\0\0\2", "changeit", "PKCS12", "is a JKS keystore"),
    ],
)
def test_a_keystore_that_cannot_be_used_is_told_without_its_password(
    tmp_path: Path, pem: Identity, content: bytes | None, password: str, kind: str, said: str
) -> None:
    """What was wrong, and what to do."""
    if content is not None:
        (tmp_path / "keys.p12").write_bytes(content or make_keystore(pem, b"changeit"))

    with pytest.raises(BadSettings) as error:
        read_keystore(tmp_path / "keys.p12", password, kind)

    assert said in str(error.value)
    assert "wrong" not in str(error.value)


@pytest.mark.skipif(
    not hasattr(pkcs12, "serialize_java_truststore"), reason="this version of cryptography writes no truststore"
)
def test_a_keystore_without_a_key_is_told(tmp_path: Path, pem: Identity) -> None:
    """A truststore is none of ours."""
    certificate = pkcs12.PKCS12Certificate(load_pem_x509_certificate(pem.chain_pem), b"ca")
    data = pkcs12.serialize_java_truststore([certificate], BestAvailableEncryption(b"changeit"))
    (tmp_path / "trust.p12").write_bytes(data)

    with pytest.raises(BadSettings, match="no private key with a certificate"):
        read_keystore(tmp_path / "trust.p12", "changeit", "PKCS12")


def test_a_certificate_is_made_up_for_every_host_and_anew_each_time() -> None:
    """Nobody can check it, but what is said stays between two."""
    identity, other = (make_up_identity(["localhost", "127.0.0.1"]) for _ in range(2))
    context = ssl.create_default_context(cadata=identity.chain_pem.decode())

    version, seen = shake_hands(server_context(identity), context)

    assert version == "TLSv1.3"
    assert seen == ssl.PEM_cert_to_DER_cert(identity.chain_pem.decode())
    assert identity.key_pem != other.key_pem


def test_a_key_is_never_shown(pem: Identity) -> None:
    """Whoever logs an identity logs no secret."""
    assert "PRIVATE" not in repr(pem)


def test_nothing_older_than_tls_1_2_is_spoken(pem: Identity, authority: trustme.CA) -> None:
    """And 1.2 is."""
    context = server_context(pem)
    newest = trusting(authority)
    newest.maximum_version = ssl.TLSVersion.TLSv1_2

    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert shake_hands(context, newest)[0] == "TLSv1.2"


def test_what_does_not_belong_together_is_told(pem: Identity) -> None:
    """Another's key, a key with a password, and no PEM at all: no question is asked at a terminal."""
    other = make_up_identity(["localhost"]).key_pem
    locked = load_pem_private_key(pem.key_pem, None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )

    for key in (other, locked, b"no key"):
        with pytest.raises(BadSettings, match="must belong together, be PEM, and the key have no password"):
            server_context(Identity(pem.chain_pem, key))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """With its key."""
    with pytest.raises(BadSettings, match="certificate_file is"):
        read_pem_files(tmp_path / "cert.pem", tmp_path / "key.pem")


def test_without_the_library_the_sentence_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEM files need it not."""
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(BadSettings, match=r"install marserve\[security\]"):
        make_up_identity(["localhost"])
    with pytest.raises(BadSettings, match=r"install marserve\[security\]"):
        read_keystore(tmp_path / "keys.p12", "changeit", "PKCS12")


def test_a_key_that_is_too_short_is_refused_with_the_reason() -> None:
    """TorchServe takes 1,024 bits; openssl does not, and its own word for it tells an operator nothing."""
    level = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).security_level
    if level != 2:
        pytest.skip(f"openssl's security level is {level} here")

    with pytest.raises(BadSettings) as caught:
        server_context(self_signed(1024))

    assert caught.value.key == "private_key_file"
    assert str(caught.value).startswith(
        "the private key is too short: openssl's security level 2 takes RSA keys of 2048 bits or more"
    )
    assert "must belong together" not in str(caught.value)
    server_context(self_signed(2048))


def test_a_key_of_another_certificate_is_refused_with_another_sentence() -> None:
    """It is long enough, and has to belong to the certificate."""
    one, other = self_signed(2048), self_signed(2048)

    with pytest.raises(BadSettings, match="must belong together"):
        server_context(Identity(one.chain_pem, other.key_pem))
