"""Environments without pip: what is asked for is noted, and is there at once, later, or never."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

from marserve.environments.requirements import Requirements
from marserve.errors import DependencyFailed


class FakeEnvironment:
    """A folder that stands for an environment."""

    def __init__(self, folder: Path, kind: Literal["packages", "venv"]) -> None:
        self.folder = folder
        self.kind = kind
        self.modules = folder / "packages"
        self.modules.mkdir(parents=True, exist_ok=True)
        self.packages = self.modules if kind == "packages" else None
        self.python = folder / "python" if kind == "venv" else None
        self.may_share_imports = False
        self.installed = ("tiny==1.0",)
        self.log = folder / "log"
        self.seconds = 0.5
        self.was_there = False
        self.is_released = False

    def release(self) -> None:
        """Note it."""
        self.is_released = True


class FakeEnvironments:
    """`gate` is waited for before each; `fails` has the next ones fail, with these words of pip's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = ""
        self.asked: list[tuple[str, Requirements, str]] = []
        self.made: list[FakeEnvironment] = []
        self.cancelled = 0

    async def obtain(
        self, model: str, requirements: Requirements, kind: Literal["packages", "venv"] = "packages"
    ) -> FakeEnvironment:
        """An environment, or what befalls it."""
        self.asked.append((model, requirements, kind))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails:
            raise DependencyFailed(f"Custom pip package installation failed for model {model}", self.fails)
        self.made.append(FakeEnvironment(self.root / str(len(self.made)), kind))
        return self.made[-1]
