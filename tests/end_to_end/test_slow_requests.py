"""Where the time of a request went, told by a real server about requests over real sockets."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from marserve.api.grpc.schema import INFERENCE, Schema
from marserve.telemetry.timeline import STAGES
from support.explained import explained
from support.server import Server, make_archive
from support.workflow_archives import write_war

HANDLER = """
import json
import time

def handle(data, context):
    if data is None:
        return None
    answers = []
    for row in data:
        asked = json.loads(bytes(next(iter(row.values()))) or b"{}")
        with context.span("work"):
            time.sleep(asked.get("sleep", 0))
        if asked.get("fail"):
            raise ValueError("no such picture")
        answers.append("x" * asked.get("bytes", 2))
    return answers
"""

PRINTS = """
def handle(data, context):
    if data is None:
        return None
    for number in range(20_000):
        print(number, "x" * 200)
    return ["x" for _ in data]
"""

CALLER = """
from marserve_handlers import model

@model
async def outer(sleep: float, context) -> str:
    return (await context.call("m", b'{"sleep": %f}' % sleep)).text
"""
WORKFLOW = """\
models:
  timeout-ms: 10000
  middle:
    url: middle.mar
dag:
  prepare: [middle]
  middle: [finish]
"""
FUNCTIONS = """\
def prepare(data, context):
    return None if data is None else [bytes(row["body"]) for row in data]

def finish(data, context):
    return None if data is None else [bytes(row["body"]) for row in data]
