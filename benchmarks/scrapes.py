"""Scrapes: what the metrics page costs to write, and what the clients of models notice of it.

    page      a page of 200 models with four workers each, all of which were asked since the last page, written at once
              in this process, beside prometheus_client writing the same registry
    scraped   a server with 200 other models of four workers each: 99th percentile of a model whose handler takes 11 ms,
              requests at random (an open loop), while the page is scraped each 0.5 s, beside the same without scrapes
    overload  a server with five models, one of which is asked by more clients than it can answer: requests a second of
              it while the page is scraped each 100 ms, beside the same without scrapes; and the processor time of a
              scrape, by the server's own, of scrapes one after the other

Pages are asked for as Prometheus does, in OpenMetrics.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

from figures import Figure, Goal
from load_generator import CannotMeasure, Load
from many_models import many_descriptors
from open_loop import Sent, poisson, send
from plan import Plan
from prometheus_client.openmetrics.exposition import generate_latest
from servers import Marserve, make_archive
from turns import in_turns, rate

from marserve.telemetry.metrics.counts import Gauges, VersionMetrics
from marserve.telemetry.metrics.page.registry import registry_of
from marserve.telemetry.metrics.server_metrics import Metrics

MODELS, QUICK_MODELS, WORKERS = 200, 20, 4
RATE = 27
CONNECTIONS, PIECES, SCRAPES = 64, 4, 100
ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3"
DESCRIPTORS_EACH = 12


def measure(plan: Plan) -> list[Figure]:
    """The figures of scrapes."""
    return [*_page(plan), *_scraped(plan), *_overload(plan)]


def _page(plan: Plan) -> list[Figure]:
    metrics = Metrics("box")
    versions = [VersionMetrics(f"model-{number:03}", "1.0") for number in range(MODELS)]
    loads = {f"W-{number}": 1.0 for number in range(WORKERS)}
    for version in versions:
        version.read_gauges = lambda: Gauges(3, {"ready": WORKERS, "loading": 0}, loads, WORKERS)
        metrics.register(version)
    registry = registry_of(lambda: metrics.families)
    turn = itertools.count(1)

    def milliseconds(write: Callable[[], object]) -> float:
        value = 0.003 * (next(turn) % 7)
        for version in versions:
            version.requests += 1
            version.answers[200] += 1
            for histogram in (version.queue_seconds, version.handler_seconds, version.total_seconds):
                histogram.observe(value)
            version.batch_sizes.observe(1)
        began = perf_counter()
        write()
        return (perf_counter() - began) * 1000

    own, library = [], []
    times = 2 if plan.is_quick else 5
    for number in range(plan.rounds):
        plan.say(f"scrapes: page, round {number + 1} of {plan.rounds}")
        pairs = [
            (milliseconds(lambda: metrics.render(is_open=True)), milliseconds(lambda: generate_latest(registry)))
            for _ in range(times)
        ]
        own.append(median(pair[0] for pair in pairs))
        library.append(median(pair[1] for pair in pairs))
    goal = Goal("at most", 0.5, "compared")
    return [
        Figure(
            f"metrics page of {MODELS} models", "ms", own, "prometheus_client's writer", library, goal=goal, digits=1
        )
    ]


def _scraped(plan: Plan) -> list[Figure]:
    models = QUICK_MODELS if plan.is_quick else MODELS
    seconds = 3.0 if plan.is_quick else 5.0
    store = plan.folder / "scraped"
    archive = make_archive(store, "known", "known_cost.py", {"minWorkers": 1, "maxWorkers": 1})
    make_archive(store, "other", "echo.py", {"minWorkers": WORKERS, "maxWorkers": WORKERS})
    spans: dict[bool, list[float]] = {False: [], True: []}
    with many_descriptors(DESCRIPTORS_EACH * models * WORKERS + 1000), contextlib.ExitStack() as stack:
        server = stack.enter_context(Marserve("marserve", archive, plan.new_folder("scraped")))
        plan.say(f"scrapes: registering {models} models of {WORKERS} workers")
        for number in range(models):
            status, body = server.manage("POST", f"/models?url=other.mar&model_name=other{number}&synchronous=true")
            if status != 200:
                raise CannotMeasure(f"scrapes: registering model {number} was answered {status}: {body[:300]!r}")
        server.settle()
        for number in range(plan.rounds):
            plan.say(f"scrapes: scraped, round {number + 1} of {plan.rounds}")
            both = {False: Sent(), True: Sent()}
            for piece in range(2 * PIECES):
                is_scraped = bool((piece + number) % 2)
                dues = poisson(RATE, seconds, number * PIECES + piece // 2)
                with _scraping(server, 0.5) if is_scraped else contextlib.nullcontext():
                    sent = send(server.port, server.path, dues, [b"x"] * len(dues))
                both[is_scraped].latencies += sent.latencies
                both[is_scraped].refused += sent.refused
            for is_scraped, sent in both.items():
                spans[is_scraped].append(sent.percentile(0.99) * 1000)
        plan.say("scrapes: stopping")
    name = f"99th percentile while a page of {models} models of {WORKERS} workers is scraped each 0.5 s"
    goal = Goal("at most", 1.1, "compared")
    return [Figure(name, "ms", spans[True], "the same without scrapes", spans[False], goal=goal, digits=1)]


def _overload(plan: Plan) -> list[Figure]:
    seconds = 0.5 if plan.is_quick else 1.0
    store = plan.folder / "overload"
    archive = make_archive(store, "echo", "echo.py", {"minWorkers": 1, "maxWorkers": 1, "batchSize": 16})
    rates: dict[str, list[float]] = {"without": [], "with": []}
    cpu_ms: list[float] = []
    with Marserve("marserve", archive, plan.new_folder("overload")) as server:
        for number in range(4):
            status, body = server.manage("POST", f"/models?url=echo.mar&model_name=echo{number}&initial_workers=1")
            if status != 200:
                raise CannotMeasure(f"scrapes: registering model {number} was answered {status}: {body[:300]!r}")
        for path in (server.path, *(f"/predictions/echo{number}" for number in range(4))):
            plan.generator.run(server.port, path, body_bytes=64, connections=16, seconds=0.3)

        def run(name: str) -> Load:
            with _scraping(server, 0.1) if name == "with" else contextlib.nullcontext():
                load = plan.generator.run(
                    server.port, server.path, body_bytes=64, connections=CONNECTIONS, seconds=seconds, warm_up_s=0.1
                )
            server.forget_output()
            return load.must_be_clean(server.name)

        for number in range(plan.rounds):
            plan.say(f"scrapes: overload, round {number + 1} of {plan.rounds}")
            for name, loads in in_turns(list(rates), number, PIECES, run).items():
                rates[name].append(rate(loads))
            server.settle()
            before_s = server.cpu_s()
            for _ in range(SCRAPES):
                _scrape(server)
            cpu_ms.append((server.cpu_s() - before_s) * 1000 / SCRAPES)
    goal = Goal("at least", 0.97, "compared")
    name = "echo 64 B, 64 connections, five models, a scrape each 100 ms"
    return [
        Figure(name, "/s", rates["with"], "the same without scrapes", rates["without"], goal=goal),
        Figure("processor time of a scrape, five models", "ms", cpu_ms, goal=Goal("at most", 3.0, "own"), digits=1),
    ]


@contextlib.contextmanager
def _scraping(server: Marserve, every_s: float) -> Iterator[None]:
    """Have the page scraped meanwhile, by a process of its own, so that who measures does not wait for it.

    Raises CannotMeasure if a scrape failed, or none ended.
    """
    command = [sys.executable, "-c", SCRAPER, f"http://127.0.0.1:{server.metrics_port}/metrics", str(every_s), ACCEPT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as scraper:
        assert scraper.stdout is not None
        scraper.stdout.readline()  # the first scrape has ended
        try:
            yield
        finally:
            said, _ = scraper.communicate("", 60)
    if scraper.returncode or not said.strip().isdigit():
        raise CannotMeasure(f"scrapes: the scraper ended with {scraper.returncode} and said {said!r}")


# Scrapes until its standard input ends; then says how often.
SCRAPER = """
import select, sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Accept": sys.argv[3]})
count = 0
while True:
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()
    count += 1
    if count == 1:
        print("begun", flush=True)
    if select.select([sys.stdin], [], [], float(sys.argv[2]))[0]:
        break
print(count)
"""


def _scrape(server: Marserve) -> None:
    """One scrape. Raises OSError for another answer than 200."""
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": ACCEPT}), timeout=30) as answer:
        answer.read()
