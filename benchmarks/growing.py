"""How far marserve grows, on paper: measured costs, a simulation that is fed them, and what it says.

    python benchmarks/growing.py size --rate 400 --service 20ms --wait 50ms
                                                 workers, front ends and nodes for a load
    python benchmarks/growing.py split --rate 640 --service 20ms --workers 16
                                                 what it costs to have them behind several queues
    python benchmarks/growing.py paper           from one worker to 10,000, and who is full first
    python benchmarks/run.py --only growing      measure the costs anew, and check the simulation

What is measured, on one core's worth of server:

    request, batch    processor time of the server's process for an echo, one by one and in batches: two equations
    scrape            processor time of a `GET /metrics` by the number of workers
    upkeep            processor time of a server that is asked next to nothing, by the number of workers
    scheduler         the real dispatcher with up to 10,000 workers all of which are busy, in this process: the time
                      that a request takes it, by the number of workers (`scheduler.py`)

The simulation is then checked beside a real server: a handler that sleeps, 1, 2 and 4 workers, requests at random.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from growing_world import RUN_SHARE, Costs, Seen, simulate
from queueing import Work, workers_for

if TYPE_CHECKING:
    from figures import Figure
    from plan import Plan
    from servers import Marserve

MEASURED = Costs(
    request_s=15.5e-6, batch_s=11.4e-6, lane_s=0.08e-9, scrape_s=0.44e-3, scrape_worker_s=1.6e-6, upkeep_worker_s=74e-6,
    wire_s=0.58e-3,
)  # fmt: skip
"""What `run.py --only growing` measured (benchmarks/RESULTS.md), for who has no time to measure."""

FULL_WORK = Work(fixed_s=0.040, item_s=0.005, batch=16)
"""What workers of the paper run: full batches of 16 take 120 ms, so that a worker answers at most 133 a second."""

MOST_SCRAPE_S = 0.1
"""A scrape that keeps the loop for longer is noticed by those who wait for it."""

MOST_USED = 0.85
"""Of what workers can answer at most, in full batches: beyond it a little more load makes waits without end."""

AT_WORK_LOOKS_S, AT_REST_LOOK_S = 15.2, 30.2
"""In which sizes are read three times where a model is at work, and once where it is at rest."""

MOST_SIMULATED = 60_000
VALIDATED_LOAD = 0.8


# --------------------------------------------------------------------------------------------------------- a sizing


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a load needs, and what it then sees."""

    workers: int
    front_ends: int
    nodes: int
    by_formula: int
    seen: Seen


