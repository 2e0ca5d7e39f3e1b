"""What ends a start: the one error of the assembly."""

from __future__ import annotations


class CannotStart(Exception):
    """The server cannot start; the message says why and what to change."""
