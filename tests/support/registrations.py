"""Registrations, written as short as tests want them."""

from __future__ import annotations

from typing import Any

from marserve.model_options import OPTIONS, Said
from marserve.registry.intake.registration import RegisterParameters

_NAMES = {option.attribute for option in OPTIONS}


def registration(url: str, **words: Any) -> RegisterParameters:
    """A registration whose words are options of the version, or what else a registration may say."""
    options = {name: value for name, value in words.items() if name in _NAMES}
    rest = {name: value for name, value in words.items() if name not in _NAMES}
    return RegisterParameters(url, options=Said(options), **rest)
