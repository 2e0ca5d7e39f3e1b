"""Requests that are kept with their bodies."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from marserve.errors import HandlerFailed
from marserve.messages import SHARED_TENSORS, Accepted, Answer, Part, Request
from marserve.telemetry.body_samples import READ_BYTES, Hiding
from marserve.telemetry.kept_requests import KEPT_BYTES, KeptRequests
from marserve.telemetry.metrics.stages import StageSeconds
from marserve.telemetry.timeline import BatchTimes, Timeline
from support.receivers import Told

HIDING = Hiding(("*password*",))
OF = StageSeconds("m", "1.0", (0.1,))


class House:
    """A keeper whose thread runs when the test says so."""

    def __init__(self, share: float = 1.0, limit_bytes: int = 1 << 20, draw: float = 0.5) -> None:
        self.calls: list[Callable[[], None]] = []
        self.keeper = KeptRequests(share, limit_bytes, HIDING, draw=lambda _: draw, look=self.calls.append)

    def take(self, request: Request, batch: BatchTimes | None = None, answer: Any = None, **job: Any) -> Told:
        """A request is answered."""
        receiver = Told()
        watched = self.keeper.watch(request, receiver)
        times = batch or BatchTimes("9000/0", 1, 1.0, landed_at=2.0, of=OF)
        watched.job = cast("Accepted", SimpleNamespace(**{"arrived": 0.5, "times": times, **job}))
        if isinstance(answer, Exception):
            watched.on_error(cast("Any", answer))
        else:
            watched.on_answer(answer or Answer(b"yes"))
        return receiver


def asked(request_id: str, body: bytes | bytearray = b"{}", content_type: str | None = None, **more: Any) -> Request:
    """A request with a body."""
    return Request(request_id, [Part("body", body, content_type)], **more)


def test_a_request_is_kept_with_what_its_handler_saw() -> None:
    """A body that can change is copied; its deadline and its timeline are not kept."""
    house, body = House(), bytearray(b"abc")
    request = asked("a", body, headers=[(b"x", b"y")], server_headers=[("u", "v")], deadline=3.0, client_id="c")

    told = house.take(request)
    body[:] = b"xyz"

    kept = house.keeper.find("c")
    assert told.ends == [Answer(b"yes")]
    assert kept is not None
    assert kept.request is not None
    assert kept.request.parts == [Part("body", b"abc")]
    assert (kept.request.headers, kept.request.server_headers) == ([(b"x", b"y")], [("u", "v")])
    assert (kept.request.deadline, kept.request.timeline, kept.request.is_inner) == (None, None, True)
    assert (kept.model, kept.version, kept.answer.status, kept.answer.size) == ("m", "1.0", 200, 3)
    assert (kept.timeline.wall_s, kept.timeline.status) == (1.5, 200)


def test_a_batch_is_kept_in_its_order() -> None:
    """With those that failed."""
    house, batch = House(), BatchTimes("9000/0", 3, 1.0, of=OF)
    for name in ("a", "b"):
        house.take(asked(name), batch)
    house.take(asked("c"), batch, HandlerFailed("no"))
    house.take(asked("d"))

    kept = house.keeper.find("b")

    assert kept is not None
    batch_of = house.keeper.batch_of(kept)
    assert [each.id for each in batch_of] == ["a", "b", "c"]
    assert batch_of[2].answer.error == HandlerFailed("no").cause


@pytest.mark.parametrize(("draw", "kept"), [(0.29, 1), (0.3, 0), (0.9, 0)])
def test_a_share_of_batches_is_kept(draw: float, kept: int) -> None:
    """All of a batch or none of it: the draw is the batch's."""
    house = House(0.3, draw=draw)

    house.take(asked("a"))

    assert len(house.keeper) == kept


