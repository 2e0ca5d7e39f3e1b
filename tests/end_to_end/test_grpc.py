"""A real server's gRPC ports: calls that reach handlers, cancels and deadlines that reach workers, an orderly end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from marserve.api.grpc.schema import INFERENCE, MANAGEMENT, Schema
from support.server import Server, make_archive, poll

SCHEMA = Schema()
PREDICTIONS, PIECES = (
    f"{INFERENCE}.InferenceAPIsService/Predictions",
    f"{INFERENCE}.InferenceAPIsService/StreamPredictions",
)

HANDLER = """
import time
from marserve_handlers.context import send_intermediate_predict_response

class Handler:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        body = bytes(data[0].get("body") or data[0].get("data"))
        if body == b"until cancelled":
            print("BEGUN")
            end = time.monotonic() + 60
            while not context.is_cancelled(0) and time.monotonic() < end:
                time.sleep(0.002)
            print("NOTICED" if context.is_cancelled(0) else "NEVER TOLD")
            return [b"late"]
        if body == b"endless":
            while True:
                send_intermediate_predict_response([b"p" * 1000], None, "", 200, context)
        if body.startswith(b"sleep"):
            print("SLEEPS")
            time.sleep(float(body[5:]))
        if body == b"raise":
            print("RAISES")
            raise ValueError("no")
        if body == b"fence":
            print("FENCE")
        return [body] * len(data)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One model and one worker."""
    folder = tmp_path_factory.mktemp("grpc")
    (folder / "store").mkdir()
    make_archive(folder / "store" / "m.mar", HANDLER)
    with Server(folder) as server:
        server.register("m.mar").raise_for_status()
        yield server


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    """To the inference port."""
    with grpc.insecure_channel(server.grpc_inference) as channel:
        yield channel


def request(body: bytes, model: str = "m") -> Any:
    """A prediction."""
    return SCHEMA.message(f"{INFERENCE}.PredictionsRequest")(model_name=model, input={"data": body})


def method(channel: grpc.Channel, path: str) -> Any:
    """A method of the channel, as generated code would have it."""
    make = channel.unary_stream if path == PIECES else channel.unary_unary
    package = path.rpartition(".")[0]
    answer = "ManagementResponse" if package == MANAGEMENT else "PredictionResponse"
    return make(
        f"/{path}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=SCHEMA.message(f"{package}.{answer}").FromString,
    )


def wait_for_output(server: Server, word: str, count: int) -> None:
    """Wait until the server has printed a word so often."""
    for _ in poll(30, f"{word} in the output"):
        if server.output().count(word) >= count:
            return


def fence(server: Server, channel: grpc.Channel) -> None:
    """Have the worker print, and wait for that: its lines before are in the output, for it has one pipe."""
    fences = server.output().count("FENCE")
    method(channel, PREDICTIONS)(request(b"fence"), timeout=30)
    wait_for_output(server, "FENCE", fences + 1)


def test_predictions_reach_the_handler(channel: grpc.Channel) -> None:
    """And what it raises reaches the client."""
    predict = method(channel, PREDICTIONS)

    assert predict(request(b"hello"), timeout=30).prediction == b"hello"
    with pytest.raises(grpc.RpcError) as caught:
        predict(request(b"raise"), timeout=30)

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "Prediction failed\norg.pytorch.serve.http.InternalServerException"
    assert dict(caught.value.trailing_metadata())["x-marserve-cause"] == "handler"


@pytest.mark.parametrize("path", [PREDICTIONS, PIECES])
def test_a_failing_handler_runs_once_for_a_client_that_retries(server: Server, path: str) -> None:
    """A channel whose policy tries `UNAVAILABLE` four times."""
    policy = {"maxAttempts": 4, "initialBackoff": "0.01s", "maxBackoff": "0.02s", "backoffMultiplier": 2}
    config = {"methodConfig": [{"name": [{}], "retryPolicy": {**policy, "retryableStatusCodes": ["UNAVAILABLE"]}}]}
    with grpc.insecure_channel(server.grpc_inference) as channel:
        fence(server, channel)  # what tests before this one had printed is there
    begun = server.output().count("RAISES")

    with grpc.insecure_channel(server.grpc_inference, [("grpc.service_config", json.dumps(config))]) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(method(channel, path)(request(b"raise"), timeout=30))
        fence(server, channel)

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.output().count("RAISES") == begun + 1


def test_a_cancelled_stream_ends_in_the_worker(server: Server, channel: grpc.Channel) -> None:
    """In its middle; the worker is free for the next call."""
    pids = server.worker_pids("m")
    stream = method(channel, PIECES)(request(b"endless"), timeout=60)
    assert len(next(stream).prediction) == 1000
    stream.cancel()

    assert method(channel, PREDICTIONS)(request(b"next"), timeout=30).prediction == b"next"
    assert server.worker_pids("m") == pids


def test_a_cancelled_call_is_told_to_the_handler(server: Server, channel: grpc.Channel) -> None:
    """It may stop its work."""
    begun, noticed = server.output().count("BEGUN"), server.output().count("NOTICED")
    call = method(channel, PREDICTIONS).future(request(b"until cancelled"), timeout=60)
    wait_for_output(server, "BEGUN", begun + 1)
    call.cancel()

    wait_for_output(server, "NOTICED", noticed + 1)


def test_a_deadline_ends_the_call_and_its_work(server: Server, channel: grpc.Channel) -> None:
    """The client's deadline is the request's."""
    noticed = server.output().count("NOTICED")

    with pytest.raises(grpc.RpcError) as caught:
        method(channel, PREDICTIONS)(request(b"until cancelled"), timeout=0.5)

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for_output(server, "NOTICED", noticed + 1)


def test_calls_are_logged_and_counted(server: Server, channel: grpc.Channel) -> None:
    """Beside those of HTTP."""
    method(channel, PREDICTIONS)(request(b"logged"), timeout=30)

    line = re.compile(rf'/127\.0\.0\.1:\d+ "gRPC {re.escape(PREDICTIONS)} HTTP/2\.0" 0 \d+')
    for _ in poll(10, "the line of the access log"):
        if line.search(server.output()):
            break
    assert 'marserve_grpc_calls_total{code="OK"}' in server.client.get(f"{server.metrics}/metrics").text


def test_models_are_managed_on_the_other_port(server: Server) -> None:
    """The same models as over HTTP."""
    with grpc.insecure_channel(server.grpc_management) as channel:
        describe = method(channel, f"{MANAGEMENT}.ManagementAPIsService/DescribeModel")
        told = describe(SCHEMA.message(f"{MANAGEMENT}.DescribeModelRequest")(model_name="m"), timeout=30)

    assert f'"pid": {server.worker_pids("m")[0]}' in told.msg


def test_a_watch_of_a_model_follows_its_workers(server: Server, channel: grpc.Channel) -> None:
    """From the first one that has loaded the model to the last, and again, until the model leaves."""
    package = "grpc.health.v1"
    answer = SCHEMA.message(f"{package}.HealthCheckResponse")
    health = channel.unary_stream(
        f"/{package}.Health/Watch",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=answer.FromString,
    )
    server.register("m.mar", model_name="watched").raise_for_status()

    watch = health(SCHEMA.message(f"{package}.HealthCheckRequest")(service="watched"), timeout=60)
    seen = [next(watch).status]
    for workers in (0, 1):
        scale = {"min_worker": workers, "max_worker": workers}
        server.client.put(f"{server.management}/models/watched", params=scale).raise_for_status()
        seen.append(next(watch).status)
    server.client.delete(f"{server.management}/models/watched").raise_for_status()
    seen.append(next(watch).status)
    watch.cancel()

    assert seen == [answer.SERVING, answer.NOT_SERVING, answer.SERVING, answer.SERVICE_UNKNOWN]


def test_a_server_that_stops_answers_what_it_accepted(tmp_path: Path) -> None:
    """Health falls, new calls are refused, the accepted one is answered; nothing is left."""
    (tmp_path / "store").mkdir()
    make_archive(tmp_path / "store" / "m.mar", HANDLER)
    with Server(tmp_path, settings={"drain_delay": "1"}) as server:
        server.register("m.mar").raise_for_status()
        assert server.process is not None
        with grpc.insecure_channel(server.grpc_inference) as channel:
            answer = SCHEMA.message("grpc.health.v1.HealthCheckResponse")
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch", response_deserializer=answer.FromString)(b"")
            assert next(watch).status == answer.SERVING
            accepted = method(channel, PREDICTIONS).future(request(b"sleep3"), timeout=60)
            wait_for_output(server, "SLEEPS", 1)
            server.process.send_signal(signal.SIGTERM)

            assert next(watch).status == answer.NOT_SERVING
            wait_for_refusal(channel)
            assert accepted.result().prediction == b"sleep3"
        server.process.wait(30)
    assert "Traceback" not in server.output()


def wait_for_refusal(channel: grpc.Channel) -> None:
    """Call until the server refuses because it is going."""
    for _ in poll(20, "calls are refused"):
        try:
            method(channel, PREDICTIONS)(request(b"x", "nobody"), timeout=30)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return


def test_a_taken_port_keeps_the_server_from_starting(tmp_path: Path) -> None:
    """As one of HTTP does."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = Server(tmp_path, settings={"grpc_inference_port": str(port)})
        server.client.close()
        environment = {**os.environ, "TMPDIR": str(server.temporary), "TEMP": str(server.temporary)}
        done = subprocess.run(
            server.command(), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )

    assert done.returncode == 1
    assert f"Failed to bind to address: 127.0.0.1:{port} (Address already in use)" in done.stderr
    assert "Set grpc_inference_port" in done.stderr


