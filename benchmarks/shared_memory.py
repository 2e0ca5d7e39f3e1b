"""Shared memory: a tensor of 1 MB in and out, left in a file of /dev/shm, beside the same one sent in the body.

Measured: one marserve with a model that declares its tensor and gives it back, in one worker. Requests of the Open
Inference Protocol over REST, in turns: with the values behind the JSON, and the answer's likewise; and with both in a
region of system shared memory. The client neither makes the values nor looks at them, so that only their way counts.

Then what the worker's copy costs that a mapping would save: 1 MB read from the file by position and added up, beside
the same file added up where it is mapped, for this one time or from before, in this process
(docs/adr/0016-shared-memory-is-read-and-not-mapped.md).
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from figures import Figure, Goal
from load_generator import CannotMeasure, Load
from plan import Plan
from servers import Marserve, Sample, make_archive
from turns import in_turns, p50_ms, rate

from marserve_handlers.declared.open_inference.shared_memory import Span, read_span

NUMBERS = 1 << 18
BYTES = 4 * NUMBERS
MANY = 16
PIECES = 4
TIMES_THE_BODY = 2.0
COPIES, QUICK_COPIES = 500, 50
SHARED = Path("/dev/shm")
PATH = "/v2/models/tensors/infer"


def measure(plan: Plan) -> list[Figure]:
    """The figures of shared memory. Raises CannotMeasure without /dev/shm."""
    if not SHARED.is_dir():
        raise CannotMeasure("shared_memory: there is no /dev/shm")
    with tempfile.TemporaryDirectory(prefix="marserve-benchmarks-", dir=SHARED) as folder:
        for name in ("in", "out"):
            (Path(folder) / name).write_bytes(bytes(BYTES))
        return [*_requests(plan, Path(folder)), *_copies(plan, Path(folder) / "in")]


def _requests(plan: Plan, folder: Path) -> list[Figure]:
    archive = make_archive(plan.folder / "shared", "tensors", "tensors.py", {"minWorkers": 1, "maxWorkers": 1})
    settings = {"system_shared_memory_folder": str(folder), "open_inference_control": "true"}
    seconds = 0.3 if plan.is_quick else 0.6
    sample = Sample(b'{"x": [1, 2]}', "application/json")
    alone: dict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    with Marserve("marserve", archive, plan.new_folder("shared"), settings=settings, sample=sample) as server:
        for name in ("in", "out"):
            order = json.dumps({"key": f"/{name}", "byte_size": BYTES}).encode()
            status, answer = server.ask(order, path=f"/v2/systemsharedmemory/region/{name}/register")
            if status != 200:
                raise CannotMeasure(f"shared_memory: the region {name} was not registered: {answer[:200]!r}")
        bodies = {"memory": _in_memory(plan.folder / "memory"), "body": _in_body(plan.folder / "body")}
        for number in range(plan.rounds):
            plan.say(f"shared_memory: round {number + 1} of {plan.rounds}")
            for connections in (1, MANY):

                def run(name: str, connections: int = connections) -> Load:
                    file, content_type = bodies[name]
                    load = plan.generator.run(
                        server.port, PATH, body_file=file, content_type=content_type, connections=connections,
                        seconds=seconds, warm_up_s=0.1,
                    ).must_be_clean(f"marserve, tensors by {name}")  # fmt: skip
                    server.settle()
                    server.forget_output()
                    return load

                for name, loads in in_turns(list(bodies), number, PIECES, run).items():
                    if connections == 1:
                        alone[name].append(1000 / p50_ms(loads))
                    else:
                        rates[name].append(rate(loads))
    goal = Goal("at least", TIMES_THE_BODY, "compared")
    return [
        Figure("1 MB in and out by shared memory, 1 connection, 1 / p50", "/s", alone["memory"], "by body",
               alone["body"], goal=goal),
        Figure(f"1 MB in and out by shared memory, {MANY} connections", "/s", rates["memory"], "by body",
               rates["body"], goal=goal),
    ]  # fmt: skip


def _in_memory(file: Path) -> tuple[Path, str]:
    """A request whose tensors lie in the regions: its body, and its content type."""
    tensors = {
        kind: [{"name": name, "parameters": {"shared_memory_region": region, "shared_memory_byte_size": BYTES}}]
        for kind, name, region in (("inputs", "x", "in"), ("outputs", "y", "out"))
    }
    tensors["inputs"][0].update({"datatype": "FP32", "shape": [1, NUMBERS]})
    file.write_text(json.dumps(tensors))
    return file, "application/json"


def _in_body(file: Path) -> tuple[Path, str]:
    """The same with the values behind the JSON; the load generator has no other place for a header."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, NUMBERS], "parameters": {"binary_data_size": BYTES}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    file.write_bytes(head + bytes(BYTES))
    return file, f"application/octet-stream\r\nInference-Header-Content-Length: {len(head)}"


def _copies(plan: Plan, file: Path) -> list[Figure]:
    """The time of a worker's copy and a look at each value, beside a look at the mapped file."""
    found = file.stat()
    span = Span(str(file), found.st_dev, found.st_ino, 0, BYTES)

    def copied() -> None:
        read_span(span, "x").view(np.float32).sum()

    def mapped() -> None:
        with _mapped(file) as memory:
            _add_up(memory)

    seen: dict[str, list[float]] = defaultdict(list)
    with _mapped(file) as kept:
        ways: dict[str, Callable[[], None]] = {"copied": copied, "mapped": mapped, "kept": lambda: _add_up(kept)}
        for _ in range(plan.rounds):
            times: dict[str, list[float]] = defaultdict(list)
            for _ in range(QUICK_COPIES if plan.is_quick else COPIES):
                for name, way in ways.items():
                    began = perf_counter()
                    way()
                    times[name].append(perf_counter() - began)
            for name, each in times.items():
                seen[name].append(median(each) * 1e6)
    title = "1 MB copied from a file and added up"
    return [
        Figure(title, "µs", seen["copied"], "mapped for it", seen["mapped"], "difference"),
        Figure(title, "µs", seen["copied"], "mapped before", seen["kept"], "difference"),
    ]


@contextmanager
def _mapped(file: Path) -> Iterator[mmap.mmap]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        with mmap.mmap(descriptor, BYTES, prot=mmap.PROT_READ) as memory:
            yield memory
    finally:
        os.close(descriptor)


def _add_up(memory: mmap.mmap) -> None:
    np.frombuffer(memory, np.float32).sum()
