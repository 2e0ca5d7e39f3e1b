"""Traces of a real server, sent over real sockets to a stand-in for a collector that decodes OTLP."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest

from marserve.api.grpc.schema import INFERENCE, Schema
from marserve.telemetry.timeline import STAGES
from support.collector import Collector, Received
from support.file_server import file_server, whole
from support.server import Server, make_archive, poll
from support.workflow_archives import write_war

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"

HANDLER = """
import json
import time

def handle(data, context):
    if data is None:
        return None
    answers = []
    for idx, row in enumerate(data):
        asked = json.loads(bytes(next(iter(row.values()))) or b"{}")
        with context.span("work"):
            time.sleep(asked.get("sleep", 0))
        if asked.get("fail"):
            raise ValueError("no such picture")
        answers.append(json.dumps(context.trace_headers(idx)))
    return answers
"""

CALLER = """
from marserve_handlers import model

@model
async def outer(call: str, context) -> dict:
    name, _, body = call.partition(" ")
    return (await context.call(name, body.encode() or b"{}")).json()
"""

STREAM = """
import time

from marserve_handlers.context import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    send_intermediate_predict_response([b"piece"], context.request_ids, "", 200, context)
    time.sleep(0.3)
    return [b"last"]
"""

WORKFLOW = """\
models:
  timeout-ms: 10000
  middle:
    url: m.mar
dag:
  prepare: [middle]
  middle: [finish]
"""
FUNCTIONS = """\
def prepare(data, context):
    return None if data is None else [b"{}" for row in data]

def finish(data, context):
    return None if data is None else [bytes(row["body"]) for row in data]
"""


def start(folder: Path, collector: Collector | None, **settings: str) -> Server:
    """A server that sends traces, with a model that has answered once."""
    server = Server(
        folder,
        entry="marserve",
        settings={"tracing": "otlp", "log_format": "json", **settings},
        environment={} if collector is None else collector.environment,
    )
    make_archive(server.store / "m.mar", HANDLER)
    make_archive(server.store / "outer.mar", CALLER)
    return server


@pytest.fixture(scope="module", params=["http/protobuf", pytest.param("grpc", marks=pytest.mark.system)])
def traced(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Collector]]:
    """A server and its collector, by each of the protocols."""
    folder = tmp_path_factory.mktemp("traces")
    with Collector(request.param) as collector, start(folder, collector) as server:
        assert server.register("m.mar", batch_size=4, max_batch_delay=1).status_code == 200
        yield server, collector


def named(spans: list[Received], name: str) -> Received:
    """The only span of this name."""
    [found] = [each for each in spans if each.name == name]
    return found


def test_a_request_is_a_trace_with_its_stages(traced: tuple[Server, Collector]) -> None:
    """In its caller's trace, whose baggage and span its handler sees; the answer names the span."""
    server, collector = traced
    answer = server.predict(
        "m", "{}", traceparent=SAMPLED, tracestate="a=1", baggage="k=v", **{"X-Request-Id": "whole"}
    )
    root, *children = collector.of_request("whole")

    assert (root.name, root.kind, root.trace_id, root.parent_id, root.state) == (
        "POST /predictions/{model_name}",
        2,
        TRACE,
        SPAN,
        "a=1",
    )
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{root.span_id}-01"
    handle = named(children, "handle")
    assert answer.json() == {"traceparent": f"00-{TRACE}-{handle.span_id}-01", "tracestate": "a=1", "baggage": "k=v"}
    assert named(children, "work").parent_id == handle.span_id
    stages = [each for each in children if each.name in STAGES]
    assert {"admit", "send", "handle", "return", "write"} <= {each.name for each in stages}
    assert all(each.parent_id == root.span_id for each in stages)
    assert sum(each.ended - each.began for each in stages) == pytest.approx(root.ended - root.began, abs=2e-5)
    assert abs(root.ended - time.time()) < 60
    assert root.attributes["http.response.status_code"] == 200
    assert root.resource["service.name"] == "under-test"
    assert root.resource["deployment.environment"] == "tests"
    recorded = server.client.get(f"{server.management}/requests/whole").json()
    assert recorded["trace_id"] == TRACE
    assert server.client.get(f"{server.management}/requests/{TRACE}").json()["trace_id"] == TRACE


