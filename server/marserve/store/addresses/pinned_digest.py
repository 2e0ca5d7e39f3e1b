"""SHA-256 digests that archives must have, in addresses (`…#sha256=HEX`) and in files beside archives. Pure."""

from __future__ import annotations

import re

from marserve.store.addresses.fetch_guard import BadTarget, hide_query

BESIDE = ".sha256"
"""What the file beside an archive is called, behind the archive's name."""
MOST_BESIDE_BYTES = 64 * 1024

_FRAGMENT = re.compile(r"sha256=([0-9a-f]{64})", re.IGNORECASE)
_LINE = re.compile(
    r"(?:\\?(?P<first>[0-9a-fA-F]{64})(?:\s+\*?(?P<name>.+))?|SHA256 \((?P<bsd>.+)\) = (?P<last>[0-9a-fA-F]{64}))"
)


def split_digest(url: str) -> tuple[str, str | None]:
    """A registration's `url` without its digest, and the digest in lower case (None without one).

    Raises BadTarget for a malformed digest.
    """
    plain, mark, fragment = url.rpartition("#")
    if not mark or not fragment.lower().startswith("sha256"):
        return url, None
    found = _FRAGMENT.fullmatch(fragment)
    if found is None:
        raise BadTarget(
            f"Given URL {hide_query(plain)[:500]} is refused: behind its # must stand sha256= and 64 hexadecimal digits"
        )
    return plain, found[1].lower()


def read_digest(text: str, name: str) -> str | None:
    """The digest of `name` in output of `sha256sum` (also the BSD form, or the digest alone); None if it is missing."""
    for line in text.splitlines():
        found = _LINE.fullmatch(line.strip())
        if found is None:
            continue
        called = found["name"] or found["bsd"]
        if called is None or called.rpartition("/")[2] == name:
            return str(found["first"] or found["last"]).lower()
    return None
