"""Roll-outs and shadows: how soon a version is taken back, or has all requests, and what a shadow costs.

Measured under a load of eight clients: from the verdict of a roll-out's judge until the last request was begun that the
version taken back answered, and until the last one was begun that the version before answered when it is promoted. And
in an open loop the 99th percentile of requests that are all mirrored, to a slow, a wrong and a dying shadow, beside the
same without a shadow.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from typing import Any

from figures import Figure, Goal
from load_generator import CannotMeasure
from open_loop import poisson, send
from plan import Plan
from servers import Marserve, Sample, make_archive

CLIENTS = 8
RATE = 40
MOST_BACK_MS = 100
MOST_PROMOTED_MS = 1000
MOST_MOVED = 1.05
FAULTS = {"2.0": "none", "2.1": "errors", "2.2": "slow", "2.3": "wrong", "2.4": "dead"}
LIMIT_S = 120.0
SAMPLE = Sample(b"[1, 1]", "application/json")


def measure(plan: Plan) -> list[Figure]:
    """The figures of roll-outs and shadows."""
    store = plan.folder / "rollouts"
    workers = {"minWorkers": 2, "maxWorkers": 2}
    first = make_archive(store, "linear", "linear.py", workers)
    for version, fault in FAULTS.items():
        make_archive(store, "linear", "linear.py", {**workers, "fault": fault}, version=version)
    back: list[float] = []
    promoted: list[float] = []
    spans: dict[tuple[str, bool], list[float]] = {}
    with Marserve("marserve", first, plan.new_folder("rollouts"), sample=SAMPLE) as server:
        for version in FAULTS:
            _call(server, "POST", f"/models?url=linear-{version}.mar&initial_workers=2")
        for number in range(plan.rounds):
            plan.say(f"rollouts: round {number + 1} of {plan.rounds}")
            back.append(_roll_out(server, "2.1", "rolled back"))
            promoted.append(_roll_out(server, "2.0", "promoted"))
            _call(server, "PUT", "/models/linear/1.0/set-default")
            for version in ("2.2", "2.3", "2.4"):
                for is_mirrored in (False, True) if number % 2 else (True, False):
                    span = _p99_ms(server, version if is_mirrored else None, 2.0 if plan.is_quick else 10.0, number)
                    spans.setdefault((version, is_mirrored), []).append(span)
    goal = Goal("at most", MOST_MOVED, "compared")
    return [
        Figure(
            "roll back: from the verdict to the last request sent there",
            "ms",
            back,
            goal=Goal("at most", MOST_BACK_MS, "own"),
        ),
        Figure(
            "promotion: from the verdict to the last request sent elsewhere",
            "ms",
            promoted,
            goal=Goal("at most", MOST_PROMOTED_MS, "own"),
        ),
        *(
            Figure(
                f"99th percentile with a {FAULTS[version]} shadow of all requests",
                "ms",
                spans[version, True],
                "without",
                spans[version, False],
                goal=goal,
                digits=1,
            )
            for version in ("2.2", "2.3", "2.4")
        ),
    ]


def _roll_out(server: Marserve, version: str, wanted: str) -> float:
    """Roll a version out under load: milliseconds from the verdict until the last request went where none should."""
    is_over = threading.Event()
    seen: list[tuple[float, str]] = []

    def load(client: int) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
            number = client
            while not is_over.is_set():
                began = time.time()
                connection.request("POST", server.path, json.dumps([number, 1.0]))
                answer = connection.getresponse()
                answer.read()
                seen.append((began, answer.headers.get("x-marserve-version", "")))
                number += CLIENTS

    threads = [threading.Thread(target=load, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        body = {"version": version, "steps": [50, 100], "hold": 1, "min_requests": 50, "max_p99_increase": None}
        _call(server, "POST", "/models/linear/rollout", body)
        deadline = time.monotonic() + LIMIT_S
        while (told := _call(server, "GET", "/models/linear/rollout"))["state"] in ("preparing", "running"):
            if time.monotonic() > deadline:
                raise CannotMeasure("a roll-out did not end")
            time.sleep(0.05)
        time.sleep(0.5)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    if told["state"] != wanted:
        raise CannotMeasure(f"a roll-out was {told['state']}, not {wanted}: {told['reason']}")
    events = {event["event"]: event["at"] for event in told["events"]}
    verdict, gone = (
        (events["rolled back"], version) if wanted == "rolled back" else (events["100% of the requests"], "1.0")
    )
    return 1000 * max(0.0, max((began for began, answered in seen if answered == gone), default=verdict) - verdict)


def _p99_ms(server: Marserve, version: str | None, seconds: float, seed: int) -> float:
    if version is not None:
        _call(server, "PUT", "/models/linear/shadow", {"version": version, "share": 1.0})
    try:
        dues = poisson(RATE, seconds, seed)
        sent = send(server.port, server.path, dues, [b"[%d, 1]" % number for number in range(len(dues))])
    finally:
        if version is not None:
            _call(server, "DELETE", "/models/linear/shadow")
    return sent.percentile(0.99) * 1000


def _call(server: Marserve, method: str, target: str, body: dict[str, Any] | None = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.management_port, timeout=120)
    with contextlib.closing(connection):
        connection.request(method, target, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        text = answer.read()
    if answer.status >= 400:
        raise CannotMeasure(f"{method} {target} got {answer.status}: {text[:300]!r}")
    return json.loads(text)
