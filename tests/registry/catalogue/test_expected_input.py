"""Tests for what a handler is taken to want."""

from __future__ import annotations

import pytest

from marserve.registry.catalogue.expected_input import expected_input
from marserve.registry.intake.handler_check import ALL_BUILT_IN


@pytest.mark.parametrize("handler", ["handler.py", "h:entry", "sagemaker_script", "", "sub/image_classifier", "x.y"])
def test_of_an_authors_own_handler_nothing_is_known(handler: str) -> None:
    """It takes what it takes."""
    assert expected_input(handler, None) == "anything"


@pytest.mark.parametrize(
    ("handler", "expected"),
    [("image_classifier", "image"), ("object_detector", "image"), ("text_handler", "text"), ("base_handler", "json")],
)
def test_built_in_handlers_are_known(handler: str, expected: str) -> None:
    """By their names."""
    assert handler in ALL_BUILT_IN
    assert expected_input(handler, None) == expected


@pytest.mark.parametrize("envelope", ["json", "kserve", "kservev2"])
def test_an_envelope_goes_before_the_handler(envelope: str) -> None:
    """It unpacks JSON, whatever the handler behind it makes of the values."""
    assert expected_input("image_classifier", envelope) == "json"


def test_an_envelope_of_an_authors_own_changes_nothing() -> None:
    """What it takes is not known."""
    assert expected_input("image_classifier", "mine.py") == "image"
