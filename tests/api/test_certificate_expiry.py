"""Tests for what a start says of certificates that end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import trustme

from marserve.api.certificate_expiry import expiry_warning

NOW = datetime(2030, 1, 15, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Its own certificate ends long after all others."""
    return trustme.CA()


def chain_that_ends(authority: trustme.CA, end: datetime) -> bytes:
    """A certificate's file."""
    issued = authority.issue_cert("localhost", not_before=end - timedelta(days=90), not_after=end)
    return b"".join(pem.bytes() for pem in issued.cert_chain_pems)


@pytest.mark.parametrize(
    ("left", "told"),
    [
        (timedelta(days=-40), "has expired (2029-12-06 12:00 UTC)"),
        (timedelta(0), "has expired"),
        (timedelta(hours=1), "expires within two days"),
        (timedelta(days=6, hours=1), "expires in 6 days (2030-01-21 13:00 UTC)"),
        (timedelta(days=7), "expires in 7 days"),
        (timedelta(days=7, seconds=1), None),
        (timedelta(days=36500), None),
    ],
)
def test_a_certificate_that_has_ended_or_will_within_a_week_is_told(
    authority: trustme.CA, left: timedelta, told: str | None
) -> None:
    """With the moment, also past 2049, from when on certificates write it otherwise."""
    warning = expiry_warning(chain_that_ends(authority, NOW + left), "https addresses", NOW)

    assert warning is None if told is None else told in (warning or "") and "https addresses" in (warning or "")


def test_of_a_chain_the_certificate_that_ends_first_is_told(authority: trustme.CA) -> None:
    """Clients refuse the chain when any of it has ended."""
    long, short = (chain_that_ends(authority, NOW + timedelta(days=days)) for days in (60, 2))

    assert "in 2 days" in (expiry_warning(long + short, "gRPC ports", NOW) or "")


@pytest.mark.parametrize(
    "chain", [b"", b"text", b"-----BEGIN CERTIFICATE-----\nMAMC\n-----END CERTIFICATE-----", b"\xff" * 99]
)
def test_what_cannot_be_read_is_left_to_openssl(chain: bytes) -> None:
    """It refuses the start with a sentence of its own."""
    assert expiry_warning(chain, "https addresses", NOW) is None


def test_a_cut_certificate_is_no_fault_of_the_start(authority: trustme.CA) -> None:
    """However much of it is missing."""
    whole = chain_that_ends(authority, NOW)
    head, foot = whole.split(b"\n", 1)[0], b"-----END CERTIFICATE-----"
    body = whole.removeprefix(head).replace(foot, b"").replace(b"\n", b"")

    for size in range(0, len(body), 40):
        cut = head + b"\n" + body[: size - size % 4] + b"\n" + foot
        assert expiry_warning(cut, "x", NOW) is None or size > 100
