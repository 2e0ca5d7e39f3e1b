"""Changes the code in small ways, one at a time, and says which changes no test noticed.

    make mutants ROOM=pool/dispatch/batcher SEED=1 COUNT=100

A room is a file of the server with the tests that bear its name (`pool/dispatch/batcher`:
`tests/pool/test_batcher*.py`). The mutants are drawn with the seed, over all rooms in proportion to what can be changed
in each. Everything happens in a copy of the repository that is deleted afterwards; the report is written to
`build/mutants`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mutants.draw import Mutant, all_mutants
from mutants.session import BROKEN, KILLED, PLAIN, SURVIVED, TIMED_OUT, UNREACHED

ROOT = Path(__file__).resolve().parents[2]
#: The rooms that are gone through where none is named, and the files whose claims are on them too: of the same folder,
#: or of the one that is named.
ROOMS: dict[str, tuple[str, ...]] = {
    "archive/reading/member_names": (),
    "pool/dispatch/batcher": ("admission", "dispatcher"),
    "pool/dispatch/queue": ("admission", "dispatcher"),
    "pool/dispatch/lanes": (
        "admission",
        "back_pressure",
        "dispatcher",
        "pool/dispatch/modes/coroutines",
        "pool/dispatch/modes/steps",
    ),
    "pool/dispatch/modes/batches": (
        "pool/dispatch/dispatcher",
        "pool/dispatch/admission",
        "pool/dispatch/lengths/asked",
    ),
    "pool/dispatch/modes/coroutines": (),
    "pool/dispatch/modes/steps_and_sequences": ("pool/dispatch/sequences",),
    "pool/dispatch/deadlines": (),
    "pool/dispatch/fingerprints": (),
    "registry/catalogue/traffic": (),
    "desired_state/diff": (),
    "rollout/judge": ("timeline",),
    "memory/ledger": (),
    "memory/host_memory": (),
    "pool/dispatch/dispatcher": ("admission", "asked_lengths", "back_pressure", "handing_over", "hold", "lanes_lent"),
    "wire": (),
    "store/addresses/fetch_guard": (),
    "archive/pickles/pickle_check": ("check_budget", "containers", "pickle_check_bounds", "pickle_program"),
    "api/tokens": (),
    "api/http/request_head": (),
    "worker/loop": ("rank",),
    "worker/serving": ("loop_orders", "checks", "lengths", "rank", "continuous_batching"),
    "store/fetching/download": (),
    "api/http/connection": (),
}
CPU_S = 3.0
SURVIVORS = (SURVIVED, UNREACHED)


def main() -> int:
    """Run what the flags ask for. The exit status is 1 when fewer than 90 of 100 viable mutants were killed."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("rooms", nargs="*", default=list(ROOMS), help="files of the server, such as pool/batcher")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--count", type=int, default=1500, help="how many mutants, over all rooms; 0 for every one")
    parser.add_argument("--again", action="store_true", help="run what survived by the report, and bring it up to date")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "mutants")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the copy is deleted then, too

    before = read_report(flags.report, flags.rooms) if flags.again else {}
    if flags.again:
        chosen = {room: still_to_kill(room, verdicts) for room, verdicts in before.items()}
    else:
        chosen = choose(flags.rooms, flags.count, flags.seed)
    flags.report.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    totals: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        copy = copy_of_the_repository(Path(name))
        for room, numbers in chosen.items():
            verdicts: list[dict[str, Any]] = []
            try:
                if numbers:
                    run_room(room, numbers, copy, Path(name))
            finally:  # what was found counts, though the room was cut off
                verdicts = read_results(Path(name)) if numbers else []
                if len(verdicts) < len(numbers):
                    print(f"{room}: cut off, {len(verdicts)} of {len(numbers)} were run", flush=True)
                verdicts = join(mutants_of(room, copy), before.get(room, []), verdicts)
                counts = collections.Counter(verdict["outcome"] for verdict in verdicts)
                totals += counts
                lines += [summary(room, counts), *described(room, verdicts), ""]
                print(summary(room, counts), flush=True)
                (flags.report / f"{room.replace('/', '-')}.json").write_text(json.dumps(verdicts, indent=1))
                (flags.report / "report.txt").write_text("\n".join([*lines, summary("all", totals)]) + "\n")
    print(summary("all", totals), f"{time.monotonic() - began:.0f} s; what survived: {flags.report / 'report.txt'}")
    return 0 if killed_share(totals) >= 0.9 else 1


def choose(rooms: list[str], count: int, seed: str) -> dict[str, list[int]]:
    """Which mutants of each room, by their numbers."""
    every = [(room, number) for room in rooms for number in range(len(mutants_of(room)))]
    drawn = every if not count or count >= len(every) else random.Random(seed).sample(every, count)
    return {room: sorted(number for one, number in drawn if one == room) for room in rooms}


