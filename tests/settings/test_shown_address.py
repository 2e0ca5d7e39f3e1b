"""Tests for what of an address may be shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.settings.shown_address import hide_each, hide_query, hide_quoted

SECRET = "Planted"
DIGEST = "#sha256=" + "0a" * 32


@pytest.mark.parametrize(
    "url",
    [
        "m.mar",
        "folder/m.mar",
        "/srv/a:b@c/m.mar",
        "digits@abc.mar",
        f"m.mar{DIGEST}",
        "https://h:8080/m@1.mar",
        "http://h:8080/packages/m@1.0/m.mar",
        f"https://h/m.mar{DIGEST}",
        "http://[::1]:80/m.mar",
        "az://box@account1/m.mar",
        "hf://org/name@main",
        "s3://b/a:b@c.mar",
        "file:///srv/m.mar",
        "C:\\m.mar",
    ],
)
def test_what_holds_no_key_is_shown_as_it_is(url: str) -> None:
    """Names, paths, ports, revisions, containers and digests."""
    assert hide_query(url) == url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"https://h/m.mar?X-Amz-Signature={SECRET}", "https://h/m.mar?…"),
        (f"https://h/m.mar#token={SECRET}", "https://h/m.mar#…"),
        (f"m.mar?next=b://{SECRET}", "m.mar?…"),
        (f"https://me:{SECRET}@h/m.mar", "https://h/m.mar"),
        (f"s3://me:a/{SECRET}/b@bucket/m.mar", "s3://bucket/m.mar"),
        (f"https://me:a?{SECRET}@h/m.mar", "https://…?…"),
        (f"https://me:a#{SECRET}@h/m.mar", "https://…#…"),
        (f"https://me%3A{SECRET}%40h/m.mar", "https://…"),
        (f"https://me:{SECRET}/h/m.mar", "https://…"),
        (f"https:/me:{SECRET}@h/m.mar", "https:/h/m.mar"),
        (f"//me:{SECRET}@h/m.mar", "//h/m.mar"),
        (f"me:{SECRET}@h/m.mar", "h/m.mar"),
        (f"\thttps://me:{SECRET}@h/m.mar", "https://h/m.mar"),
    ],
)
def test_what_may_be_a_key_is_not_shown(url: str, shown: str) -> None:
    """In its place, in a wrong place, and where the address is mistyped."""
    assert hide_query(url) == shown


@given(
    st.text(alphabet="AbZ09/?#@:%+=", max_size=12),
    st.sampled_from(["https", "S3", "gs", "hf", "ftp"]),
    st.text(alphabet="ab@:/.", max_size=6),
)
def test_no_password_is_shown_whatever_is_in_it(noise: str, scheme: str, tail: str) -> None:
    """However its letters part it; but for one that begins with digits and a slash, which looks like a port."""
    shown = hide_query(f"{scheme}://me:x{noise}{SECRET}@host/{tail}")

    assert SECRET not in shown


def test_addresses_are_hidden_in_lists_and_texts() -> None:
    """What stands around them stays."""
    assert hide_each(f"a=https://h/m?{SECRET},b.mar,c=s3://k:{SECRET}@b/m") == "a=https://h/m?…,b.mar,c=s3://b/m"
    assert hide_each("all") == "all"
    assert hide_each(f"b.mar,c=https:/me:{SECRET}@h/m.mar") == "b.mar,c=https:/h/m.mar"
    assert hide_quoted(f"'https:/me:{SECRET}@h/m.mar' and C:/m.mar") == "'https:/h/m.mar' and C:/m.mar"
    assert hide_quoted(f'{{"place": "s3://k:{SECRET}@b/"}} and m.mar') == '{"place": "s3://b/"} and m.mar'