def test_the_page_of_metrics_has_the_trace_of_an_example(traced: tuple[Server, Collector]) -> None:
    """From where a slow bucket leads to a trace; a request whose trace is not kept does not take its place."""
    server, _ = traced
    url, wish = f"{server.metrics}/metrics", {"accept": "application/openmetrics-text"}
    server.client.get(url, headers=wish)
    server.predict("m", "{}", traceparent=SAMPLED, **{"X-Request-Id": "shown"})
    server.predict("m", "{}", traceparent=UNSAMPLED, **{"X-Request-Id": "not-shown"})

    lines = server.client.get(url, headers=wish).text.splitlines()
    of_total = [
        line for line in lines if line.startswith("marserve_request_seconds_bucket") and 'stage="total"' in line
    ]
    assert any(f'request_id="shown",trace_id="{TRACE}"' in line for line in of_total)


def test_the_requests_of_a_batch_are_linked_to_its_span(traced: tuple[Server, Collector]) -> None:
    """And the batch to each of them."""
    server, collector = traced
    ids = [f"batch-{number}" for number in range(4)]
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(server.predict, "m", '{"sleep": 0.3}')
        time.sleep(0.1)
        for answer in pool.map(lambda one: server.predict("m", "{}", **{"X-Request-Id": one}), ids):
            assert answer.status_code == 200
        assert first.result().status_code == 200
    roots = [collector.of_request(one)[0] for one in ids]
    handles = {each.parent_id: each for each in collector.spans if each.name == "handle"}
    collector.wait_for(lambda spans: any(each.name == "batch m" for each in spans))
    linked = [handles[root.span_id] for root in roots if handles[root.span_id].links]

    assert len(linked) >= 2
    for handle in linked:
        [(trace_id, span_id)] = handle.links
        batch = next(each for each in collector.spans if (each.trace_id, each.span_id) == (trace_id, span_id))
        assert batch.name == "batch m"
        assert (handle.trace_id, handle.parent_id) in batch.links
        assert len(batch.links) == batch.attributes["marserve.batch.size"]


def test_a_failed_request_says_so(traced: tuple[Server, Collector]) -> None:
    """With the class of its cause."""
    server, collector = traced
    assert server.predict("m", '{"fail": 1}', **{"X-Request-Id": "fails"}).status_code == 500
    root = collector.of_request("fails")[0]
    assert (root.is_error, root.message, root.attributes["error.type"]) == (True, "handler", "handler")


def test_lines_of_the_logs_have_their_requests_trace(traced: tuple[Server, Collector]) -> None:
    """Of its access line and of what its handler raised; by the trace's id they are found."""
    server, collector = traced
    server.predict("m", '{"fail": 1}', **{"X-Request-Id": "logged"})
    root = collector.of_request("logged")[0]

    for _ in poll(5, "both lines are written"):
        answer = server.client.get(f"{server.management}/logs", params={"request": root.trace_id}).json()
        lines = {each["log"]: json.loads(each["text"]) for each in answer["lines"]}
        if len(lines) == 2:
            break

    assert {log: (line["trace_id"], line["span_id"]) for log, line in lines.items()} == {
        "access": (root.trace_id, root.span_id),
        "model": (root.trace_id, root.span_id),
    }


