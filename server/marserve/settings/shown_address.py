"""Addresses as logs, descriptions and errors may show them: without parts that may be a key. Pure.

Presigned addresses carry a key in the query, others in user information or a fragment. Mistyped addresses (a slash of
the secret that was not escaped, one slash in place of two) are treated alike. Doubtful parts are hidden.
"""

from __future__ import annotations

import re

from marserve.settings.stores import SCHEMES

CONTAINER = re.compile(r"\$root|\$web|\$logs|[a-z0-9](-?[a-z0-9]){2,62}")
"""What a container of Azure's may be called: it stands before the `@` of an address, and is no user of it."""

_ADDRESS = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)
_PIECE = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:/.*", re.DOTALL)
_QUOTED = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:/[^\s'\"]*")
# The beginning of an address that has too few slashes, or no scheme.
_BEGINNING = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:/+|//+|")
_HOST_AND_PORT = re.compile(r"\[[0-9A-Fa-f:.]*\](:[0-9]*)?|[^:%@]*(:[0-9]*)?")
_DIGEST = re.compile(r"sha256=[0-9a-f]{64}", re.IGNORECASE)


def hide_query(url: str) -> str:
    """An address, or a name in the store, without its query, its user information, and any fragment but a digest."""
    found = _ADDRESS.fullmatch(url)
    if found is None:
        beginning = _BEGINNING.match(url)
        assert beginning is not None
        name, more = _without_query(url[beginning.end() :])
        user, at, host = name.rpartition("@")
        is_user = at and ":" in user and not name.startswith("/")
        return f"{beginning[0]}{host if is_user else name}{more}"
    scheme = found[1]
    body, more = _without_query(found[2])
    authority = body.partition("/")[0]
    user, at, _ = authority.rpartition("@")
    if at and SCHEMES.get(scheme.lower()) == "az" and CONTAINER.fullmatch(user):
        return f"{scheme}://{body}{more}"
    if _HOST_AND_PORT.fullmatch(authority):
        return f"{scheme}://{body}{more}"
    # A user, or the beginning of one whose secret has a slash, or an escaped character.
    return f"{scheme}://{body.rpartition('@')[2] if '@' in body else '…'}{more}"


def hide_each(text: str) -> str:
    """Comma-separated words, such as `name=address`, each without the parts that `hide_query` hides."""
    return ",".join(_PIECE.sub(lambda found: hide_query(found[0]), word) for word in text.split(","))


def hide_quoted(text: str) -> str:
    """A text with quoted addresses, as in JSON: each without the parts that `hide_query` hides."""
    return _QUOTED.sub(lambda found: hide_query(found[0]), text)


def _without_query(text: str) -> tuple[str, str]:
    """The text before a query and a fragment, and what is shown in their place."""
    rest, mark, _ = text.partition("?")
    rest, sharp, fragment = rest.partition("#")
    shown = f"#{fragment}" if not sharp or _DIGEST.fullmatch(fragment) else "#…"
    return rest, f"{shown if sharp else ''}{'?…' if mark else ''}"
