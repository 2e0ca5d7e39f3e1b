"""Groups of ranks and workers with several devices, end to end: what clients, describe and the model log see (C11)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.open_loop import OpenLoop, Shot, count_by_status, evenly, post
from support.server import Server, make_archive, poll

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc"),
]

# Every rank turns the letters on by its share; only all of them together make upper case of it.
TOGETHER = """
import os
import torch
import torch.distributed as dist

class Handler:
    def initialize(self, context):
        dist.init_process_group()
        self.rank = dist.get_rank()

    def handle(self, data, context):
        bodies = [bytes(row["body"]) for row in data]
        width = max(map(len, bodies))
        letters = torch.tensor([list(body.ljust(width)) for body in bodies], dtype=torch.int64)
        share = letters if self.rank == 0 else torch.full_like(letters, -32)
        dist.all_reduce(share)
        return [bytes(row[: len(body)]) for row, body in zip(share.tolist(), bodies)]
"""

# Says what it was given; needs no torch.
WHAT_I_HAVE = """
import os
def handle(data, context):
    if not data:
        return
    names = ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE")
    told = {name: os.environ.get(name) for name in names}
    return [{**told, "gpu_id": context.system_properties["gpu_id"], "pid": os.getpid()}] * len(data)
"""

FOUR_GPUS = """#!/bin/sh
case "$*" in
  -L) for number in 0 1 2 3; do echo "GPU $number: Made-up GPU"; done ;;
esac
"""


def nonce(number: int) -> bytes:
    """A word of lower-case letters that no other request has."""
    return "".join(chr(ord("a") + int(digit)) for digit in f"{number:08d}").encode()


def ranks(server: Server, model: str) -> list[int]:
    """The processes of the first worker's ranks; none while there is no worker."""
    return [rank["pid"] for rank in server.describe(model)["workers"][0].get("ranks", [])]


def fire_and_kill(folder: Path, *, seconds: float, rate: float, every_s: float, bound_s: float) -> None:
    """C11: a steady load, and meanwhile rank 1, rank 0, then both are killed, again and again.

    Only 200 and 503, every answer that of its own request, each group re-formed within `bound_s`, nothing left.
    """
    with Server(folder) as server:
        config = "parallelType: tp\ntorchrun:\n  nproc-per-node: 2\nminWorkers: 1\nmaxWorkers: 1\nbatchSize: 8\n"
        make_archive(server.store / "m.mar", TOGETHER, config=config)
        server.register("m.mar").raise_for_status()
        groups: list[tuple[list[int], float]] = []

        def kill_in_turn() -> None:
            end = time.monotonic() + seconds
            for turn in range(10_000):
                time.sleep(every_s)
                if time.monotonic() > end:
                    return
                before = ranks(server, "m")
                for victim in ((1,), (0,), (0, 1))[turn % 3]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(before[victim], signal.SIGKILL)
                began = time.monotonic()
                for _ in poll(bound_s + 10, "the group is formed anew"):
                    worker = server.describe("m")["workers"][0]
                    now = [rank["pid"] for rank in worker.get("ranks", [])]
                    if worker["status"] == "READY" and now and not set(now) & set(before):
                        break
                groups.append((before, time.monotonic() - began))

        async def load() -> list[tuple[Shot, int, bytes]]:
            due = evenly(rate, seconds)
            shots = [Shot(when, str(index), post("m", nonce(index))) for index, when in enumerate(due)]
            killing = asyncio.create_task(asyncio.to_thread(kill_in_turn))
            outcomes = await OpenLoop(int(server.inference.rsplit(":", 1)[1])).fire(shots)
            await killing
            assert set(count_by_status(outcomes)) <= {200, 503}, count_by_status(outcomes)
            return [(outcome.shot, outcome.status, outcome.body) for outcome in outcomes]

        told = asyncio.run(load())

        crossed = [body for shot, status, body in told if status == 200 and body != nonce(int(shot.name)).upper()]
        assert crossed == []
        assert sum(status == 200 for _, status, _ in told) > 0.9 * len(told)
        assert len(groups) >= 3
        assert max(took_s for _, took_s in groups) < bound_s
        gone = {pid for pids, _ in groups for pid in pids}
        assert not {pid for pid in gone if psutil.pid_exists(pid)}
        assert server.describe("m")["lastDeath"]["cause"] == "killed"
        assert server.describe("m")["lastDeath"]["detail"].startswith("rank ")


