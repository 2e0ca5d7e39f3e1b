"""Streams, sequences, continuous batching and handlers that are coroutines, through a real server over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.server import Server, make_archive

ONE_WORKER = "minWorkers: 1\nmaxWorkers: 1\n"
TALK = """
class Talk:
    def initialize(self, context):
        self.said = {}

    def handle(self, rows, context):
        answers = []
        for index, row in enumerate(rows):
            name = context.get_sequence_id(index)
            if context.get_request_header(index, context.header_key_sequence_start) == "true":
                self.said[name] = ""
            self.said[name] = self.said.get(name, "?") + bytes(row["body"]).decode()
            context.set_response_header(index, context.header_key_sequence_id, name)
            answers.append(self.said[name])
        return answers
"""
STEPS = """
class Steps:
    def initialize(self, context):
        self.left = {}

    def handle(self, rows, context):
        names = [context.get_request_id(index) for index in range(len(rows))]
        for name, row in zip(names, rows):
            if row:
                self.left[name] = int(bytes(row["body"]))
        for name in names:
            self.left[name] -= 1
        context.stopping_criteria = [lambda _, name=name: self.left[name] <= 0 for name in names]
        return [f"{self.left[name]};" for name in names]
"""
SLEEPER = """
import asyncio
from ts.handler_utils.utils import send_intermediate_predict_response

gate = None

async def handle(rows, context):
    global gate
    gate = gate or asyncio.Event()
    if bytes(rows[0]["body"]) == b"open":
        gate.set()
    else:
        send_intermediate_predict_response(["waits;"], context.request_ids, "", 200, context)
        await gate.wait()
    return ["done"]
"""
BREAKS = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(rows, context):
    if rows is None:
        return None
    send_intermediate_predict_response(["a piece"], context.request_ids, "", 200, context)
    raise ValueError("in the middle")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one model of each kind, whose sequences are named in headers of the operator's choice."""
    folder: Path = tmp_path_factory.mktemp("streaming")
    sequences = f"{ONE_WORKER}batchSize: 4\nsequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 1\n"
    headers = {
        "ts_header_key_sequence_id": "X-Conversation",
        "ts_header_key_sequence_start": "X-Conversation-Start",
        "ts_header_key_sequence_end": "X-Conversation-End",
    }
    server = Server(folder, settings=headers, arguments=["--models", "all"])
    for name, handler, config in (
        ("talk", TALK, sequences),
        ("steps", STEPS, f"{ONE_WORKER}batchSize: 8\ncontinuousBatching: true\n"),
        ("sleeper", SLEEPER, f"{ONE_WORKER}asyncCommunication: true\n"),
        ("breaks", BREAKS, ONE_WORKER),
    ):
        make_archive(server.store / f"{name}.mar", handler, config=config)
    with server:
        yield server


def test_sequences_are_named_in_the_headers_of_the_settings(server: Server) -> None:
    """The handler finds the same names in its context, whatever the case in which a client spells them."""
    first = server.predict("talk", "a", **{"x-conversation": "one", "X-Conversation-Start": "true"})
    second = server.predict("talk", "b", **{"X-Conversation": "one"})
    refused = server.predict("talk", "c", **{"X-Conversation": "two"})

    described = server.describe("talk")
    metrics = server.client.get(f"{server.metrics}/metrics", params={"name[]": "marserve_sequences"}).text

    assert second.headers.get("x-marserve-cause") is None
    assert (first.text, second.text) == ("a", "ab")
    assert second.headers["x-conversation"] == "one"
    assert refused.status_code == 503
    assert refused.json()["type"] == "ServiceUnavailableException"
    assert refused.headers["x-marserve-cause"] == "too_many_sequences"
    assert described["sequences"] == {"living": 1, "most": 1, "lost": 0}
    assert described["stateful"] is True
    assert [line for line in metrics.splitlines() if line.startswith("marserve_sequences{") and line.endswith("} 1.0")]


def test_requests_of_many_lengths_are_answered_side_by_side(server: Server) -> None:
    """Each has the pieces of its own steps, in order."""
    lengths = [1, 7, 2, 30, 3, 1, 12, 5, 4, 9]

    with ThreadPoolExecutor(len(lengths)) as clients:
        answers = list(clients.map(lambda length: server.predict("steps", str(length)), lengths))

    assert [answer.text for answer in answers] == ["".join(f"{n - 1 - i};" for i in range(n)) for n in lengths]
    assert ["ts_stream_next" in answer.headers for answer in answers] == [length > 1 for length in lengths]


def test_a_coroutine_streams_while_another_waits(server: Server) -> None:
    """Two streams are open in one worker before the request that ends them comes."""
    url = f"{server.inference}/predictions/sleeper"
    with (
        server.client.stream("POST", url, content=b"wait") as one,
        server.client.stream("POST", url, content=b"wait") as other,
    ):
        pieces = [one.iter_text(), other.iter_text()]
        first = [next(each) for each in pieces]
        opened = server.predict("sleeper", "open")
        rest = ["".join(each) for each in pieces]

    assert first == ["waits;", "waits;"]
    assert opened.text == "done"
    assert rest == ["done", "done"]


def test_a_stream_that_breaks_cannot_pass_for_a_whole_one(server: Server) -> None:
    """The connection is closed in the middle of the chunks."""
    url = f"{server.inference}/predictions/breaks"

    with server.client.stream("POST", url, content=b"x") as answer:
        status = answer.status_code
        with pytest.raises(httpx.RemoteProtocolError):
            answer.read()

    assert status == 200
