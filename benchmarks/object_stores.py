"""Object stores: marserve's ranges beside s3fs and one stream of boto3, from nginx as an endpoint of S3.

    a limit of 25 MB/s a connection   as a provider's network has one: MB/s, and the goal
    no limit                          what the libraries themselves cost; reported, no goal

Each fetches the same object into a file, in a process of its own, imports included. s3fs and boto3 get an environment
of the run's own: beside the boto3 of the tests pip would fall back to an s3fs of years ago.

    python benchmarks/run.py --only object_stores
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from figures import Figure, Goal
from load_generator import CannotMeasure
from peer_environment import CannotInstall, make_environment
from plan import Plan
from servers import BESIDE
from slow_origin import slow_origin

BYTES_PER_S = 25_000_000
LARGE_BYTES, QUICK_LARGE_BYTES = 500_000_000, 50_000_000
RANGES = 8
AT_LEAST = 1.6
BUCKET, KEY = "models", "large.mar"
# Named exactly: left to itself, pip tries hundreds of pairs that do not fit.
PEERS = ("s3fs==2026.9.0", "aiobotocore==3.10.0", "boto3==1.43.117", "botocore==1.43.117")
INSTALL_LIMIT_S = 300.0
MIB = 1 << 20

FETCH = """
import json, os, resource, sys, time
before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
from marserve.store.fetching.download import DownloadOptions, download
from marserve.store.addresses.fetch_guard import parse_target
from marserve.store.sources.object_store import ObjectStores
url, path, connections, endpoint = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
environment = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
source = ObjectStores(environment=environment).open(parse_target(url))
file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
done = download(source, file, DownloadOptions(connections=connections))
seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps({"bytes": done.entry.size, "seconds": seconds, "cpu": cpu}))
"""


def measure(plan: Plan) -> list[Figure]:
    """The figures of object stores."""
    python = _install(plan)
    size = QUICK_LARGE_BYTES if plan.is_quick else LARGE_BYTES
    root = plan.new_folder("bucket")
    (root / BUCKET).mkdir(parents=True)
    with (root / BUCKET / KEY).open("wb") as file:
        for at in range(0, size, MIB):
            file.write(os.urandom(min(MIB, size - at)))
    figures = []
    for limit, words in ((BYTES_PER_S, f"at {BYTES_PER_S / 1e6:g} MB/s a connection"), (0, "without a limit")):
        rates, cores = _compare(plan, python, root, limit)
        goal = Goal("at least", AT_LEAST, "compared") if limit else None
        name = f"S3, {size / 1e9:g} GB {words}"
        figures += [
            Figure(f"{name}, {RANGES} ranges", "MB/s", rates["marserve"], "s3fs", rates["s3fs"], goal=goal),
            Figure(
                f"{name}, {RANGES} ranges", "MB/s", rates["marserve"], "boto3, one stream", rates["boto3"], goal=goal
            ),
            Figure(
                f"{name}, processor time", "cores", cores["marserve"], "boto3, one stream", cores["boto3"], digits=2
            ),
        ]
    return figures


def _compare(plan: Plan, python: Path, root: Path, limit: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """MB/s and cores of each, round by round, in another order each round."""
    rates: dict[str, list[float]] = defaultdict(list)
    cores: dict[str, list[float]] = defaultdict(list)
    target = plan.folder / "fetched"
    with slow_origin(plan.new_folder("nginx"), root, limit) as endpoint:
        peer = [str(python), str(BESIDE / "s3_peer.py")]
        place = [endpoint, BUCKET, KEY, str(target)]
        ways: dict[str, Callable[[], list[str]]] = {
            "marserve": lambda: [
                sys.executable, "-c", FETCH, f"s3://{BUCKET}/{KEY}", str(target), str(RANGES), endpoint,
            ],
            "s3fs": lambda: [*peer, "s3fs", *place],
            "boto3": lambda: [*peer, "boto3", *place],
        }  # fmt: skip
        for number in range(plan.rounds):
            plan.say(f"object stores, {limit / 1e6:g} MB/s a connection: round {number + 1} of {plan.rounds}")
            names = list(ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                facts = _run(ways[name]())
                rates[name].append(facts["bytes"] / facts["seconds"] / 1e6)
                cores[name].append(facts["cpu"] / facts["seconds"])
                target.unlink()
    return rates, cores


def _run(command: list[str]) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise CannotMeasure(f"the object could not be fetched: {done.stderr.strip()[-500:]}")
    facts: dict[str, float] = json.loads(done.stdout)
    return facts


def _install(plan: Plan) -> Path:
    """The interpreter of the peers' environment; `MEASURE_S3_PEERS` names one that is there already."""
    if ready := os.environ.get("MEASURE_S3_PEERS"):
        return Path(ready)
    folder = plan.folder / "s3-peers"
    plan.say("installing s3fs and boto3 into an environment of their own")
    try:
        return make_environment(folder, PEERS, INSTALL_LIMIT_S)
    except CannotInstall as error:
        raise CannotMeasure(error.of("s3fs")) from None
