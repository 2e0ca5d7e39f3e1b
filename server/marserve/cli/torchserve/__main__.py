"""`python -m marserve.cli.torchserve` is `torchserve`."""

from __future__ import annotations

from marserve.cli.torchserve.torchserve import main

main()
