"""The certificate and key of https listeners, and their TLS context (contract §6.3). Knows no addresses or sockets.

They come from PEM files or a PKCS#12 keystore, or are made at the start; the caller chooses. Keystores and made
certificates need the library `cryptography`, which is imported only then. Clients are not asked for certificates.
gRPC's ports have contexts of the same identity.
"""

from __future__ import annotations

import ipaddress
import ssl
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from marserve.errors import BadSettings
from marserve.files.regular import read_regular
from marserve.optional import trouble

if TYPE_CHECKING:
    from cryptography.x509 import GeneralName

# The first bytes of Java's own keystores.
_JKS = b"\xfe\xed\xfe\xed"
LARGEST_FILE = 1 << 20
SELF_SIGNED_FOR = timedelta(days=365)
# A new certificate is valid from a day ago, for clients whose clocks are behind.
SELF_SIGNED_SINCE = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Identity:
    """The server's certificate chain and its private key, as PEM."""

    chain_pem: bytes
    key_pem: bytes = field(repr=False)


def read_pem_files(certificate_file: Path, private_key_file: Path) -> Identity:
    """The identity in two PEM files. Raises BadSettings where one cannot be read."""
    read = {}
    for key, file in (("certificate_file", certificate_file), ("private_key_file", private_key_file)):
        try:
            read[key] = read_regular(file, LARGEST_FILE)
        except OSError as error:
            raise BadSettings(f"{key} is {str(file)!r}, which cannot be read ({error.strerror})", key=key) from error
    return Identity(read["certificate_file"], read["private_key_file"])


def read_keystore(file: Path, password: str, kind: str) -> Identity:
    """The identity in a PKCS#12 keystore, which is what Java writes since version 9. Raises BadSettings."""
    if kind.upper() not in ("PKCS12", "P12", "PFX"):
        raise BadSettings(
            f"keystore_type is {kind!r}, and only PKCS12 keystores can be read; "
            "`keytool -importkeystore -deststoretype PKCS12` makes one of it",
            key="keystore_type",
        )
    serialization = _cryptography("hazmat.primitives.serialization", "keystore", "is given")
    pkcs12 = _cryptography("hazmat.primitives.serialization.pkcs12", "keystore", "is given")
    try:
        data = read_regular(file, LARGEST_FILE)
        key, certificate, others = pkcs12.load_key_and_certificates(data, password.encode())
    except OSError as error:
        raise BadSettings(
            f"keystore is {str(file)!r}, which cannot be read ({error.strerror})", key="keystore"
        ) from error
    except ValueError as error:
        if data.startswith(_JKS):
            raise BadSettings(
                f"keystore is {str(file)!r}, which is a JKS keystore, and only PKCS12 keystores can be read; "
                "`keytool -importkeystore -deststoretype PKCS12` makes one of it",
                key="keystore",
            ) from error
        raise BadSettings(
            f"keystore is {str(file)!r}, which is no PKCS12 keystore, or keystore_pass is not its password",
            key="keystore",
        ) from error
    if key is None or certificate is None:
        raise BadSettings(f"keystore is {str(file)!r}, and no private key with a certificate is in it", key="keystore")
    pem = serialization.Encoding.PEM
    return Identity(
        b"".join(one.public_bytes(pem) for one in (certificate, *others)),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def make_up_identity(hosts: Iterable[str]) -> Identity:
    """A new key, and a certificate for these host names and addresses that it signs itself. Raises BadSettings."""
    why = "is not given"
    x509 = _cryptography("x509", "certificate_file", why)
    hashes = _cryptography("hazmat.primitives.hashes", "certificate_file", why)
    serialization = _cryptography("hazmat.primitives.serialization", "certificate_file", why)
    ec = _cryptography("hazmat.primitives.asymmetric.ec", "certificate_file", why)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SELF_SIGNED_SINCE)
        .not_valid_after(now + SELF_SIGNED_FOR)
        .add_extension(x509.SubjectAlternativeName([_general_name(x509, host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return Identity(
        certificate.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def server_context(identity: Identity, inside: str = "http/1.1") -> ssl.SSLContext:
    """TLS 1.2 and newer, with this protocol inside, as ALPN names it.

    Raises BadSettings if the certificate and the key do not fit.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([inside])
    # The library reads only files. Only the owner can read this one, and it is removed at once.
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:
        file.write(identity.key_pem.rstrip() + b"\n" + identity.chain_pem)
        file.flush()
        try:
            # Without this openssl would ask for a password at the terminal.
            context.load_cert_chain(file.name, password=lambda: b"")
        except ssl.SSLError as error:
            raise BadSettings(_why_refused(error, context.security_level), key="private_key_file") from error
    return context


# The least bits of an RSA key and of an elliptic curve's at openssl's security levels.
_LEAST_BITS: Final = {1: (1024, 160), 2: (2048, 224), 3: (3072, 256), 4: (7680, 384), 5: (15360, 512)}


def _why_refused(error: ssl.SSLError, level: int) -> str:
    """The sentence for a certificate and a key that openssl refuses at its security level."""
    weak = {
        "EE_KEY_TOO_SMALL": "the private key is too short",
        "CA_KEY_TOO_SMALL": "the key of an authority in the certificate's chain is too short",
        "CA_MD_TOO_WEAK": "a certificate of the chain is signed with a digest that is too weak",
    }.get(error.reason or "")
    if weak is None:
        return (
            f"the certificate and the private key cannot be used ({error.reason or error}): they must belong together, "
            "be PEM, and the key have no password"
        )
    rsa, curve = _LEAST_BITS.get(level, _LEAST_BITS[2])
    return (
        f"{weak}: openssl's security level {level} takes RSA keys of {rsa} bits or more, elliptic curves of {curve} or "
        "more, and digests stronger than SHA-1; most clients refuse less too. Have a new key and certificate made"
    )


def _general_name(x509: Any, host: str) -> GeneralName:
    try:
        made: GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        made = x509.DNSName(host)
    return made


def _cryptography(module: str, key: str, why: str) -> Any:
    """A module of the library. Raises BadSettings, with what to install, where it is missing."""
    try:
        return import_module(f"cryptography.{module}")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a broken installation panics, which is no Exception
        raise BadSettings(
            f"an address is https and {key} {why}: that needs the library cryptography, and "
            f"{trouble('security', error)}; install marserve[security], or name certificate and key as PEM files in "
            "certificate_file and private_key_file",
            key=key,
        ) from error
