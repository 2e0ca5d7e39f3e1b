"""Patterns for cleaning text. Pure."""

from __future__ import annotations

import re

CLEANUP_REGEX = re.compile("<.*?>")
"""Markup tags."""