"""
STREAM = """
from marserve_handlers.context import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    for _ in range(199):
        send_intermediate_predict_response([b"x" * 65536], context.request_ids, "part", 200, context)
    return [b"x" * 65536]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a model of one worker, which has answered a few requests."""
    folder = tmp_path_factory.mktemp("slow_requests")
    with Server(folder, entry="marserve") as running:
        make_archive(running.store / "m.mar", HANDLER)
        assert running.register("m.mar", initial_workers=1, batch_size=4).status_code == 200
        for _ in range(8):
            assert running.predict("m", b"{}").status_code == 200
        yield running


def ms(found: dict[str, Any], stage: str) -> float:
    """How long a stage took."""
    return next(float(each["ms"]) for each in found["stages"] if each["name"] == stage)


def ask(server: Server, request_id: str, **asked: Any) -> threading.Thread:
    """Send a request on a thread."""
    thread = threading.Thread(target=server.predict, args=("m", json.dumps(asked)), kwargs={"X-Request-Id": request_id})
    thread.start()
    return thread


def test_a_slow_handler_is_named_with_what_its_author_named(server: Server) -> None:
    """The stages add up to what the client saw."""
    began = time.monotonic()
    server.predict("m", json.dumps({"sleep": 0.3}), **{"X-Request-Id": "slow-handler"})
    seen_ms = (time.monotonic() - began) * 1000

    found = explained(server, "slow-handler")

    assert (found["cause"], found["model"], found["version"]) == ("handler", "m", "1.0")
    # The client may have the answer before the server has looked at its clock again.
    assert 300 <= ms(found, "handle") <= found["wall_ms"] <= seen_ms + 50
    assert [span["name"] for span in found["spans"]] == ["work"]
    assert found["spans"][0]["ms"] >= 300
    assert (found["bytes_in"], found["bytes_out"], found["worker"]) == (14, 2, "W-9000-m_1.0")


def test_quick_requests_of_a_server_at_rest_were_held_by_nothing(server: Server) -> None:
    """Nothing stood still, and no list of them says so."""
    for number in range(40):
        server.predict("m", b"{}", **{"X-Request-Id": f"quick-{number}"})
    explained(server, "quick-39")

    listed = server.client.get(f"{server.management}/requests?order=newest&limit=40").json()["requests"]
    quick = [each for each in listed if each["wall_ms"] < 5]

    # Others may compute on this machine, and are named then, but not all the time.
    assert any(each["cause"] == "handler" and "nothing held it" in each["why"] for each in quick), listed
    assert not [each for each in quick if each["cause"] == "loop_stalled"]


def test_what_other_models_did_meanwhile_is_told(server: Server) -> None:
    """One printed a lot, and one had more requests than it takes."""
    make_archive(server.store / "prints.mar", PRINTS, name="prints")
    make_archive(server.store / "full.mar", HANDLER, name="full", config="jobQueueSize: 1\n")
    for model in ("prints", "full"):
        assert server.register(f"{model}.mar").status_code == 200
    with ThreadPoolExecutor(20) as many:
        asked = ask(server, "beside", sleep=1.5)
        printed = many.submit(server.predict, "prints")
        flood = [many.submit(server.predict, "full", '{"sleep": 0.2}') for _ in range(20)]
        asked.join()
        assert printed.result().status_code == 200
        assert 503 in [each.result().status_code for each in flood]

    meanwhile = explained(server, "beside")["meanwhile"]

    assert any(each.partition(": ")[2].startswith("prints W-") and " printed " in each for each in meanwhile), meanwhile
    assert any(
        ": full had more requests than it takes, and refused a request (queue_full)" in each for each in meanwhile
    ), meanwhile


def test_a_request_that_waited_is_told_for_whom(server: Server) -> None:
    """The only worker ran another one."""
    first = ask(server, "before", sleep=0.5)
    time.sleep(0.1)  # the first one is with the worker by now
    second = ask(server, "behind")
    for thread in (first, second):
        thread.join()

    found = explained(server, "behind")

    assert found["cause"] == "queue"
    assert "request before" in found["why"]
    assert ms(found, "queue") > 200


def test_nodes_of_a_workflow_and_calls_of_handlers_have_their_times(server: Server) -> None:
    """No traces are needed; which of them took how long is said with the whole."""
    make_archive(server.store / "middle.mar", HANDLER)
    write_war(server.store / "w.war", WORKFLOW, FUNCTIONS)
    assert server.client.post(f"{server.management}/workflows", params={"url": "w.war"}).status_code == 200
    make_archive(server.store / "caller.mar", CALLER)
    assert server.register("caller.mar").status_code == 200

    headers = {"X-Request-Id": "of-nodes"}
    server.client.post(f"{server.inference}/wfpredict/w", content=b"{}")  # no worker is cold
    answer = server.client.post(f"{server.inference}/wfpredict/w", content=b'{"sleep": 0.2}', headers=headers)
    called = server.predict("caller", b"0.1", **{"X-Request-Id": "calls", "Content-Type": "application/json"})
    assert called.status_code == 200, called.text
    whole, caller = explained(server, "of-nodes"), explained(server, "calls")

    assert answer.status_code == 200, answer.text
    assert (whole["model"], whole["version"], whole["worker"]) == ("w", "", "")
    assert ms(whole, "handle") >= 200 > 50 > ms(whole, "admit")
    assert [part["name"] for part in whole["parts"]] == ["node prepare", "node middle", "node finish"]
    assert whole["parts"][1]["model"] == "w__middle"
    assert ms(whole["parts"][1], "handle") >= 200
    assert whole["cause"] == "handler"
    assert "node middle took 2" in whole["why"]
    assert [(part["name"], part["depth"], part["status"]) for part in caller["parts"]] == [("call m", 1, 200)]
    assert "call m took 1" in caller["why"]


def test_mates_are_named(server: Server) -> None:
    """Those that left together."""
    first = ask(server, "blocks", sleep=0.4)
    time.sleep(0.1)  # the first one is with the worker by now
    others = [ask(server, f"mate-{number}") for number in range(3)]
    for thread in (first, *others):
        thread.join()

    found = explained(server, "mate-0")

    assert found["batch"]["size"] == 3
    assert set(found["batch"]["mates"]) == {"mate-1", "mate-2"}


def test_a_client_that_sends_slowly_is_named(server: Server) -> None:
    """Its header and body came in pieces."""
    with socket.create_connection(("127.0.0.1", int(server.inference.rpartition(":")[2]))) as client:
        client.sendall(b"POST /predictions/m HTTP/1.1\r\nhost: localhost\r\nx-request-id: trickle\r\n")
        time.sleep(0.15)  # what is slow here is the client
        client.sendall(b"content-length: 4\r\n\r\n{ ")
        time.sleep(0.2)  # as above
        client.sendall(b" }")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")

    found = explained(server, "trickle")

    assert found["cause"] == "slow_client"
    assert ms(found, "header") > 100
    assert ms(found, "body") > 150


def test_a_client_that_takes_its_stream_slowly_is_named(server: Server) -> None:
    """Its worker had to wait; the handler itself was quick."""
    make_archive(server.store / "stream.mar", STREAM)
    assert server.register("stream.mar", initial_workers=1).status_code == 200
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        client.connect(("127.0.0.1", int(server.inference.rpartition(":")[2])))
        head = "POST /predictions/stream HTTP/1.1\r\nhost: localhost\r\nx-request-id: sips\r\n"
        client.sendall(f"{head}content-length: 0\r\n\r\n".encode())
        time.sleep(1.0)  # what is slow here is the client
        while not client.recv(1 << 20).endswith(b"0\r\n\r\n"):
            pass

    found = explained(server, "sips")

    assert found["cause"] == "slow_client"
    assert found["bytes_out"] == 200 * 65536
    assert found["first_piece_ms"] < found["wall_ms"] / 2


def test_a_failure_has_its_class_and_stands_in_the_list(server: Server) -> None:
    """A client's mistake does not."""
    failed = server.predict("m", json.dumps({"fail": True}), **{"X-Request-Id": "fails"})
    unknown = server.predict("nosuch", b"{}", **{"X-Request-Id": "unknown-model"})
    assert (failed.status_code, unknown.status_code) == (500, 404)

    found = explained(server, "fails")
    listed = server.client.get(f"{server.management}/requests", params={"failed": "true"}).json()["requests"]

    assert (found["status"], found["error"]) == (500, "handler")
    assert "fails" in [each["id"] for each in listed]
    assert "unknown-model" not in [each["id"] for each in listed]
    assert explained(server, "unknown-model")["model"] == ""


