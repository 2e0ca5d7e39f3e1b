"""How a server ends, and how it refuses to begin: in order, with a reason, and leaving nothing."""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from marserve.api.grpc.schema import INFERENCE, Schema
from marserve.app.server import LAST_WORKERS_S
from support.open_loop import OpenLoop, Outcome, Shot, evenly, post
from support.processes import left_of
from support.server import Server, make_archive, poll

SCHEMA = Schema()

BUSY = """
import time
class Busy:
    def initialize(self, context):
        pass
    def handle(self, data, context):
        time.sleep(0.01)
        return [bytes(row["body"]) for row in data]
"""

QUICK = """
class Quick:
    def initialize(self, context):
        pass
    def handle(self, data, context):
        return [bytes(row["body"]) for row in data]
"""

SLOW_TO_LOAD = """
import time
class Slow:
    def initialize(self, context):
        time.sleep(600)
    def handle(self, data, context):
        return data
"""

STREAM = """
import time
from ts.handler_utils.utils import send_intermediate_predict_response
class Stream:
    def initialize(self, context):
        pass
    def handle(self, data, context):
        while True:
            context.set_response_content_type(0, "%s")
            send_intermediate_predict_response(["data: x\\n\\n"], context.request_ids, "", 200, context)
            time.sleep(0.05)
"""

SLOW_TO_ANSWER = """
import time
class Slow:
    def initialize(self, context):
        pass
    def handle(self, data, context):
        time.sleep(float(bytes(data[0]["body"])))
        return ["answered"] * len(data)
"""


def make_store(folder: Path, **handlers: str) -> Path:
    """A store with an archive for each handler's source."""
    store = folder / "store"
    store.mkdir()
    for name, source in handlers.items():
        make_archive(store / f"{name}.mar", source)
    return store


def ask_in_vain(server: Server) -> None:
    """Send a request that takes 30 s to a server that will not live so long."""
    with pytest.raises(httpx.TransportError):
        server.predict("slow", b"30")


@dataclass
class Probe:
    """What `/readyz` says, asked all the time: when asked, when answered (in the load's seconds), and the status."""

    server: Server
    seen: list[tuple[float, float, int]] = field(default_factory=list)

    def run(self, load: OpenLoop) -> None:
        """Ask until nobody listens any more."""
        with httpx.Client(timeout=20) as client:
            while True:
                asked_s = time.monotonic() - load.started_at
                try:
                    status = client.get(f"{self.server.inference}/readyz").status_code
                except httpx.RemoteProtocolError as error:
                    if "without sending" not in str(error):  # closed between two questions, as HTTP allows
                        raise
                except httpx.TransportError:
                    return
                else:
                    self.seen.append((asked_s, time.monotonic() - load.started_at, status))


def stop_under_load(folder: Path, *, rate: float, seconds: float, drain_delay_s: float) -> list[Outcome]:
    """Stop a server in the middle of so many requests a second; what came of each.

    The handler takes a while, so that some requests are always under way. With a delay, readiness is the first to fall.
    """
    store = make_store(folder, busy=BUSY)
    shots = [Shot(due, str(number), post("busy", b"%d" % number)) for number, due in enumerate(evenly(rate, seconds))]
    settings = {"drain_delay": str(drain_delay_s), "job_queue_size": str(len(shots))}
    with Server(folder, store=store, settings=settings) as server, ThreadPoolExecutor(2) as threads:
        server.register("busy.mar", batch_size=64, max_batch_delay=1).raise_for_status()
        load = OpenLoop(int(server.inference.rpartition(":")[2]))
        firing = threads.submit(lambda: asyncio.run(load.fire(shots)))
        for _ in poll(10, "the load has begun"):
            if load.started_at < time.monotonic():
                break
        probe = Probe(server)
        probing = threads.submit(probe.run, load)
        for _ in poll(30, "a third of the load is behind"):
            if time.monotonic() - load.started_at > seconds / 3:
                break
        told_s = time.monotonic() - load.started_at
        server.stop()  # exit status 0 in time, workers and sockets gone
        outcomes = firing.result()
        probing.result()

    if drain_delay_s:
        # Only what one process saw before the other did is compared: on a busy machine an answer may be read late.
        fell_s = next(answered_s for _, answered_s, status in probe.seen if status == 503)
        assert all(status == 200 for _, answered_s, status in probe.seen if answered_s < told_s)
        assert all(status == 503 for asked_s, _, status in probe.seen if asked_s >= fell_s)
        first_refusal_s = min((outcome.ended_s for outcome in outcomes if outcome.status == 503), default=math.inf)
        assert all(status == 503 for asked_s, _, status in probe.seen if asked_s >= first_refusal_s)
        assert all(outcome.closes for outcome in outcomes if outcome.status and outcome.sent_s > fell_s)
        assert any(outcome.status == 200 and outcome.closes for outcome in outcomes)  # who had not noticed
    return outcomes


