"""Shadows: the client first, copies within their bounds, answers compared, nothing of it ever told to a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from marserve.errors import BadInput, HandlerFailed, NoWorker, QueueFull, WorkerDied
from marserve.messages import SHARED_TENSORS, Answer, Load, Part, Request
from marserve.option_values import Tolerance
from marserve.pool.options import PoolOptions
from marserve.registry.observing.shadow import COPY_LIMIT_S, KEPT_SAMPLES, Shadow
from marserve.registry.observing.shadow_spec import ShadowSpec, read_shadow
from support.fake_pool import Behaviour, FakePool
from support.receivers import Told

pytestmark = pytest.mark.anyio


def pool(**behaviour: Any) -> FakePool:
    """A shadow's pool, with a worker."""
    load = Load("m", "2.0", "", "h.py", None, None, 1)
    made = FakePool(PoolOptions("m", "2.0", 1, 1, queue_size=100), load, Behaviour(**behaviour))
    made.start()
    return made


class House:
    """A shadow of a pool, and requests whose primary answers as the test says."""

    def __init__(self, made: FakePool | None, *, most_bytes: int = 10_000, draw: float = 0.0, **spec: Any) -> None:
        self.pool = made
        self.shadow = Shadow(
            ShadowSpec("2.0", **{"share": 1.0, **spec}),
            lambda: self.pool,
            lambda: False,
            draw=lambda: draw,
            most_bytes=most_bytes,
        )
        self.count = 0

    def serve(self, answer: bytes = b"m 2.0", body: bytes = b"in", **more: Any) -> Told:
        """A request comes and is answered by the primary; what its client was told."""
        self.count += 1
        told = Told()
        receiver = self.shadow.follow(Request(f"r{self.count}", [Part("body", body)], **more), told)
        receiver.on_answer(Answer(answer))
        return told

    async def settle(self) -> dict[str, Any]:
        """Let everything that can happen, happen."""
        for _ in range(20):
            await asyncio.sleep(0)
        return self.shadow.describe()


async def test_the_client_is_told_first_and_the_copy_leaves_afterwards() -> None:
    """With the lowest priority, a deadline of its own, and counted as nobody's request."""
    house = House(pool(holds=True))

    told = house.serve(priority=1)

    assert told.body == b"m 2.0"
    assert house.pool is not None
    assert house.pool.held == []
    await house.settle()
    copy = house.pool.held[0].request
    assert (copy.priority, copy.is_inner, copy.names_version) == (9, True, False)
    assert copy.deadline is not None
    assert copy.parts == [Part("body", b"in")]
    assert COPY_LIMIT_S >= 60


async def test_a_request_that_shares_memory_with_its_client_is_not_mirrored() -> None:
    """A copy would read what has changed since, and write into it."""
    house = House(pool())

    client = house.serve(server_headers=[(SHARED_TENSORS, "{}")])

    told = await house.settle()
    assert (client.body, told["mirrored"], told["skipped"]) == (b"m 2.0", 0, {"shared_memory": 1})


async def test_equal_answers_are_counted_and_differing_ones_kept_for_reading() -> None:
    """Where they differ, both answers, the request; and in the metrics of the shadow version."""
    house = House(pool())
    house.serve(b"m 2.0")
    house.serve(b"m 1.0", body=b"the input")

    told = await house.settle()

    assert (told["mirrored"], told["compared"], told["differing"]) == (2, 2, 1)
    sample = told["differences"][0]
    assert (sample["where"], sample["shadowAnswer"], sample["primaryAnswer"]) == ("byte 2", "m 2.0", "m 1.0")
    assert sample["request"] == [{"name": "body", "body": "the input"}]
    assert house.pool is not None
    metrics = house.pool.metrics
    assert (metrics.shadow_mirrored, metrics.shadow_compared, metrics.shadow_differing) == (2, 2, 1)
    assert (told["copiesUnderWay"], told["bytes"]) == (0, 0)


@pytest.mark.parametrize(
    ("primary", "shadow", "where"),
    [
        (Answer(b"a", 200), Answer(b"a", 201), "status"),
        (
            Answer(b"a", headers=[("Content-Type", "x")]),
            Answer(b"a", headers=[("content-type", "y")]),
            "header:content-type",
        ),
        (Answer(b"a" * 5000 + b"b"), Answer(b"a" * 5000), "byte 5000"),
        (Answer(b"a", headers=[("x-other", "1")]), Answer(b"a"), None),
    ],
)
async def test_what_exactly_means(primary: Answer, shadow: Answer, where: str | None) -> None:
    """Status, content type and every byte; other headers do not count."""
    house = House(pool(holds=True))
    receiver = house.shadow.follow(Request("r", []), Told())
    receiver.on_answer(primary)
    await house.settle()
    assert house.pool is not None
    house.pool.held[0].answer(shadow)

    told = await house.settle()

    assert [each["where"] for each in told["differences"]] == ([] if where is None else [where])


