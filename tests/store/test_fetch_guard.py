"""Which URLs may be fetched: one reading of each spelling, the operator's patterns, and hosts that never are."""

from __future__ import annotations

import ipaddress

import pytest

from marserve.errors import ArchiveNotFound
from marserve.settings.stores import SCHEMES
from marserve.store.fetch_guard import (
    AllowedUrls,
    BadTarget,
    Target,
    check_address,
    hide_query,
    is_address,
    parse_target,
)


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://example.org/m.mar", "http://example.org/m.mar"),
        ("HTTPS://Example.ORG:443/a/m.mar", "https://example.org/a/m.mar"),
        ("http://example.org:8080/m.mar?X-Sig=a%2Fb&y=1", "http://example.org:8080/m.mar?X-Sig=a%2Fb&y=1"),
        ("http://127.0.0.1:80/m.mar", "http://127.0.0.1/m.mar"),
        ("http://[2001:DB8:0:0::1]:8080/m.mar", "http://[2001:db8::1]:8080/m.mar"),
        ("file:///allowed/m.mar", "file:///allowed/m.mar"),
        ("file://localhost/allowed/m.mar", "file:///allowed/m.mar"),
        ("S3://bucket/a/m.mar", "s3://bucket/a/m.mar"),
        ("gs://my_bucket.org/m.mar", "gs://my_bucket.org/m.mar"),
        ("az://container/a/b/m.mar", "az://container/a/b/m.mar"),
        ("hf://Organisation/name@main", "hf://Organisation/name@main"),
    ],
)
def test_a_url_has_one_normal_form(url: str, normal: str) -> None:
    """It is what patterns are matched with, and what is fetched."""
    assert parse_target(url).url == normal
    assert parse_target(normal).url == normal


REFUSED = [
    # user information, and what looks like it
    "http://user@example.org/m.mar",
    "http://user:pass@example.org/m.mar",
    "http://allowed.org@evil.org/m.mar",
    "http://allowed.org:80@evil.org/m.mar",
    "http://allowed.org%40evil.org/m.mar",
    "http://@evil.org/m.mar",
    # fragments, backslashes, blanks, control characters, what is not ASCII
    "http://evil.org#@allowed.org/m.mar",
    "http://evil.org/m.mar#allowed",
    "http://allowed.org\\@evil.org/m.mar",
    "http:\\\\evil.org\\m.mar",
    "http://evil.org\\.allowed.org/m.mar",
    "http://allowed.org /m.mar",
    " http://allowed.org/m.mar",
    "http://allowed.org\t.evil.org/m.mar",
    "http://allowed.org/m.mar\r\nHost: evil.org",
    "http://allowed.org/m\x00.mar",
    "http://exämple.org/m.mar",
    "http://example。org/m.mar",
    "http://①②⑦.⓪.⓪.①/m.mar",
    "http://xn--/../m.mar",
    # paths that lead elsewhere
    "http://allowed.org/a/../m.mar",
    "http://allowed.org/a/%2e%2e/m.mar",
    "http://allowed.org/a/%2E./m.mar",
    "http://allowed.org/a/%252e%252e/m.mar",
    "http://allowed.org/./m.mar",
    "http://allowed.org/a%2Fm.mar",
    "http://allowed.org/a%5Cm.mar",
    "http://allowed.org/m%00.mar",
    "http://allowed.org/m%zz.mar",
    "file:///allowed/../etc/passwd",
    "file:///allowed/%2e%2e/etc/passwd",
    "file:///allowed/..%2f..%2fetc%2fpasswd",
    # hosts that are numbers in an unusual form
    "http://2130706433/m.mar",
    "http://0x7f000001/m.mar",
    "http://0x7f.0.0.1/m.mar",
    "http://017700000001/m.mar",
    "http://0177.0.0.1/m.mar",
    "http://127.1/m.mar",
    "http://127.0.1/m.mar",
    "http://127.0.0.1.5/m.mar",
    "http://127.0.0.256/m.mar",
    "http://127.0.0.01/m.mar",
    "http://0/m.mar",
    "http://0x/m.mar",
    "http://127.0.0.1./m.mar",
    "http://localhost./m.mar",
    "http://example.org../m.mar",
    "http://.example.org/m.mar",
    "http://-example.org/m.mar",
    # IPv6
    "http://[::1/m.mar",
    "http://::1/m.mar",
    "http://[fe80::1%25eth0]/m.mar",
    "http://[fe80::1%eth0]/m.mar",
    "http://[v1.x]/m.mar",
    "http://[::1]x/m.mar",
    "http://[1.2.3.4]/m.mar",
    # ports
    "http://example.org:0/m.mar",
    "http://example.org:65536/m.mar",
    "http://example.org:99999999/m.mar",
    "http://example.org:80:80/m.mar",
    "http://example.org:8o/m.mar",
    # other schemes
    "gopher://example.org/m.mar",
    "ftp://example.org/m.mar",
    "s4://bucket/m.mar",
    "dict://127.0.0.1:11211/m.mar",
    "jar:http://example.org/m.mar",
    "data://text/plain,m.mar",
    "javascript://example.org/m.mar",
    "http:/example.org/m.mar",
    "http:example.org/m.mar",
    "http:///m.mar",
    "http://?m.mar",
    "://example.org/m.mar",
    # object stores
    "s3://key:secret@bucket/m.mar",
    "s3://bucket:9000/m.mar",
    "s3://bucket/m.mar?X-Amz-Signature=1",
    "s3://bucket/../other/m.mar",
    "s3:///m.mar",
    "s3://bucket",
    "gs://bucket/folder/",
    # files
    "file://evil.org/share/m.mar",
    "file:////evil.org/share/../m.mar",
    "file:///allowed/m.mar?x",
    # names that no file in the store can have
    "http://example.org/",
    "http://example.org",
    "http://example.org/.hidden",
    "http://example.org/m.mar/",
    "http://example.org/" + "m" * 300,
    "http://example.org/m.mar?" + "x" * 9000,
    "http://example.org/a;b|c.mar",
    "",
]


