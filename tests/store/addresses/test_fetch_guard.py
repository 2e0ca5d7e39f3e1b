"""Which URLs may be fetched: one reading of each spelling, the operator's patterns, and hosts that never are."""

from __future__ import annotations

import ipaddress
import re
import socket

import pytest

from marserve.errors import ArchiveNotFound
from marserve.settings.stores import SCHEMES
from marserve.store.addresses.fetch_guard import (
    AllowedUrls,
    BadTarget,
    Target,
    check_address,
    hide_query,
    is_address,
    parse_target,
    resolve_host,
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
        ("s3+https://bucket.s3.eu-west-1.amazonaws.com/a/m.mar", "s3://bucket/a/m.mar"),
        ("http://example.org/a%20b/m%C3%A4%2B.mar", "http://example.org/a%20b/m%C3%A4%2B.mar"),
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
        (r"http://127\.0\.0\.1:[0-9]+/.*", "http://127.0.0.1:8000/m.mar", True),
        (r"http://127\.0\.0\.1(:[0-9]+)?/.*", "http://127.0.0.1/m.mar", True),
        (r"https?://minio(?::\d{1,5})?\/.*", "http://minio:9000/m.mar", True),
        (r"http(s)?://minio:90\d\d/.*", "https://minio:9001/m.mar", True),
        (r"(http|https)://\[::1\]:\d*/.*", "http://[::1]:8000/m.mar", True),
        (r"http://127\.0\.0\.[0-9]+/.*", "http://127.0.0.1/m.mar", False),
        (r"http://127\.0\.0\.1[0-9]+/.*", "http://127.0.0.12/m.mar", False),
        (r"http://127\.0\.0\.1:.*", "http://127.0.0.1:80/m.mar", False),
        (r"http://minio:[0-9]+.*", "http://minio:80/m.mar", False),
        (r"http://\[fd00::[0-9]+\]/.*", "http://[fd00::1]/m.mar", False),
        (r"http://minio[0-9]?:[0-9]+/.*", "http://minio:80/m.mar", False),
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


REASONS = {
    "more than 8192 characters": ["http://example.org/m.mar?" + "x" * (8192 - 24)],
    "characters that no URL has unescaped": ["http://example.org/m.mar#", "http://example.org/ä.mar", "m.mar\n"],
    "only http, https, file, s3, gs, az and hf are fetched": ["ftp://example.org/m.mar", "m.mar", "http:/m.mar"],
    "its path leads through `.` or `..`": [
        "http://example.org/../m.mar",
        "http://example.org/a/./m.mar",
        "http://example.org/%2e%2e/m.mar",
        "http://example.org/a/%252E/m.mar",
        "http://example.org/a%5c..%5cm.mar",
        "file:///a/../m.mar",
        "s3://bucket/../m.mar",
    ],
    "its path holds an invalid escape, or one that hides a separator": [
        "http://example.org/a%2fm.mar",
        "http://example.org/a%2Fm.mar",
        "http://example.org/a%5cm.mar",
        "http://example.org/a%5Cm.mar",
        "http://example.org/a%00/m.mar",
        "http://example.org/%/m.mar",
        "http://example.org/%0g/m.mar",
    ],
    "its path ends with no name": [
        "http://example.org/",
        "http://example.org",
        "http://example.org/-m.mar",
        "http://example.org/.m",
        "http://example.org/" + "m" * 201,
        "http://example.org/m:1",
    ],
    "a file has no host and no query": ["file://example.org/m.mar", "file:///m.mar?a", "file://localhost/m.mar?a"],
    "user information does not belong into it": ["http://user@example.org/m.mar", "https://a:b@example.org/m.mar"],
    "its host and port are invalid": ["http://[::1/m.mar", "http://a:b:1/m.mar", "http://a:123456/m.mar"],
    "65536 is no port": ["http://example.org:65536/m.mar", "http://[::1]:65536/m.mar"],
    "0 is no port": ["http://example.org:0/m.mar"],
    "its host is no IPv6 address": ["http://[1.2.3.4]/m.mar", "http://[:::1]/m.mar"],
    "a number that is no IPv4 address": ["http://127.1/m.mar", "http://0x7F.1/m.mar", "http://1.2.3.256/m.mar"],
    "its host is no name": ["http:///m.mar", "http://-a/m.mar", "http://a..b/m.mar", "http://a./m.mar"],
}


@pytest.mark.parametrize(("why", "url"), [(why, url) for why, urls in REASONS.items() for url in urls])
def test_a_refusal_says_what_is_wrong_with_the_url(why: str, url: str) -> None:
    """The first thing that is, so that it can be put right; nothing of a query is repeated."""
    with pytest.raises(BadTarget, match="is refused: .*" + re.escape(why)) as refusal:
        parse_target(url)

    assert hide_query(url)[:500] in refusal.value.message


def test_the_longest_of_everything_passes() -> None:
    """8,192 characters, the last port, 200 letters of a file's name, 253 of a host's and 63 of a label's."""
    longest = "http://example.org/m.mar?" + "x" * (8192 - 25)
    host = ".".join(["a" * 63] * 3 + ["b" * 61])

    assert parse_target(longest).url == longest
    assert parse_target(f"http://{host}:65535/" + "m" * 200).port == 65535
    for wrong in (host + "b", "a" * 64):
        with pytest.raises(BadTarget, match="its host is no name"):
            parse_target(f"http://{wrong}/m.mar")


def test_a_targets_parts_are_what_is_asked_for() -> None:
    """The `Host` header, the key of an object, and what the archive is called."""
    target = parse_target("https://[2001:db8::1]:8443/a/b/m.mar?sig=1")
    assert (target.scheme, target.host, target.port) == ("https", "2001:db8::1", 8443)
    assert (target.authority, target.path, target.query) == ("[2001:db8::1]:8443", "/a/b/m.mar", "?sig=1")
    assert (target.key, target.file_name, target.written) == ("a/b/m.mar", "m.mar", "")
    assert parse_target("http://[2001:db8::1]:80/m.mar").authority == "[2001:db8::1]"
    assert parse_target("https://example.org/m.mar").port == 443
    assert parse_target("http://example.org:443/m.mar").authority == "example.org:443"
    stored = parse_target("s3://bucket/a/m.mar")
    assert (stored.scheme, stored.host, stored.port, stored.key) == ("s3", "bucket", 0, "a/m.mar")
    assert stored.written == ""
    assert parse_target("S3A://bucket/a/m.mar").written == "s3a://bucket"


def test_another_spelling_of_a_store_is_allowed_as_it_is_written_or_as_it_is_meant() -> None:
    """Patterns that were written for TorchServe's spellings go on; a third one matches neither."""
    target = parse_target("s3a://bucket/a/m.mar")

    AllowedUrls([r"s3://bucket/.*"]).check(target)
    AllowedUrls([r"s3a://bucket/.*"]).check(target)
    for pattern in (r"s3n://bucket/.*", r"s3a://bucket"):
        with pytest.raises(ArchiveNotFound, match="does not match"):
            AllowedUrls([pattern]).check(target)
    with pytest.raises(ArchiveNotFound):
        AllowedUrls([r"s3a://bucket/.*"]).check(parse_target("s3://bucket/a/m.mar"))


@pytest.mark.parametrize(
    ("patterns", "url", "is_named"),
    [
        ([r"http://.*", r"http://minio/.*"], "http://minio/m.mar", True),
        ([r"http://.*", r"http://other/.*"], "http://minio/m.mar", False),
        ([r"http://.*", r"http://minio/deep/.*"], "http://minio/m.mar", False),
        ([r"http://minio:9000/.*"], "http://minio:9000/m.mar", True),
        ([r"https://minio/.*"], "https://minio/m.mar", True),
        ([r"http://MINIO/.*"], "http://minio/m.mar", True),
        ([r"http\://minio/.*"], "http://minio/m.mar", True),
        ([r"http://minio.local/.*"], "http://minioxlocal/m.mar", False),
        ([r".*http://minio/.*"], "http://minio/m.mar", False),
        ([r"http://minio(:9000)?/.*"], "http://minio/m.mar", True),
        ([r"http://\[::1\]/.*"], "http://[::1]/m.mar", True),
    ],
)
def test_the_pattern_that_matches_is_the_one_that_must_name_the_host(
    patterns: list[str], url: str, is_named: bool
) -> None:
    """Another pattern's word for it does not count, nor one that could mean other hosts."""
    assert AllowedUrls(patterns).names_host(parse_target(url)) is is_named


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("::ffff:93.184.216.34", "public"),
        ("2002:5db8:d822::1", "public"),  # 6to4 of a public one
        ("2002:a00:1::1", "private"),
        ("2001:0:a9fe:a9fe::1", "never"),  # Teredo, by a server with a link-local address
        ("2001:0:5db8:d822:0:ffff:5601:5601", "never"),  # Teredo, of a client with one (its bits are inverted)
        ("::a00:1", "never"),
        ("240.0.0.1", "never"),
        ("198.18.0.1", "private"),
    ],
)
def test_an_address_within_an_address_is_judged_too(address: str, answer: str) -> None:
    """IPv6 has several ways to say an IPv4 address, and a gateway may follow each."""
    if answer == "never":
        with pytest.raises(BadTarget, match=f"example.org is {address}, which is never fetched"):
            judge(address, is_named=True)
    elif answer == "private":
        with pytest.raises(BadTarget, match=f"example.org is {address}, an address that is not public"):
            judge(address, is_named=False)
        judge(address, is_named=True)
    else:
        judge(address, is_named=True)


def test_a_host_is_resolved_to_each_of_its_addresses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the resolver's order, for a stream's port, and without the name of an interface."""
    asked: list[tuple[object, ...]] = []

    def resolve(host: str, port: int, **more: object) -> list[tuple[object, ...]]:
        asked.append((host, port, more))
        return [(0, 0, 0, "", (address, port)) for address in ("fe80::1%eth0", "10.0.0.1", "fe80::1%eth0")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    found = resolve_host(parse_target("http://example.org:8080/m.mar"))

    assert found == [ipaddress.ip_address("fe80::1"), ipaddress.ip_address("10.0.0.1")]
    assert asked == [("example.org", 8080, {"type": socket.SOCK_STREAM})]
