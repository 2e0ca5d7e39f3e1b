"""A registry over pools without processes and a store in a temporary folder, and applications that speak to it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx

from marserve.api.rest.application import build_app
from marserve.api.rest.description import description_router
from marserve.api.rest.models.management import management_router
from marserve.api.rest.platforms.health import health_router
from marserve.archive.reading.reader import Limits
from marserve.environments.environments import Environments
from marserve.registry.intake.intake import Intake
from marserve.registry.intake.registration import RegistryOptions
from marserve.registry.models import Registry
from marserve.store.fetching.fetched_archives import FetchedArchives
from marserve.store.fetching.fetcher import Fetcher
from marserve.store.sources.local import LocalStore
from support.echo_archives import manifest, write_mar
from support.fake_pool import FakeMetrics, FakePools


class House:
    """The parts, and what its fakes saw."""

    def __init__(
        self,
        root: Path,
        *,
        environments: Environments | None = None,
        fetcher: Fetcher | None = None,
        fetched_archives: FetchedArchives | None = None,
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
            Intake(
                LocalStore(self.store, roots=roots),
                self.scratch,
                Limits(),
                fetcher=fetcher,
                fetched_archives=fetched_archives,
            ),
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
        """One listener's application, lent until the test ends: making one takes FastAPI longer than most tests do."""
        return _lend(self.registry, management, inference, enable_model_api)

    def new_application(self) -> Any:
        """One for management that no test has called before, for claims about what a listener keeps."""
        lent = _Lent(management=True, inference=False, enable_model_api=True)
        lent.registry = self.registry
        return lent.app


class _Lent:
    """An application and the registry that it speaks to: that of the house that has it now."""

    def __init__(self, management: bool, inference: bool, enable_model_api: bool) -> None:
        self.registry: Registry | None = None
        self.lent_to = ""
        registry = cast(Registry, _Current(self))
        routers = [
            description_router(registry, has_inference=inference, has_management=management),
            health_router(registry, has_ping=inference),
        ]
        if management:
            routers.append(management_router(registry, enable_model_api=enable_model_api))
        self.app = build_app(routers, title="test")


class _Current:
    """Stands for whichever registry it is now."""

    def __init__(self, lent: _Lent) -> None:
        self._lent = lent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lent.registry, name)


_made: dict[tuple[bool, bool, bool], list[_Lent]] = {}


def _lend(registry: Registry, management: bool, inference: bool, enable_model_api: bool) -> Any:
    """An application that no house of this test has, one of an earlier test if there is any."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    made = _made.setdefault((management, inference, enable_model_api), [])
    free = next((lent for lent in made if lent.lent_to != test), None)
    if free is None:
        free = _Lent(management, inference, enable_model_api)
        made.append(free)
    free.lent_to, free.registry = test, registry
    return free.app


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client that speaks to `app` without a socket."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client