async def test_the_first_and_the_latest_differences_are_kept_and_no_more() -> None:
    """However many there are."""
    house = House(pool(), in_flight=256)
    for number in range(100):
        house.serve(b"%d" % number)
        await house.settle()

    told = await house.settle()

    assert told["differing"] == 100
    assert [each["primaryAnswer"] for each in told["differences"]] == [
        *(str(number) for number in range(KEPT_SAMPLES)),
        *(str(number) for number in range(100 - KEPT_SAMPLES, 100)),
    ]


async def test_only_the_share_is_mirrored() -> None:
    """What the draw says is not to be is handed through untouched."""
    house = House(pool(), draw=0.3, share=0.3)
    told = Told()

    assert house.shadow.follow(Request("r", []), told) is told


async def test_copies_are_bounded_in_number_and_those_beyond_are_dropped_and_counted() -> None:
    """A shadow that holds them gets no more; nor one that has requests which wait."""
    house = House(pool(holds=True), in_flight=3)
    for _ in range(10):
        house.serve()  # none has left yet: the event loop has had no turn

    told = await house.settle()

    assert (told["mirrored"], told["dropped"], told["copiesUnderWay"]) == (3, {"busy": 7}, 3)
    assert house.pool is not None
    for job in list(house.pool.held):
        job.answer(Answer(b"m 2.0"))
    told = await house.settle()
    assert (told["compared"], told["copiesUnderWay"], told["bytes"]) == (3, 0, 0)


async def test_copies_are_bounded_in_bytes() -> None:
    """Requests and answers together."""
    house = House(pool(), most_bytes=1000)
    house.serve(b"x" * 600, body=b"y" * 500)
    house.serve(b"m 2.0", body=b"y" * 500)

    told = await house.settle()

    assert (told["mirrored"], told["dropped"]) == (1, {"memory": 1})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (WorkerDied("crash"), {"errors": {"crash": 1}}),
        (HandlerFailed("no"), {"errors": {"handler": 1}}),
        (QueueFull("m"), {"dropped": {"busy": 1}}),
    ],
)
async def test_a_copy_without_an_answer_is_counted_by_its_cause(error: Any, expected: dict[str, Any]) -> None:
    """What the shadow was too busy for is no error of its."""
    house = House(pool(fails=error))
    told = house.serve()

    described = await house.settle()

    assert told.body == b"m 2.0"
    assert {key: described[key] for key in expected} == expected
    assert (described["copiesUnderWay"], described["compared"]) == (0, 0)


async def test_a_shadow_without_workers_and_one_that_is_gone() -> None:
    """Counted; the client knows nothing of it."""
    dead = pool()
    dead.scale(0, 0)
    house = House(dead)
    house.serve()
    told = await house.settle()
    cause = NoWorker("m").cause or "unknown"
    assert told["errors"] == {cause: 1}
    assert not told["ready"]

    house.pool = None
    house.serve()

    assert (await house.settle())["skipped"] == {"no_version": 1}


async def test_streams_and_failures_of_the_primary_are_skipped() -> None:
    """Each with its count; the client gets every piece."""
    house = House(pool())
    streamed, failed = Told(), Told()
    receiver = house.shadow.follow(Request("r", []), streamed)
    receiver.on_piece(Answer(b"1"), False)
    receiver.on_piece(Answer(b"2"), True)
    house.shadow.follow(Request("r", []), failed).on_error(HandlerFailed())

    told = await house.settle()

    assert [piece.body for piece in streamed.pieces] == [b"1", b"2"]
    assert isinstance(failed.end, HandlerFailed)
    assert (told["skipped"], told["mirrored"]) == ({"streamed": 1, "failed": 1}, 0)


async def test_a_shadow_that_streams_is_cancelled_and_skipped() -> None:
    """There is nothing to compare a piece with."""
    house = House(pool(holds=True))
    house.serve()
    await house.settle()
    assert house.pool is not None
    job = house.pool.held[0]
    job.receiver.on_piece(Answer(b"1"), False)

    told = await house.settle()

    assert (told["skipped"], told["copiesUnderWay"], job.is_cancelled) == ({"streamed": 1}, 0, True)