def test_a_request_that_no_worker_had_is_not_kept() -> None:
    """Nor one for a description."""
    house = House()

    house.take(asked("a"), times=None)
    house.take(asked("b", is_describe=True))

    assert len(house.keeper) == 0


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (asked("a", b'{"a": [{"My_Password": 1}]}'), "a value under 'My_Password'"),
        (asked("a", b'{"a": "{\\"password\\": 1}"}'), "a value under 'password'"),
        (asked("a", b"user=x&password=y", "application/x-www-form-urlencoded"), "a value under 'password'"),
        (Request("a", [Part("password", b"x")]), "a value under 'password'"),
        (asked("a", b'{"password": 1} \xff\x00'), "a value under 'password'"),
        (asked("a", b'{"a": "{\\"password\\": 1}"} \xff'), "a value under 'password'"),
        (asked("a", b"x" * 70_000), "its body has 70000 bytes, and of bodies over 65536 none is kept"),
        (asked("a", server_headers=[(SHARED_TENSORS, "x")]), "shared memory"),
    ],
)
def test_what_must_not_be_kept_says_why(request_: Request, why: str) -> None:
    """Its body is let go."""
    house = House()

    house.take(request_)

    kept = house.keeper.find("a")
    assert kept is not None
    assert kept.request is None
    assert why in kept.why_not


def test_a_stream_is_not_kept() -> None:
    """Its pieces go on to the client."""
    house, receiver = House(), Told()
    watched = house.keeper.watch(asked("a"), receiver)
    watched.job = cast("Accepted", SimpleNamespace(arrived=0.5, times=BatchTimes("9000/0", 1, 1.0, of=OF)))
    watched.on_piece(Answer(b"x"), False)
    watched.on_piece(Answer(b"y"), True)

    kept = house.keeper.find("a")

    assert kept is not None
    assert (kept.request, kept.why_not) == (None, "its answer was a stream, and streams are not run again")
    assert len(receiver.pieces) == 2


def test_headers_that_must_not_be_kept_are_left_out() -> None:
    """Keys among them, whatever the rules; the others stay."""
    house = House()

    house.take(asked("a", headers=[(b"Authorization", b"k"), (b"X-Password", b"p"), (b"x", b"y")]))

    kept = house.keeper.find("a")
    assert kept is not None
    assert kept.request is not None
    assert kept.request.headers == [(b"x", b"y")]
    assert list(kept.left_out) == ["authorization", "x-password"]


def test_a_long_body_is_looked_through_elsewhere() -> None:
    """Until then it cannot be run again."""
    house = House()
    house.take(asked("a", b'{"a": "' + b"x" * READ_BYTES + b'"}'))
    house.take(asked("b", b'{"password": "' + b"x" * READ_BYTES + b'"}'))
    kept = [house.keeper.find(name) for name in ("a", "b")]

    assert ["ask again in a moment" in each.why_not for each in kept if each is not None] == [True, True]
    for call in house.calls:
        call()

    assert [each.request is not None for each in kept if each is not None] == [True, False]
    assert [each.why_not[:15] for each in kept if each is not None] == ["", "it was redacted"]


def test_the_oldest_leave_when_it_is_full() -> None:
    """Everything that is kept counts."""
    house = House(limit_bytes=4 * (KEPT_BYTES + 1000))
    for number in range(10):
        house.take(asked(f"a-{number}", b"x" * 500))

    assert house.keeper.kept_bytes <= house.keeper.limit_bytes
    assert house.keeper.find("a-9") is not None
    assert house.keeper.find("a-0") is None
    assert 4 <= len(house.keeper) < 6


def test_the_newest_of_a_client_comes_before_those_made_for_it() -> None:
    """A workflow's nodes have its id."""
    house = House()
    house.take(asked("a", b"1"))
    house.take(asked("a", b"2"))
    house.take(asked("a", b"3", is_inner=True))

    found = house.keeper.find("a")

    assert found is not None
    assert found.request is not None
    assert found.request.parts[0].body == b"2"


def test_its_own_timeline_is_the_first_time() -> None:
    """Where it has one."""
    house = House()
    timeline = Timeline("a", 0.25)

    house.take(asked("a", timeline=timeline))

    kept = house.keeper.find("a")
    assert kept is not None
    assert kept.timeline is timeline
