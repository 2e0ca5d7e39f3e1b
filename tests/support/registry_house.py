"""The house with short ways to register versions and to send them requests."""

from __future__ import annotations

from typing import Any

from marserve.errors import MarserveError
from marserve.messages import Answer, Part, Request
from marserve.registry.catalogue.traffic import VERSION_HEADER
from marserve.registry.intake.registration import Registered
from support.management_house import House as ManagementHouse
from support.registrations import registration


class Told:
    """A receiver that keeps what it was told; `versions` are those that answers named."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.answers: list[Answer] = []
        self.errors: list[MarserveError] = []

    def on_answer(self, answer: Answer) -> None:
        """The answer."""
        self.versions += [value for name, value in answer.headers if name == VERSION_HEADER]
        headers = [line for line in answer.headers if line[0] != VERSION_HEADER]
        self.answers.append(Answer(answer.body, answer.status, answer.reason, headers))

    def on_piece(self, piece: Answer, last: bool) -> None:
        """A piece."""
        self.answers.append(piece)

    def on_error(self, error: MarserveError) -> None:
        """An error."""
        self.errors.append(error)


class House(ManagementHouse):
    """The house with short ways to register and to send requests."""

    async def add(self, name: str = "m", version: str = "1.0", *, workers: int = 1, **parameters: Any) -> Registered:
        """Register a version of a model, waiting for its workers."""
        archive = self.put(name, version)
        return await self.registry.register(registration(archive, initial_workers=workers, **parameters))

    def send(self, model: str = "m", version: str | None = None, *, is_inner: bool = False) -> Told:
        """Send a request and give its receiver."""
        told = Told()
        self.registry.data_plane.submit(model, version, Request("id", [Part("body", b"x")], is_inner=is_inner), told)
        return told
