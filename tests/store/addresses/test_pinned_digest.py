"""Digests in addresses and beside archives: read strictly, never guessed at."""

from __future__ import annotations

import pytest

from marserve.store.addresses.fetch_guard import BadTarget
from marserve.store.addresses.pinned_digest import read_digest, split_digest

HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("url", "plain", "digest"),
    [
        ("m.mar", "m.mar", None),
        (f"m.mar#sha256={HEX}", "m.mar", HEX),
        (f"http://a/m.mar?x=1#sha256={HEX.upper()}", "http://a/m.mar?x=1", HEX),
        (f"/models/a#b/m.mar#SHA256={HEX}", "/models/a#b/m.mar", HEX),
        ("a#b.mar", "a#b.mar", None),
        ("http://a/m.mar#top", "http://a/m.mar#top", None),
    ],
)
def test_a_digest_is_split_off(url: str, plain: str, digest: str | None) -> None:
    """Another fragment is left to who judges addresses."""
    assert split_digest(url) == (plain, digest)


@pytest.mark.parametrize(
    "fragment", ["sha256=", "sha256=abc", f"sha256={HEX}0", f"sha256:{HEX}", f"sha256={HEX[:-1]}g"]
)
def test_what_begins_like_a_digest_must_be_one(fragment: str) -> None:
    """A typing error must not switch the comparison off."""
    with pytest.raises(BadTarget, match="64 hexadecimal digits"):
        split_digest(f"http://a/m.mar#{fragment}")


@pytest.mark.parametrize(
    "text",
    [
        HEX,
        f"{HEX}\n",
        f"{HEX}  m.mar\n",
        f"{HEX.upper()} *m.mar\r\n",
        f"SHA256 (m.mar) = {HEX}\n",
        f"{'1' * 64}  other.mar\n{HEX}  ./build/m.mar\n",
    ],
)
def test_the_forms_of_sha256sum_are_read(text: str) -> None:
    """The line that names the archive counts, or the only one."""
    assert read_digest(text, "m.mar") == HEX


@pytest.mark.parametrize(
    "text", ["", "<html>", f"{HEX}  other.mar", f"{HEX[:-1]}  m.mar", f"SHA1 (m.mar) = {HEX[:40]}"]
)
def test_what_has_no_digest_of_the_archive_has_none(text: str) -> None:
    """Least of all another archive's."""
    assert read_digest(text, "m.mar") is None
