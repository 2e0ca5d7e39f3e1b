"""How much is to be measured, and with what: what every benchmark is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from load_generator import LoadGenerator


@dataclass(frozen=True, slots=True)
class Plan:
    """`rounds` are how often each thing is measured, in turns; `is_quick` asks for less of everything.

    `folder` is the run's own and is removed after it; `say` tells whoever waits what is going on.
    """

    folder: Path
    rounds: int
    is_quick: bool
    generator: LoadGenerator
    say: Callable[[str], None]

    def new_folder(self, name: str) -> Path:
        """The path of a folder that does not exist yet."""
        number = 1
        while (path := self.folder / f"{name}-{number}").exists():
            number += 1
        return path
