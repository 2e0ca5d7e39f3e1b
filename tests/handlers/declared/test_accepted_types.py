"""Tests for the choice between what a client asks for and what is usual."""

from __future__ import annotations

import pytest

from marserve_handlers.declared.accept import prefers

CHROMIUM = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


def wants_html(accept: str) -> bool:
    """Whether HTML goes out in the place of JSON."""
    return prefers(accept, "text/html", "application/json")


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "application/json",
        "text/*",
        "text/html;q=0",
        "text/html; Q=0.000",
        "text/html;charset=utf-8 ; q = 0",
        "text/html;q=x",
        "text/html;q=-1",
        "text/html;q=1e9",
        "text/html;q=nan",
        "text/html;q=2",
        'text/plain;note="a, text/html"',
        'text/plain;note="a \\", text/html',
        ",;,",
        ";text/html",
    ],
)
def test_a_client_that_does_not_ask_for_it_gets_what_is_usual(accept: str) -> None:
    """Which is what curl and libraries want; a weight of 0 is a refusal."""
    assert not wants_html(accept)


@pytest.mark.parametrize(
    "accept",
    [
        CHROMIUM,
        "TEXT/HTML",
        "application/json, text/html",
        "*/*;q=0.1, text/html;q=0.2",
        "text/html;q=0.001",
        "text/html;q=1.",
        'text/html;note="a;q=0"',
        "text/html;q=0, text/html",
    ],
)
def test_a_client_that_names_it_gets_it(accept: str) -> None:
    """In any case."""
    assert wants_html(accept)


def test_the_one_that_is_asked_for_more_wins() -> None:
    """By its `q`."""
    assert not wants_html("text/html;q=0.4, application/json;q=0.5")
    assert wants_html("text/html;level=1;q=0.5, application/json;q=0.4")
