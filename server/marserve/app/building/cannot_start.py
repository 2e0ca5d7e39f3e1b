"""What ends a start: the one error of the assembly, and its sentence for an address that cannot be had."""

from __future__ import annotations

import errno


class CannotStart(Exception):
    """The server cannot start; the message says why and what to change."""


def cannot_bind(address: object, error: OSError, *keys: str) -> CannotStart:
    """For an address that these keys name, any of which may be changed."""
    is_taken = error.errno == errno.EADDRINUSE
    why = f"{error.strerror or error}"
    step = "Is another server running there? " if is_taken else ""
    right = "a free one" if is_taken else "one that this machine has"
    return CannotStart(f"Failed to bind to address: {address} ({why}). {step}Set {' or '.join(keys)} to {right}.")
