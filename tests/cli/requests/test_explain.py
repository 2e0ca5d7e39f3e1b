"""`marserve explain`."""

from __future__ import annotations

import pytest

from support.command_line import marserve
from support.fake_apis import EXPLAINED, fake_apis


def test_a_request_is_explained_in_words_and_bars() -> None:
    """The longest stage has the longest bar."""
    with fake_apis() as apis:
        apis.answer("GET /requests/r-1", EXPLAINED)

        ran = marserve("explain", "r-1", "--management", apis.url)

    lines = ran.out.splitlines()
    assert ran.status == 0
    assert lines[0] == "r-1"
    assert lines[1] == "digits 1.0, W-9000-digits_1.0: 200, 14 bytes in, 11 bytes out"
    assert "Why: queue, 100.0 ms: it waited for a worker" in lines
    assert "  also 20.0 ms: the handler ran its batch of 2" in lines
    assert f"  queue        100.00 ms  {'█' * 40}" in lines
    assert f"  handle        20.00 ms  {'█' * 8}" in lines
    # Below the stage whose part it is, as the page on slow requests has it.
    below = lines[lines.index(f"  handle        20.00 ms  {'█' * 8}") + 1]
    assert below == "    tokenise: 2.00 ms, 1.00 ms after the batch began"
    assert "  with r-2" in lines
    assert "  after 3 ms: other was put to sleep to make room" in lines


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("--slowest",), {"limit": "1"}),
        (("--failed", "--model", "digits"), {"limit": "1", "failed": "true", "model": "digits"}),
        (("--slowest", "--cause", "queue"), {"limit": "1", "cause": "queue"}),
    ],
)
def test_the_slowest_is_found_first(words: tuple[str, ...], asked: dict[str, str]) -> None:
    """Of those that are wanted."""
    with fake_apis() as apis:
        apis.answer("GET /requests", {"requests": [{"id": "r-1"}], "recorded": 1})
        apis.answer("GET /requests/r-1", EXPLAINED)

        ran = marserve("explain", *words, "--management", apis.url)

        assert ran.status == 0
        assert apis.asked[0].parameters == asked
        assert ran.out.startswith("r-1\n")


def test_a_list_has_a_line_for_each() -> None:
    """To choose from."""
    row = {"id": "r-1", "model": "m", "version": "1", "status": 200, "wall_ms": 12.3, "cause": "queue", "why": "w"}
    with fake_apis() as apis:
        apis.answer("GET /requests", {"requests": [row], "recorded": 1})

        ran = marserve("explain", "--list", "--slower-than", "10ms", "--management", apis.url)

        assert apis.asked[0].parameters == {"limit": "50", "slower_than": "10ms"}
    assert ran.out.split() == ["12.3", "ms", "200", "queue", "m", "1", "r-1"]


def test_the_newest_are_listed_if_asked_for() -> None:
    """They have an order only in a list."""
    with fake_apis() as apis:
        apis.answer("GET /requests", {"requests": [], "recorded": 0})
        marserve("explain", "--list", "--newest", "--management", apis.url)

        ran = marserve("explain", "--newest", "--slowest", "--management", apis.url)

        assert [each.parameters for each in apis.asked] == [{"limit": "50", "order": "newest"}]
    assert ran.status == 2
    assert "say --list, too" in ran.err


@pytest.mark.parametrize(("share", "said"), [(0.4, ["  40% of it are padding if"]), (0.01, []), (0.0, [])])
def test_padding_is_said_where_it_is_worth_a_line(share: float, said: list[str]) -> None:
    """As a share of the batch; texts of as many numbers differ a little, too."""
    padded = {**EXPLAINED, "batch": {**EXPLAINED["batch"], "padding": share}}
    with fake_apis() as apis:
        apis.answer("GET /requests/r-1", padded)

        ran = marserve("explain", "r-1", "--management", apis.url)

    assert [line.partition(" inputs")[0] for line in ran.out.splitlines() if "padding" in line] == said


def test_scripts_get_the_document() -> None:
    """With `--json`."""
    with fake_apis() as apis:
        apis.answer("GET /requests/r-1", EXPLAINED)

        assert marserve("explain", "r-1", "--json", "--management", apis.url).document == EXPLAINED


def test_an_id_is_one_segment_of_the_path() -> None:
    """Whatever is in it."""
    with fake_apis() as apis:
        apis.answer("GET /requests/a%2F..%2Fb", EXPLAINED)

        assert marserve("explain", "a/../b", "--management", apis.url).status == 0


@pytest.mark.parametrize("words", [(), ("r-1", "--slowest")])
def test_one_request_must_be_named_or_searched_for(words: tuple[str, ...]) -> None:
    """Not both; no server is asked."""
    ran = marserve("explain", *words, "--management", "http://127.0.0.1:9")

    assert ran.status == 2
    assert "--slowest" in ran.err


def test_that_none_is_recorded_is_said() -> None:
    """With how many there are."""
    with fake_apis() as apis:
        apis.answer("GET /requests", {"requests": [], "recorded": 7})

        ran = marserve("explain", "--failed", "--management", apis.url)

    assert ran.status == 1
    assert "None of the 7 recorded requests is such a one." in ran.err


def test_a_server_that_records_nothing_is_named_as_one() -> None:
    """It was started as torchserve, or without the recorder."""
    with fake_apis() as apis:
        refusal = {"code": 404, "type": "ResourceNotFoundException", "message": "no"}
        apis.answer("GET /requests/r-1", refusal, status=404)

        ran = marserve("explain", "r-1", "--management", apis.url)

    assert ran.status == 1
    assert "flight_recorder_size=0" in ran.err
