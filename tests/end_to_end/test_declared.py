"""A real server with handlers that declare their input: the page's first steps, and what is answered to bad input."""

from __future__ import annotations

import json
import shlex
import zipfile
from collections.abc import Iterator

import pytest

from support.pages import block
from support.server import Server, make_archive, poll

PAGE = "docs/declared-handlers.md"
JSON = {"Content-Type": "application/json"}
SUMS_DECLARED = (
    '{"version": 1, "kind": "tensors", "inputs": [{"name": "pair", "dtype": "float32", "shape": ["batch", 2]}],'
    ' "outputs": [{"name": "sum", "dtype": "float32", "shape": ["batch"]}]}'
)
GATE = """
import asyncio

from marserve_handlers import model

gate = None


@model
async def say(text: str):
    global gate
    gate = gate or asyncio.Event()
    if text == "open":
        gate.set()
    elif text == "endless":
        while True:
            yield "x" * 65536
    else:
        yield f"{text} waits;"
        await gate.wait()
    yield "done"
"""
GATE_DECLARED = (
    '{"version": 1, "kind": "item", "input": {"type": "text", "contentType": "text/plain"},'
    ' "output": {"type": "any", "stream": true}%s}'
)
SUMS, GREET, TOKENS, PIPE = (block(PAGE, name) for name in ("sums", "greet", "tokens", "pipe"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the whole file, with the page's models."""
    folder = tmp_path_factory.mktemp("declared")
    store = folder / "store"
    store.mkdir()
    make_archive(store / "sums.mar", SUMS, config="minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\n")
    make_archive(store / "greet.mar", GREET)
    make_archive(store / "tokens.mar", TOKENS)
    make_archive(store / "pipe.mar", PIPE)
    for name, declaration in (("other", SUMS_DECLARED.replace("float32", "int8", 1)), ("same", SUMS_DECLARED)):
        make_archive(store / f"{name}.mar", SUMS, name=name)
        with zipfile.ZipFile(store / f"{name}.mar", "a") as archive:
            archive.writestr("MAR-INF/declaration.json", declaration)
    one = "minWorkers: 1\nmaxWorkers: 1\n"
    for name, mark, config in (
        ("gate", ', "async": true', one),
        ("batches", ', "async": true', f"{one}asyncCommunication: false\n"),
        ("unmarked", "", one),
    ):
        make_archive(store / f"{name}.mar", GATE, name=name, config=config)
        with zipfile.ZipFile(store / f"{name}.mar", "a") as archive:
            archive.writestr("MAR-INF/declaration.json", GATE_DECLARED % mark)
    with Server(folder, store=store, entry="marserve") as server:
        server.register("sums.mar").raise_for_status()
        server.register("greet.mar").raise_for_status()
        server.register("tokens.mar").raise_for_status()
        server.register("pipe.mar").raise_for_status()
        yield server


def test_the_pages_requests_get_the_pages_answers(server: Server) -> None:
    """An item, and rows with the batch axis."""
    curls = [shlex.split(line) for line in block(PAGE, "sums-commands").splitlines() if line.startswith("curl")]

    answers = [
        server.client.post(
            f"{server.inference}/predictions/sums",
            content=words[words.index("-d") + 1],
            headers=JSON,
        )
        for words in curls
    ]

    assert [answer.json() for answer in answers] == json.loads(block(PAGE, "sums-answers"))
    assert answers[0].headers["content-type"] == "application/json"


def test_what_does_not_fit_is_400_with_the_field(server: Server) -> None:
    """Of tensors and of items, with the sentences of the page."""
    tensor = server.predict("sums", b'{"pair": [1, 2, 3]}', **JSON)
    item = server.predict("greet", b'{"name": "Ada", "age": "x"}', **JSON)

    assert (tensor.status_code, tensor.json()["message"]) == (400, "pair: expected float32 [2], got [3]")
    assert (item.status_code, item.json()["message"]) == (400, "age: expected int, got str")


def test_describe_shows_the_declaration(server: Server) -> None:
    """As the worker that loaded the model reported it."""
    sums = server.client.get(f"{server.management}/models/sums").json()[0]["declaration"]
    greet = server.client.get(f"{server.management}/models/greet").json()[0]["declaration"]

    assert sums["inputs"] == [{"name": "pair", "dtype": "float32", "shape": ["batch", 2]}]
    assert greet["input"]["schema"]["required"] == ["name", "age"]


def test_a_handler_asks_other_models(server: Server) -> None:
    """Two at a time, while it answers one request."""
    assert server.predict("pipe", b"Ada").json() == {"text": "Ada is 36", "sum": 3.0}


def test_events_are_streamed(server: Server) -> None:
    """With the header of the page; the last one says that it is the last."""
    answer = server.predict("tokens", b"hello world", Accept="text/event-stream")

    assert answer.headers["content-type"] == "text/event-stream"
    words = "".join(f"event: token\ndata: {word}\n\n" for word in ("hello", "world"))
    assert answer.text == f"{words}event: end\ndata: {{}}\n\n"


def test_another_declaration_in_the_archive_fails_the_load(server: Server) -> None:
    """The sentence names both; an equal one is shown before a worker is up."""
    other = "other.mar&initial_workers=1&synchronous=false"
    server.client.post(f"{server.management}/models?url={other}").raise_for_status()
    server.client.post(f"{server.management}/models?url=same.mar").raise_for_status()

    death = None
    for _ in poll(60, "the load has failed"):
        if (death := server.describe("other").get("lastDeath")) is not None:
            break
    assert death is not None
    assert 'at inputs[0].dtype: the archive "int8", the handler "float32"' in death["detail"]
    assert server.describe("same")["workers"] == []
    assert server.describe("same")["declaration"] == json.loads(SUMS_DECLARED)


def test_the_api_description_has_a_path_for_each_declared_model_that_is_registered(server: Server) -> None:
    """With its schema, for both ways to name it; what is unregistered is not described any more."""
    server.client.post(f"{server.management}/models?url=same.mar&model_name=gone").raise_for_status()
    before = server.client.get(f"{server.inference}/openapi.json").json()["paths"]
    server.client.delete(f"{server.management}/models/gone").raise_for_status()
    after = server.client.get(f"{server.inference}/openapi.json").json()["paths"]

    greet = before["/predictions/greet"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert greet["required"] == ["name", "age"]
    assert {"/predictions/gone", "/predictions/gone/1.0"} <= before.keys()
    assert {"/predictions/sums/1.0", "/predictions/{model_name}"} <= after.keys()
    assert "/predictions/gone" not in after


def test_streams_of_a_declared_coroutine_run_side_by_side(server: Server) -> None:
    """Two are open in one worker before the request that ends them comes; before, the client of an endless one left."""
    server.register("gate.mar").raise_for_status()
    url = f"{server.inference}/predictions/gate"
    with server.client.stream("POST", url, content=b"endless") as endless:
        assert next(endless.iter_bytes(1)) == b"x"
    with (
        server.client.stream("POST", url, content=b"one") as one,
        server.client.stream("POST", url, content=b"other") as other,
    ):
        pieces = [one.iter_text(), other.iter_text()]
        first = [next(each) for each in pieces]
        opened = server.predict("gate", b"open")
        rest = ["".join(each) for each in pieces]

    assert first == ["one waits;", "other waits;"]
    assert (opened.text, rest) == ("done", ["done", "done"])
    assert server.describe("gate")["maxConcurrentRequests"] == 64


def test_a_declared_coroutine_runs_batch_by_batch_where_that_is_said_or_the_archive_is_older(server: Server) -> None:
    """Both are loaded and answer."""
    for name in ("batches", "unmarked"):
        server.register(f"{name}.mar").raise_for_status()

        assert server.predict(name, b"open").text == "done"
        assert "maxConcurrentRequests" not in server.describe(name)