@pytest.mark.torch
def test_ranks_that_are_killed_under_load_cost_no_answer(tmp_path: Path) -> None:
    """C11 in short; the bound has room for a machine that does other things."""
    pytest.importorskip("torch.distributed")
    fire_and_kill(tmp_path, seconds=7.0, rate=100, every_s=1.2, bound_s=10.0)


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.timeout(300)
def test_ranks_that_are_killed_for_two_minutes_cost_no_answer(tmp_path: Path) -> None:
    """C11: every 5 s for 2 minutes; the model's own load takes next to nothing."""
    pytest.importorskip("torch.distributed")
    fire_and_kill(tmp_path, seconds=120.0, rate=100, every_s=5.0, bound_s=5.0)


@pytest.fixture
def four_gpus(tmp_path: Path) -> dict[str, str]:
    """An environment in which the machine says that it has four accelerators."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(FOUR_GPUS)
    (tools / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


def test_workers_of_several_devices_have_them_to_themselves(tmp_path: Path, four_gpus: dict[str, str]) -> None:
    """Next to each other, as many workers as there are devices for; `custom` is one process with all of its own."""
    pairs = "parallelType: {kind}\nparallelLevel: 2\nminWorkers: 3\nmaxWorkers: 3\n"
    with Server(tmp_path, environment=four_gpus) as server:
        for kind in ("tp", "custom"):
            make_archive(server.store / f"{kind}.mar", WHAT_I_HAVE, config=pairs.format(kind=kind))
            server.register(f"{kind}.mar").raise_for_status()
        make_archive(server.store / "all.mar", WHAT_I_HAVE, config="parallelType: tp\nparallelLevel: 8\n")

        tp, custom = server.describe("tp"), server.describe("custom")
        told = server.predict("tp").json()
        told_custom = server.predict("custom").json()
        refused = server.register("all.mar")

        for described in (tp, custom):
            assert (described["minWorkers"], described["maxWorkers"]) == (2, 2)
            assert [worker["gpuIds"] for worker in described["workers"]] == [[0, 1], [2, 3]]
            assert [worker["gpuId"] for worker in described["workers"]] == [0, 2]
            assert "there are at most 2 workers: each has 2 of 4 devices" in described["warnings"]
        assert [worker["id"] for worker in tp["workers"]] == ["29500", "29502"]
        assert [worker["id"] for worker in custom["workers"]] == ["29504", "29506"]
        assert [len(worker["ranks"]) for worker in tp["workers"]] == [2, 2]
        assert not any("ranks" in worker for worker in custom["workers"])
        assert (told["CUDA_VISIBLE_DEVICES"], told["gpu_id"]) in (("0,1", 0), ("2,3", 0))  # among those it sees
        assert (told["RANK"], told["WORLD_SIZE"]) == ("0", "2")
        assert (told_custom["CUDA_VISIBLE_DEVICES"], told_custom["gpu_id"]) in (("0,1", 0), ("2,3", 0))
        assert told_custom["WORLD_SIZE"] is None
        assert refused.status_code == 500
        assert refused.json() == {
            "code": 500,
            "type": "WorkerInitializationException",
            "message": "No enough gpu devices for model:all parallelLevel:8",
        }
        scaled = server.client.put(f"{server.management}/models/tp", params={"min_worker": 4, "synchronous": "true"})
        assert scaled.status_code == 200
        assert len(server.describe("tp")["workers"]) == 2