def lost(outcomes: list[Outcome]) -> list[Outcome]:
    """Those whose connection was there, and that got neither their answer nor the word that the server goes."""
    return [
        outcome
        for outcome in outcomes
        if not outcome.is_refused
        and not (outcome.status == 200 and outcome.body == outcome.shot.name.encode())
        and not (outcome.status == 503 and b"shutting down" in outcome.body)
    ]


@pytest.mark.parametrize("drain_delay_s", [0, 0.6])
def test_sigterm_at_a_thousand_requests_a_second_loses_none(tmp_path: Path, drain_delay_s: float) -> None:
    """RELIABILITY F1: a client that tries again on a refused connection only hears of every request that it sent."""
    outcomes = stop_under_load(tmp_path, rate=1000, seconds=1.2 + drain_delay_s, drain_delay_s=drain_delay_s)

    assert lost(outcomes) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_sigterm_under_load_loses_none_in_ten_stops(tmp_path: Path) -> None:
    """The same, also with the delay of containers, until rare moments have come."""
    sent = 0
    for number in range(10):
        (tmp_path / str(number)).mkdir()
        outcomes = stop_under_load(tmp_path / str(number), rate=1000, seconds=9, drain_delay_s=5 * (number % 2))
        assert lost(outcomes) == []
        sent += sum(not outcome.is_refused for outcome in outcomes)
    assert sent > 30_000  # 0 lost of so many are fewer than 1 in 10,000, with 95 % confidence


def test_readiness_falls_before_requests_are_refused(tmp_path: Path) -> None:
    """During `drain_delay` a probe is told to go elsewhere while requests are still answered."""
    store = make_store(tmp_path, quick=QUICK)
    with Server(tmp_path, store=store, settings={"drain_delay": "1.5"}) as server:
        server.register("quick.mar").raise_for_status()
        assert server.client.get(f"{server.inference}/readyz").status_code == 200
        assert server.process is not None

        server.process.send_signal(signal.SIGTERM)
        for _ in poll(2, "readiness falls"):
            ready = server.client.get(f"{server.inference}/readyz")
            if ready.status_code == 503:
                break

        assert "shutting down" in ready.text
        late = server.predict("quick", b"late")  # by who has not noticed yet
        assert late.content == b"late"
        assert late.headers["connection"] == "close"  # its next request is somebody else's
        assert server.client.get(f"{server.inference}/livez").status_code == 200
        server.stop()
        assert "Model server stopped." in server.output()


@pytest.mark.system
def test_what_outlasts_the_deadline_is_refused_by_name(tmp_path: Path) -> None:
    """RELIABILITY F2: what ends in time is answered; the rest hears that the server goes, a stream in its own words."""
    store = make_store(tmp_path, slow=SLOW_TO_ANSWER, events=STREAM % "text/event-stream", bytes=STREAM % "text/plain")
    with Server(tmp_path, store=store, settings={"drain_timeout": "1.5"}) as server, ThreadPoolExecutor(4) as clients:
        for model in ("slow", "events", "bytes"):
            server.register(f"{model}.mar").raise_for_status()
        begun = clients.submit(server.predict, "slow", b"1")
        for _ in poll(5, "the request runs"):
            if server.describe("slow")["runningRequests"]:
                break
        runs = clients.submit(server.predict, "slow", b"30")
        streams = [clients.submit(read_stream, server, model) for model in ("events", "bytes")]
        for _ in poll(5, "all are under way"):
            waiting = server.describe("slow")["jobQueueStatus"]["pendingRequests"]
            if waiting == 1 and all(server.describe(model)["runningRequests"] for model in ("events", "bytes")):
                break

        server.stop()

        assert begun.result().text == "answered"
        refused = runs.result()
        events, text = (stream.result() for stream in streams)
        lines = [line for line in server.output().splitlines() if "drain_timeout is over" in line]
    assert refused.status_code == 503
    assert refused.headers["connection"] == "close"
    assert refused.headers["x-marserve-cause"] == "draining"
    assert events.endswith("}\n\n")
    assert 'event: error\ndata: {\ndata:   "code": 503,' in events
    assert text
    assert "error" not in text
    assert len(lines) == 3
    assert any(
        "Model slow version 1.0: 1 request refused" in line and refused.headers["x-request-id"] in line
        for line in lines
    )
    assert sum("0 requests refused (0 waited, 0 ran) and 1 stream cut" in line for line in lines) == 2


