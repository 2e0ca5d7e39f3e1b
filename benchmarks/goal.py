"""Batches for a goal: how much `batchPolicy: goal` does beside the best of a row of fixed batch sizes.

Measured: one worker with a handler of known cost (10 ms a batch and 1 ms an item, by sleeping) and a goal of 100 ms for
95 of 100 requests, which come when they please (an open loop), at random and in bursts.

    rate kept       the highest rate of a ladder at which the 95th percentile is within the goal and nobody is
                    refused. Beside it the best of several fixed batch sizes in the same run; the policy is told none.
    recovery        at half of what could be done, the cost of all batches doubles: the 95th percentile from 30 s
                    after that on.

And an echo handler, whose batches take microseconds: there the policy has nothing to win, and what it costs is seen.

    requests/s      64 bytes, 64 connections, beside `batchPolicy: idle` with batches of the same size in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from figures import Figure, Goal
from open_loop import bursty, poisson, send
from plan import Plan
from servers import Marserve, make_archive

GOAL_MS = 100
FIXED = (4, 8, 16, 32, 64)
RATES = (100, 200, 250, 300, 350, 400, 450, 500, 550, 600, 650, 700)
DOUBLED_RATE, SETTLES_S = 200, 30.0
DEPTH = 5000
SMALL, MANY, ECHO_BATCH, ECHO_TURNS = 64, 64, 16, 4


def measure(plan: Plan) -> list[Figure]:
    """The figures of batches for a goal."""
    config = {"minWorkers": 1, "maxWorkers": 1, "jobQueueSize": DEPTH}
    policies = {"goal": {"batchPolicy": "goal", "latencyGoalMs": GOAL_MS, "batchSize": 64}}
    policies |= {f"fixed-{size}": {"batchSize": size, "maxBatchDelay": 5} for size in FIXED}
    seconds = 2.0 if plan.is_quick else 6.0
    arrivals: dict[str, Callable[[float, float, int], list[float]]] = {"at random": poisson, "in bursts": bursty}
    kept: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        servers = {}
        for name, policy in policies.items():
            archive = make_archive(plan.folder / name, "known", "known_cost.py", {**config, **policy})
            servers[name] = stack.enter_context(Marserve(name, archive, plan.new_folder(name)))
        for number in range(plan.rounds):
            for how, arrive in arrivals.items():
                plan.say(f"goal: round {number + 1} of {plan.rounds}, requests {how}")
                for name, server in servers.items():
                    kept.setdefault((how, name), []).append(_most_kept(server, arrive, seconds, number))
        plan.say("goal: costs double")
        recovered_ms = _p95_after_doubling_ms(servers["goal"], plan.is_quick)
    figures = _echo(plan)
    for how in arrivals:
        best = max((kept[how, name] for name in servers if name != "goal"), key=sorted)
        figures.append(
            Figure(
                f"goal of {GOAL_MS} ms, requests {how}: rate kept",
                "/s",
                kept[how, "goal"],
                f"the best of batch sizes {', '.join(map(str, FIXED))}",
                best,
                goal=Goal("at least", 0.9, "compared"),
            )
        )
    name = f"95th percentile from {SETTLES_S:g} s after costs doubled on"
    figures.append(Figure(name, "ms", [recovered_ms], goal=Goal("at most", GOAL_MS, "own")))
    return figures


def _echo(plan: Plan) -> list[Figure]:
    """What the policy costs where there is nothing to win: many short turns, so that others disturb both alike."""
    policies = {"goal": {"batchPolicy": "goal", "latencyGoalMs": GOAL_MS}, "idle": {"maxBatchDelay": 5}}
    rates: dict[str, list[float]] = {name: [] for name in policies}
    with ExitStack() as stack:
        servers = {}
        for name, policy in policies.items():
            config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": ECHO_BATCH, **policy}
            archive = make_archive(plan.folder / f"echo-{name}", "echo", "echo.py", config)
            servers[name] = stack.enter_context(Marserve(f"echo, {name}", archive, plan.new_folder(f"echo-{name}")))
        for number in range(plan.rounds * ECHO_TURNS):
            plan.say(f"goal: echo, turn {number + 1} of {plan.rounds * ECHO_TURNS}")
            for name in sorted(servers, reverse=bool(number % 2)):
                server = servers[name]
                load = plan.generator.run(
                    server.port, server.path, body_bytes=SMALL, connections=MANY, seconds=0.3 if plan.is_quick else 1.0
                ).must_be_clean(server.name)
                rates[name].append(load.per_second)
                server.forget_output()
    goal = Goal("at least", 0.95, "compared")
    name = "batchPolicy goal, echo 64 B, batches of up to 16, 64 connections"
    return [Figure(name, "/s", rates["goal"], "batchPolicy idle", rates["idle"], goal=goal)]


def _most_kept(
    server: Marserve, arrive: Callable[[float, float, int], list[float]], seconds: float, seed: int
) -> float:
    """The highest rate of the ladder that is kept, 0 if none is; found by halving."""
    low, high = 0, len(RATES)
    while low < high:
        middle = (low + high + 1) // 2
        dues = arrive(RATES[middle - 1], seconds, seed)
        sent = send(server.port, server.path, dues, [b"x"] * len(dues))
        if sent.percentile(0.95, since=seconds / 4) * 1000 <= GOAL_MS:
            low = middle
        else:
            high = middle - 1
    return float(RATES[low - 1]) if low else 0.0


def _p95_after_doubling_ms(server: Marserve, is_quick: bool) -> float:
    """In milliseconds, over 10 s."""
    before_s, settles_s = (3.0, 5.0) if is_quick else (10.0, SETTLES_S)
    dues = poisson(DOUBLED_RATE, before_s + settles_s + 10.0, 1)
    bodies = [b"d" if due >= before_s else b"x" for due in dues]
    return send(server.port, server.path, dues, bodies).percentile(0.95, since=before_s + settles_s) * 1000
