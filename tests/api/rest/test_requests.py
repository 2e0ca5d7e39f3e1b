"""Single requests on the management API."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest

from marserve.answers.management import RecordedRequest, RecordedRequests
from marserve.api.rest import requests
from marserve.api.rest.application import build_app
from marserve.api.rest.requests import requests_router
from marserve.messages import Span, Work
from marserve.telemetry.explanation import Evidence
from marserve.telemetry.happenings import Happening, Happenings
from marserve.telemetry.metrics.stages import StageSeconds
from marserve.telemetry.recorder import Recorder
from marserve.telemetry.timeline import STAGES, BatchTimes, Timeline
from support.documents import document_of
from support.management_house import client_of

pytestmark = pytest.mark.anyio


class House:
    """The routes over a recorder."""

    def __init__(self) -> None:
        self.recorder = Recorder(1 << 20)
        self.happenings = Happenings()
        self.app = build_app([requests_router(self.recorder, self.happenings)], title="t")

    def leave(self, *names: str) -> None:
        """Requests of the server before."""
        other = House()
        other.take(*names)
        self.recorder.previous = lambda: list(other.recorder)  # type: ignore[method-assign]
        self.recorder.may_have_previous = names.__contains__  # type: ignore[method-assign]

    def take(
        self,
        *names: str,
        wall_s: float = 0.1,
        status: int = 200,
        error: str = "",
        model: str = "m",
        sizes: Sequence[int] = (),
        began: float = 100.0,
    ) -> None:
        """A batch of requests."""
        of = StageSeconds(model, "1", (0.1,))
        batch = BatchTimes("9000/0", len(names), began, is_first=True)
        batch.land(began + wall_s, wall_s, Work(began, 0.0, 0.0, spans=[Span("tokenise", 0.001, 0.002)]))
        for name, size in zip_longest(names, sizes, fillvalue=7):
            timeline = Timeline(str(name), began, int(size), admitted_at=began, of=of)
            timeline.left_in(batch)
            timeline.end(began + wall_s, status, 5, error)
            self.recorder.take(timeline)

    async def get(self, target: str) -> tuple[int, Any]:
        """Ask."""
        async with client_of(self.app) as client:
            answer = await client.get(target)
        return answer.status_code, answer.json()


@pytest.fixture
def house() -> House:
    """The routes, with nothing recorded."""
    return House()


async def test_a_request_is_explained_from_its_first_byte_to_its_last(house: House) -> None:
    """With its batch and what its author named."""
    house.take("a", "b", "c")

    status, body = await house.get("/requests/a")

    assert status == 200
    document_of(RecordedRequest, body)
    assert (body["id"], body["model"], body["version"], body["worker"]) == ("a", "m", "1", "W-9000-m_1")
    assert (body["status"], body["wall_ms"], body["bytes_in"], body["bytes_out"]) == (200, 100.0, 7, 5)
    assert [stage["name"] for stage in body["stages"]] == list(STAGES)
    assert sum(stage["ms"] for stage in body["stages"]) == pytest.approx(100.0)
    assert body["spans"] == [{"name": "tokenise", "after_ms": 1.0, "ms": 2.0}]
    assert body["batch"] == {
        "size": 3,
        "mates": ["b", "c"],
        "runs": 1,
        "first_of_worker": True,
        "handler_ms": 100.0,
        "padding": 0.0,
    }
    assert body["cause"] == "cold_worker"
    assert body["why"] == "100.0 ms: it was its worker's first batch"
    assert body["started"].endswith("Z")


async def test_what_else_the_server_did_is_told(house: House) -> None:
    """With when, seen from the request."""
    house.take("a", wall_s=0.5)
    house.happenings.note("load", 99.9, 100.2, "W-9001-other_1 was started and loaded the model", "other", "1")
    house.happenings.note("stall", 100.25, 100.3, "the event loop stood still")
    house.happenings.note("stall", 101.0, 101.1, "later")

    assert (await house.get("/requests/a"))[1]["meanwhile"] == [
        "100 ms before its first byte: other W-9001-other_1 was started and loaded the model",
        "after 250 ms: the event loop stood still",
    ]


async def test_how_much_of_a_batch_is_padding_is_known_from_the_largest_input(house: House) -> None:
    """If all of it are recorded, and it has several."""
    house.take("a", "b", "c", "d", sizes=(400, 100, 100, 200))
    house.take("alone", sizes=(400,))

    assert (await house.get("/requests/b"))[1]["batch"]["padding"] == 0.5
    assert "padding" not in (await house.get("/requests/alone"))[1]["batch"]


async def test_of_several_requests_of_one_id_the_newest_is_explained(house: House) -> None:
    """The others are named."""
    house.take("a", wall_s=0.1)
    house.take("a", wall_s=0.2)

    body = (await house.get("/requests/a"))[1]

    assert body["wall_ms"] == 200.0
    assert [other["id"] for other in body["others"]] == ["a"]


async def test_requests_of_the_server_before_are_found_too(house: House) -> None:
    """Where it left a file; lists have them if they are asked for."""
    house.leave("old")
    house.take("new")

    status, body = await house.get("/requests/old")
    listed = (await house.get("/requests"))[1]["requests"]
    before = (await house.get("/requests?previous=true"))[1]["requests"]

    assert (status, body["id"]) == (200, "old")
    assert ([each["id"] for each in listed], [each["id"] for each in before]) == (["new"], ["old"])


async def test_a_request_that_is_gone_is_told_how_long_they_are_kept(house: House) -> None:
    """Or that never was."""
    status, body = await house.get("/requests/nosuch")

    assert (status, body["type"]) == (404, "ResourceNotFoundException")
    assert body["message"].startswith("Request not found: nosuch. The newest ")
    assert "flight_recorder_size" in body["message"]


async def test_many_who_ask_at_once_are_answered_one_after_the_other_and_beside_the_loop(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evidence for each would take memory, and the loop's turns."""
    house.take("a", "b")
    loops_thread, running, most = threading.get_ident(), 0, 0

    def watched(known: Sequence[Timeline], happenings: Sequence[Happening]) -> Evidence:
        nonlocal running, most
        assert threading.get_ident() != loops_thread
        running += 1
        most = max(most, running)
        threading.Event().wait(0.01)  # others may come meanwhile
        running -= 1
        return Evidence(known, happenings)

    monkeypatch.setattr(requests, "Evidence", watched)
    answers = await asyncio.gather(*(house.get(target) for target in ["/requests", "/requests/a"] * 5))

    assert [status for status, _ in answers] == [200] * 10
    assert most == 1