async def test_numbers_are_compared_in_a_worker_some_pairs_at_a_time() -> None:
    """Within the tolerance; not more than ten together."""
    house = House(pool(body=b"1.5"), compare=Tolerance(0, 0.1), in_flight=256)
    for number in range(25):
        house.serve(b"1.55" if number else b"2.5")

    told = await house.settle()

    assert (told["compared"], told["differing"]) == (25, 1)
    # Clopper and Pearson's lower bound at 95 % for 24 of 25.
    assert told["shownAgreement"] == pytest.approx(0.8239, abs=1e-4)
    assert told["differences"][0]["where"] == "y"
    assert house.pool is not None
    assert house.pool.compared == 3
    assert told["bytes"] == 0


async def test_a_comparison_that_fails_is_no_difference() -> None:
    """Neither of one pair, nor of all because the worker died."""
    house = House(pool(body=b"bad"), compare="handler")
    house.serve(b"bad")
    told = await house.settle()
    assert (told["errors"], told["compared"]) == ({"comparison": 1}, 0)
    assert "ValueError" in told["lastError"]

    assert house.pool is not None
    house.pool.compare_error = WorkerDied("crash")
    house.serve(b"bad")

    assert (await house.settle())["errors"] == {"comparison": 2}


async def test_of_scores_the_mean_error_is_told_once_some_were_compared() -> None:
    """All differences beside all that was wanted."""
    house = House(pool(body=b"[0.1, 0.9]"), compare="scores")
    assert "meanError" not in house.shadow.describe()

    house.serve(b"[0.1, 0.9]")

    assert (await house.settle())["meanError"] == pytest.approx(0.05)


async def test_after_its_end_nothing_of_it_is_left() -> None:
    """Copies are cancelled, what was on its way is dropped, requests that were followed get their answers."""
    house = House(pool(holds=True))
    late = Told()
    followed = house.shadow.follow(Request("late", []), late)
    house.serve()
    await house.settle()
    assert house.pool is not None
    job = house.pool.held[0]
    house.serve()  # its copy has not left

    house.shadow.stop_now()
    await house.shadow.wait_until_stopped()
    followed.on_answer(Answer(b"x"))

    told = await house.settle()
    assert job.is_cancelled
    assert house.pool.held == []
    assert (told["copiesUnderWay"], told["bytes"]) == (0, 0)
    assert late.body == b"x"


# --------------------------------------------------------------------------------------------------- reading


def test_what_may_be_asked_for() -> None:
    """The least, and all of it; the description may be put again."""
    assert read_shadow({"version": "2.0"}) == ShadowSpec("2.0")
    whole = {
        "version": "2.0",
        "share": 0.5,
        "compare": {"relative": 0.01, "absolute": 0.0, "ignore": ["id"]},
        "in_flight": 2,
    }
    assert read_shadow(whole).document() == whole
    scores = {"version": "2.0", "share": 0.1, "compare": "scores", "in_flight": 8}
    assert read_shadow(scores).document() == scores


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (3, "is an object"),
        ({"version": "2.0", "shard": 1}, "'shard'"),
        ({}, "version of a shadow"),
        ({"version": "2.0", "share": 0}, "share of a shadow is 0"),
        ({"version": "2.0", "share": 1.5}, "share of a shadow is 1.5"),
        ({"version": "2.0", "in_flight": True}, "in_flight of a shadow is True"),
        ({"version": "2.0", "compare": "nearly"}, "compare is 'nearly'"),
        ({"version": "2.0", "compare": {"relative": -1}}, "relative of compare is -1"),
        ({"version": "2.0", "compare": {"ignore": "x"}}, "ignore of compare"),
    ],
)
def test_what_cannot_be_meant(document: Any, words: str) -> None:
    """The sentence names member and value."""
    with pytest.raises(BadInput) as caught:
        read_shadow(document)

    assert words in str(caught.value)


async def test_niceness_follows_the_traffic() -> None:
    """Workers are made nice while the shadow has copies alone, plain as soon as it has requests, never where it cannot
    be taken back."""
    from marserve.registry.observing.yielding import NICE, PLAIN, Yielding

    made = pool()
    has_requests = [False]
    set_to: list[tuple[int, int]] = []

    def yielding(is_able: bool) -> Yielding:
        renice: Callable[[int, int], None] = lambda pid, value: set_to.append((pid, value))  # noqa: E731
        return Yielding(lambda: made, lambda: has_requests[0], lambda: is_able, renice)

    unable = yielding(False)
    unable.start()
    assert (unable.is_yielding, set_to) == (False, [])

    able = yielding(True)
    able.start()
    assert (able.is_yielding, set_to) == (True, [(4711, NICE)])
    has_requests[0] = True
    able.look()
    assert (able.is_yielding, set_to[1:]) == (False, [(4711, PLAIN)])
    has_requests[0] = False
    able.look()
    able.stop()
    assert set_to[2:] == [(4711, NICE), (4711, PLAIN)]
