"""Tests for the line of a request that logs show."""

from __future__ import annotations

import time
from urllib.parse import quote

import pytest

from marserve.api.http.request_head import request_line

SECRET = "planted"


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("/models?url=m.mar&batch_size=2", "/models?url=m.mar&batch_size=2"),
        ("/models?url=https://h/a/m.mar&batch_size=2", "/models?url=https://h/a/m.mar&batch_size=2"),
        ("/models?url=https%3A%2F%2Fh%2Fm%20n.mar", "/models?url=https%3A%2F%2Fh%2Fm%20n.mar"),
        (f"/models?url=https://h/m.mar?sig={SECRET}&more={SECRET}", "/models?url=https://h/m.mar?…"),
        (
            f"/models?a=1&url={quote(f'https://h/m.mar?sig={SECRET}&x={SECRET}', safe='')}&batch_size=2",
            "/models?a=1&url=https%3A%2F%2Fh%2Fm.mar?…&batch_size=2",
        ),
        (f"/models?url=https://me:{SECRET}@h/m.mar", "/models?url=https://h/m.mar"),
        (
            f"/workflows?url={quote(f'https://me:{SECRET}%21@h/m.war', safe='')}",
            "/workflows?url=https%3A%2F%2Fh%2Fm.war",
        ),
        (f"/models?url=s3://me:{SECRET}@b/m.mar", "/models?url=s3://b/m.mar"),
        (f"/models?url=s3%2Bhttps%3A%2F%2Fme%3A{SECRET}%40h%2Fm.mar", "/models?url=s3%2Bhttps%3A%2F%2Fh%2Fm.mar"),
        (f"/models?url=s3://me:a/{SECRET}/b@b/m.mar&batch_size=2", "/models?url=s3://b/m.mar&batch_size=2"),
        (f"/models?url=https%3A%2F%2Fme%3Aa%2F{SECRET}%40h%2Fm.mar", "/models?url=https://h/m.mar"),
        (f"/models?url=https%3A%2Fme%3A{SECRET}%40h%2Fm.mar", "/models?url=https:/h/m.mar"),
        (f"/models?url=https%3A%2F%2Fh%2Fm.mar%23token%3D{SECRET}", "/models?url=https://h/m.mar#…"),
        ("/models?url=hf://org/name@main", "/models?url=hf://org/name@main"),
        ("/predictions/m?curl=a?b", "/predictions/m?curl=a?b"),
    ],
)
def test_an_address_is_logged_without_its_key(target: str, shown: str) -> None:
    """Whoever reads a log is not always who may fetch the archive."""
    assert request_line(b"POST", target.encode(), "1.1") == f"POST {shown} HTTP/1.1"


@pytest.mark.parametrize("value", ["%" * 8000, "a%3A" * 2000, "http://" + "a:" * 4000, "&url=a" * 1300])
def test_a_long_address_costs_no_more_than_its_length(value: str) -> None:
    """Targets are read on the event loop."""
    began = time.thread_time()

    request_line(b"POST", f"/models?url={value}".encode(), "1.1")

    assert time.thread_time() - began < 0.5
