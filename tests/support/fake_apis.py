"""A stand-in for a running marserve: both its APIs on one port of this machine, answering what a test put there.

Knows no models: each route has a list of answers, of which the last one stays.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True)
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    parameters: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass
class FakeApis:
    """The server's address, what it is to answer (`headers`: with each answer), and what it was asked."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    _answers: dict[str, list[tuple[int, bytes, str]]] = field(default_factory=dict)
    _waits: dict[str, tuple[str, int]] = field(default_factory=dict)
    _lock: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, route: str, other: str, times: int) -> None:
        """Answer `METHOD /path` only when that other route has been asked for so often."""
        self._waits[route] = (other, times)

    def answer(self, route: str, document: Any, status: int = 200, content_type: str = "application/json") -> None:
        """Answer `METHOD /path` with this from now on, after answers put there before were each given once."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self._answers.setdefault(route, []).append((status, body, content_type))

    def orders(self, method: str) -> list[Asked]:
        """The requests of this method, in order."""
        return [asked for asked in self.asked if asked.method == method]

    def take(self, asked: Asked) -> tuple[int, bytes, str]:
        """The next answer for this request."""
        with self._lock:
            self.asked.append(asked)
            self._lock.notify_all()
            if wait := self._waits.get(f"{asked.method} {asked.path}"):
                self._lock.wait_for(
                    lambda: sum(f"{each.method} {each.path}" == wait[0] for each in self.asked) >= wait[1], 10
                )
            answers = self._answers.get(f"{asked.method} {asked.path}")
            if not answers:
                error = {"code": 404, "type": "ModelNotFoundException", "message": f"Model not found: {asked.path}"}
                return 404, json.dumps(error).encode(), "application/json"
            return answers.pop(0) if len(answers) > 1 else answers[0]


@contextmanager
def fake_apis() -> Iterator[FakeApis]:
    """A server that runs while the block does."""
    apis = FakeApis()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are two writes: the second would wait 40 ms

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            asked = Asked(self.command, parts.path, dict(parse_qsl(parts.query)), headers, body)
            status, answer, content_type = apis.take(asked)
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(answer)))
            self.send_header("x-request-id", "6f1c-42")
            for name, value in apis.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = _serve

        def log_message(self, format: str, *values: object) -> None:
            """Tests print nothing."""

    class Listener(ThreadingHTTPServer):
        request_queue_size = 512  # of 5 at a time the rest would wait a second or more
        daemon_threads = True

    server = Listener(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    apis.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield apis
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def description(model: str = "digits", version: str = "1.0", **changes: Any) -> dict[str, Any]:
    """One version as describe tells it: one worker wanted, one ready, unless `changes` says otherwise."""
    return {
        "modelName": model,
        "modelVersion": version,
        "modelUrl": f"{model}.mar",
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 1,
        "workers": [worker()],
        "jobQueueStatus": {"remainingCapacity": 100, "pendingRequests": 0},
        "isDefault": True,
        "state": "ready",
        **changes,
    }


def worker(status: str = "READY", **changes: Any) -> dict[str, Any]:
    """One worker as describe tells it."""
    return {"id": "9000", "status": status, "pid": 4711, "memoryUsage": 2**20, "gpu": False, "restarts": 0, **changes}


def version_activity(model: str = "digits", version: str = "1.0", **changes: Any) -> dict[str, Any]:
    """One version as `/stats` tells it."""
    return {
        "modelName": model,
        "modelVersion": version,
        "isDefault": True,
        "state": "ready",
        "answersPerSecond": 12.5,
        "p50": 3.25,
        "p99": 1250.0,
        "errors": 1,
        "refused": 2,
        "queued": 7,
        "running": 3,
        "batchSize": 8,
        "meanBatch": 3.2,
        "minWorkers": 1,
        "maxWorkers": 1,
        "readyWorkers": 1,
        "memoryBytes": 412 << 20,
        "workers": [worker_activity()],
        **changes,
    }


def worker_activity(**changes: Any) -> dict[str, Any]:
    """One worker of it."""
    return {"id": "9000", "status": "READY", "memoryBytes": 412 << 20, "restarts": 0, **changes}


def server_activity(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What `/stats` answers."""
    return {
        "at": 1000.0,
        "ready": True,
        "reasons": [],
        "versions": list(rows),
        "versionsInAll": len(rows),
        "versionsFound": len(rows),
        "answersPerSecond": 12.5,
        "errors": 0,
        "refused": 0,
        "times": {"upTo": [1.0], "counts": [0, 0], "sum": 0.0},
        "queued": 7,
        "running": 3,
        "memoryBytes": 412 << 20,
        "devices": [],
        **changes,
    }


def description_with_dry_runs(*, knows: bool = True) -> dict[str, Any]:
    """What the API description of a server has that knows dry runs, or of one that does not, as TorchServe."""
    known = [{"name": "dry_run", "in": "query"}] if knows else []
    path = "/models/{model_name}/{model_version}/set-default"
    return {"paths": {path: {"put": {"parameters": [{"name": "model_name", "in": "path"}, *known]}}}}


EXPLAINED: dict[str, Any] = {
    "id": "r-1",
    "model": "digits",
    "version": "1.0",
    "worker": "W-9000-digits_1.0",
    "status": 200,
    "started": "2026-01-31T12:00:00.000Z",
    "wall_ms": 120.0,
    "bytes_in": 14,
    "bytes_out": 11,
    "stages": [{"name": "queue", "ms": 100.0}, {"name": "handle", "ms": 20.0}, {"name": "write", "ms": 0.1}],
    "spans": [{"name": "tokenise", "after_ms": 1.0, "ms": 2.0}],
    "batch": {"size": 2, "mates": ["r-2"], "runs": 1, "first_of_worker": False, "handler_ms": 20.0},
    "cause": "queue",
    "why": "100.0 ms: it waited for a worker",
    "also": ["20.0 ms: the handler ran its batch of 2"],
    "meanwhile": ["after 3 ms: other was put to sleep to make room"],
    "others": [],
}
"""One request as `/requests/{id}` explains it."""
