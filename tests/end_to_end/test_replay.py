"""`marserve replay`: requests to a real server run again in its workers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from support.command_line import marserve
from support.explained import explained
from support.server import Server, make_archive

# Answers how large its batch is, and who called it how often; a file of the model's decides what goes wrong later.
HANDLER = """
import json
import os
import time

def handle(data, context):
    if data is None:
        return None
    answers = []
    for index, row in enumerate(data):
        asked = next(iter(row.values()))
        asked = asked if isinstance(asked, dict) else json.loads(bytes(asked))
        with context.span("work"):
            time.sleep(asked.get("sleep", 0))
        if asked.get("fail"):
            raise ValueError("no such picture")
        if asked.get("die") and os.path.exists(asked["die"]):
            os._exit(3)
        said = asked.get("say", "")
        header = (context.get_request_header(index, "X-Word") or "") + (
            context.get_request_header(index, "Authorization") or "")
        answers.append(json.dumps([len(data), said, header, SUFFIX]))
    return answers
"""
CALLER = """
from marserve_handlers import model

@model
async def outer(say: str, context) -> list:
    return (await context.call("m", {"say": say}, version="1.0")).json()
"""
STREAM = """
from marserve_handlers.context import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    send_intermediate_predict_response([b"x"], context.request_ids, "part", 200, context)
    return [b"y"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that keeps all requests, with a model of one worker and two versions, and one that streams."""
    folder = tmp_path_factory.mktemp("replay")
    with Server(folder, entry="marserve", settings={"replay_sample": "1", "replay_size": "262144"}) as running:
        for version, suffix in (("1.0", "''"), ("2.0", "'!'")):
            make_archive(
                running.store / f"m{version}.mar", HANDLER.replace("SUFFIX", suffix), name="m", version=version
            )
            registered = running.register(f"m{version}.mar", initial_workers=1, batch_size=4)
            assert registered.status_code == 200, registered.text
        make_archive(running.store / "s.mar", STREAM)
        make_archive(running.store / "c.mar", CALLER, config="asyncCommunication: false\n")
        make_archive(running.store / "a.mar", CALLER, config="asyncCommunication: true\n")
        for name in ("s", "c", "a"):
            assert running.register(f"{name}.mar", initial_workers=1).status_code == 200
        yield running


def sent(server: Server, request_id: str, model: str = "m/1.0", **asked: Any) -> httpx.Response:
    """Send a request of this id and wait for its answer."""
    headers = {"X-Request-Id": request_id, "Content-Type": "application/json", "X-Word": "word"}
    return server.predict(model, json.dumps(asked), **headers)


def replayed(server: Server, request_id: str, **query: str) -> tuple[int, dict[str, Any]]:
    """Run it again."""
    answer = server.client.post(f"{server.management}/requests/{request_id}/replay", params=query, timeout=30)
    return answer.status_code, answer.json()


def counted(server: Server) -> list[Any]:
    """What the model's statistics say of its requests and batches since the start."""
    found = server.client.get(f"{server.management}/models/m/1.0/stats").json()
    start = found["versions"][0]["sinceStart"]
    return [start[name] for name in ("requests", "answers", "errors", "batches", "batchSizes", "milliseconds")]


def test_a_request_runs_again_with_its_mates(server: Server) -> None:
    """In one batch, of which the model's counts know nothing."""
    blocked = threading.Thread(target=sent, args=(server, "blocks"), kwargs={"sleep": 0.4})
    blocked.start()
    time.sleep(0.1)  # it is with the worker by now
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda number: sent(server, f"mate-{number}", say=str(number)).json(), range(3)))
    blocked.join()
    explained(server, "mate-1")
    before = counted(server)

    status, ran = replayed(server, "mate-1")

    assert {each[0] for each in answers} == {3}
    assert status == 200, ran
    assert (ran["model"], ran["version"], ran["answer"]) == ("m", "1.0", "equal")
    assert ran["batch"]["size"] == 3
    assert set(ran["batch"]["ran"]) == {"mate-0", "mate-1", "mate-2"}
    assert (ran["batch"]["missing"], ran["batch"]["unknown"]) == ([], 0)
    assert len(ran["times"]) == 1
    assert ran["times"][0]["answer"]["sha256"] == ran["first"]["answer"]["sha256"]
    assert [stage["name"] for stage in ran["first"]["stages"]] == [stage["name"] for stage in ran["times"][0]["stages"]]
    assert "mates_different" not in ran["times"][0]
    assert counted(server) == before


