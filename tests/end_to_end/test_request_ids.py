"""One id of a request, from its client to every line of the logs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.server import Server, make_archive, poll

SAYS = """
import logging
import sys
import threading

def handle(data, context):
    if not data:
        return None
    print("printed")
    print("to stderr", file=sys.stderr)
    logging.getLogger("mine").warning("logged")
    thread = threading.Thread(target=print, args=("threaded",))
    thread.start()
    thread.join()
    if data[0]["body"] == b"fail":
        raise ValueError("no such picture")
    return [context.get_request_id(index) for index in range(len(data))]
"""
OWN = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def lines_of(path: Path, count: int, mark: str) -> list[str]:
    """The lines of a log with `mark`, once there are so many."""
    lines: list[str] = []
    for _ in poll(5, f"{count} lines with {mark} in {path.name}"):
        lines = [line for line in path.read_text().splitlines() if mark in line]
        if len(lines) >= count:
            break
    return lines


def test_a_clients_id_is_taken_and_stands_in_every_line(tmp_path: Path) -> None:
    """Under `marserve`: given back, shown to the handler, in the access log and in what the worker prints and logs."""
    folder = tmp_path / "logs"
    with Server(tmp_path, entry="marserve", settings={"log_location": str(folder)}) as server:
        make_archive(server.store / "m.mar", SAYS)
        assert server.register("m.mar").status_code == 200

        answer = server.predict("m", b"x", **{"X-Request-Id": "order:17.a_B"})
        failed = server.predict("m", b"fail", **{"x-request-id": "order-18"})
        strange = server.predict("m", b"x", **{"X-Request-Id": "a b"})
        long = server.predict("m", b"x", **{"X-Request-Id": "x" * 10_000})
        describe = server.client.get(f"{server.management}/models/m", headers={"X-Request-Id": "ask-1"})

        said = lines_of(folder / "model_log.log", 4, " MODEL_LOG [order:17.a_B] - ")
        lines_of(folder / "model_log.log", 5, " MODEL_LOG [order-18] - ")
        traceback = lines_of(folder / "model_log.log", 1, "ValueError: no such picture")
        [access] = lines_of(folder / "access_log.log", 1, " order-18")
        logs = server.client.get(f"{server.management}/logs", params={"request": "order-18", "model": "m"}).json()
    assert {line["log"] for line in logs["lines"]} == {"access", "model"}
    assert any("ValueError: no such picture" in line["text"] for line in logs["lines"])
    assert (answer.headers["x-request-id"], answer.text) == ("order:17.a_B", "order:17.a_B")
    assert {line.rpartition(" - ")[2] for line in said} == {"printed", "to stderr", "logged", "threaded"}
    assert failed.headers["x-request-id"] == "order-18"
    assert all("[order-18]" in line for line in traceback)
    assert access.endswith(" order-18")
    assert OWN.fullmatch(strange.headers["x-request-id"])
    assert OWN.fullmatch(long.headers["x-request-id"])
    assert describe.headers["x-request-id"] == "ask-1"


CHATTY = """
import logging

def handle(data, context):
    logging.getLogger("mine").debug("whispered")
    return [b"" for _ in data] if data else None
"""


def test_logs_are_asked_for_and_levels_changed_while_it_serves(tmp_path: Path) -> None:
    """Without log files, too; workers that come later have the level as well."""
    with Server(tmp_path, entry="marserve") as server:
        make_archive(server.store / "m.mar", CHATTY)
        assert server.register("m.mar").status_code == 200
        logs, logging = f"{server.management}/logs", f"{server.management}/logging"
        server.predict("m", b"x", **{"X-Request-Id": "before"})

        assert server.client.put(logging, params={"level": "debug", "model": "m"}).status_code == 200
        server.predict("m", b"x", **{"X-Request-Id": "after"})

        for _ in poll(5, "the line"):
            lines = server.client.get(logs, params={"log": "model", "model": "m", "tail": 50}).json()["lines"]
            if any("[after] - whispered" in line["text"] for line in lines):
                break
        assert not any("[before]" in line["text"] for line in lines)
        assert server.client.get(logs, params={"level": "loud"}).status_code == 400
        with server.client.stream("GET", logs, params={"follow": "true", "request": "last", "tail": 0}) as stream:
            pieces = stream.iter_lines()
            assert next(pieces) == ": "
            server.client.put(f"{server.management}/models/m", params={"min_worker": 2, "synchronous": "true"})
            server.predict("m", b"x", **{"X-Request-Id": "last"})
            said = json.loads(next(piece for piece in pieces if piece.startswith("data: ")).removeprefix("data: "))
    assert "last" in said["text"]


@pytest.mark.system
def test_the_traceback_of_a_failed_load_is_found_by_the_registrations_id_and_by_the_model(tmp_path: Path) -> None:
    """Its worker's output is found by the model."""
    with Server(tmp_path, entry="marserve") as server:
        make_archive(server.store / "bad.mar", "print('begun')\nraise ValueError('no weights')\n")
        query = {"url": "bad.mar", "initial_workers": "1", "synchronous": "true"}
        refused = server.client.post(f"{server.management}/models", params=query, headers={"X-Request-Id": "load-1"})

        def found(**asked: str) -> str:
            lines = server.client.get(f"{server.management}/logs", params=asked).json()["lines"]
            return "\n".join(line["text"] for line in lines)

        for _ in poll(5, "the line of the whole request"):
            if " load-1" in found(request="load-1", log="access"):
                break
        by_id, by_model = found(request="load-1"), found(model="bad")
    assert refused.status_code == 500
    for text in (by_id, by_model):
        assert "Traceback (most recent call last):" in text
        assert "ValueError: no weights" in text
    assert "MODEL_LOG - begun" in by_model


@pytest.mark.parametrize("format", ["text", "json"])
def test_torchserve_makes_an_id_and_notes_the_clients_beside_it(tmp_path: Path, format: str) -> None:
    """Text lines stay as TorchServe prints them; JSON has both ids."""
    folder = tmp_path / "logs"
    settings = {"log_location": str(folder), "log_format": format}
    with Server(tmp_path, entry="torchserve", settings=settings) as server:
        make_archive(server.store / "m.mar", SAYS)
        assert server.register("m.mar").status_code == 200

        own = server.predict("m", b"x", **{"X-Request-Id": "order-17"}).headers["x-request-id"]

        said = lines_of(folder / "model_log.log", 4, "MODEL_LOG")
        [access] = lines_of(folder / "access_log.log", 1, "/predictions/m")
        for method, path in (("GET", "/logs"), ("GET", "/logging"), ("PUT", "/logging")):
            assert server.client.request(method, f"{server.management}{path}").status_code in (404, 405)
    assert OWN.fullmatch(own)
    if format == "text":
        assert any(line.endswith(" MODEL_LOG - printed") for line in said)
        assert not any(own in line or "order-17" in line for line in [*said, access])
    else:
        both = {"request_id": own, "client_request_id": "order-17"}
        [printed] = [line for line in map(json.loads, said) if line["message"] == "printed"]
        assert printed | both == printed
        assert json.loads(access) | both == json.loads(access)
