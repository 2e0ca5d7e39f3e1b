"""`marserve replay`."""

from __future__ import annotations

from typing import Any

from support.command_line import marserve
from support.fake_apis import fake_apis


def run(queue_ms: float, **answer: Any) -> dict[str, Any]:
    """One run of a request."""
    return {
        "version": "1.0",
        "worker": "W-9000-m_1.0",
        "wall_ms": queue_ms + 2.0,
        "stages": [{"name": "queue", "ms": queue_ms}, {"name": "handle", "ms": 2.0}],
        "first_of_worker": False,
        "answer": {"status": 200, "bytes": 2, "sha256": "ab" * 32, **answer},
    }


RAN: dict[str, Any] = {
    "id": "r-1",
    "model": "m",
    "version": "1.0",
    "answer": "different",
    "first": run(100.0),
    "times": [
        {**run(1.0, compared="equal"), "mates_different": ["r-2"]},
        run(5.0, compared="different", sha256=None, status=500, error="handler", message="no such picture"),
        {**run(3.0, compared="equal"), "first_of_worker": True},
    ],
    "batch": {"size": 4, "ran": ["r-1", "r-2"], "missing": [{"id": "r-3", "why": "it was redacted"}], "unknown": 1},
    "headers_left_out": ["authorization"],
    "asked_times": 9,
}


def test_both_times_stand_side_by_side() -> None:
    """With what was different, and what could not be run again."""
    with fake_apis() as apis:
        apis.answer("POST /requests/r-1/replay", RAN)

        ran = marserve("replay", "r-1", "--version", "1.0", "--times", "9", "--management", apis.url)

        assert apis.asked[0].parameters == {"version": "1.0", "times": "9"}
    assert ran.status == 0
    assert ran.out.splitlines() == [
        "r-1: m 1.0, W-9000-m_1.0, 3 times, of which the medians are shown",
        "first by 1.0, W-9000-m_1.0",
        "",
        "The answer is different from the first one.",
        "  first: 200, 2 bytes, sha256 abababababababab…",
        "  again: 200, 2 bytes, sha256 abababababababab…",
        "  again: 500, handler: no such picture",
        "  different, too, of its batch: r-2",
        "",
        "                first         again",
        "  queue        100.00 ms       3.00 ms",
        "  handle         2.00 ms       2.00 ms",
        "  in all       102.00 ms       5.00 ms",
        "",
        "A run was its worker's first batch.",
        "Its batch had 4; 2 of them ran again",
        "  without r-3: it was redacted",
        "  without 1 of which nothing is kept",
        "Without its headers authorization, which are not kept",
        "Of 9 runs 3 were made: that took a minute",
    ]


def test_scripts_get_the_document() -> None:
    """With `--json`."""
    with fake_apis() as apis:
        apis.answer("POST /requests/r-1/replay", RAN)

        assert marserve("replay", "r-1", "--json", "--management", apis.url).document == RAN


def test_a_refusal_is_shown_in_the_servers_words() -> None:
    """And is a failure."""
    with fake_apis() as apis:
        apis.answer("POST /requests/r-1/replay", {"code": 409, "type": "x", "message": "It was redacted."}, status=409)

        ran = marserve("replay", "r-1", "--management", apis.url)

    assert ran.status == 1
    assert "It was redacted." in ran.err
