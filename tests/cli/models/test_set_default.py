"""`marserve set-default`."""

from __future__ import annotations

from support.command_line import marserve
from support.fake_apis import fake_apis


def test_a_version_is_made_the_default_one() -> None:
    """The server's words are repeated."""
    with fake_apis() as apis:
        apis.answer("PUT /models/digits/2.0/set-default", {"status": "updated"})

        ran = marserve("set-default", "digits", "2.0", "--management", apis.url)
        document = marserve("set-default", "digits", "2.0", "--json", "--management", apis.url).document

    assert (ran.status, ran.out) == (0, "updated\n")
    assert document == {"model": "digits", "version": "2.0", "status": "updated"}


def test_an_unknown_version_is_a_failure() -> None:
    """Status 1 and the server's words."""
    with fake_apis() as apis:
        ran = marserve("set-default", "digits", "3.0", "--management", apis.url)

    assert ran.status == 1
    assert "Model not found" in ran.err
