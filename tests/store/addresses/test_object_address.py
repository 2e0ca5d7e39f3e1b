"""Addresses of object stores: every spelling has one form that counts, and what is doubtful is none."""

from __future__ import annotations

import pytest

from marserve.errors import ArchiveNotFound
from marserve.store.addresses.fetch_guard import AllowedUrls, BadTarget, hide_query, is_store_address, parse_target

SPELLINGS = [
    ("s3://bucket/a/m.mar", "s3://bucket/a/m.mar"),
    ("S3A://bucket/m.mar", "s3://bucket/m.mar"),
    ("s3n://my.bucket/m.mar", "s3://my.bucket/m.mar"),
    ("s3://bucket/m.mar?versionId=3HL4kqtJvjVBH40Nrjfkd", "s3://bucket/m.mar?versionId=3HL4kqtJvjVBH40Nrjfkd"),
    ("gcs://bucket_1/m.mar", "gs://bucket_1/m.mar"),
    ("gs://bucket/m.mar?generation=17", "gs://bucket/m.mar?generation=17"),
    ("azure://models/m.mar", "az://models/m.mar"),
    ("abfs://models/m.mar", "az://models/m.mar"),
    ("az://$web/m.mar", "az://$web/m.mar"),
    ("abfss://models@account1.dfs.core.windows.net/a/m.mar", "az://models@account1/a/m.mar"),
    ("wasbs://models@account1.blob.core.windows.net/m.mar", "az://models@account1/m.mar"),
    ("az://models@account1/m.mar", "az://models@account1/m.mar"),
    ("hf://org/name@main", "hf://org/name@main"),
    ("hf://org/name@main/folder/m.mar", "hf://org/name@main/folder/m.mar"),
    ("s3+https://bucket.s3.eu-west-1.amazonaws.com/a/m.mar", "s3://bucket/a/m.mar"),
    ("s3+https://my.bucket.s3-us-west-2.amazonaws.com/m.mar", "s3://my.bucket/m.mar"),
    ("s3+https://s3.amazonaws.com/bucket/a/m.mar", "s3://bucket/a/m.mar"),
    ("s3+https://bucket.s3.dualstack.eu-west-1.amazonaws.com/m.mar", "s3://bucket/m.mar"),
]


@pytest.mark.parametrize(("url", "normal"), SPELLINGS)
def test_every_spelling_has_one_normal_form(url: str, normal: str) -> None:
    """Which is what settings and patterns are looked up with."""
    assert is_store_address(url)
    assert parse_target(url).url == normal
    assert parse_target(normal).url == normal


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/m.mar",  # no bucket has a name so short
        "s3://Bucket/m.mar",
        "s3://bucket:9000/m.mar",
        "s3://bucket@evil.org/m.mar",
        "s3://key:secret@bucket/m.mar",
        "s3://bucket//m.mar",
        "s3://bucket/a//m.mar",
        "s3://bucket/m.mar?X-Amz-Signature=1",
        "s3://bucket/m.mar?versionId=1&x=2",
        "gs://bucket/m.mar?versionId=1",
        "gs://bucket/m.mar?generation=1x",
        "az://a/m.mar",
        "az://models@account.evil.org/m.mar",
        "abfss://models@account.dfs.core.windows.net.evil.org/m.mar",
        "abfss://models@account.dfs.core.windows.net:8080/m.mar",
        "abfss://models@evil.org/x.dfs.core.windows.net/m.mar",
        "abfss://user:pass@account.dfs.core.windows.net/m.mar",
        "az://models/m.mar?sv=2023-11-03&sig=abc",
        "hf://user:pass@org/name",
        "hf://org/name@main?token=x",
        "s3+https://evil.org/bucket/m.mar",
        "s3+https://bucket.s3.amazonaws.com.evil.org/m.mar",
        "s3+https://s3.amazonaws.com/m.mar",
        "s3+https://bucket.s3.eu-west-1.amazonaws.com/m.mar?X-Amz-Signature=1",
        "s3+http://bucket.s3.amazonaws.com/m.mar",
    ],
)
def test_what_is_doubtful_is_no_address(url: str) -> None:
    """Two readers might take it for two places."""
    with pytest.raises(BadTarget):
        parse_target(url)


@pytest.mark.parametrize(
    ("pattern", "url", "is_allowed"),
    [
        ("s3://bucket/.*", "s3://bucket/m.mar", True),
        ("s3://bucket/.*", "s3a://bucket/m.mar", True),
        ("s3a://bucket/.*", "s3a://bucket/m.mar", True),
        ("s3a://bucket/.*", "s3://bucket/m.mar", False),
        ("s3://bucket/.*", "s3://bucket2/m.mar", False),
        ("s3://bucket/team/.*", "s3://bucket/other/team/m.mar", False),
        ("az://models/.*", "abfss://models@other.dfs.core.windows.net/m.mar", False),
        ("az://models@account1/.*", "abfss://models@account1.dfs.core.windows.net/m.mar", True),
        (
            "abfss://models@account1.dfs.core.windows.net/.*",
            "abfss://models@account1.dfs.core.windows.net/m.mar",
            True,
        ),
        ("https://bucket.s3.amazonaws.com/.*", "s3+https://bucket.s3.amazonaws.com/m.mar", True),
        ("https://s3.amazonaws.com/bucket/.*", "s3+https://s3.amazonaws.com/bucket/m.mar", True),
        ("https://s3.amazonaws.com/bucket/.*", "s3+https://s3.amazonaws.com/other/m.mar", False),
        ("s3://bucket/.*", "s3+https://bucket.s3.amazonaws.com/m.mar", True),
        ("https?://.*", "s3://bucket/m.mar", False),
    ],
)
def test_patterns_hold_for_the_normal_form_and_for_what_was_written(pattern: str, url: str, is_allowed: bool) -> None:
    """And for nothing that is another place: an account that an address names is part of it."""
    allowed = AllowedUrls([pattern])

    if is_allowed:
        allowed.check(parse_target(url))
    else:
        with pytest.raises(ArchiveNotFound, match="does not match any allowed URL"):
            allowed.check(parse_target(url))


def test_what_stands_before_the_at_is_hidden_unless_it_is_a_container() -> None:
    """A container is not a user; everything else there may be a secret."""
    shown = "abfss://models@account1.dfs.core.windows.net/m.mar"

    assert hide_query(shown) == shown
    assert hide_query("abfss://user:pass@account1/m.mar") == "abfss://account1/m.mar"
    assert hide_query("s3://key:secret@bucket/m.mar") == "s3://bucket/m.mar"
