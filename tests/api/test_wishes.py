"""What a client may ask for beside its input (`api/wishes.py`); the surfaces' tests show how it travels."""

from __future__ import annotations

import pytest

from marserve.api.wishes import (
    NO_WISHES,
    PRIORITY,
    TIMEOUT,
    VERSION,
    Wishes,
    read_priority,
    read_timeout_s,
    read_version,
)
from marserve.errors import BadInput


def test_wishes_are_gathered_and_each_may_stand_there_once() -> None:
    """Those that were read stay; what the request is called is the surface's word."""
    read = NO_WISHES.adding(TIMEOUT, b"1500").adding(VERSION, b"beta").adding(PRIORITY, b"0")

    assert read == Wishes(1.5, 0, "beta")
    assert Wishes(None, None, None) == NO_WISHES
    with pytest.raises(BadInput, match=f"{PRIORITY} stands in the call more than once"):
        read.adding(PRIORITY, b"1", "call")


@pytest.mark.parametrize(("value", "seconds"), [(b"1", 0.001), (b"250", 0.25), (b"2147483647", 2147483.647)])
def test_a_deadline_is_in_milliseconds(value: bytes, seconds: float) -> None:
    """From one to about 25 days."""
    assert read_timeout_s(value) == seconds


@pytest.mark.parametrize("value", [b"", b"0", b"-1", b"1.5", b"2147483648", b"9" * 11, b" 1", b"1e3", b"\xb2"])
def test_what_is_no_deadline_is_said(value: bytes) -> None:
    """With what it must be."""
    with pytest.raises(BadInput, match="whole number of milliseconds, 1 to 2147483647"):
        read_timeout_s(value)


def test_a_priority_is_one_digit() -> None:
    """0 is the most urgent; a long value is cut in the sentence."""
    assert [read_priority(b"%d" % number) for number in range(10)] == list(range(10))
    for value in (b"", b"10", b"-1", b"a", b"\xb2"):
        with pytest.raises(BadInput, match="from 0"):
            read_priority(value)
    with pytest.raises(BadInput, match=f"is '{'5' * 40}';"):
        read_priority(b"5" * 40)
    with pytest.raises(BadInput, match=rf"is '{'5' * 40}\.\.\.';"):
        read_priority(b"5" * 41)


def test_a_version_may_be_percent_encoded_and_is_never_empty() -> None:
    """What is no UTF-8 then becomes what stands for it: it names no version."""
    assert read_version(b" b\xe9ta ") == "béta"
    assert read_version(b"%CE%B1") == "α"
    assert read_version(b"%ff") == "�"
    for value in (b"", b"  "):
        with pytest.raises(BadInput, match="x-marserve-version is empty"):
            read_version(value)
