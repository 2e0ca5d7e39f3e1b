"""The error that ends a start, and its sentence for an address that cannot be bound."""

from __future__ import annotations

import errno


class CannotStart(Exception):
    """The server cannot start; the message says why and what to change."""


def cannot_bind(address: object, error: OSError, *keys: str) -> CannotStart:
    """The error for an address; changing any of these keys may help."""
    is_taken = error.errno == errno.EADDRINUSE
    why = f"{error.strerror or error}"
    step = "Is another server running there? " if is_taken else ""
    right = "a free one" if is_taken else "one that this machine has"
    return CannotStart(f"Failed to bind to address: {address} ({why}). {step}Set {' or '.join(keys)} to {right}.")