@pytest.mark.parametrize("url", REFUSED)
def test_a_spelling_that_two_readers_may_understand_differently_is_refused(url: str) -> None:
    """Whatever the patterns say, and without a guess at what was meant."""
    with pytest.raises(BadTarget, match="is refused"):
        parse_target(url)


def test_there_are_eighty_spellings() -> None:
    """So many are promised."""
    assert len(set(REFUSED)) >= 80


def test_a_pattern_must_match_as_a_whole() -> None:
    """Its beginning or a part of the URL is not enough; case does not count."""
    allowed = AllowedUrls([r"https://models\.example\.org/.*"])

    allowed.check(parse_target("https://MODELS.example.org/a/m.mar"))
    for url in (
        "http://models.example.org/m.mar",
        "https://models.example.org.evil.org/m.mar",
        "https://evil.org/https://models.example.org/m.mar",
        "https://models.example.org:8443/m.mar",
        "https://modelsXexample.org/m.mar",
    ):
        with pytest.raises(ArchiveNotFound, match=r"does not match any allowed URL\(s\)"):
            allowed.check(parse_target(url))


def test_without_patterns_nothing_is_allowed() -> None:
    """Fetching is the operator's to switch on."""
    with pytest.raises(ArchiveNotFound, match="does not match"):
        AllowedUrls([]).check(parse_target("https://example.org/m.mar"))


@pytest.mark.parametrize(
    ("pattern", "url", "is_named"),
    [
        (r"http://127\.0\.0\.1:8000/.*", "http://127.0.0.1:8000/m.mar", True),
        (r"http://127.0.0.1:8000/echo.*", "http://127.0.0.1:8000/echo.mar", True),
        (r"^http://minio\.local/.*", "http://minio.local/m.mar", True),
        (r"http:\/\/minio-1:9000\/.*", "http://minio-1:9000/m.mar", True),
        (r"http://\[::1\]:8000/.*", "http://[::1]:8000/m.mar", True),
        (r"http://.*", "http://127.0.0.1/m.mar", False),
        (r"https?://.*", "http://127.0.0.1/m.mar", False),
        (r"http://127\.0\.0\..*", "http://127.0.0.1/m.mar", False),
        (r"http://(127\.0\.0\.1|minio)/.*", "http://minio/m.mar", False),
        (r"http://127\.0\.0\.1.*", "http://127.0.0.1.evil.org/m.mar", False),
    ],
)
def test_a_host_is_named_where_a_pattern_spells_it_out(pattern: str, url: str, is_named: bool) -> None:
    """Only then may it be one of a private network."""
    assert AllowedUrls([pattern]).names_host(parse_target(url)) is is_named


PUBLIC = ["93.184.216.34", "2606:2800:220:1::1"]
PRIVATE = [
    "127.0.0.1",
    "10.0.0.1",
    "172.16.3.4",
    "192.168.1.1",
    "100.64.0.1",
    "::1",
    "fc00::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
]
NEVER = [
    *("169.254.169.254", "169.254.170.2", "100.100.100.200", "192.0.0.192", "0.0.0.0", "255.255.255.255", "224.0.0.1"),
    *("fe80::1", "fd00:ec2::254", "::", "ff02::1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe"),
    *("2002:a9fe:a9fe::1", "::169.254.169.254"),
]


def judge(address: str, *, is_named: bool) -> None:
    """Check an address for a URL that every pattern allows."""
    check_address(Target("http", "example.org", 80, "/m.mar", ""), ipaddress.ip_address(address), is_named=is_named)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_connected_to(address: str) -> None:
    """That is what fetching is for."""
    judge(address, is_named=False)


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_needs_its_host_spelt_out(address: str) -> None:
    """A pattern that matches everything does not open the operator's network."""
    with pytest.raises(BadTarget, match="must spell the host out"):
        judge(address, is_named=False)

    judge(address, is_named=True)


@pytest.mark.parametrize("address", NEVER)
def test_addresses_where_clouds_keep_secrets_are_never_connected_to(address: str) -> None:
    """Not even where a pattern names them, in no form."""
    for is_named in (False, True):
        with pytest.raises(BadTarget, match="never fetched"):
            judge(address, is_named=is_named)


def test_secrets_of_a_url_are_not_shown() -> None:
    """Presigned URLs carry them in the query."""
    assert hide_query("https://b.s3.org/m.mar?X-Amz-Signature=abc") == "https://b.s3.org/m.mar?…"
    assert hide_query("https://user:word@b.org/m.mar") == "https://b.org/m.mar"
    assert hide_query("m.mar") == "m.mar"
    with pytest.raises(ArchiveNotFound) as refused:
        AllowedUrls([]).check(parse_target("https://b.org/m.mar?abc"))
    assert "abc" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "answer"),
    [
        ("m.mar", False),
        ("a/m.mar", False),
        ("http://x/m", True),
        ("FILE:///m", True),
        ("ftp://b/m", False),
        ("s3x://b/m", False),
    ],
)
def test_an_address_is_told_from_a_name(url: str, answer: bool) -> None:
    """By its scheme."""
    assert is_address(url) is answer


@pytest.mark.parametrize("scheme", [*SCHEMES, "S3", "Hf"])
def test_every_scheme_of_a_store_is_that_of_an_address(scheme: str) -> None:
    """Whether a pattern allows it or not: else the last part of another bucket's key would name a file here."""
    assert is_address(f"{scheme}://other/a/mnist.mar")
