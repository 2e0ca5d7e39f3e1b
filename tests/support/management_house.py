"""A registry over pools without processes and a store in a temporary folder, and applications that speak to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from marserve.api.application import build_app
from marserve.api.description import description_router
from marserve.api.health import health_router
from marserve.api.management import management_router
from marserve.archive.reader import Limits
from marserve.registry.calls import RegistryOptions
from marserve.registry.intake import Intake
from marserve.registry.models import Registry
from marserve.registry.ports import EnvironmentsLike
from marserve.store.fetcher import Fetcher
from marserve.store.local import LocalStore
from support.echo_archives import manifest, write_mar
from support.fake_pool import FakeMetrics, FakePools


class House:
    """The parts, and what its fakes saw."""

    def __init__(
        self,
        root: Path,
        *,
        environments: EnvironmentsLike | None = None,
        fetcher: Fetcher | None = None,
        roots: Sequence[Path] = (),
        **options: Any,
    ) -> None:
        self.store = root / "store"
        self.store.mkdir(parents=True, exist_ok=True)
        self.scratch = root / "models"
        self.pools = FakePools()
        self.metrics = FakeMetrics()
        self.changes = 0
        self.registry = Registry(
            RegistryOptions(**options),
            Intake(LocalStore(self.store, roots=roots), self.scratch, Limits(), fetcher=fetcher),
            self.pools,
            self.metrics,
            environments,
            self._note_change,
        )

    def _note_change(self) -> None:
        self.changes += 1

    def folders(self) -> list[str]:
        """The extracted archives on disk."""
        return [entry.name for entry in self.scratch.iterdir()] if self.scratch.exists() else []

    def put(self, name: str = "m", version: str = "1.0", **model: Any) -> str:
        """Put the archive of a version into the store; gives its name there."""
        return write_mar(self.store / f"{name}-{version}.mar", manifest(name, version, **model)).name

    def application(self, *, management: bool = True, inference: bool = False, enable_model_api: bool = True) -> Any:
        """One listener's application."""
        routers = [
            description_router(self.registry, has_inference=inference, has_management=management),
            health_router(self.registry, has_ping=inference),
        ]
        if management:
            routers.append(management_router(self.registry, enable_model_api=enable_model_api))
        return build_app(routers, title="test")


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client that speaks to `app` without a socket."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client
