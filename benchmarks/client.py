"""What `marserve_client` adds to a call of bare httpx: a prediction of 64 bytes, one call at a time.

    CPU time a call     of this process, in which both clients run. This is the figure to read: it is the client's own.
    one call            the median time. Server and client share the machine, so it swings by more than the client adds.

Bare httpx posts the same body to the same address, without a deadline, retries or typed errors. Both in turns, in
another order each round, with threads and with asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any, Final, NamedTuple

import httpx
from figures import Figure, Goal
from load_generator import CannotMeasure
from plan import Plan
from servers import Marserve, make_archive
from turns import in_turns

from marserve_client import AsyncClient, Client

BODY: Final = b"x" * 64
MODEL: Final = "echo"
PIECES: Final = 20  # of a round
CALLS, QUICK_CALLS, WARM_UP = 100, 10, 5
NAMES: Final = ("client", "httpx", "async client", "async httpx")
AT_MOST_MS: Final = 0.06


class Seen(NamedTuple):
    """What one piece came to."""

    cpu_ms: float
    p50_ms: float


def measure(plan: Plan) -> list[Figure]:
    """The figures. Raises CannotMeasure for an answer that is not the body."""
    archive = make_archive(plan.folder / MODEL, MODEL, "echo.py", {"minWorkers": 1, "maxWorkers": 1})
    with Marserve("marserve", archive, plan.new_folder("client")) as server:
        return _figures(asyncio.run(_measure(plan, f"http://127.0.0.1:{server.port}", server.path)))


async def _measure(plan: Plan, address: str, path: str) -> dict[str, list[list[Seen]]]:
    calls = QUICK_CALLS if plan.is_quick else CALLS
    pieces: dict[str, list[list[Seen]]] = defaultdict(list)
    url = address + path
    bare, slow_bare = httpx.Client(trust_env=False), httpx.AsyncClient(trust_env=False)
    async with AsyncClient(address) as slow_client, slow_bare:
        with Client(address) as client, bare:
            asking: dict[str, Callable[[], Any]] = {
                "client": lambda: client.predict(MODEL, BODY),
                "httpx": lambda: bare.post(url, content=BODY),
                "async client": lambda: slow_client.predict(MODEL, BODY),
                "async httpx": lambda: slow_bare.post(url, content=BODY),
            }
            for name, ask in asking.items():
                came = ask()
                if (await came if name.startswith("async") else came).content != BODY:
                    raise CannotMeasure(f"the answer to {name} is not the body")
            for number in range(plan.rounds):
                plan.say(f"client: round {number + 1} of {plan.rounds}")
                for kind, names in (("threads", NAMES[:2]), ("asyncio", NAMES[2:])):
                    if kind == "threads":
                        seen = in_turns(names, number, PIECES, lambda name: _run(asking[name], calls))
                    else:
                        seen = {name: [] for name in names}
                        for piece in range(PIECES):
                            for name in names if (number + piece) % 2 else reversed(names):
                                seen[name].append(await _run_async(asking[name], calls))
                    for name, each in seen.items():
                        pieces[name].append(each)
    return pieces


def _run(ask: Callable[[], object], calls: int) -> Seen:
    for _ in range(WARM_UP):
        ask()
    taken = []
    cpu_s = time.process_time()
    for _ in range(calls):
        begun = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - begun)
    return Seen((time.process_time() - cpu_s) * 1e3 / calls, median(taken) * 1e3)


async def _run_async(ask: Callable[[], Awaitable[object]], calls: int) -> Seen:
    for _ in range(WARM_UP):
        await ask()
    taken = []
    cpu_s = time.process_time()
    for _ in range(calls):
        begun = time.perf_counter()
        await ask()
        taken.append(time.perf_counter() - begun)
    return Seen((time.process_time() - cpu_s) * 1e3 / calls, median(taken) * 1e3)


def _figures(pieces: dict[str, list[list[Seen]]]) -> list[Figure]:
    def by_round(name: str, member: str) -> list[float]:
        return [median(getattr(seen, member) for seen in each) for each in pieces[name]]

    goal = Goal("at most", AT_MOST_MS, "compared")
    figures = []
    for name, beside in (NAMES[:2], NAMES[2:]):
        cpu, other_cpu = by_round(name, "cpu_ms"), by_round(beside, "cpu_ms")
        what = f"{name}, a prediction of {len(BODY)} B"
        figures += [
            Figure(f"{what}, CPU time a call", "ms", cpu, beside, other_cpu, "difference", goal, 3),
            Figure(f"{what}, CPU time a call", "ms", cpu, beside, other_cpu, digits=3),
            Figure(f"{what}, p50", "ms", by_round(name, "p50_ms"), beside, by_round(beside, "p50_ms"), "difference",
                   goal, 3),
        ]  # fmt: skip
    return figures
