"""Envelopes: what stands between requests of one protocol and a handler that takes plain values (`service_envelope`).

`find_envelope` gives the class of a word of the settings; importing this imports none of them.
"""

from __future__ import annotations

import importlib

ENVELOPES = {
    "body": ("marserve_handlers.envelopes.body", "BodyEnvelope"),
    "json": ("marserve_handlers.envelopes.json", "JSONEnvelope"),
    "kserve": ("marserve_handlers.envelopes.kserve", "KServeEnvelope"),
    "kservev2": ("marserve_handlers.envelopes.kserve_v2", "KServev2Envelope"),
}
"""Word of the settings to module and class."""

_FORMER = {"kfserving": "kserve", "kfservingv2": "kservev2"}


def find_envelope(word: str) -> type:
    """The class of that word: one of ENVELOPES, or the first class with `handle` that the module of that name defines.

    Raises ModuleNotFoundError for a word that names neither, and ValueError for a module without such a class.
    """
    place = ENVELOPES.get(word)
    if place is not None:
        found: type = getattr(importlib.import_module(place[0]), place[1])
        return found
    # For a quicker start: the envelopes that come with marserve do not need it.
    from marserve_handlers.support.classes import list_classes_from_module

    try:
        module = importlib.import_module(word)
    except ModuleNotFoundError as error:
        if error.name != word.partition(".")[0] and error.name != word:
            raise
        import difflib  # here for smaller workers: words are right as a rule

        near = _FORMER.get(word) or next(iter(difflib.get_close_matches(word, ENVELOPES, 1)), None)
        hint = f"; did you mean {near}?" if near else ""
        raise ModuleNotFoundError(
            f"service_envelope={word} is not one of {', '.join(ENVELOPES)}, and no module of that name can be "
            f"imported{hint}",
            name=word,
        ) from None
    classes = [found for found in list_classes_from_module(module) if callable(getattr(found, "handle", None))]
    if not classes:
        raise ValueError(f"service_envelope={word} names a module that defines no class with a method handle.")
    return classes[0]