def read_stream(server: Server, model: str) -> str:
    """All that comes of a stream that breaks off."""
    came = ""
    try:
        with httpx.stream("POST", f"{server.inference}/predictions/{model}", timeout=30) as answer:
            for piece in answer.iter_text():
                came += piece
    except httpx.RemoteProtocolError:
        return came
    raise AssertionError(f"the stream ended as a whole one: {came}")


def test_grpc_clients_are_sent_away_while_their_calls_are_answered(tmp_path: Path) -> None:
    """After the delay a GOAWAY: the connection takes nothing new, what runs is answered, the rest UNAVAILABLE."""
    store = make_store(tmp_path, slow=SLOW_TO_ANSWER)
    states: list[grpc.ChannelConnectivity] = []
    with Server(tmp_path, store=store) as server, grpc.insecure_channel(server.grpc_inference) as channel:
        server.register("slow.mar").raise_for_status()
        accepted = ask_by_grpc(channel, b"2")
        for _ in poll(10, "the call runs"):
            if server.describe("slow")["runningRequests"]:
                break
        assert server.process is not None
        channel.subscribe(states.append)
        server.process.send_signal(signal.SIGTERM)
        for _ in poll(10, "the connection is given up"):
            if grpc.ChannelConnectivity.IDLE in states:
                break

        was_running = not accepted.done()
        refused = ask_by_grpc(channel, b"0").exception()

        assert was_running
        assert accepted.result().prediction == b"answered"
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        server.process.wait(20)


def test_a_grpc_call_that_outlasts_the_deadline_is_unavailable(tmp_path: Path) -> None:
    """Not cancelled: it is the server that goes, and another may be asked."""
    store = make_store(tmp_path, slow=SLOW_TO_ANSWER)
    with (
        Server(tmp_path, store=store, settings={"drain_timeout": "0.5"}) as server,
        grpc.insecure_channel(server.grpc_inference) as channel,
    ):
        server.register("slow.mar").raise_for_status()
        accepted = ask_by_grpc(channel, b"30")
        for _ in poll(10, "the call runs"):
            if server.describe("slow")["runningRequests"]:
                break

        server.stop()

        refused = accepted.exception()
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert "was not answered in the time" in refused.details()
        assert "Model slow version 1.0: 1 request refused (0 waited, 1 ran)" in server.output()


def ask_by_grpc(channel: grpc.Channel, body: bytes) -> Any:
    """A prediction of `slow` on its way."""
    predict = channel.unary_unary(
        f"/{INFERENCE}.InferenceAPIsService/Predictions",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=SCHEMA.message(f"{INFERENCE}.PredictionResponse").FromString,
    )
    request = SCHEMA.message(f"{INFERENCE}.PredictionsRequest")(model_name="slow", input={"body": body})
    return predict.future(request, timeout=60)


def test_a_second_signal_hurries(tmp_path: Path) -> None:
    """A request of ten minutes does not hold up a server that is told twice, and may take its time to drain."""
    store = make_store(tmp_path, slow=SLOW_TO_ANSWER)
    with Server(tmp_path, store=store, settings={"drain_timeout": "600"}) as server:
        server.register("slow.mar").raise_for_status()
        assert server.process is not None
        sender = threading.Thread(target=lambda: server.predict("slow", b"600"))
        sender.start()
        for _ in poll(5, "the request runs"):
            if server.describe("slow")["runningRequests"]:
                break
        server.process.send_signal(signal.SIGTERM)
        for _ in poll(5, "it drains"):
            if "draining" in server.output():
                break

        server.stop(number=signal.SIGINT)  # which waits for half a minute

        sender.join()