def test_a_call_over_grpc_is_in_its_callers_trace(traced: tuple[Server, Collector]) -> None:
    """Its handler sees the metadata that carries the trace, and no other."""
    server, collector = traced
    schema = Schema()
    request = schema.message(f"{INFERENCE}.PredictionsRequest")
    response = schema.message(f"{INFERENCE}.PredictionResponse")
    with grpc.insecure_channel(server.grpc_inference) as channel:
        unary = channel.unary_unary(
            f"/{INFERENCE}.InferenceAPIsService/Predictions",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        metadata = [("x-request-id", "by-grpc"), ("traceparent", SAMPLED), ("baggage", "k=v"), ("other", "x")]
        answer, call = unary.with_call(request(model_name="m", input={"body": b"{}"}), metadata=metadata)
    root, *children = collector.of_request("by-grpc")

    assert (root.name, root.parent_id) == (f"{INFERENCE}.InferenceAPIsService/Predictions", SPAN)
    assert root.attributes["rpc.system"] == "grpc"
    handle = named([each for each in children if each.parent_id == root.span_id], "handle")
    assert json.loads(answer.prediction) == {"traceparent": f"00-{TRACE}-{handle.span_id}-01", "baggage": "k=v"}
    assert dict(call.trailing_metadata())["traceresponse"] == f"00-{TRACE}-{root.span_id}-01"


def test_the_protocols_trace_settings_are_those_of_the_server(traced: tuple[Server, Collector]) -> None:
    """Clients of Triton's extension see whether there are traces; they cannot change it."""
    server, _ = traced

    shown = server.client.get(f"{server.management}/v2/trace/setting").json()
    refused = server.client.post(f"{server.management}/v2/trace/setting", json={"trace_level": ["OFF"]})

    assert (shown["trace_level"], shown["trace_count"]) == (["TIMESTAMPS"], "-1")
    assert refused.status_code == 400
    assert "this server stays as it was started" in refused.text


def test_a_models_load_is_a_trace_of_its_own(traced: tuple[Server, Collector]) -> None:
    """From the start of its worker."""
    _, collector = traced
    spans = collector.wait_for(lambda spans: any(each.name == "load m" for each in spans))
    load = next(each for each in spans if each.name == "load m")
    assert (load.parent_id, load.attributes["marserve.model.version"]) == ("", "1.0")
    assert load.ended > load.began


def test_a_download_is_a_trace_of_its_own(tmp_path: Path) -> None:
    """With its address, without what is secret of it, how it ended and how much came; a failed one, too."""
    with (
        file_server() as files,
        Collector() as collector,
        start(tmp_path, collector, allowed_urls=f"{files.url}/.*") as server,
    ):
        archive = (server.store / "m.mar").read_bytes()
        url = files.on("/far.mar?sig=secret", whole(archive))
        began = time.time()
        answer = server.register(url, model_name="far")
        assert answer.status_code == 200, answer.text
        assert server.register(f"{files.url}/nosuch.mar", model_name="gone").status_code == 400
        ended = time.time()
        spans = collector.wait_for(lambda spans: sum(each.name == "download" for each in spans) == 2)
    done, failed = (each for each in spans if each.name == "download")
    assert done.parent_id == ""
    assert done.attributes["marserve.what"].startswith(f"download of {files.url}/far.mar")
    assert done.attributes["marserve.what"].endswith(f": done, {len(archive)} bytes")
    assert "secret" not in done.attributes["marserve.what"]
    assert began - 1 < done.began < done.ended < ended + 1
    assert f"{files.url}/nosuch.mar: failed" in failed.attributes["marserve.what"]


def test_nodes_of_a_workflow_and_calls_of_handlers_are_children(tmp_path: Path) -> None:
    """Each with its stages, and with what they call below them."""
    with Collector() as collector, start(tmp_path, collector) as server:
        write_war(server.store / "w.war", WORKFLOW, FUNCTIONS)
        assert server.register("m.mar").status_code == 200
        assert server.register("outer.mar").status_code == 200
        answer = server.client.post(f"{server.management}/workflows", params={"url": "w.war"})
        assert answer.status_code == 200, answer.text
        seen = server.client.post(
            f"{server.inference}/wfpredict/w", content="{}", headers={"X-Request-Id": "flow", "traceparent": SAMPLED}
        ).json()
        root, *children = collector.of_request("flow")
        assert root.name == "POST /wfpredict/{workflow_name}"
        nodes = {name: named(children, f"node {name}") for name in ("prepare", "middle", "finish")}
        assert all(each.parent_id == root.span_id for each in nodes.values())
        handle = next(each for each in children if each.name == "handle" and each.parent_id == nodes["middle"].span_id)
        assert seen == {"traceparent": f"00-{TRACE}-{handle.span_id}-01"}

        inner = server.predict("outer", "m", baggage="k=v", **{"X-Request-Id": "calls"}).json()
        root, *children = collector.of_request("calls")
        called = named(children, "call m")
        above = next(each for each in children if each.span_id == called.parent_id)
        assert (above.name, above.parent_id) == ("handle", root.span_id)
        below = next(each for each in children if each.name == "handle" and each.parent_id == called.span_id)
        assert inner == {"traceparent": f"00-{root.trace_id}-{below.span_id}-03", "baggage": "k=v"}


@pytest.mark.system
def test_a_slow_and_a_failed_request_are_kept_though_not_sampled(tmp_path: Path) -> None:
    """Whatever their caller's flag, and the share."""
    with Collector() as collector:
        with start(tmp_path, collector, trace_sample="0", trace_slower_than="0.2") as server:
            assert server.register("m.mar").status_code == 200
            for _ in range(20):
                answer = server.predict("m", "{}", **{"X-Request-Id": "quick"})
                assert (answer.status_code, "traceresponse" in answer.headers) == (200, False)
                assert answer.json()["traceparent"].endswith("-02")
            server.predict("m", "{}", traceparent=UNSAMPLED, **{"X-Request-Id": "quick"})
            answer = server.predict("m", '{"sleep": 0.3}', traceparent=UNSAMPLED, **{"X-Request-Id": "slow"})
            assert answer.headers["traceresponse"].endswith("-00")
            server.predict("m", '{"fail": 1}', **{"X-Request-Id": "fails"})
            server.predict("m", "{}", traceparent=SAMPLED, **{"X-Request-Id": "callers"})
        # The server has stopped, and has sent what waited.
        roots = [each for each in collector.spans if each.kind == 2]
        assert [each.attributes["marserve.request.id"] for each in roots] == ["slow", "fails", "callers"]
        assert roots[0].trace_id == TRACE


@pytest.mark.system
def test_a_slow_request_that_only_had_ids_is_a_whole_trace(tmp_path: Path) -> None:
    """Without a recorder most requests have no timeline until they turn out slow: stages, streams, calls are there."""
    with Collector() as collector:
        settings = {"trace_sample": "0", "trace_slower_than": "0.2", "flight_recorder_size": "0"}
        with start(tmp_path, collector, **settings) as server:
            make_archive(server.store / "stream.mar", STREAM)
            for archive in ("m.mar", "outer.mar", "stream.mar"):
                assert server.register(archive).status_code == 200
            assert server.predict("outer", "m", **{"X-Request-Id": "quick"}).status_code == 200
            seen = server.predict("m", '{"sleep": 0.3}', **{"X-Request-Id": "slow"}).json()
            called = server.predict("outer", 'm {"sleep": 0.3}', **{"X-Request-Id": "calls"}).json()
            assert server.predict("stream", "{}", **{"X-Request-Id": "stream"}).text == "piecelast"
        root, *children = collector.of_request("slow")
        handle = named(children, "handle")
        assert seen == {"traceparent": f"00-{root.trace_id}-{handle.span_id}-02"}
        assert named(children, "work").parent_id == handle.span_id
        assert {"send", "handle", "return", "write"} <= {each.name for each in children}
        assert root.ended - root.began > 0.3

        root, *children = collector.of_request("calls")
        call = named(children, "call m")
        above, below = (
            next(each for each in children if each.name == "handle" and each.parent_id == parent)
            for parent in (root.span_id, call.span_id)
        )
        assert call.parent_id == above.span_id
        assert called == {"traceparent": f"00-{root.trace_id}-{below.span_id}-02"}

        root, *children = collector.of_request("stream")
        assert named(children, "handle").ended - named(children, "handle").began > 0.3
        assert root.ended - root.began > 0.3
        assert [each for each in collector.spans if each.attributes.get("marserve.request.id") == "quick"] == []


@pytest.mark.parametrize("protocol", ["http/protobuf", pytest.param("grpc", marks=pytest.mark.system)])
def test_a_collector_that_hangs_harms_no_request_and_no_stop(tmp_path: Path, protocol: str) -> None:
    """What has no room is dropped, and counted."""
    with Collector(protocol, holds=threading.Event()) as collector:
        collector_environment = {**collector.environment, "OTEL_BSP_MAX_QUEUE_SIZE": "20"}
        server = start(tmp_path, collector)
        server._environment.update(collector_environment)
        with server:
            assert server.register("m.mar").status_code == 200
            assert collector.was_asked.wait(20)
            for _ in range(100):
                assert server.predict("m", "{}").status_code == 200
            page = server.client.get(f"{server.metrics}/metrics").text
            [lost] = [
                line for line in page.splitlines() if line.startswith('marserve_spans_dropped_total{reason="queue')
            ]
            assert float(lost.split()[-1]) > 100
            assert "marserve_traces_waiting 20" in page
            began = time.monotonic()
        assert time.monotonic() - began < 8.0


@pytest.mark.system
def test_a_collector_that_is_away_is_told_of_in_one_line(tmp_path: Path) -> None:
    """And requests are answered all the same."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        server = start(tmp_path, None)
        server._environment.update(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{closed.getsockname()[1]}",
                "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
                "OTEL_BSP_SCHEDULE_DELAY": "50",
            }
        )
        with server:
            assert server.register("m.mar").status_code == 200
            assert server.predict("m", "{}").status_code == 200
            for _ in poll(20, "spans are lost"):
                page = server.client.get(f"{server.metrics}/metrics").text
                if 'marserve_spans_dropped_total{reason="not_taken"} 0' not in page:
                    break
            assert server.predict("m", "{}").status_code == 200
    log = server.output()
    assert log.count("The collector takes no traces (") == 1
    assert "opentelemetry" not in log
    assert "Traceback" not in log


@pytest.mark.system
def test_hostile_traceparents_are_answered_as_any_other(traced: tuple[Server, Collector]) -> None:
    """A thousand of them, cut, swapped, long, and not of text."""
    server, _ = traced
    draw = random.Random(19)
    with httpx.Client() as client:
        for number in range(1000):
            value = bytearray(SAMPLED.encode())
            for _ in range(draw.randrange(1, 6)):
                value[draw.randrange(len(value))] = draw.choice(b"0123456789abcdefABCXYZ-_,;=% \xe4\xff")
            cut = (bytes(value[draw.randrange(3) :]) * draw.choice((1, 1, 1, 2, 50))).strip()
            headers = [(b"traceparent", cut), (b"tracestate", cut[::-1]), (b"baggage", cut * 2)]
            if number % 7 == 0:
                headers.append((b"traceparent", SAMPLED.encode()))
            answer = client.post(f"{server.inference}/predictions/m", content=b"{}", headers=headers)
            assert answer.status_code == 200, (number, cut, answer.text)
            seen = answer.json()["traceparent"]
            assert len(seen) == 55, seen
            assert seen.split("-")[1] == answer.headers["traceresponse"].split("-")[1]


def test_without_tracing_headers_reach_handlers_and_nothing_is_imported(tmp_path: Path) -> None:
    """Neither the SDK, nor an exporter, nor grpcio; calls of other models carry the trace on."""
    with Server(tmp_path, entry="marserve") as server:
        make_archive(server.store / "m.mar", HANDLER)
        make_archive(server.store / "outer.mar", CALLER)
        assert server.register("m.mar").status_code == 200
        assert server.register("outer.mar").status_code == 200
        sent = {"traceparent": SAMPLED, "tracestate": "a=1", "baggage": "k=v"}
        answer = server.predict("m", "{}", **sent)
        assert answer.json() == sent
        assert "traceresponse" not in answer.headers
        assert server.predict("outer", "m", **sent).json() == sent
        assert server.process is not None
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "grpc/_cython" not in maps
    code = (
        "import sys, marserve.app.server, marserve.telemetry.traces.tracing\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter', 'grpc'))])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.system
def test_libraries_that_cannot_be_used_are_one_line_and_no_traces(tmp_path: Path) -> None:
    """The server starts, and answers."""
    broken = tmp_path / "broken" / "opentelemetry" / "sdk"
    server = start(tmp_path, None)
    blocker = tmp_path / "blocker"
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text(
        "import sys\nsys.modules['opentelemetry.sdk.trace'] = None\nsys.modules['opentelemetry.sdk.resources'] = None\n"
    )
    assert not broken.exists()
    server._environment["PYTHONPATH"] = str(blocker)
    with server:
        assert server.register("m.mar").status_code == 200
        answer = server.predict("m", "{}")
        assert (answer.status_code, "traceresponse" in answer.headers) == (200, False)
    assert server.output().count("No traces are sent: ") == 1
    assert "pip install 'marserve[otlp]'" in server.output()


@pytest.mark.system
def test_bodies_are_sampled_only_while_the_log_is_at_debug(tmp_path: Path) -> None:
    """Without what is hidden."""
    with Server(tmp_path, entry="marserve", settings={"body_sample": "1", "body_sample_hide": "pin"}) as server:
        make_archive(server.store / "m.mar", HANDLER)
        assert server.register("m.mar").status_code == 200
        assert server.predict("m", '{"pin": "before"}').status_code == 200
        changed = server.client.post(f"{server.management}/v2/logging", json={"log_verbose_level": 1})
        assert changed.status_code == 200, changed.text
        headers = {"X-Request-Id": "seen", "Authorization": "Bearer before"}
        assert server.predict("m", '{"pin": "before", "a": 1}', **headers).status_code == 200
        for _ in poll(5, "the sample is written"):
            if "Body sample: " in server.output():
                break
    output = server.output()
    [line] = [line for line in output.splitlines() if "Body sample: " in line]
    assert "before" not in line
    assert '"a\\":1' in line
    assert "seen" in line
