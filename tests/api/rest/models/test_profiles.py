"""Profiles over HTTP: what may be asked for, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from marserve.answers.profiles import ModelProfile, ProfileState
from marserve.api.rest.application import build_app
from marserve.api.rest.models.profiles import profile_router, read_wish
from marserve.errors import BadInput, CannotProfile, ModelNotFound, ProfileUnknown
from marserve.profiling.session import Profiles, ProfileWish
from support.management_house import client_of
from support.profiles import a_profile

pytestmark = pytest.mark.anyio


class FakeProfiles:
    """Knows the model `digits`, whose version 2.0 is being profiled."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, ProfileWish]] = []

    async def make(self, model: str, version: str | None, wish: ProfileWish) -> ModelProfile:
        """Make one."""
        if model != "digits":
            raise ModelNotFound(model)
        if version == "2.0":
            raise CannotProfile("digits 2.0 is being profiled since 3 s")
        self.asked.append((model, version, wish))
        return a_profile()

    def state(self, model: str, version: str | None) -> ProfileState:
        """One is under way."""
        return ProfileState(True, 1.5, 7)

    def trace(self, model: str, version: str | None) -> bytes:
        """Of version 1.0 alone."""
        if version != "1.0":
            raise ProfileUnknown("no profile")
        return b"packed"


async def ask(method: str, target: str) -> tuple[FakeProfiles, Any]:
    """Ask the routes; the answer."""
    fake = FakeProfiles()
    async with client_of(build_app([profile_router(cast("Profiles", fake))], title="t")) as client:
        return fake, await client.request(method, target)


async def test_a_profile_is_made_as_asked_for() -> None:
    """Of the default version, or of one; the answer is the profile."""
    fake, answer = await ask("POST", "/models/digits/profile?requests=50")
    other, _ = await ask("POST", "/models/digits/1.0/profile?seconds=2.5&operators=false&memory=true")

    assert answer.status_code == 200
    assert answer.json()["parts"][0] == {"name": "operators", "ms": 500.0, "share": 0.5}
    assert fake.asked == [("digits", None, ProfileWish(50, 60.0, 64 << 20))]
    assert other.asked == [("digits", "1.0", ProfileWish(0, 2.5, 0, memory=True))]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"requests": "0"}, r"requests is 0; it must be a whole number from 1 to 20000"),
        ({"requests": "many"}, r"requests is 'many'; it must be a whole number"),
        ({"seconds": "0"}, r"seconds is '0'; it must be a number above 0, at most 600"),
        ({"seconds": "nan"}, r"seconds is 'nan'"),
        ({"seconds": "1e9"}, r"seconds is '1e9'"),
        ({"max_bytes": "1000"}, r"max_bytes is 1000; it must be from 1048576 .*operators=false"),
        ({"shapes": "yes"}, r"shapes is 'yes'; it must be true or false"),
        ({"second": "5"}, r"second"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_with_the_value_and_the_next_step(
    query: Mapping[str, str], said: str
) -> None:
    """Before a worker is touched."""
    with pytest.raises(BadInput, match=said):
        read_wish(query)


async def test_refusals_have_their_statuses() -> None:
    """An unknown model, one that is being profiled, a profile that is not there."""
    answers = [
        (await ask("POST", "/models/nope/profile"))[1],
        (await ask("POST", "/models/digits/2.0/profile"))[1],
        (await ask("GET", "/models/digits/profile/trace"))[1],
        (await ask("POST", "/models/digits/profile?seconds=x"))[1],
    ]

    assert [answer.status_code for answer in answers] == [404, 409, 404, 400]


async def test_progress_and_the_trace_can_be_had() -> None:
    """The trace is a file to save."""
    _, state = await ask("GET", "/models/digits/profile")
    _, trace = await ask("GET", "/models/digits/1.0/profile/trace")

    assert state.json() == {"isRunning": True, "seconds": 1.5, "requests": 7}
    assert (trace.content, trace.headers["content-type"]) == (b"packed", "application/gzip")
    assert trace.headers["content-disposition"] == 'attachment; filename="trace.json.gz"'
