"""The metrics page of a running server: in both formats, with a plug-in's metrics, for clients that do not read."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
from pathlib import Path

import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open

from support.plugin_packages import Installation
from support.server import Server, make_archive

# Those that a version with one answered request has, beside what has not happened yet.
OF_A_REQUEST = {
    *("requests", "request_seconds", "batch_size", "answers", "queue_length", "queue_oldest_seconds", "input_bytes"),
    *("answer_bytes", "traffic_share", "traffic_requests", "workers", "workers_target", "worker_starts", "cancelled"),
    *("worker_busy_seconds", "worker_busy_ratio", "worker_cpu_seconds", "worker_resident_bytes", "model_memory_bytes"),
    *("worker_proportional_bytes", "usage_requests", "usage_compute_seconds", "usage_bytes", "downloads", "expired"),
    *("download_bytes", "http_responses", "bytes_in_flight", "memory_charged_bytes", "loop_lag_seconds", "loop_stalls"),
}
# Beside the times of head and body, where those do not come at once.
STAGES = {"admit", "queue", "send", "decode", "handler", "encode", "return", "write", "total"}

OPEN = {"accept": "application/openmetrics-text;version=1.0.0"}

HANDLER = """
class Echo:
    def handle(self, data, context):
        return [row["body"] for row in data]
"""

# Six megabytes: more than the sockets between server and client hold.
COLLECTOR = """
from prometheus_client.core import GaugeMetricFamily

class Depths:
    def collect(self):
        family = GaugeMetricFamily("acme_depth", "How deep.", labels=["where"])
        for number in range(300):
            family.add_metric([f"{number}" + "x" * 20000], number)
        return [family]
"""


def test_a_servers_page_in_openmetrics_says_what_workers_use_and_whose_request_it_was(tmp_path: Path) -> None:
    """As Prometheus asks for it; the library's parser takes all of it."""
    with Server(tmp_path, entry="marserve") as server:
        make_archive(server.store / "m.mar", HANDLER)
        assert server.register("m.mar").status_code == 200
        first = server.client.get(f"{server.metrics}/metrics", headers=OPEN)
        answer = server.predict("m", b"four")
        page = server.client.get(f"{server.metrics}/metrics", headers=OPEN).text

    families = {family.name: family for family in parse_open(page)}
    values = {
        (each.name, *sorted(each.labels.values())): each.value for its in families.values() for each in its.samples
    }
    assert first.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert {"process_cpu_seconds", "python_info", "python_gc_collections"} <= families.keys()
    shown = {name.removeprefix("marserve_") for name, family in families.items() if family.samples}
    assert shown >= OF_A_REQUEST
    stages = {
        each.labels["stage"]: each.value
        for each in families["marserve_request_seconds"].samples
        if each.name.endswith("_count")
    }
    assert stages.items() >= dict.fromkeys(STAGES, 1).items()
    assert values["marserve_requests_total", "1.0", "m"] == 1
    assert values["marserve_usage_requests_total", "m"] == 1
    assert values["marserve_input_bytes_total", "1.0", "m"] == 4
    assert values["marserve_answer_bytes_total", "1.0", "m"] == 4
    assert values["marserve_worker_resident_bytes", "1.0", "m"] > 1 << 20
    assert values["marserve_worker_proportional_bytes", "1.0", "m"] > 1 << 20
    assert values["marserve_worker_cpu_seconds_total", "1.0", "m"] >= 0
    exemplars = [sample.exemplar for sample in families["marserve_request_seconds"].samples if sample.exemplar]
    assert {exemplar.labels["request_id"] for exemplar in exemplars} == {answer.headers["x-request-id"]}
    assert families["Requests2XX"].type == "unknown"


def test_as_torchserve_a_server_has_one_format(tmp_path: Path) -> None:
    """What Prometheus got of TorchServe, whatever it asks for."""
    with Server(tmp_path) as server:
        answer = server.client.get(f"{server.metrics}/metrics", headers=OPEN)

    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "# TYPE Requests2XX counter" in answer.text


@pytest.mark.system
def test_clients_that_do_not_read_cost_no_memory_and_no_page_of_others(tmp_path: Path) -> None:
    """Of pages of six megabytes; twenty scrapes at once are all answered."""
    installation = Installation(tmp_path)
    installation.install("acme-depths", COLLECTOR, {"marserve.collectors": {"depths": "{module}:Depths"}})
    with Server(tmp_path, entry="marserve", environment={"PYTHONPATH": str(installation.folder)}) as server:
        url = f"{server.metrics}/metrics"
        with concurrent.futures.ThreadPoolExecutor(20) as threads:
            answers = list(threads.map(lambda _: server.client.get(url, timeout=60), range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert all("acme_depth{" in answer.text for answer in answers)
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        host, port = server.metrics.removeprefix("http://").split(":")
        with contextlib.ExitStack() as hanging:
            for _ in range(20):
                client = hanging.enter_context(socket.create_connection((host, int(port)), timeout=60))
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
                assert client.recv(9) == b"HTTP/1.1 "

            taken = server.client.get(url, headers=OPEN, timeout=60)

            assert taken.status_code == 200
            assert len(list(parse_open(taken.text))) > 50
            # Each holds its own page, of which the sockets hold a part.
            assert process.memory_info().rss - before < 20 * 7 << 20
        assert server.client.get(url, timeout=60).status_code == 200
