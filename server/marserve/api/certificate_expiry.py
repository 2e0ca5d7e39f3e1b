"""When certificates end, read from their own bytes, as servers with PEM files need no library for them. Pure."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

# The start warns of a certificate that ends sooner.
SOON: Final = timedelta(days=7)

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18


def expiry_warning(chain_pem: bytes, what: str, now: datetime) -> str | None:
    """A warning if a certificate of the chain has ended or will end soon; None if not, or if it cannot be read.

    `what` says whose it is, as in `https addresses`.
    """
    ends = [end for end in map(_end_of, _PEM.findall(chain_pem)) if end is not None]
    if not ends or (end := min(ends)) > now + SOON:
        return None
    day = f"{end:%Y-%m-%d %H:%M} UTC"
    if end <= now:
        return f"The certificate of the {what} has expired ({day}): clients refuse it. Have a new one issued."
    days = (end - now).days
    left = f"in {days} days" if days > 1 else "within two days"
    return f"The certificate of the {what} expires {left} ({day}). Have a new one issued, and restart the server."


def _end_of(pem: bytes) -> datetime | None:
    """The last moment of a certificate; None for bytes that are no certificate."""
    try:
        certificate = ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
        (_, outer), *_ = _read(certificate)
        (_, signed), *_ = _read(outer)
        fields = [field for field in _read(signed) if field[0] != _VERSION]
        _, validity = fields[3]  # after the serial number, the kind of signature and the issuer
        _, (kind, text) = _read(validity)
        form = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}[kind]
        return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC)
    except (ValueError, IndexError, KeyError):
        return None


def _read(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements of a DER sequence, in order: kind and content. Raises IndexError if one is cut off."""
    at = 0
    while at < len(data):
        kind, length = data[at], data[at + 1]
        at += 2
        if length > 0x7F:
            size = length & 0x7F
            length = int.from_bytes(data[at : at + size])
            at += size
        if at + length > len(data):
            raise IndexError
        yield kind, data[at : at + length]
        at += length