@pytest.mark.parametrize("request_id", ["x" * 10_000, "a%0Ab", "%FF%FE", "%00", "..", "a%2Fb"])
async def test_any_id_gets_a_clear_answer(house: House, request_id: str) -> None:
    """Long, with a newline, of another encoding."""
    status, body = await house.get(f"/requests/{request_id}")

    assert status in (400, 404)
    assert body["message"]
    assert len(body["message"]) < 500


async def test_the_slowest_are_listed_first(house: House) -> None:
    """Each with the cause of most of its time."""
    house.take("quick", wall_s=0.1)
    house.take("slow", wall_s=0.9)

    status, body = await house.get("/requests")

    assert status == 200
    document_of(RecordedRequests, body)
    assert [each["id"] for each in body["requests"]] == ["slow", "quick"]
    assert body["recorded"] == 2
    assert body["requests"][0]["cause"] == "cold_worker"


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("model=m", ["slow", "quick"]),
        ("model=other", ["failed"]),
        ("slower_than=500ms", ["slow"]),
        ("slower_than=0.5s", ["slow"]),
        ("slower_than=500", ["slow"]),
        ("slower_than=1m", []),
        ("failed=true", ["failed"]),
        ("cause=cold_worker&limit=1", ["slow"]),
        ("cause=queue", []),
        ("order=newest", ["later", "slow", "quick", "failed"]),
        ("order=newest&limit=1", ["later"]),
        ("order=slowest&limit=1", ["slow"]),
    ],
)
async def test_a_list_has_what_was_asked_for(house: House, query: str, found: list[str]) -> None:
    """By model, time, cause and failure."""
    house.take("quick", wall_s=0.1)
    house.take("slow", wall_s=0.9)
    house.take("failed", wall_s=0.05, status=500, error="handler", model="other")
    house.take("later", wall_s=0.01, model="third", began=100.5)

    assert [each["id"] for each in (await house.get(f"/requests?{query}"))[1]["requests"]] == found


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("slower_than=soon", "slower_than is 'soon'; it must be a time as 250ms, 1.5s or 2m."),
        ("slower_than=-1", "slower_than is '-1'"),
        ("slower_than=nan", "slower_than is 'nan'"),
        ("cause=gremlins", "cause is 'gremlins'; it is one of queue, full_batches"),
        ("failed=maybe", "failed is 'maybe'; it must be true or false."),
        ("previous=1", "previous is '1'; it must be true or false."),
        ("limit=0", "limit is 0; it must be a whole number from 1 to 1000."),
        ("limit=many", "limit"),
        ("order=oldest", "order is 'oldest'; it is one of slowest, newest."),
        ("modle=m", "modle"),
    ],
)
async def test_a_query_that_cannot_be_read_is_refused(house: House, query: str, words: str) -> None:
    """With the value that was seen."""
    status, body = await house.get(f"/requests?{query}")

    assert status == 400
    assert words in body["message"]
