"""Memory: four workers of one large model.

Measured: marserve with a TorchScript model of 384 MB on the CPU (96 layers of 4 MB with random weights, one of which
runs) and four workers, after each of them has worked. The total is the proportional set size (PSS, from
`smaps_rollup`) of the server and all its processes: a page that n processes share counts 1/n in each of them, so the
sum counts it once.

Workers are forked from a template that has loaded the model once (`workerStart: auto`); beside it, in the same run,
`workerStart: fresh`, where every worker loads a copy of its own. The goal is 1.3 times one copy plus 60 MB a worker.
"""

from __future__ import annotations

from importlib.util import find_spec

from figures import Figure, Goal
from load_generator import CannotMeasure
from plan import Plan
from servers import Marserve, make_archive
from start import make_large_model

MIB = 1024 * 1024
WORKERS = 4
LAYERS, LAYER_MIB = 96, 4
COPIES, MIB_A_WORKER = 1.3, 60


def measure(plan: Plan) -> list[Figure]:
    """The figures of memory."""
    if find_spec("torch") is None:
        raise CannotMeasure("memory: torch is not installed; install marserve's extra `torch`")
    plan.say("memory: making the model")
    model = make_large_model(plan.folder / "memory-large", LAYERS)
    one_copy = LAYERS * LAYER_MIB
    totals: dict[str, list[float]] = {"auto": [], "fresh": []}
    for start, total in totals.items():
        config = {"minWorkers": WORKERS, "maxWorkers": WORKERS, "batchSize": 8, "workerStart": start}
        archive = make_archive(plan.folder / f"memory-{start}", "large", "large_torchscript.py", config, model)
        plan.say(f"memory: {WORKERS} workers, workerStart {start}")
        with Marserve(f"marserve, {start}", archive, plan.new_folder("memory")) as server:
            server.wait_for_workers(WORKERS)
            plan.generator.run(server.port, server.path, body_bytes=64, connections=32, seconds=2.0).must_be_clean(
                server.name
            )
            sizes = server.pss_bytes()
            total.append(sum(sizes.values()) / MIB)
            plan.say("memory: " + ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in sizes.items()))
        archive.unlink()
    bound = COPIES * one_copy + MIB_A_WORKER * WORKERS
    name = f"{WORKERS} workers of a {one_copy} MiB model, PSS of all processes"
    return [
        Figure(name, "MiB", totals["auto"], "workerStart: fresh", totals["fresh"], goal=Goal("at most", bound, "own")),
        Figure("the same, as copies of the model", "MiB", totals["auto"], "one copy", [float(one_copy)]),
    ]