def read_report(folder: Path, rooms: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What an earlier run found, of those of these rooms that it went through."""
    files = {room: folder / f"{room.replace('/', '-')}.json" for room in rooms}
    return {room: json.loads(file.read_text()) for room, file in files.items() if file.exists()}


def still_to_kill(room: str, verdicts: list[dict[str, Any]]) -> list[int]:
    """The numbers of those that survived, of the room's source as it is: what it has no longer is passed over."""
    left = {one["key"] for one in verdicts if one["outcome"] in SURVIVORS}
    return [number for number, mutant in enumerate(mutants_of(room)) if mutant.key in left]


def join(mutants: list[Mutant], before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was found last of each of these; one that the source has no longer does not count, however it ended."""
    verdicts = {one["key"]: one for one in (*before, *now)}
    return [
        {**verdicts[mutant.key], "number": number, "line": mutant.lines[0]}
        for number, mutant in enumerate(mutants)
        if mutant.key in verdicts
    ]


def mutants_of(room: str, repository: Path = ROOT) -> list[Mutant]:
    """Every mutant of a room's source as it is there."""
    return all_mutants((repository / "server/marserve" / f"{room}.py").read_text("utf-8"))


def read_results(scratch: Path) -> list[dict[str, Any]]:
    """What a session has found so far."""
    results = scratch / "results.jsonl"
    lines = results.read_text("utf-8").splitlines(keepends=True) if results.exists() else []
    return [json.loads(line) for line in lines[1:] if line.endswith("\n")]


def copy_of_the_repository(folder: Path) -> Path:
    """Copy what git tracks or would; the tracer lies in it where every interpreter finds it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    copy = folder / "copy"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    shutil.copy2(copy / "tests/mutants/tracing.py", copy / "server/sitecustomize.py")
    return copy


def tests_of(room: str, copy: Path) -> list[str]:
    """The files of tests that bear the room's name, and those that stand beside it in `ROOMS`."""
    folder = Path(room).parent
    words = [Path(room), *(Path(word) if "/" in word else folder / word for word in ROOMS.get(room, ()))]
    found = {
        str(path.relative_to(copy))
        for word in words
        for path in (copy / "tests" / word.parent).glob(f"test_{word.name}*.py")
    }
    return sorted(found)


def run_room(room: str, numbers: list[int], copy: Path, scratch: Path, *, cpu_s: float = CPU_S) -> list[dict[str, Any]]:
    """Run the mutants with these numbers in a session of their own."""
    target = copy / "server/marserve" / f"{room}.py"
    results = scratch / "results.jsonl"
    order = {
        "target": str(target),
        "numbers": numbers,
        "results": str(results),
        "scratch": str(scratch),
        "cpu_s": cpu_s,
    }
    (scratch / "order.json").write_text(json.dumps(order))
    results.unlink(missing_ok=True)
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": os.pathsep.join(str(copy / folder) for folder in ("server", "handlers", "client", "tests")),
        "MARSERVE_MUTANTS_ORDER": str(scratch / "order.json"),
        "MARSERVE_MUTANTS_TRACED": str(target),
        "MARSERVE_MUTANTS_NOTES": str(scratch / "notes"),
        "MARSERVE_MUTANTS_PARENT": str(os.getpid()),
    }
    flags = ["-q", *PLAIN]
    marks = ["-m", "not long and not system and not torch and not contract", f"--basetemp={scratch}/t"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *marks, *tests_of(room, copy)],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if not results.exists():
        raise SystemExit(f"{room}: the tests were not run:\n{run.stdout[-3000:]}{run.stderr[-3000:]}")
    head = json.loads(results.read_text("utf-8").partition("\n")[0])
    verdicts = read_results(scratch)
    if head["failing"]:
        print(
            f"{room}: left out, for they fail or take too long without any change: {', '.join(head['failing'])}",
            flush=True,
        )
    if len(verdicts) != len(numbers):
        raise SystemExit(
            f"{room}: {len(verdicts)} of {len(numbers)} were run:\n{run.stdout[-3000:]}{run.stderr[-3000:]}"
        )
    return verdicts


def killed_share(counts: collections.Counter[str]) -> float:
    """How many of the viable were killed, from 0 to 1."""
    viable = counts.total() - counts[BROKEN]
    return (counts[KILLED] + counts[TIMED_OUT]) / viable if viable else 1.0


def summary(room: str, counts: collections.Counter[str]) -> str:
    """One line."""
    viable = counts.total() - counts[BROKEN]
    killed = counts[KILLED] + counts[TIMED_OUT]
    late = f", {counts[TIMED_OUT]} of them by time" if counts[TIMED_OUT] else ""
    return (
        f"{room:24} drawn {counts.total():4}  viable {viable:4}  killed {killed:4} ({100 * killed_share(counts):.0f} %"
        f"{late})  survived {counts[SURVIVED]}  not reached {counts[UNREACHED]}"
    )


def described(room: str, verdicts: list[dict[str, Any]]) -> list[str]:
    """The changes that no test noticed."""
    return [
        f"  {room}.py:{one['line']}  [{one['outcome']}, {one['tests']} tests]  {one['change']}"
        for one in verdicts
        if one["outcome"] in (SURVIVED, UNREACHED, TIMED_OUT)
    ]


if __name__ == "__main__":
    sys.exit(main())
