"""The server's header that marks a request of the protocol; its worker looks for it."""

from __future__ import annotations

from typing import Final

MARK: Final = ("open_inference", "v2")
