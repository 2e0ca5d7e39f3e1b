"""`marserve watches`."""

from __future__ import annotations

from typing import Any

from support.command_line import marserve
from support.fake_apis import fake_apis

WATCH: dict[str, Any] = {
    "name": "s3",
    "place": "s3://bucket/models/",
    "policy": "load",
    "archives": 2,
    "states": {"loaded": 1, "refused": 1},
    "reachable": False,
    "lastSuccess": "2026-01-02T03:04:05Z",
    "lastError": {"at": "2026-01-02T03:05:05Z", "reason": "the connection was refused"},
    "unfinished": [{"key": "up.mar", "size": 7, "reason": "up.mar is no complete zip file: it has no end record"}],
}
ARCHIVES = {
    "archiveList": [
        {"key": "m.mar", "state": "loaded", "at": "2026-01-02T03:04:05Z", "modelName": "m", "modelVersion": "1.0"},
        {"key": "n.mar", "state": "refused", "at": "2026-01-02T03:04:05Z", "reason": "n.mar is damaged"},
    ]
}


def test_watches_are_listed_with_their_state() -> None:
    """A line each; the document is the server's."""
    with fake_apis() as apis:
        apis.answer("GET /watches", {"watches": [WATCH]})

        ran = marserve("watches", "--management", apis.url)
        document = marserve("watches", "--json", "--management", apis.url).document

    assert ran.status == 0
    assert "1 loaded, 1 refused" in ran.out
    assert "the connection was refused" in ran.out
    assert document == {"watches": [WATCH]}


def test_a_server_that_watches_nothing_says_so() -> None:
    """In a sentence."""
    with fake_apis() as apis:
        apis.answer("GET /watches", {"watches": []})

        assert marserve("watches", "--management", apis.url).out == "Nothing is watched.\n"
        assert marserve("watches", "--look", "--management", apis.url).out == "Nothing is watched.\n"


def test_a_watch_is_shown_with_its_archives() -> None:
    """And with what is not finished."""
    with fake_apis() as apis:
        apis.answer("GET /watches/s3", {**WATCH, **ARCHIVES})

        ran = marserve("watches", "s3", "--management", apis.url)

    assert "n.mar is damaged" in ran.out
    assert "Not finished: up.mar: up.mar is no complete zip file" in ran.out
    assert "m 1.0" in ran.out


def test_a_look_is_asked_for_now() -> None:
    """Of one watch, or of all."""
    with fake_apis() as apis:
        apis.answer("GET /watches", {"watches": [WATCH, {**WATCH, "name": "other"}]})
        apis.answer("POST /watches/s3/look", {"status": "Watch s3 looks now"})
        apis.answer("POST /watches/other/look", {"status": "Watch other looks now"})

        one = marserve("watches", "s3", "--look", "--management", apis.url)
        all_of_them = marserve("watches", "--look", "--json", "--management", apis.url).document

    assert one.out == "Watch s3 looks now\n"
    assert all_of_them == {"looked": ["s3", "other"]}


def test_a_watch_that_is_not_there_is_a_failure() -> None:
    """Status 1 and the server's words."""
    with fake_apis() as apis:
        ran = marserve("watches", "nope", "--management", apis.url)

    assert ran.status == 1