def size(
    rate: float, work: Work, wait_s: float, costs: Costs = MEASURED, *,
    workers_per_node: int = 16, workers_per_front_end: int = 2000,
) -> Sizing:  # fmt: skip
    """The fewest workers with which 99 of 100 requests wait at most `wait_s`, as the simulation sees it.

    The formula says where to begin. A wait is what comes on top of a request's own run, alone. Raises ValueError for
    what no number of workers reaches.
    """
    if min(rate, work.service_s(), wait_s) <= 0:
        raise ValueError("rate, service time and wait are above 0")
    least = math.ceil(rate / work.per_worker / MOST_USED)
    formula = workers = max(least, workers_for(rate, work, wait_s))
    fits, below = None, least - 1
    for _ in range(40):
        fronts = front_ends_for(rate, work, workers, costs, workers_per_front_end)
        seen = _settled(fronts, workers, rate, work, costs)
        keeps = seen.wait_p99_s <= wait_s
        if keeps:
            fits = Sizing(workers, fronts, math.ceil(workers / workers_per_node), formula, seen)
        else:
            below = workers
        if fits is None:
            workers = math.ceil(workers * 1.25) + 1
        elif fits.workers - below <= max(1, fits.workers // 50):
            return fits
        else:
            workers = (fits.workers + below) // 2
    raise ValueError(f"no number of workers keeps {wait_s} s: the costs of a request alone are above it")


def front_ends_for(rate: float, work: Work, workers: int, costs: Costs, at_most: int) -> int:
    """How many front ends: none busy for more than `RUN_SHARE` of its time, kept too long by a scrape, or overfull."""
    together = _together(rate, work, workers)
    fronts = max(1, math.ceil(workers / at_most))
    while fronts < workers:
        own = math.ceil(workers / fronts)
        load = sum(costs.parts(rate / fronts, together, own).values())
        if load <= RUN_SHARE and costs.scrape(own) <= MOST_SCRAPE_S:
            return fronts
        fronts += max(1, fronts // 50)
    return workers


def _together(rate: float, work: Work, workers: int) -> float:
    """How many requests share a batch when workers take what is there: what keeps them just as busy as they must be."""
    for together in range(1, work.batch + 1):
        if rate * work.service_s(together) / together <= 0.95 * workers:
            return float(together)
    return float(work.batch)


def _settled(fronts: int, workers: int, rate: float, work: Work, costs: Costs) -> Seen:
    """A simulation that is long enough to settle, and no longer. Of many front ends a few are played: all are alike."""
    played = min(fronts, 8)
    rate, workers = rate * played / fronts, max(1, round(workers * played / fronts))
    seconds = max(50 * work.service_s(work.batch), min(60.0, 5000 / rate))
    return simulate(played, workers, rate, work, costs, min(seconds, max(MOST_SIMULATED / rate, 0.5)))


# -------------------------------------------------------------------------------------------------------- on paper


@dataclass(frozen=True, slots=True)
class Step:
    """A size on paper. `carried` is what one front end answers a second of it, at most; `full_first` says why no more;
    `front_ends` is how many answer all of it, and `seen` what requests then see.
    """

    workers: int
    rate: float
    carried: float
    full_first: str
    front_ends: int
    seen: Seen


def paper(costs: Costs = MEASURED, sizes: Sequence[int] = (1, 10, 100, 1000, 10_000)) -> list[Step]:
    """From one worker to ten thousand, each asked for three quarters of what it can answer: 1,000,000/s at the end."""
    steps = []
    for workers in sizes:
        rate = 0.75 * workers * FULL_WORK.per_worker
        fronts = front_ends_for(rate, FULL_WORK, workers, costs, at_most=workers)
        carried = most_carried(workers, rate, costs)
        seen = simulate(fronts, workers, rate, FULL_WORK, costs, _window(rate))
        steps.append(Step(workers, rate, carried, full_first(rate, workers, costs), fronts, seen))
    return steps


def most_carried(workers: int, rate: float, costs: Costs) -> float:
    """How much of `rate` one front end with all these workers answers: as the simulation sees it, within 5 %."""
    if _is_carried(workers, rate, costs):
        return rate
    least, most = 0.0, min(rate, 1 / costs.request_s)
    while most - least > 0.05 * most and most > 1:
        middle = (least + most) / 2
        least, most = (middle, most) if _is_carried(workers, middle, costs) else (least, middle)
    return least


def _is_carried(workers: int, rate: float, costs: Costs) -> bool:
    """Whether no more is left at the end than is under way at any moment."""
    seen = simulate(1, workers, rate, FULL_WORK, costs, _window(rate))
    return seen.left <= rate * FULL_WORK.service_s() + 50


def full_first(rate: float, workers: int, costs: Costs) -> str:
    """Why one front end would not do at this size: what alone would fill its loop, or keep it for too long at once."""
    parts = costs.parts(rate, _together(rate, FULL_WORK, workers), workers)
    full = [name for name, load in sorted(parts.items(), key=lambda each: -each[1]) if load > RUN_SHARE]
    if costs.scrape(workers) > MOST_SCRAPE_S and "scrapes" not in full:
        full.append("scrapes")
    return ", ".join(full) or "-"


def busiest_pool(work: Work, costs: Costs) -> int:
    """The largest pool of one front end that still gets all done while requests wait, which is when its scheduler has
    most to do: beyond it, workers stand idle though there is work.
    """
    each_s = costs.request_s + costs.batch_s / work.batch
    looks = work.per_worker * (1 + 1 / work.batch) * costs.lane_s
    once = work.per_worker * each_s
    if not looks:
        return math.floor(1 / once)
    return math.floor((-once + math.sqrt(once**2 + 4 * looks)) / (2 * looks))  # looks x n² + once x n = 1


def _window(rate: float) -> float:
    return max(5 * FULL_WORK.service_s(FULL_WORK.batch), min(20.0, MOST_SIMULATED / rate))


# ------------------------------------------------------------------------------------------------------- measuring


def scheduler_lane_s(sizes: Sequence[int] = (10, 10_000), requests: int = 2000) -> dict[int, float]:
    """What a request takes the real dispatcher while requests wait, in seconds, by the number of workers."""
    from scheduler import request_s

    return {workers: request_s("waiting", workers, requests) for workers in sizes}


def slope(points: dict[int, float]) -> float:
    """What one more costs, between the smallest and the largest."""
    few, many = min(points), max(points)
    return max(0.0, (points[many] - points[few]) / (many - few))


def measure(plan: Plan) -> list[Figure]:
    """The costs, and how far the simulation is from a real server, as `run.py` wants them."""
    from figures import Figure

    costs, idle_worker_s = measure_costs(plan)
    plan.say(f"growing: costs {asdict(costs)}")
    figures = [
        Figure("front end, a request beside its batch", "µs", [costs.request_s * 1e6], digits=1),
        Figure("front end, a batch", "µs", [costs.batch_s * 1e6], digits=1),
        Figure("scheduler, each worker more, for a request while requests wait", "ns", [costs.lane_s * 1e9], digits=3),
        Figure("scrape", "ms", [costs.scrape_s * 1e3], digits=2),
        Figure("scrape, each worker more", "µs", [costs.scrape_worker_s * 1e6], digits=1),
        Figure("upkeep, each worker at work", "µs/s", [costs.upkeep_worker_s * 1e6], digits=1),
        Figure("upkeep, each idle worker", "µs/s", [idle_worker_s * 1e6], digits=1),
        Figure("a batch's way to its worker and back", "ms", [costs.wire_s * 1e3], digits=2),
    ]
    return figures + validate(plan, costs)


def measure_costs(plan: Plan) -> tuple[Costs, float]:
    """All of them, on servers of their own; and what upkeep takes for each worker that has nothing to do."""
    plan.say("growing: the scheduler")
    lane_s = slope(scheduler_lane_s())
    request_s, batch_s = _front_end_costs(plan)
    few, many = (1, 8) if plan.is_quick else (1, 128)
    with ExitStack() as stack:
        servers = {workers: stack.enter_context(_serve(plan, "echo.py", workers)) for workers in (few, many)}
        plan.say(f"growing: scrapes of {few} and of {many} workers")
        scrape = _scrape_s(servers)
        plan.say(f"growing: upkeep of {few} and of {many} workers")
        upkeep = _upkeep_shares(servers, 2.0 if plan.is_quick else AT_WORK_LOOKS_S, are_asked=True)
        idle = _upkeep_shares(servers, 1.0 if plan.is_quick else AT_REST_LOOK_S, are_asked=False)
    with _serve(plan, "known_cost.py", 1) as server:
        load = plan.generator.run(server.port, server.path, body_bytes=64, connections=1, seconds=1.0)
        wire_s = max(0.0, load.must_be_clean(server.name).p50_ms / 1e3 - _sleep_s() - request_s - batch_s)
    each = slope(scrape)
    costs = Costs(request_s, batch_s, lane_s, max(0.0, scrape[few] - few * each), each, slope(upkeep), wire_s)
    return costs, slope(idle)


def _serve(plan: Plan, handler: str, workers: int, batch: int = 1) -> Marserve:
    from servers import Marserve, make_archive

    config = {"minWorkers": workers, "maxWorkers": workers, "batchSize": batch, "maxBatchDelay": 5}
    name = handler.removesuffix(".py")
    archive = make_archive(plan.new_folder(f"growing-{name}"), name, handler, config)
    server = Marserve(f"marserve, {workers} workers", archive, plan.new_folder("growing"))
    server.wait_for_workers(workers)
    return server


def _front_end_costs(plan: Plan) -> tuple[float, float]:
    """Of a request and of a batch: what the server's own process takes, at two sizes of batches."""
    seconds = 0.5 if plan.is_quick else 3.0
    points = []
    for batch in (1, 16):
        with _serve(plan, "echo.py", 1, batch) as server:
            plan.say(f"growing: the front end, batches of up to {batch}")
            plan.generator.run(server.port, server.path, body_bytes=64, connections=64, seconds=0.5)
            server.settle()
            before, batches_before = _own_cpu_s(server), _counted(server, "marserve_batch_size_count")
            load = plan.generator.run(
                server.port, server.path, body_bytes=64, connections=64, seconds=seconds, warm_up_s=0.0
            ).must_be_clean(server.name)
            batches = _counted(server, "marserve_batch_size_count") - batches_before
            points.append(((_own_cpu_s(server) - before) / load.answered_in_all, batches / load.answered_in_all))
    (alone_s, many), (shared_s, few) = points
    batch_s = max(0.0, (alone_s - shared_s) / (many - few))
    return alone_s - many * batch_s, batch_s


def _own_cpu_s(server: Marserve) -> float:
    """Processor time of the server's first process: the front end."""
    import psutil

    times = psutil.Process(server.pids()[0]).cpu_times()
    return float(times.user + times.system)


def _page(server: Marserve) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as answer:
        return str(answer.read().decode())


def _counted(server: Marserve, name: str) -> float:
    lines = [line for line in _page(server).splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _scrape_s(servers: Mapping[int, Marserve], rounds: int = 10, scrapes: int = 20) -> dict[int, float]:
    """What a scrape takes the first process of each server, in turns."""
    taken: dict[int, list[float]] = {workers: [] for workers in servers}
    for _ in range(rounds):
        for workers, server in servers.items():
            before_s = _exact_cpu_s(server)
            for _ in range(scrapes):
                _page(server)
            taken[workers].append((_exact_cpu_s(server) - before_s) / scrapes)
    return {workers: statistics.median(each) for workers, each in taken.items()}


def _upkeep_shares(servers: Mapping[int, Marserve], seconds: float, *, are_asked: bool) -> dict[int, float]:
    """The share of a core that the first process of each takes; with a request a second they count as being at work."""
    for server in servers.values():
        server.settle()
    begun = time.monotonic()
    before_s = {workers: _exact_cpu_s(server) for workers, server in servers.items()}
    while (left_s := begun + seconds - time.monotonic()) > 0:
        if are_asked:
            for server in servers.values():
                server.ask()
        time.sleep(min(1.0, left_s))
    took_s = time.monotonic() - begun
    return {workers: (_exact_cpu_s(server) - before_s[workers]) / took_s for workers, server in servers.items()}


def _exact_cpu_s(server: Marserve) -> float:
    """Processor time of the server's first process to the nanosecond: idle ones take less than psutil's ticks."""
    tasks = Path(f"/proc/{server.pids()[0]}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


# ------------------------------------------------------------------------------------------------ beside a real one


def validate(plan: Plan, costs: Costs) -> list[Figure]:
    """A handler that sleeps 11 ms, at four fifths of what its workers can answer: beside what the simulation says."""
    from figures import Figure
    from open_loop import poisson, send

    seconds = 3.0 if plan.is_quick else 10.0
    figures = []
    with ExitStack() as stack:
        for workers in (1, 2, 4):
            server = stack.enter_context(_serve(plan, "known_cost.py", workers))
            path = server.path
            work = Work(_sleep_s())
            rate = VALIDATED_LOAD * workers / work.service_s()
            real: dict[str, list[float]] = {"mean": [], "p99": []}
            seen: list[Seen] = []
            for number in range(plan.rounds):
                plan.say(f"growing: {workers} workers, round {number + 1} of {plan.rounds}")
                dues = poisson(rate, seconds, seed=number + 1)
                sent = send(server.port, path, dues, [b"x"] * len(dues))
                spans = [span for due, span in sent.latencies if due >= seconds / 5]
                real["mean"].append(statistics.fmean(spans) * 1e3)
                real["p99"].append(sorted(spans)[int(0.99 * len(spans))] * 1e3)
                seen.append(simulate(1, workers, rate, work, costs, seconds, dues=dues))
            what = f"{workers} worker{'s' * (workers > 1)} asked for {VALIDATED_LOAD:.0%}"
            figures += [
                Figure(f"{what}, mean time to answer", "ms", real["mean"], "the simulation",
                       [each.mean_s * 1e3 for each in seen], digits=1),
                Figure(f"{what}, 99th percentile", "ms", real["p99"], "the simulation",
                       [each.p99_s * 1e3 for each in seen], digits=1),
            ]  # fmt: skip
    return figures


def _sleep_s() -> float:
    """What `time.sleep(0.011)` takes here, which is the whole of the handler."""
    taken = []
    for _ in range(30):
        begun = time.perf_counter()
        time.sleep(0.011)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


# ------------------------------------------------------------------------------------------------- the command line


def seconds(text: str) -> float:
    """`20ms`, `1.5s` or `0.02` as seconds."""
    number, unit = (text[:-2], 1e-3) if text.endswith("ms") else (text.removesuffix("s"), 1.0)
    try:
        value = float(number) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 20ms or 1.5s") from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time of 0 or more")
    return value


def main(words: Sequence[str] | None = None) -> int:
    """Read the command line and print."""
    parser = argparse.ArgumentParser(description="How many workers, front ends and nodes a load needs.")
    commands = parser.add_subparsers(dest="command", required=True)
    sizing = commands.add_parser("size", help="workers, front ends and nodes for a load")
    sizing.add_argument("--rate", type=float, required=True, help="requests a second at the busiest time")
    sizing.add_argument("--service", type=seconds, required=True, help="what a batch takes beside its items, as 20ms")
    sizing.add_argument("--item", type=seconds, default=0.0, help="what each request of a batch adds, as 2ms")
    sizing.add_argument("--batch", type=int, default=1, help="batchSize (default: 1)")
    sizing.add_argument("--variation", type=float, default=0.0, help="coefficient of variation of the service time")
    sizing.add_argument("--wait", type=seconds, required=True, help="what 99 of 100 may wait beside their own run")
    sizing.add_argument("--per-node", type=int, default=16, help="workers that a node has room for (default: 16)")
    split = commands.add_parser("split", help="the same workers behind one queue, and behind several")
    split.add_argument("--rate", type=float, required=True, help="requests a second")
    split.add_argument("--service", type=seconds, required=True, help="what a request takes, as 20ms")
    split.add_argument("--workers", type=int, required=True, help="how many there are in all")
    commands.add_parser("paper", help="from one worker to 10,000, and who is full first")
    said = parser.parse_args(words)
    if said.command == "paper":
        _print_paper(paper())
        return 0
    if said.command == "split":
        _print_split(said.rate, Work(said.service), said.workers)
        return 0
    work = Work(said.service, said.item, said.batch, said.variation)
    try:
        sized = size(said.rate, work, said.wait, workers_per_node=said.per_node)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    seen = sized.seen
    used = said.rate / sized.workers / work.per_worker
    print(f"workers     {sized.workers}    (by formula {sized.by_formula}; {used:.0%} of what they can answer at most)")
    print(f"front ends  {sized.front_ends}    ({seen.loop:.0%} busy)")
    print(f"nodes       {sized.nodes}    (of {said.per_node} workers)")
    print(f"wait        {seen.wait_p99_s * 1e3:.1f} ms (99 of 100, beside their own run)")
    print(f"answers in  {seen.p50_s * 1e3:.1f} ms (median), {seen.p99_s * 1e3:.1f} ms (99 of 100)")
    print(f"batches of  {seen.together:.1f}")
    return 0


def _print_split(rate: float, work: Work, workers: int) -> None:
    print("queues  workers each  p50 ms  p99 ms")
    for queues in (count for count in range(1, workers + 1) if workers % count == 0):
        seen = simulate(queues, workers, rate, work, MEASURED, MOST_SIMULATED / rate)
        print(f"{queues:6}  {workers // queues:12}  {seen.p50_s * 1e3:6.1f}  {seen.p99_s * 1e3:6.1f}")


def _print_paper(steps: Sequence[Step]) -> None:
    print(
        "workers     rate/s | one carries  full of                                    "
        "| front ends  busy  scrape ms  p50 ms  p99 ms"
    )
    for step in steps:
        seen = step.seen
        print(
            f"{step.workers:7,} {step.rate:10,.0f} | {step.carried:11,.0f}  {step.full_first:42} | "
            f"{step.front_ends:10,} {seen.loop:5.0%} {seen.scraped_s * 1e3:10.1f} "
            f"{seen.p50_s * 1e3:7.0f} {seen.p99_s * 1e3:7.0f}"
        )
    print(f"One pool that is full to the brim: {busiest_pool(FULL_WORK, MEASURED):,} workers a front end.")


if __name__ == "__main__":
    sys.exit(main())
