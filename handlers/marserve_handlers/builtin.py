"""Which handlers come with marserve, by the names that manifests use. Importing this imports none of them."""

from __future__ import annotations

import importlib

BUILT_IN = {
    "base_handler": ("marserve_handlers.base", "BaseHandler"),
    "image_classifier": ("marserve_handlers.image_classifier", "ImageClassifier"),
}
"""Name in the manifest to module and class."""


def find_built_in(name: str) -> type | None:
    """The class of the built-in handler of that name, imported now, or None if there is none."""
    place = BUILT_IN.get(name)
    if place is None:
        return None
    found: type = getattr(importlib.import_module(place[0]), place[1])
    return found
