"""Which of two content types a client would rather have (`Accept`, RFC 9110, 12.5.1). Pure.

The server, which imports nothing of handlers, has its own for its pages (`api/rest/pages/accept.py`).
"""

from __future__ import annotations

import re
from typing import Final

# A range with its parameters; commas and semicolons in quotes belong to a value. A quote that nothing ends goes on.
_RANGE: Final = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.?)*(?:"|$))+', re.DOTALL)
_PARAMETER: Final = re.compile(r'(?:[^;"]|"(?:[^"\\]|\\.?)*(?:"|$))+', re.DOTALL)
_QUALITY: Final = re.compile(r"[0-9]+(?:\.[0-9]*)?")


def prefers(accept: str, content_type: str, usual: str) -> bool:
    """Whether an `Accept` names the content type, and does not ask for the usual one more.

    Both are in lower case, without parameters. A client that accepts anything (`*/*`, as curl and most libraries send)
    gets the usual one.
    """
    qualities = {content_type: 0.0, usual: 0.0}
    for found in _RANGE.finditer(accept):
        kind, _, parameters = found[0].partition(";")
        name = kind.strip().lower()
        if name in qualities:
            qualities[name] = max(qualities[name], _quality(parameters))
    return qualities[content_type] > 0 and qualities[content_type] >= qualities[usual]


def _quality(parameters: str) -> float:
    """The `q` among a range's parameters; 1 without one, 0 for a value that is no number from 0 to 1."""
    for parameter in _PARAMETER.findall(parameters):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            value = value.strip()
            quality = float(value) if _QUALITY.fullmatch(value) else 0.0
            return quality if quality <= 1 else 0.0
    return 1.0
