"""Which bodies are refused for a while because they killed workers. Pure: time is passed in."""

from __future__ import annotations

import hashlib

from marserve.messages import Request

# How long the body of a request that killed two workers is refused (RELIABILITY C3).
REFUSE_S = 60.0
MAX_REFUSED = 1000
MAX_DEATHS = 2


class Fingerprints:
    """Digests of the bodies that are refused. While `until` is empty no request needs a digest."""

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until: dict[bytes, float] = {}  # by digest, the one that ends soonest first

    def refuse(self, request: Request, now: float) -> None:
        """Refuse this body for a while. The table is bounded: the entry that ends soonest makes room."""
        until, fingerprint = self.until, fingerprint_of(request)
        until.pop(fingerprint, None)
        if len(until) >= MAX_REFUSED:
            del until[next(iter(until))]
        until[fingerprint] = now + REFUSE_S

    def refused_for_s(self, request: Request, now: float) -> float:
        """How much longer this body is refused; 0 if it is not."""
        until = self.until
        while until:
            fingerprint, end = next(iter(until.items()))
            if end > now:
                return max(0.0, until.get(fingerprint_of(request), now) - now)
            del until[fingerprint]
        return 0.0


def fingerprint_of(request: Request) -> bytes:
    """A digest of a request's inputs, names and bytes, by which the same request is recognised."""
    digest = hashlib.blake2b(digest_size=16)
    for part in request.parts:
        name = part.name.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%d:" % (len(name), len(part.body)))
        digest.update(name)
        digest.update(part.body)
    return digest.digest()