@pytest.mark.system
def test_broken_packages_close_what_needs_them_and_the_server_starts(tmp_path: Path) -> None:
    """The first ones on the path, whose import raises: a line of each that the server asks for, with what is needed."""
    for name in ("h2", "uvloop", "obstore", "cryptography", "pynvml"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text(f"raise SystemError('{name} of another machine')\n")
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with Server(tmp_path, environment={"PYTHONPATH": path}) as server:
        for _ in poll(5, "the line is written, which the log's thread does"):
            if lines := [line for line in server.output().splitlines() if "stay closed" in line]:
                break
        host, _, port = server.grpc_inference.partition(":")
        with socket.socket() as sock:
            assert sock.connect_ex((host, int(port))) != 0
        output = server.output()

    assert len(lines) == 1
    assert re.search(r"h2 [0-9.]+ \(>=[0-9.]+ is needed\)", lines[0]), lines
    assert "cannot be used (SystemError: h2 of another machine)" in lines[0]
    assert "pip install 'marserve[grpc]' opens them" in lines[0]
    assert "uvloop cannot be used (SystemError: uvloop of another machine)" in output
    assert "Traceback" not in output


def test_the_server_process_loads_grpc_only_to_serve_it() -> None:
    """Commands that ask a server start without it."""
    program = "import sys, marserve.app.server; sys.exit('grpc' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_many_threads_of_a_client_share_a_connection(channel: grpc.Channel) -> None:
    """Each gets its own answer."""
    predict, answers = method(channel, PREDICTIONS), {}

    def ask(number: int) -> None:
        answers[number] = predict(request(b"%d" % number), timeout=60).prediction

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == {number: b"%d" % number for number in range(50)}
