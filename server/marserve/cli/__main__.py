"""`python -m marserve.cli` is `marserve`."""

from __future__ import annotations

from marserve.cli import main

main()
