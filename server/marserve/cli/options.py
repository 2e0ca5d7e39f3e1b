"""Options that many commands share and that need nothing else to be loaded."""

from __future__ import annotations

from typing import Annotated

import typer

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be; nothing is changed.")]
