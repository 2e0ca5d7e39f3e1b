"""The error that ends a start, and its sentence for an address that cannot be bound."""

from __future__ import annotations

import errno

from marserve.api.port_holder import say_holder


class CannotStart(Exception):
    """The server cannot start; the message says why and what to change."""


def cannot_bind(address: object, error: OSError, *keys: str) -> CannotStart:
    """The error for an address; changing any of these keys may help."""
    is_taken = error.errno == errno.EADDRINUSE
    why = f"{error.strerror or error}"
    port = str(address).rpartition(":")[2]
    holder = say_holder(int(port)) if is_taken and port.isdecimal() else ""
    step = f"It is in use by {holder}. " if holder else "Is another server running there? " if is_taken else ""
    right = "a free one" if is_taken else "one that this machine has"
    return CannotStart(f"Failed to bind to address: {address} ({why}). {step}Set {' or '.join(keys)} to {right}.")
