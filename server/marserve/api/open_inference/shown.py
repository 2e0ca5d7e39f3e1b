"""Values of clients in sentences: bounded, quoted, and in ASCII. Pure."""

from __future__ import annotations

from typing import Final

MOST_SHOWN: Final = 60


def shown(value: object, most: int = MOST_SHOWN) -> str:
    """A value as JSON has it, of which a list or an object is only named."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return bounded(ascii(value[:most] if isinstance(value, str) else value), most)


def bounded(text: str, most: int = MOST_SHOWN) -> str:
    """A text, cut where it is long."""
    return text if len(text) <= most else text[:most] + "…"