def test_another_version_may_answer_differently(server: Server) -> None:
    """And the command shows both, with their times side by side."""
    sent(server, "compare", say="a")
    explained(server, "compare")

    ran = marserve("replay", "compare", "--version", "2.0", "--times", "3", "--management", server.management)

    assert ran.status == 0, ran.err
    assert "compare: m 2.0, W-9001-m_2.0, 3 times, of which the medians are shown" in ran.out
    assert "The answer is different from the first one." in ran.out
    assert "first: 200, 20 bytes" in ran.out
    assert "again: 200, 21 bytes" in ran.out
    assert "Its batch had 1; all of them ran again" in ran.out


def test_a_failure_is_compared_by_its_cause_and_message(server: Server) -> None:
    """As a client would have got it."""
    assert sent(server, "fails", fail=True).status_code >= 500

    status, ran = replayed(server, "fails")

    assert (status, ran["answer"]) == (200, "equal")
    assert ran["times"][0]["answer"]["error"] == ran["first"]["answer"]["error"]
    assert ran["times"][0]["answer"]["status"] == ran["first"]["answer"]["status"]


def test_a_worker_that_dies_of_it_is_an_outcome(server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    """And the next request is answered by another worker."""
    flag = tmp_path_factory.mktemp("flag") / "die"
    assert sent(server, "dies", die=str(flag)).status_code == 200
    flag.touch()

    status, ran = replayed(server, "dies")

    assert (status, ran["answer"]) == (200, "different")
    assert ran["times"][0]["answer"]["error"] == "exit"
    assert sent(server, "later").status_code == 200


def test_models_that_the_handler_calls_are_called_again(server: Server) -> None:
    """What it does itself happens as ever."""
    first = sent(server, "calls", "c", say="inner")
    assert first.status_code == 200

    assert replayed(server, "calls")[1]["answer"] == "equal"


@pytest.mark.parametrize(
    ("request_id", "query", "status", "said"),
    [
        ("no-such", {}, 404, "Request not found: no-such"),
        ("x" * 10_000, {}, 414, "The request line is longer than"),
        ("x" * 1000, {}, 400, "The id has 1000 characters"),
        ("plain", {"version": "9"}, 404, "Model version: 9 does not exist"),
        ("plain", {"times": "101"}, 400, "times is 101"),
        ("plain", {"colour": "red"}, 400, "colour"),
        ("hidden", {}, 409, "it was redacted: it has a value under 'Password', which body_sample_hide names"),
        ("large", {}, 409, "of bodies over 16384 none is kept"),
        ("streamed", {}, 409, "its answer was a stream"),
        ("beside", {}, 409, "calls side by side; its requests cannot be run again"),
    ],
)
def test_what_cannot_run_again_says_why(
    server: Server, request_id: str, query: dict[str, str], status: int, said: str
) -> None:
    """A clear sentence for each."""
    sent(server, "plain")
    sent(server, "hidden", user={"Password": "x"})
    sent(server, "large", say="x" * 20_000)
    sent(server, "streamed", "s")
    assert sent(server, "beside", "a", say="a").status_code == 200

    assert replayed(server, request_id, **query)[0] == status
    assert said in replayed(server, request_id, **query)[1]["message"]


def test_keys_are_left_out(server: Server) -> None:
    """The handler sees the request without them, and the answer says so."""
    headers = {"X-Request-Id": "with-key", "Authorization": "Bearer geheim"}
    server.client.post(f"{server.inference}/predictions/m/1.0", content=b"{}", headers=headers)

    ran = replayed(server, "with-key")[1]

    assert (ran["headers_left_out"], ran["answer"]) == (["authorization"], "different")


def test_replays_run_one_at_a_time(server: Server) -> None:
    """The second one is refused by name."""
    sent(server, "slow", sleep=1.0)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(replayed, server, "slow")
        time.sleep(0.3)  # the worker has it by now

        status, body = replayed(server, "plain")

        assert first.result()[0] == 200
    assert (status, body["message"].partition(",")[0]) == (409, "Request slow is being run again now")


def test_a_version_without_workers_is_not_loaded_for_it(server: Server) -> None:
    """Its operator decides that."""
    sent(server, "asleep", "m/2.0")
    assert (
        server.client.put(
            f"{server.management}/models/m/2.0", params={"min_worker": 0, "max_worker": 0, "synchronous": "true"}
        ).status_code
        == 200
    )

    status, body = replayed(server, "asleep")

    assert status == 409
    assert "Version 2.0 of m has no worker that has loaded it" in body["message"]
