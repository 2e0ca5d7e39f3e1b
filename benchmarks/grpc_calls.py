"""Unary gRPC calls beside REST requests that do the same work: an echo of 64 bytes in batches of up to 16.

Beside them stands grpcio's own server with a handler that gives back the bytes it got (`beside/bare_grpc.py`): no
server in Python on top of grpcio can be quicker.

    CPU time a call     of all the server's processes, 64 calls at once, and one at a time. This is the figure to
                        read: a server with a core to itself takes as many calls as fit in it.
    calls a second      what grpcio's client and the server make of the machine together. The client costs as much as
                        the server; where they share two cores this is about half of what the server could take.
    one call            the median time of a lone call, as a difference to a lone request.

One server answers both, all in turns, in another order each round. `docs/grpc.md` says what bounds it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
from figures import Figure
from load_generator import CannotMeasure
from plan import Plan
from servers import Marserve, free_ports, make_archive
from turns import in_turns

BODY_BYTES, MANY = 64, 64
BATCH, DELAY_MS = 16, 5
PIECES = 3  # of a round
WARM_UP_S = 0.2
BESIDE = Path(__file__).parent / "beside"
MODEL = "echo"


class Seen(NamedTuple):
    """What one piece came to."""

    per_second: float
    p50_ms: float
    cpu_ms: float


def measure(plan: Plan) -> list[Figure]:
    """The figures. Raises CannotMeasure without grpcio."""
    seconds = 0.5 if plan.is_quick else 1.0
    pieces: dict[tuple[str, int], list[list[Seen]]] = defaultdict(list)
    config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": BATCH, "maxBatchDelay": DELAY_MS}
    archive = make_archive(plan.folder / MODEL, MODEL, "echo.py", config)
    with _bare_server() as bare, Marserve("marserve, gRPC and REST", archive, plan.new_folder("grpc")) as server:
        for number in range(plan.rounds):
            plan.say(f"grpc: round {number + 1} of {plan.rounds}")
            for at_once in (MANY, 1):

                def run(name: str, at_once: int = at_once) -> Seen:
                    if name == "bare":
                        before_s = bare.cpu_s()
                        per_second, p50_ms, in_all = _call(bare.port, at_once, seconds)
                        return Seen(per_second, p50_ms, (bare.cpu_s() - before_s) * 1e3 / in_all)
                    before_s = server.cpu_s()
                    if name == "grpc":
                        per_second, p50_ms, in_all = _call(server.grpc_port, at_once, seconds)
                    else:
                        load = plan.generator.run(
                            server.port, server.path, body_bytes=BODY_BYTES, connections=at_once, seconds=seconds,
                            warm_up_s=WARM_UP_S,
                        ).must_be_clean(server.name)  # fmt: skip
                        per_second, p50_ms, in_all = load.per_second, load.p50_ms, load.answered_in_all
                    server.settle()
                    server.forget_output()
                    return Seen(per_second, p50_ms, (server.cpu_s() - before_s) * 1e3 / in_all)

                for name, seen in in_turns(["grpc", "rest", "bare"], number, PIECES, run).items():
                    pieces[name, at_once].append(seen)
    return _figures(pieces)


class _Bare(NamedTuple):
    """grpcio's own server."""

    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """Seconds of a core that it has used."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def _bare_server() -> Iterator[_Bare]:
    (port,) = free_ports(1)
    command = [sys.executable, str(BESIDE / "bare_grpc.py"), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                raise CannotMeasure("grpcio's own server does not start; is the extra grpc installed?")
            yield _Bare(port, psutil.Process(process.pid))
        finally:
            process.terminate()


def _call(port: int, at_once: int, seconds: float) -> tuple[float, float, int]:
    """Calls a second, the median time in ms, and all calls that were made. Raises CannotMeasure."""
    words = [port, MODEL, BODY_BYTES, at_once, seconds, WARM_UP_S]
    done = subprocess.run(
        [sys.executable, str(BESIDE / "grpc_load.py"), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=seconds + 60,
    )
    if done.returncode:
        raise CannotMeasure(f"the gRPC client ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    seen = json.loads(done.stdout)
    if seen["errors"] or not seen["calls"]:
        raise CannotMeasure(f"of {seen['in_all']} gRPC calls {seen['errors']} failed")
    return seen["calls"] / seen["seconds"], seen["p50_ms"], seen["in_all"]


def _figures(pieces: dict[tuple[str, int], list[list[Seen]]]) -> list[Figure]:
    def by_round(name: str, at_once: int, member: str) -> list[float]:
        return [sum(getattr(seen, member) for seen in each) / len(each) for each in pieces[name, at_once]]

    what = f"gRPC, echo {BODY_BYTES} B, batches of up to {BATCH}"
    many, alone = f"{what}, {MANY} calls at once", f"{what}, one call at a time"
    return [
        Figure(f"{many}, CPU time a call", "ms", by_round("grpc", MANY, "cpu_ms"), "REST",
               by_round("rest", MANY, "cpu_ms"), digits=3),
        Figure(f"{many}, CPU time a call", "ms", by_round("grpc", MANY, "cpu_ms"), "bare grpcio",
               by_round("bare", MANY, "cpu_ms"), digits=3),
        Figure(many, "/s", by_round("grpc", MANY, "per_second"), "bare grpcio", by_round("bare", MANY, "per_second")),
        Figure(many, "/s", by_round("grpc", MANY, "per_second"), "REST", by_round("rest", MANY, "per_second")),
        Figure(f"{alone}, CPU time a call", "ms", by_round("grpc", 1, "cpu_ms"), "REST",
               by_round("rest", 1, "cpu_ms"), digits=3),
        Figure(f"{alone}, p50", "ms", by_round("grpc", 1, "p50_ms"), "REST", by_round("rest", 1, "p50_ms"),
               "difference", digits=3),
    ]  # fmt: skip
