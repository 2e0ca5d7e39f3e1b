"""Many models: what a model's clients notice of 500 others that are registered, and what each of those weighs.

Measured with a small echo, 64 bytes, 64 connections, batches of up to 16: a server that has this model alone, beside

    500 asleep   others that are scaled to zero (`minWorkers: 0` with `idleTimeout`): no process, some objects
    500 awake    others with one worker each, forked from their models' templates: a thousand processes

in turns, one right after the other. Those awake need some ten descriptors each of the server's, so the limit on open
files is raised as far as it goes. Nobody asks the others. Their weight is what the proportional set size of all of
the server's processes grows by while they are registered, for each.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from figures import Figure, Goal
from load_generator import CannotMeasure, Load
from plan import Plan
from servers import Marserve, make_archive
from turns import in_turns, rate

OTHERS, QUICK_OTHERS = 500, 30
BODY_BYTES, CONNECTIONS = 64, 64
BATCH, DELAY_MS = 16, 5
PIECES = 4  # of a round
KEPT, KIB_EACH = 0.9, 50.0
KIB = 1024
DESCRIPTORS_EACH = 12
KINDS = ("asleep", "awake")
CONFIGS = {
    "asleep": {"minWorkers": 0, "maxWorkers": 1, "idleTimeout": 3600},
    "awake": {"minWorkers": 1, "maxWorkers": 1},
}


def measure(plan: Plan) -> list[Figure]:
    """The figures of many models."""
    others = QUICK_OTHERS if plan.is_quick else OTHERS
    seconds = 0.3 if plan.is_quick else 0.6
    rates: dict[str, list[float]] = {"alone": [], **{kind: [] for kind in KINDS}}
    kib_each: dict[str, float] = {}
    with ExitStack() as stack:
        stack.enter_context(many_descriptors(DESCRIPTORS_EACH * others + 1000))
        servers = {"alone": stack.enter_context(_serve(plan, "alone"))}
        for kind in KINDS:
            server = servers[kind] = stack.enter_context(_serve(plan, kind))
            kib_each[kind] = _register(plan, server, kind, others)
        for server in servers.values():
            plan.generator.run(server.port, server.path, body_bytes=BODY_BYTES, connections=16, seconds=1.0)
            server.settle()

        def run(name: str) -> Load:
            server = servers[name]
            load = plan.generator.run(
                server.port, server.path, body_bytes=BODY_BYTES, connections=CONNECTIONS, seconds=seconds, warm_up_s=0.1
            )
            server.settle()
            server.forget_output()
            return load.must_be_clean(server.name)

        for number in range(plan.rounds):
            plan.say(f"many_models: round {number + 1} of {plan.rounds}")
            for name, loads in in_turns(list(servers), number, PIECES, run).items():
                rates[name].append(rate(loads))
        plan.say("many_models: stopping")
    return [
        *(Figure(f"echo 64 B, {others} other models {kind}", "/s", rates[kind], "no others", rates["alone"],
                 goal=Goal("at least", KEPT, "compared")) for kind in KINDS),
        Figure("memory of each model asleep", "KiB", [kib_each["asleep"]], goal=Goal("at most", KIB_EACH, "own"),
               digits=1),
        Figure("memory of each model awake, with its template and worker", "KiB", [kib_each["awake"]]),
    ]  # fmt: skip


@contextmanager
def many_descriptors(count: int) -> Iterator[None]:
    """Let the processes that are started meanwhile open as many files as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise CannotMeasure(f"many_models: {count} open files are needed, and `ulimit -Hn` says {hard}; raise it")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _serve(plan: Plan, kind: str) -> Marserve:
    """A server of the echo model, with the archive of the others in its store."""
    config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": BATCH, "maxBatchDelay": DELAY_MS}
    store: Path = plan.folder / f"many-{kind}"
    archive = make_archive(store, "echo", "echo.py", config)
    if kind in CONFIGS:
        make_archive(store, "other", "echo.py", CONFIGS[kind])
    return Marserve(f"marserve, others {kind}", archive, plan.new_folder("many"))


def _register(plan: Plan, server: Marserve, kind: str, others: int) -> float:
    """Register the others: KiB that each weighs."""
    plan.say(f"many_models: registering {others} models, {kind}")
    first = 10  # what the first ones bring for all is not counted
    before = 0
    for number in range(first + others):
        if number == first:
            before = sum(server.pss_bytes().values())
        status, body = server.manage("POST", f"/models?url=other.mar&model_name=other{number}")
        if status != 200:
            raise CannotMeasure(f"many_models: registering model {number} was answered {status}: {body[:300]!r}")
    return (sum(server.pss_bytes().values()) - before) / others / KIB
