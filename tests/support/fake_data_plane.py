"""A data plane that does as the test says: answers at once, or holds requests until the test answers them.

A request for `echo` is answered with its first part's body before `submit` returns; one for a model named in `errors`
is refused with that error; every other waits in `submitted`. With `echoes_all` none waits.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from marserve.errors import MarserveError
from marserve.messages import Answer, Receiver, Request


@dataclass
class Submitted:
    """One request as it was submitted; `is_cancelled` tells that its client has gone."""

    model: str
    version: str | None
    request: Request
    receiver: Receiver
    is_cancelled: bool = False
    is_held: bool = False
    keeps_the_only_worker: bool = False

    def cancel(self) -> None:
        """As a job of the pool."""
        self.is_cancelled = True

    def hold(self) -> None:
        """The client does not keep up."""
        self.is_held = True

    def resume(self) -> None:
        """The client has caught up."""
        self.is_held = False

    @property
    def body(self) -> bytes:
        """The body of the first part; empty for a form without one."""
        return self.request.parts[0].body if self.request.parts else b""

    def answer(self, body: bytes = b"", status: int = 200, reason: str = "", **headers: str) -> None:
        """Answer it; underscores in header names become hyphens."""
        self.receiver.on_answer(Answer(body, status, reason, _lines(headers)))

    def piece(self, body: bytes, *, last: bool = False, **headers: str) -> None:
        """Answer a piece of it."""
        self.receiver.on_piece(Answer(body, headers=_lines(headers)), last)

    def fail(self, error: MarserveError) -> None:
        """End it with an error."""
        self.receiver.on_error(error)


@dataclass
class FakeDataPlane:
    """Takes requests as `DataPlane` does."""

    only_startup_model: str | None = None
    echoes_all: bool = False
    errors: dict[str, Exception] = field(default_factory=dict)
    submitted: list[Submitted] = field(default_factory=list)
    enveloped: set[str] = field(default_factory=set)

    def has_envelope(self, model: str, version: str | None = None) -> bool:
        """Whether the test says that the model's handler has an envelope."""
        return model in self.enveloped

    def submit(self, model: str, version: str | None, request: Request, receiver: Receiver) -> Submitted:
        """Take a request."""
        job = Submitted(model, version, request, receiver)
        self.submitted.append(job)
        if model in self.errors:
            raise self.errors[model]
        if model == "echo" or self.echoes_all:
            receiver.on_answer(Answer(job.body))
        return job

    async def wait_for(self, count: int) -> Submitted:
        """Wait until `count` requests were submitted in all; returns the last of these."""
        async with asyncio.timeout(10):
            while len(self.submitted) < count:
                await asyncio.sleep(0.001)
        return self.submitted[count - 1]


def _lines(headers: dict[str, str]) -> list[tuple[str, str]]:
    return [(name.replace("_", "-"), value) for name, value in headers.items()]
