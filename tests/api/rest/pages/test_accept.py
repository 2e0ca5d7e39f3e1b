"""Tests for the choice of HTML or JSON."""

from __future__ import annotations

import pytest

from marserve.api.rest.pages.accept import prefers_html

CHROMIUM = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


@pytest.mark.parametrize("accept", ["", "*/*", "application/json", "text/*", "text/html;q=0", "text/html;q=x", ",;,"])
def test_who_does_not_ask_for_html_gets_json(accept: str) -> None:
    """Which is what curl and libraries want."""
    assert not prefers_html(accept)


@pytest.mark.parametrize("accept", [CHROMIUM, "TEXT/HTML", "application/json, text/html", "*/*;q=0.1, text/html;q=0.2"])
def test_browsers_get_html(accept: str) -> None:
    """They name it, in any case."""
    assert prefers_html(accept)


def test_the_one_that_is_asked_for_more_wins() -> None:
    """By its `q`."""
    assert not prefers_html("text/html;q=0.4, application/json;q=0.5")
    assert prefers_html("text/html;level=1;q=0.5, application/json;q=0.4")
