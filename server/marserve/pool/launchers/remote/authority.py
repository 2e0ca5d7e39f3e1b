"""A certificate authority that lives as long as the server, for the connections to its agents. Needs `cryptography`.

It signs one certificate for the server and one for each agent; after a restart certificates made before are invalid.
Keys stay in memory, except for the moment in which the standard library reads them from a file.
"""

from __future__ import annotations

import datetime
import ssl
import tempfile
from typing import Any

from marserve.agent_link import SERVER_NAME

# Longer than any server runs; a restart makes a new authority.
DAYS = 3650


class Authority:
    """Makes certificates. Raises ImportError without `cryptography`."""

    def __init__(self) -> None:
        from cryptography import x509

        self._key = _new_key()
        self._name = _name("marserve authority")
        self._certificate = self._sign(
            self._name, self._key.public_key(), [(x509.BasicConstraints(ca=True, path_length=0), True)]
        )

    @property
    def certificate(self) -> str:
        """The authority's certificate, which both sides trust, as PEM."""
        return _pem(self._certificate)

    def issue(self, name: str, *, is_server: bool = False) -> tuple[str, str]:
        """A certificate for this name and its key, both as PEM."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = _new_key()
        usage = ExtendedKeyUsageOID.SERVER_AUTH if is_server else ExtendedKeyUsageOID.CLIENT_AUTH
        extensions = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.ExtendedKeyUsage([usage]), True),
            (x509.SubjectAlternativeName([x509.DNSName(name)]), False),
        ]
        certificate = self._sign(_name(name), key.public_key(), extensions)
        encoded = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return _pem(certificate), encoded.decode()

    def server_context(self) -> ssl.SSLContext:
        """The context of the server's listener: its certificate, and only agents with one of this authority."""
        certificate, key = self.issue(SERVER_NAME, is_server=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(certificate + key)
            file.flush()
            context.load_cert_chain(file.name)
        return context

    def _sign(self, subject: Any, public_key: Any, extensions: list[tuple[Any, bool]]) -> Any:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            # The clocks of two machines may differ by any amount.
            .not_valid_before(datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, critical=is_critical)
        return builder.sign(self._key, hashes.SHA256())


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _name(common: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _pem(certificate: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return str(certificate.public_bytes(Encoding.PEM).decode())
