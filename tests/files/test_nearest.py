"""Tests for suggestions: the nearest name is found, none where none is near, and no long name is compared."""

from __future__ import annotations

import pytest

from marserve.files import nearest as nearest_module
from marserve.files.nearest import LONGEST_COMPARED, did_you_mean, nearest

KNOWN = ("batch_size", "max_batch_delay", "min_workers")


@pytest.mark.parametrize(
    ("word", "least", "is_loose", "found"),
    [
        ("batch_sise", 0.6, False, "batch_size"),
        ("batch_sise", 0.95, False, None),
        ("BatchSize", 0.85, False, None),
        ("BatchSize", 0.85, True, "batch_size"),
        ("max-batch-delay", 1.0, True, "max_batch_delay"),
        ("colour", 0.6, False, None),
        ("", 0.6, True, None),
    ],
)
def test_the_nearest_name_is_found_where_one_is_near_enough(
    word: str, least: float, is_loose: bool, found: str | None
) -> None:
    """A loose comparison leaves out capitals, dashes and underscores, and gives the name as it is known."""
    assert nearest(word, KNOWN, least=least, is_loose=is_loose) == found


def test_a_message_names_it_or_says_something_else() -> None:
    """Known names may be any collection, an empty one too."""
    assert did_you_mean("min_worker", dict.fromkeys(KNOWN)) == "; did you mean min_workers?"
    assert did_you_mean("colour", KNOWN) == ""
    assert did_you_mean("colour", (), otherwise="; it has none") == "; it has none"


def test_a_long_word_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send one of a megabyte."""
    known = ["a" * LONGEST_COMPARED]
    assert nearest("a" * LONGEST_COMPARED, known) == known[0]

    monkeypatch.delattr(nearest_module, "get_close_matches")

    assert nearest("a" * (LONGEST_COMPARED + 1), known) is None
