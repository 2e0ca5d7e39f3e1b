"""Which names models, versions and workflows may newly get, and how text that comes from outside is shown. Pure.

A name stands in paths, logs, tables and pages. Controls and separators of lines (Unicode's classes Cc, Zl and Zp) break
a line or command a terminal, half a surrogate pair (Cs) cannot be encoded, a bidirectional control lets one name look
like another, and `.` and `..` are lost in every path that a client tidies.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import Any, Final

from marserve.errors import BadName

# The bidirectional controls are those with Unicode's property Bidi_Control.
_BIDIRECTIONAL: Final = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_SPECIAL: Final = f"\x7f-\x9f\u2028\u2029\ud800-\udfff{_BIDIRECTIONAL}"
# Words that stand where a version may stand in paths of management. Other such words have routes of older servers.
RESERVED_VERSIONS: Final = frozenset(("all", "check", "logs", "optimise", "profile", "stats"))
_UNFIT: Final = re.compile(f"[\x00-\x1f{_SPECIAL}]")
_UNFIT_RUN: Final = re.compile(f"[\x00-\x1f{_SPECIAL}]+")
# JSON escapes the first 32 characters itself; those that stand in a document are its layout.
_UNFIT_IN_JSON: Final = re.compile(f"[{_SPECIAL}]")


def name_fault(what: str, name: str) -> str | None:
    """A clause that says why the `what` ("model", "version", "workflow") cannot be called `name`; None where it can."""
    lost = next((part for part in name.split("/") if part in (".", "..")), None)
    if lost is not None:
        part = "" if name == lost else f", for its part '{lost}'"
        return f"the {what} name '{escaped(name[:100])}' is lost in paths{part}"
    found = _UNFIT.search(name)
    if found is None:
        return None
    character = ord(found[0])
    kind = unicodedata.name(found[0], "half of a surrogate pair" if 0xD800 <= character < 0xE000 else "a control")
    return f"the {what} name '{escaped(name[:100])}' holds U+{character:04X} ({kind})"


def reserved_fault(version: str) -> str | None:
    """A clause that says why a version is not newly called so, though any text may name one; None where it is."""
    if version not in RESERVED_VERSIONS:
        return None
    words = ", ".join(sorted(RESERVED_VERSIONS))
    return f"the version name '{version}' is one of {words}, which stand for other things in /models/MODEL/{version}"


def check_new_version(name: str, *, may_be_reserved: bool) -> None:
    """Raise BadName for what no version is newly called."""
    check_new_name("version", name)
    if not may_be_reserved and (fault := reserved_fault(name)) is not None:
        raise BadName(f"{fault[0].upper()}{fault[1:]}; choose another version name, such as 1.0.")


def check_new_name(what: str, name: str) -> None:
    """Raise BadName for what no model, version or workflow is newly called."""
    fault = name_fault(what, name)
    if fault is not None:
        raise BadName(f"{fault[0].upper()}{fault[1:]}, so nothing can be registered under it; choose another name.")


def escaped(text: str, keep: str = "") -> str:
    """The text with what is unfit for a name in escapes, as `\\x1b` and `\\u202e`; characters of `keep` stay.

    Text of nothing else takes 0.15 µs a character: a worker may print much of it.
    """
    if text.isprintable():
        return text
    escapes = _escapes_but(keep)
    return _UNFIT_RUN.sub(lambda found: found[0].translate(escapes), text)


class _Escapes(dict[int, str]):
    """The escape of each character, made when it is needed."""

    def __missing__(self, character: int) -> str:
        made = self[character] = chr(character).encode("unicode_escape").decode("ascii")
        return made


@functools.cache
def _escapes_but(keep: str) -> _Escapes:
    return _Escapes({ord(character): character for character in keep})


def encodable(name: str) -> str:
    """A name that a start brought with it, with half surrogate pairs as escapes: no wire and no page can carry them."""
    return name.encode("utf-8", "backslashreplace").decode()


def encodable_document(document: Any) -> Any:
    """The same of every text in a document of maps and lists; other values are handed on as they are."""
    if isinstance(document, str):
        return encodable(document)
    if isinstance(document, dict):
        return {encodable_document(key): encodable_document(value) for key, value in document.items()}
    return [encodable_document(item) for item in document] if isinstance(document, list) else document


def json_escaped(document: str) -> str:
    """A JSON text that means the same, with what is unfit for a name in JSON's escapes.

    Half a surrogate pair, which many readers of JSON refuse, becomes a question mark.
    """
    if document.isascii() and "\x7f" not in document:
        return document
    return _UNFIT_IN_JSON.sub(_json_escape, document)


def _json_escape(found: re.Match[str]) -> str:
    character = ord(found[0])
    return "?" if 0xD800 <= character < 0xE000 else f"\\u{character:04x}"