def test_sigterm_while_a_model_loads_ends_cleanly(tmp_path: Path) -> None:
    """A model that takes ten minutes to load is given up at once."""
    store = make_store(tmp_path, slow=SLOW_TO_LOAD)
    with Server(tmp_path, store=store) as server:
        server.register("slow.mar", synchronous="false").raise_for_status()
        for _ in poll(5, "it loads"):
            if len(server.family()) > 1:
                break

        server.stop()  # which waits for half a minute


def test_sigterm_during_a_registration_answers_it_and_leaves_nothing(tmp_path: Path) -> None:
    """RELIABILITY F3: who waits for a model to load hears at once that the server goes."""
    store = make_store(tmp_path, slow=SLOW_TO_LOAD)
    with Server(tmp_path, store=store) as server, ThreadPoolExecutor(1) as clients:
        asked = clients.submit(server.register, "slow.mar")
        for _ in poll(5, "it loads"):
            if len(server.family()) > 1:
                break

        server.stop()  # which waits for half a minute

        assert asked.result().status_code == 503
        assert "Traceback" not in server.output()


@pytest.mark.system
@pytest.mark.parametrize("stopped", ["templates", "all of them"])
def test_sigterm_ends_a_server_whose_processes_are_stopped_within_its_time(tmp_path: Path, stopped: str) -> None:
    """By SIGSTOP, as a debugger or a full cgroup does it: they hear no order, end by no SIGTERM, and reap no child."""
    store = make_store(tmp_path, forked=QUICK)
    make_archive(store / "fresh.mar", QUICK, config="workerStart: fresh\n")
    server = Server(tmp_path, store=store, settings={"drain_timeout": "1"})
    with server:
        for model in ("forked", "fresh"):
            assert server.register(f"{model}.mar", initial_workers=2).status_code == 200
        workers = {pid for model in ("forked", "fresh") for pid in server.worker_pids(model)}
        family = {process.pid for process in server.family()[1:]}
        assert len(workers) == 4
        assert len(family) > 4
        for pid in family - workers if stopped == "templates" else family:
            psutil.Process(pid).suspend()

        began = time.monotonic()
        server.stop()

        took = time.monotonic() - began

    assert took < LAST_WORKERS_S
    assert "left behind" not in server.output()


def test_signals_without_end_make_no_other_end(tmp_path: Path) -> None:
    """RELIABILITY F3: at whatever moment of the end a further signal comes, the exit status is 0 and nothing stays."""
    store = make_store(tmp_path, quick=QUICK)
    with Server(tmp_path, store=store) as server:
        server.register("quick.mar").raise_for_status()
        process = server.process
        assert process is not None
        for _ in poll(20, "the server ends"):
            process.send_signal(signal.SIGTERM)
            if process.poll() is not None:
                break

        assert process.returncode == 0, server.output()


def test_kill_9_on_the_server_takes_its_workers_along(tmp_path: Path) -> None:
    """No worker or template outlives the server, and its ports are free at once."""
    store = make_store(tmp_path, slow=SLOW_TO_ANSWER)
    server = Server(tmp_path, store=store)
    server.start()
    try:
        server.register("slow.mar", initial_workers=2).raise_for_status()
        asked = threading.Thread(target=ask_in_vain, args=(server,))
        asked.start()
        for _ in poll(5, "the request runs"):
            if server.describe("slow")["runningRequests"]:
                break
        family = server.family()
        assert len(family) >= 4
        assert server.process is not None

        server.process.kill()
        server.process.wait()

        assert not left_of(family, 2)
        asked.join()

        # The same ports, in the same moment; and what the dead one had extracted is cleared away.
        left = set(server.temporary.glob("marserve-*"))
        assert left
        server.start()
        server.register("slow.mar").raise_for_status()
        assert server.predict("slow", b"0").text == "answered"
        for _ in poll(5, "the dead server's folders are gone"):
            if not any(folder.exists() for folder in left):
                break
    finally:
        server.stop()
        server.client.close()


def test_a_wrong_setting_is_told_with_its_line(tmp_path: Path) -> None:
    """Key, value, what would be right, and the line of the file."""
    server = Server(tmp_path, settings={"job_queue_size": "many"})
    server.client.close()

    done = subprocess.run(
        server.command(), cwd=tmp_path, env=server.environment, capture_output=True, text=True, timeout=20, check=False
    )

    assert done.returncode == 1
    told = done.stdout + done.stderr
    assert "job_queue_size" in told
    assert "many" in told
    assert "config.properties, line" in told
    assert "Traceback" not in told