def test_a_client_that_left_is_recorded_as_gone(server: Server) -> None:
    """With what had become of its request."""
    with socket.create_connection(("127.0.0.1", int(server.inference.rpartition(":")[2]))) as client:
        body = json.dumps({"sleep": 0.3})
        head = "POST /predictions/m HTTP/1.1\r\nhost: localhost\r\nx-request-id: leaves\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(0.1)  # the request is with the worker by now

    found = explained(server, "leaves")

    assert (found["status"], found["error"]) == (499, "client_gone")
    assert found["wall_ms"] < 300


def test_calls_over_grpc_have_timelines_as_well(server: Server) -> None:
    """Each under the call's id."""
    schema = Schema()
    request = schema.message(f"{INFERENCE}.PredictionsRequest")
    response = schema.message(f"{INFERENCE}.PredictionResponse")
    with grpc.insecure_channel(server.grpc_inference) as channel:
        call = channel.unary_unary(
            f"/{INFERENCE}.InferenceAPIsService/Predictions",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        call(request(model_name="m", input={"body": b'{"sleep": 0.5}'}), metadata=[("x-request-id", "by-grpc")])

    found = explained(server, "by-grpc")

    assert (found["cause"], found["status"]) == ("handler", 200)
    assert found["bytes_out"] == 2


def test_stages_have_histograms(server: Server) -> None:
    """For all requests together; header and body only of those that came in pieces."""
    assert server.predict("m", b"{}").status_code == 200

    page = server.client.get(f"{server.metrics}/metrics").text

    for stage in ({*STAGES} - {"header", "body", "handle"}) | {"handler", "total"}:
        assert f'marserve_request_seconds_count{{model="m",version="1.0",stage="{stage}"}}' in page


def test_a_killed_server_leaves_its_requests_to_the_next_one(tmp_path: Path) -> None:
    """In a file, if that is asked for."""
    settings = {"flight_recorder_file": str(tmp_path / "requests")}
    with Server(tmp_path, entry="marserve", settings=settings) as server:
        make_archive(server.store / "m.mar", HANDLER)
        assert server.register("m.mar", initial_workers=1).status_code == 200
        server.predict("m", json.dumps({"sleep": 0.2}), **{"X-Request-Id": "before-the-crash"})
        server.stop(check=False, number=signal.SIGKILL)
        server.start()

        found = explained(server, "before-the-crash")
        listed = server.client.get(f"{server.management}/requests", params={"previous": "true"}).json()["requests"]

    assert (found["model"], found["cause"], found["worker"]) == ("m", "cold_worker", "W-9000-m_1.0")
    assert [each["id"] for each in listed] == ["before-the-crash"]


def test_under_torchserve_there_are_no_such_routes(tmp_path: Path) -> None:
    """As recorded; and without the recorder there are none either."""
    with Server(tmp_path, entry="torchserve") as server:
        assert server.client.get(f"{server.management}/requests").status_code in (404, 405)


def test_of_very_many_requests_those_that_fail_are_known(server: Server) -> None:
    """Though most have no timeline."""
    with ThreadPoolExecutor(16) as clients:
        list(clients.map(lambda _: server.predict("nosuch", b"{}"), range(400)))
        failed = list(
            clients.map(
                lambda number: server.predict(
                    "m", json.dumps({"fail": number % 40 == 0}), **{"X-Request-Id": f"n{number}"}
                ),
                range(400),
            )
        )

    listed = server.client.get(f"{server.management}/requests", params={"failed": "true", "limit": "1000"}).json()

    assert {answer.status_code for answer in failed} == {200, 500}
    assert {f"n{number}" for number in range(0, 400, 40)} <= {each["id"] for each in listed["requests"]}


def test_the_histograms_of_queue_handler_and_total_agree_with_the_timelines_of_the_same_requests(
    server: Server,
) -> None:
    """The dispatcher counts those, the recorder has the others; batches of two, of which most waited."""
    make_archive(server.store / "sums.mar", HANDLER, name="sums")
    assert server.register("sums.mar", batch_size=2).status_code == 200
    names = [f"sum-{number}" for number in range(12)]
    with ThreadPoolExecutor(6) as many:
        answers = [many.submit(server.predict, "sums", '{"sleep": 0.06}', **{"X-Request-Id": name}) for name in names]
        assert {each.result().status_code for each in answers} == {200}
    timelines = [explained(server, name) for name in names]
    page = server.client.get(f"{server.metrics}/metrics").text

    in_timelines = {
        "queue": sum(ms(each, "queue") for each in timelines),
        "handler": sum(ms(each, "handle") for each in timelines),
        "total": sum(
            ms(each, stage) for each in timelines for stage in ("queue", "send", "decode", "handle", "encode", "return")
        ),
    }
    for stage, summed_ms in in_timelines.items():
        labels = f'{{model="sums",version="1.0",stage="{stage}"}}'
        figures = {
            what: float(line.split()[-1])
            for what in ("count", "sum")
            for line in page.splitlines()
            if line.startswith(f"marserve_request_seconds_{what}{labels}")
        }
        assert figures["count"] == len(names)
        # Each of the timelines' figures is rounded to a microsecond.
        assert figures["sum"] * 1000 == pytest.approx(summed_ms, abs=0.001 * 6 * len(names)), stage
    assert in_timelines["queue"] > 60
