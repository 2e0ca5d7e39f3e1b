"""Downloads: what parallel ranges bring, what a start with many archives to fetch takes, and what is not copied.

From nginx (one process) that gives each connection 25 MB/s, on this machine:

    1 GB, 8 ranges      beside one stream of the same downloader, and its processor time: under one core
    20 models of 50 MB  the start until all have a worker, archives fetched over ranges, beside the longer of what
                        fetching alone takes (the same fetcher, as many at a time) and loading alone (the archives lie
                        in the store already)
    a folder of 1 GB    below `model_roots`: what all processes of the server write until it serves (/proc/PID/io)

    python benchmarks/run.py --only downloads,download_start

The first is `downloads`, the others `download_start`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
from figures import Figure, Goal
from load_generator import CannotMeasure
from plan import Plan
from servers import HANDLERS, Marserve, make_archive
from slow_origin import slow_origin

BYTES_PER_S = 25_000_000
LARGE_BYTES, QUICK_LARGE_BYTES = 1_000_000_000, 100_000_000
MODELS, QUICK_MODELS = 20, 3
MODEL_BYTES = 50_000_000
RANGES = 8
AT_LEAST, AT_MOST_CORES, AT_MOST_START, AT_MOST_MIB = 5.0, 1.0, 1.3, 1.0
PARALLEL_FETCHES = 4  # as the registry does
PATIENCE_S = 120.0
MIB = 1 << 20

FETCH = """
import json, os, resource, sys, time
from marserve.store.fetching.download import DownloadOptions, download
from marserve.store.addresses.fetch_guard import AllowedUrls, parse_target
from marserve.store.sources.http import HttpOrigins
url, path, connections = sys.argv[1], sys.argv[2], int(sys.argv[3])
source = HttpOrigins(AllowedUrls([url[: url.index("/", 8)].replace(".", "[.]") + "/.*", url]))(parse_target(url))
file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
done = download(source, file, DownloadOptions(connections=connections))
seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps({"bytes": done.entry.size, "seconds": seconds, "cpu": cpu}))
"""


def measure(plan: Plan) -> list[Figure]:
    """The figures of ranges."""
    return _ranges(plan)


def measure_start(plan: Plan) -> list[Figure]:
    """The figures of a start with archives to fetch, and of a folder that is served in place."""
    return [_start(plan), _folder(plan)]


def _ranges(plan: Plan) -> list[Figure]:
    size = QUICK_LARGE_BYTES if plan.is_quick else LARGE_BYTES
    root = plan.new_folder("origin")
    root.mkdir()
    _write(root / "large.mar", size)
    target = plan.folder / "large"
    many: list[float] = []
    one: list[float] = []
    cores: list[float] = []
    with slow_origin(plan.new_folder("nginx"), root, BYTES_PER_S) as url:
        for number in range(plan.rounds):
            plan.say(f"downloads: round {number + 1} of {plan.rounds}")
            facts = fetch(f"{url}/large.mar", target, RANGES)
            many.append(facts["bytes"] / facts["seconds"] / 1e6)
            cores.append(facts["cpu"] / facts["seconds"])
            facts = fetch(f"{url}/large.mar", target, 1)
            one.append(facts["bytes"] / facts["seconds"] / 1e6)
    target.unlink()
    (root / "large.mar").unlink()
    return [
        Figure(f"download of {size / 1e9:g} GB, {RANGES} ranges", "MB/s", many, "one stream", one,
               goal=Goal("at least", AT_LEAST, "compared")),
        Figure(f"processor time of {RANGES} ranges", "cores", cores, goal=Goal("at most", AT_MOST_CORES, "own"),
               digits=2),
    ]  # fmt: skip


def fetch(url: str, target: Path, connections: int) -> dict[str, float]:
    """Fetch with marserve's downloader, in a process of its own: bytes, seconds and processor seconds."""
    command = [sys.executable, "-c", FETCH, url, str(target), str(connections)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMeasure(f"{url} could not be fetched: {done.stderr.strip()[-500:]}")
    facts: dict[str, float] = json.loads(done.stdout)
    return facts


# ------------------------------------------------------------------------------------------- many at the start


def _start(plan: Plan) -> Figure:
    count = QUICK_MODELS if plan.is_quick else MODELS
    root = plan.new_folder("models")
    root.mkdir()
    weights = root / "weights.dat"
    _write(weights, MODEL_BYTES)
    config = {"minWorkers": 1, "maxWorkers": 1}
    names = [f"m{number:02}" for number in range(count)]
    made = make_archive(plan.folder / "made", "one", "echo.py", config, weights)
    for name in names:  # each file is another archive for who fetches it, and each model has a name of its own
        os.link(made, root / f"{name}.mar")
    first = make_archive(plan.folder / "first", "echo", "echo.py", config)
    starts: list[float] = []
    bounds: list[float] = []
    with slow_origin(plan.new_folder("nginx"), root, BYTES_PER_S) as url:
        urls = [f"{url}/{name}.mar" for name in names]
        for number in range(plan.rounds):
            plan.say(f"downloads, start with {count} models: round {number + 1} of {plan.rounds}")
            fetching = _fetch_all(plan, urls)
            loading = _start_s(plan, first, names, [str(root / f"{name}.mar") for name in names], root)
            starts.append(_start_s(plan, first, names, urls, root))
            bounds.append(max(fetching, loading))
            plan.say(f"    fetching {fetching:.1f} s, loading {loading:.1f} s, start {starts[-1]:.1f} s")
    return Figure(f"start with {count} models of {MODEL_BYTES / 1e6:g} MB to fetch", "s", starts,
                  "fetching or loading alone", bounds, goal=Goal("at most", AT_MOST_START, "compared"),
                  digits=1)  # fmt: skip


def _fetch_all(plan: Plan, urls: list[str]) -> float:
    """Seconds until all are in a folder, as many at a time as a server fetches."""
    from marserve.store.addresses.fetch_guard import AllowedUrls
    from marserve.store.fetching.fetcher import Fetcher

    store = plan.new_folder("fetched")
    store.mkdir()
    origin = urls[0].rpartition("/")[0]
    fetcher = Fetcher(AllowedUrls([f"{origin}/.*"]))
    began = time.monotonic()
    with ThreadPoolExecutor(PARALLEL_FETCHES) as threads:
        for fetched in threads.map(lambda url: fetcher.fetch(url, store), urls):
            fetched.release()
    seconds = time.monotonic() - began
    for path in store.iterdir():
        path.unlink()
    return seconds


def _start_s(plan: Plan, first: Path, names: list[str], urls: list[str], roots: Path) -> float:
    """Seconds from the start of the command until every model has a worker."""
    origin = urls[0].rpartition("/")[0]
    store = plan.new_folder("store")  # an empty one but for what answers first: what was fetched stays in it
    store.mkdir()
    archive = store / first.name
    archive.write_bytes(first.read_bytes())
    settings = {
        "load_models": ",".join([first.name, *(f"{name}={url}" for name, url in zip(names, urls, strict=True))]),
        "allowed_urls": f"{origin}/.*",
        "model_roots": str(roots),
        "default_workers_per_model": "1",
    }
    began = time.monotonic()
    with Marserve("marserve", archive, plan.new_folder("start"), settings=settings) as server, httpx.Client() as client:
        waiting = set(names)
        while waiting:
            for name in sorted(waiting):
                answer = client.get(f"http://127.0.0.1:{server.management_port}/models/{name}")
                workers = answer.json()[0]["workers"] if answer.status_code == 200 else []
                if not any(worker["status"] == "READY" for worker in workers):
                    break
                waiting.discard(name)
            if time.monotonic() - began > PATIENCE_S:
                raise CannotMeasure(f"{len(waiting)} models have no worker after {PATIENCE_S:g} s")
            time.sleep(0.02)
        return time.monotonic() - began


# ------------------------------------------------------------------------------------------- in place


def _folder(plan: Plan) -> Figure:
    size = QUICK_LARGE_BYTES if plan.is_quick else LARGE_BYTES
    root = plan.new_folder("roots")
    model = root / "large"
    (model / "MAR-INF").mkdir(parents=True)
    (model / "echo.py").write_bytes((HANDLERS / "echo.py").read_bytes())
    manifest = {"modelName": "large", "modelVersion": "1.0", "handler": "echo.py"}
    (model / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"runtime": "python", "model": manifest}))
    _write(model / "weights.dat", size)
    first = make_archive(plan.folder / "folder-echo", "echo", "echo.py", {"minWorkers": 1, "maxWorkers": 1})
    written: list[float] = []
    for number in range(plan.rounds):
        plan.say(f"downloads, folder in place: round {number + 1} of {plan.rounds}")
        with Marserve("marserve", first, plan.new_folder("folder"), settings={"model_roots": str(root)}) as server:
            before = _written(server)
            answer = httpx.post(
                f"http://127.0.0.1:{server.management_port}/models",
                params={"url": str(model), "initial_workers": 1, "synchronous": "true"},
                timeout=60,
            )
            if answer.status_code != 200:
                raise CannotMeasure(f"the folder was not registered: {answer.text}")
            written.append((_written(server) - before) / MIB)
    return Figure(f"written until a folder of {size / 1e9:g} GB serves", "MiB", written,
                  goal=Goal("at most", AT_MOST_MIB, "own"), digits=2)  # fmt: skip


def _written(server: Marserve) -> int:
    """Bytes that all living processes of the server have written, to files and pipes; logs are among them."""
    total = 0
    for pid in server.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            total += int(dict(line.split(": ") for line in lines)["wchar"])
    return total


def _write(path: Path, size: int) -> None:
    """A file that does not compress."""
    with path.open("wb") as file:
        for at in range(0, size, MIB):
            file.write(os.urandom(min(MIB, size - at)))
