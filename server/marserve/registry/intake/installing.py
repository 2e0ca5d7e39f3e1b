"""Versions whose requirements are being installed: not registered yet, but their names are taken.

Until the installation has ended no call finds the version. Unregistering it, or stopping the server, gives the
installation up.
"""

from __future__ import annotations

import asyncio

from marserve.environments.environments import Environment, Environments
from marserve.errors import DependencyFailed, VersionConflict
from marserve.registry.catalogue.plan import Plan
from marserve.registry.intake.plan import equip


class Claim:
    """One version's name, taken from before its installation until it is registered or given up.

    Use it as a context manager around the installation, the registration and the clean-up after a failure.
    """

    def __init__(self, claims: dict[tuple[str, str], Claim], model: str, version: str) -> None:
        self._claims = claims
        self._key = (model, version)
        self._installing: asyncio.Task[Environment] | None = None
        self._is_given_up = False
        self._ended = asyncio.Event()

    def check(self) -> None:
        """Raise VersionConflict while another claim has the name."""
        if self._key in self._claims:
            raise VersionConflict(*self._key)

    def __enter__(self) -> Claim:
        self.check()
        self._claims[self._key] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._claims[self._key]
        self._ended.set()

    async def install(self, plan: Plan, environments: Environments, *, is_synchronous: bool) -> Plan:
        """Install the plan's requirements; returns the plan with their environment.

        Raises DependencyFailed, also when it was given up; BadArchive or LoadFailed as `equip` does.
        """
        assert plan.wanted is not None
        model, version = self._key
        work = environments.obtain(model, plan.wanted.requirements, plan.wanted.kind)
        self._installing = asyncio.ensure_future(work)
        if self._is_given_up:
            self._installing.cancel()
        try:
            await asyncio.wait([self._installing])
        except asyncio.CancelledError:
            self._installing.cancel()
            await asyncio.wait([self._installing])
            if not self._installing.cancelled() and self._installing.exception() is None:
                self._installing.result().release()
            raise
        if self._installing.cancelled():
            words = f"Custom pip package installation failed for model {model}"
            raise DependencyFailed(words, f"the installation for version {version} was given up")
        environment = self._installing.result()
        try:
            return await asyncio.to_thread(equip, plan, environment, is_synchronous=is_synchronous)
        except BaseException:
            environment.release()
            raise

    def give_up(self) -> None:
        """End the installation; returns at once."""
        self._is_given_up = True
        if self._installing is not None:
            self._installing.cancel()

    async def wait_until_ended(self) -> None:
        """Wait until the version is registered, or nothing of it is left."""
        await self._ended.wait()


class Installations:
    """The claims of one registry."""

    def __init__(self) -> None:
        self._claims: dict[tuple[str, str], Claim] = {}

    def claim(self, model: str, version: str) -> Claim:
        """A claim on a version's name. `with` takes the name, and raises VersionConflict while another claim has it."""
        return Claim(self._claims, model, version)

    def find(self, model: str, version: str | None = None) -> list[Claim]:
        """The claims on a version, or on any version of the model."""
        return [
            claim
            for (name, number), claim in self._claims.items()
            if name == model and (version is None or number == version)
        ]

    def give_up_all(self) -> None:
        """End every installation; returns at once."""
        for claim in self._claims.values():
            claim.give_up()
