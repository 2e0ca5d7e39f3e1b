"""Tests for workers that are groups of ranks: real processes, real collectives over Gloo, and what a death does."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from marserve import wire
from marserve.errors import HandlerFailed, LoadFailed, WaitTooLong, WorkerDied
from marserve.messages import Answer, DeviceLost, Hello, Load, Loaded, NotLoaded, Part, Results
from marserve.option_values import Sample
from marserve.pool.launchers import group as group_module
from marserve.pool.launchers.group import RankGroup
from marserve.pool.launchers.process import WorkerProcess
from marserve.pool.worker_end.cause_of_death import Cause, Death
from marserve.pool.worker_end.output import WorkerOutput
from support.processes import until
from support.running_pool import RunningPool, Sent
from support.worker_logs import KeptLines

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the ranks need the extra `torch`"),
]

# Adds its own number to each request's over all ranks; tells in a file of each rank what it saw.
SUM = """
import json, os, sys, time
import torch
import torch.distributed as dist

WORDS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")

class Handler:
    def initialize(self, context):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.seen = open(f"seen-{self.rank}", "a", buffering=1)
        print(f"rank {self.rank} is up")

    def handle(self, data, context):
        words = [bytes(row["body"]) for row in data]
        self.seen.write(json.dumps([word.decode() for word in words]) + chr(10))
        numbers = torch.tensor([float(len(word)) for word in words])
        drawn = float(torch.rand(1))
        if b"exit 1" in words and self.rank == 1:
            sys.exit(7)
        dist.all_reduce(numbers)
        answers = [str(int(number)) for number in numbers]
        for index, word in enumerate(words):
            if word == b"environment":
                answers[index] = {name: os.environ.get(name) for name in WORDS}
            elif word == b"drawn":
                draws = [None] * dist.get_world_size()
                dist.all_gather_object(draws, drawn)
                answers[index] = draws
            elif word == b"raise":
                raise ValueError("all ranks alike")
            elif word == b"rank 1 alone" and self.rank == 1:
                raise ValueError("not like the others")
            elif word == b"wait":
                while not context.is_cancelled(index):
                    dist.barrier()
                    time.sleep(0.001)
            elif word.startswith(b"sleep"):
                time.sleep(float(word.split()[1]))
        return answers
"""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


def group(folder: Path, source: str = SUM, *, kind: str = "tp", level: int = 2, **options: Any) -> RunningPool:
    """A pool whose workers are groups of two ranks."""
    return RunningPool(folder, source, parallel_type=kind, parallel_level=level, **options)


def ranks(running: RunningPool) -> tuple[int, ...]:
    """The processes of the first worker's ranks."""
    return running.pool.workers()[0].ranks


def seen(running: RunningPool, rank: int) -> list[list[str]]:
    """What each call of a rank's handler was given."""
    return [json.loads(line) for line in running.file(f"seen-{rank}").read_text().splitlines()]


def sockets_outside_loopback(pids: tuple[int, ...]) -> list[object]:
    """Network sockets of these processes that are not on loopback, of any kind."""
    found: list[object] = []
    for pid in pids:
        for connection in psutil.Process(pid).net_connections("inet"):
            address = ipaddress.ip_address(connection.laddr.ip)
            mapped = getattr(address, "ipv4_mapped", None)
            if not (mapped or address).is_loopback:
                found.append(connection)
    return found


class Rank(WorkerProcess):
    """A process that only notes the signals it got."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid, asyncio.get_running_loop().create_future())
        self.signals: list[int] = []

    def signal_group(self, number: int) -> None:
        """Note it."""
        self.signals.append(number)


def formed(size: int = 3) -> tuple[RankGroup, list[Rank], list[Any]]:
    """A group whose processes are made up, and the server's ends of the wires to its further ranks."""
    output = WorkerOutput("m", "1.0", "29500", KeptLines())
    grouped = RankGroup(group_module.GroupShape(size, True), 1, "m_29500", output)
    members = [Rank(100 + rank) for rank in range(size)]
    for member in members:
        grouped.add(member)
    followers = [group_module._Follower(rank, grouped) for rank in range(1, size)]
    for follower in followers:
        grouped.follow(follower)
    grouped.formed(Load("m", "1.0", "", "h.py", None, None, 1), "info")
    return grouped, members, followers


# ------------------------------------------------------------------------------------------- one process of several


async def test_the_rank_that_ends_first_ends_the_group_and_says_why() -> None:
    """The group has ended when all of its ranks were reaped; its status is the first one's."""
    grouped, members, _ = formed()
    assert (grouped.pid, grouped.pids) == (100, [100, 101, 102])

    members[1].exited.set_result(7 << 8)
    await asyncio.sleep(0)
    members[2].exited.set_result(signal.SIGKILL)
    await asyncio.sleep(0)
    assert members[0].signals == members[2].signals == [signal.SIGKILL]
    assert not grouped.exited.done()
    members[0].exited.set_result(signal.SIGKILL)

    assert await asyncio.wait_for(grouped.exited, 1) == 7 << 8
    assert grouped.explain(Death(Cause.EXIT, "it ended", 7)) == Death(Cause.EXIT, "rank 1: it ended", 7)
    assert grouped.reported_death is None
    assert not await grouped.is_whole()


@pytest.mark.parametrize(("device_count", "numbers"), [(3, [0, 1, 2]), (2, [0, 1, 0]), (0, [5, 5, 5])])
async def test_a_ranks_gpu_id_is_its_own_among_those_that_it_sees(device_count: int, numbers: list[int]) -> None:
    """The second group as well: the number on the machine is none of a rank's. Without a list it is as ordered."""
    output = WorkerOutput("m", "1.0", "29500", KeptLines())
    grouped = RankGroup(group_module.GroupShape(3, True, {}, device_count), 1, "m_29500", output)
    order = Load("m", "1.0", "", "h.py", None, None, 1, gpu_id=5)

    assert [grouped.load(order, rank).gpu_id for rank in range(3)] == numbers


async def test_a_rank_that_lost_its_device_ends_the_group() -> None:
    """It is the cause, though another process is gone first."""
    grouped, members, followers = formed()

    followers[0].data_received(b"".join(wire.encode(DeviceLost(0, "device 1 is lost", "Traceback"))))

    assert all(member.signals == [signal.SIGKILL] for member in members)
    assert grouped.reported_death == (Death(Cause.DEVICE_LOST, "rank 1: device 1 is lost"), "Traceback")


async def test_what_a_rank_said_counts_if_it_is_the_first_to_end() -> None:
    """Another one's complaint of a lost peer does not."""
    for first, told in ((2, "rank 2: no such file"), (1, None)):
        grouped, members, followers = formed()
        followers[1].data_received(b"".join(wire.encode(NotLoaded("missing_file", "no such file", "Traceback"))))

        members[first].exited.set_result(1 << 8)
        await asyncio.sleep(0)

        assert (grouped.reported_death[0].detail if grouped.reported_death is not None else None) == told


async def test_a_group_is_whole_when_all_ranks_have_loaded() -> None:
    """Rank 0 says so on the worker's own wire."""
    grouped, _, followers = formed()
    waiting = asyncio.ensure_future(grouped.is_whole())
    loaded = b"".join(wire.encode(Loaded(1.0)))

    followers[0].data_received(b"".join(wire.encode(Hello(101, "3"))) + loaded)
    await asyncio.sleep(0)
    assert not waiting.done()
    followers[1].data_received(loaded)

    assert await asyncio.wait_for(waiting, 1)


@pytest.mark.parametrize(
    "said",
    [b"no frame at all" * 5, b"".join(wire.encode(Results(1, 0.0, []))), b"".join(wire.encode(Hello(1, "3")))[:9]],
)
async def test_a_further_rank_that_says_what_it_may_not_ends_the_group(said: bytes) -> None:
    """It has no answers to give; half a message is not one yet."""
    grouped, members, followers = formed(2)

    followers[0].data_received(said)

    if len(said) == 9:
        assert grouped.reported_death is None
        return
    assert grouped.reported_death is not None
    assert grouped.reported_death[0].cause is Cause.BAD_FRAME
    assert [member.signals for member in members] == [[signal.SIGKILL]] * 2


# ------------------------------------------------------------------------------------------- tp


async def test_every_rank_sees_a_request_and_rank_0_answers(tmp_path: Path) -> None:
    """With torchrun's environment, the same random numbers, no socket outside loopback, and lines that say whose."""
    async with group(tmp_path, batch_size=4) as running:
        await running.start()

        answers = await asyncio.gather(*(running.ask_body(b"x" * length) for length in range(1, 30)))
        drawn = json.loads(await running.ask_body(b"drawn"))
        told = json.loads(await running.ask_body(b"environment"))

        assert [int(answer) for answer in answers] == [2 * length for length in range(1, 30)]
        assert seen(running, 0) == seen(running, 1)
        assert len(drawn) == 2
        assert drawn[0] == drawn[1]
        assert told["RANK"] == told["LOCAL_RANK"] == told["GROUP_RANK"] == "0"
        assert told["WORLD_SIZE"] == told["LOCAL_WORLD_SIZE"] == "2"
        assert told["MASTER_ADDR"] == "127.0.0.1"
        assert told["OMP_NUM_THREADS"] == str(running.pool.threads)
        view = running.pool.workers()[0]
        assert (view.id, view.pid, len(view.ranks)) == ("29500", view.ranks[0], 2)
        assert sockets_outside_loopback(view.ranks) == []
        lines = {line.worker_id: line.text for line in running.log.lines if "is up" in line.text}
        assert lines == {"29500": "rank 0 is up", "29500.1": "rank 1 is up"}


async def test_every_rank_logs_at_the_level_that_was_set_last(tmp_path: Path) -> None:
    """From its load on, and changed between two requests."""
    source = """
import logging, os
log = logging.getLogger("mine")
def handle(data, context):
    log.debug("%s of rank %s", bytes(data[0]["body"]).decode() if data else "load", os.environ["RANK"])
    return [b""] * len(data or ())
"""
    async with group(tmp_path, source) as running:
        running.launchers.levels.set("debug", "m")
        await running.start()
        for level, word in (("info", b"unsaid"), ("debug", b"said")):
            running.launchers.levels.set(level)
            await running.ask_body(word)
        await until(lambda: sum(text.startswith("said") for text in running.log.texts) == 2, "both lines")

        said = sorted(text for text in running.log.texts if " of rank " in text)
        assert said == ["load of rank 0", "load of rank 1", "said of rank 0", "said of rank 1"]


async def test_what_is_late_or_cancelled_is_left_out_on_every_rank_alike(tmp_path: Path) -> None:
    """A collective never waits for a rank that still has what another has dropped."""
    dice = random.Random(11)
    async with group(tmp_path, batch_size=8, max_batch_delay_s=0.0, queue_size=1000) as running:
        await running.start()
        kept: list[tuple[int, Sent]] = []
        for length in range(1, 161):
            deadline = time.monotonic() + dice.uniform(0.001, 0.1) if dice.random() < 0.4 else None
            with contextlib.suppress(WaitTooLong):
                kept.append((length, running.send(b"x" * length, deadline=deadline)))
            if dice.random() < 0.4:
                dice.choice(kept)[1].job.cancel()
            if length % 4 == 0:
                running.send(b"sleep 0.003")
                await asyncio.sleep(0.003)

        await until(lambda: running.pool.dispatcher.is_empty, "all have ended")

        answers = [(length, sent.body) for length, sent in kept if sent.body is not None]
        assert [int(body) for _, body in answers] == [2 * length for length, _ in answers]
        assert len(answers) > 30
        assert seen(running, 0) == seen(running, 1)
        assert running.metrics.worker_deaths == {}


async def test_a_cancel_is_told_to_all_ranks_at_the_same_question(tmp_path: Path) -> None:
    """They meet at a barrier after each question: one that left a turn earlier would leave the others there."""
    async with group(tmp_path, response_timeout_s=20.0) as running:
        await running.start()
        for _ in range(5):
            sent = running.send(b"wait")
            await until(lambda: running.pool.running == 1, "it runs")
            await asyncio.sleep(0.03)

            sent.job.cancel()

            assert await running.ask_body(b"abc") == b"6"
        assert running.metrics.worker_deaths == {}


async def test_samples_warm_all_ranks_up_and_are_checked_by_all(tmp_path: Path) -> None:
    """Each call of a warm-up and of a check is every rank's; the certificate is that of any other worker."""
    samples = [Sample(body=b"x" * length) for length in (1, 2, 3)]
    options = {"samples": tuple(samples), "batch_check": "refuse"}
    async with group(tmp_path, batch_size=4, load={"warm_up": samples}, **options) as running:
        await running.start()

        report = await running.pool.check([[Part("body", b"abcd")], [Part("body", b"ab")]])

        assert report["certificate"] == "passed", report
        assert running.pool.described["batching"]["certificate"] == "passed"
        assert seen(running, 0) == seen(running, 1)
        assert len(seen(running, 0)) > 10


async def test_a_batch_that_raises_on_all_ranks_is_split_as_any_other(tmp_path: Path) -> None:
    """Only the guilty item fails; the group goes on."""
    async with group(tmp_path, batch_size=4) as running:
        await running.start()
        running.send(b"sleep 0.05")

        good, bad, late = (running.send(body) for body in (b"abc", b"raise", b"abcd"))

        told = await good.told(10), await bad.told(10), await late.told(10)
        assert isinstance(told[0], Answer)
        assert isinstance(told[2], Answer)
        assert (told[0].body, str(told[1]), told[2].body) == (b"6", "Prediction failed", b"8")
        assert seen(running, 0) == seen(running, 1)
        assert running.metrics.worker_deaths == {}


async def test_a_stream_is_rank_0s_and_is_not_broken_off_for_one_rank_alone(tmp_path: Path) -> None:
    """All ranks send pieces; when nobody waits any more, all of them run on to the end."""
    source = """
    import torch
    import torch.distributed as dist
    from ts.handler_utils.utils import send_intermediate_predict_response

    class Handler:
        def initialize(self, context):
            dist.init_process_group("gloo")

        def handle(self, data, context):
            for step in range(1000 if bytes(data[0]["body"]) == b"long" else 3):
                number = torch.tensor(float(step))
                dist.all_reduce(number)
                piece = [f"{int(number)} "]
                send_intermediate_predict_response(piece, context.request_ids, "part", 200, context)
            return ["end"]
    """
    async with group(tmp_path, source) as running:
        await running.start()

        sent = running.send(b"short")
        end = await sent.told(10)
        long = running.send(b"long")
        await long.piece()
        long.job.cancel()

        assert isinstance(end, Answer)
        assert [piece.body for piece in sent.pieces] == [b"0 ", b"2 ", b"4 ", b"end"]
        assert isinstance(await running.ask(b"short"), Answer)
        assert running.metrics.worker_deaths == {}


# ------------------------------------------------------------------------------------------- pp

PIPELINE = """
import os
import torch
import torch.distributed.rpc as rpc

def stage(tensor):
    return tensor * 10

class Handler:
    def initialize(self, context):
        self.rank = int(os.environ["RANK"])
        rpc.init_rpc(f"stage-{self.rank}", rank=self.rank, world_size=int(os.environ["WORLD_SIZE"]))

    def handle(self, data, context):
        assert self.rank == 0
        return [str(int(rpc.rpc_sync("stage-1", stage, args=(torch.tensor(int(row["body"])),)))) for row in data]
"""


async def test_in_a_pipeline_rank_0_alone_sees_requests(tmp_path: Path) -> None:
    """The others wait for what it sends them; torch's RPC stays on loopback, too. A dead rank re-forms the pipeline."""
    async with group(tmp_path, PIPELINE, kind="pp") as running:
        await running.start()

        assert await running.ask_body(b"7") == b"70"
        assert sockets_outside_loopback(ranks(running)) == []
        running.look()
        os.kill(ranks(running)[1], signal.SIGKILL)

        assert await running.ask_body(b"8") == b"80"
        assert running.pool.last_death is not None
        assert running.pool.last_death.detail.startswith("rank 1: killed by SIGKILL")


# A made-up torch in each rank; `lose` costs rank 1 its device, of which rank 0 sees no more than that its stage failed.
LOSING_PIPELINE = f"""
import os, pathlib, runpy
module = runpy.run_path({str(Path(__file__).parents[1] / "support" / "lost_device.py")!r})
rank = os.environ["RANK"]

def is_lost(device):
    lost = pathlib.Path("lost")
    return lost.exists() and lost.read_text() == str(os.getpid())

module["Device"].is_lost = property(is_lost)

class Handler:
    def initialize(self, context):
        pathlib.Path("rank-" + rank).write_text(str(os.getpid()))

    def handle(self, data, context):
        words = [bytes(row["body"]).decode() for row in data]
        if "lose" in words:
            pathlib.Path("lost").write_text(pathlib.Path("rank-1").read_text())
        if "lose" in words or "raise" in words:
            raise RuntimeError("stage 1 has failed")
        return words
"""


async def test_a_device_that_another_rank_of_a_pipeline_lost_ends_the_group(tmp_path: Path) -> None:
    """Rank 0's own is well: it asks. A failure that leaves all devices well costs nothing."""
    async with group(tmp_path, LOSING_PIPELINE, kind="pp") as running:
        await running.start()
        before = ranks(running)
        raised = await running.send(b"raise").told(10)
        after_raise = ranks(running)

        lost = await running.send(b"lose").told(20)
        answered = await running.ask_body(b"7")
        death = running.pool.last_death

        assert isinstance(raised, HandlerFailed)
        assert after_raise == before
        assert isinstance(lost, WorkerDied)
        assert answered == b"7"
        assert death is not None
        assert (death.cause, death.detail.partition(" is lost")[0]) == ("device_lost", "rank 1: device 0")
        assert running.metrics.worker_deaths["device_lost"] == 2


# ------------------------------------------------------------------------------------------- deaths


async def test_a_rank_that_dies_ends_the_group_which_is_formed_anew(tmp_path: Path) -> None:
    """Whichever it was: what was in flight is run again, and describe names the rank that was first."""
    async with group(tmp_path) as running:
        await running.start()
        for victims in ((0,), (1,), (1, 0)):
            before = ranks(running)
            running.look()
            sent = running.send(b"sleep 0.3")
            await until(lambda: running.pool.running == 1, "it runs")

            for victim in victims:
                os.kill(before[victim], signal.SIGKILL)

            assert isinstance(await sent.told(30), Answer)
            assert not set(ranks(running)) & set(before)
            death = running.pool.last_death
            assert death is not None
            assert death.cause == "killed"
            assert death.detail.split(":")[0] in {f"rank {victim}" for victim in victims}
        await until(lambda: running.pool.is_healthy, "it is well again")
        assert await running.ask_body(b"abc") == b"6"


async def test_an_exit_of_a_rank_has_its_status_and_its_last_lines(tmp_path: Path) -> None:
    """The other rank's complaints that its peer is gone are not the cause."""
    async with group(tmp_path, retry_on_worker_death=False) as running:
        await running.start()

        end = await running.ask(b"exit 1")

        assert isinstance(end, WorkerDied)
        assert end.cause == "exit"
        await until(lambda: running.pool.ready_workers == 1, "the next one")
        death = running.pool.last_death
        assert death is not None
        assert death.detail.startswith("rank 1: the worker's process ended by itself with exit status 7")
        assert death.last_lines == ("rank 1 is up",)


async def test_a_rank_that_ends_a_call_otherwise_than_the_others_ends_the_group(tmp_path: Path) -> None:
    """Their collectives may be one apart from then on, and answers those of other requests; the author sees why."""
    async with group(tmp_path, retry_on_worker_death=False) as running:
        await running.start()

        await running.ask(b"rank 1 alone")
        await until(lambda: running.metrics.worker_deaths["out_of_step"] == 1, "its end")

        assert await running.ask_body(b"abc") == b"6"
        death = running.pool.last_death
        assert death is not None
        assert death.detail == "rank 1 raised in a call that rank 0 ended without"
        assert "not like the others" in death.traceback or death.traceback == ""


async def test_a_stopped_rank_is_named_when_the_answer_does_not_come(tmp_path: Path) -> None:
    """Rank 0 waits for it in a collective, and looks wedged; all of the group is ended."""
    async with group(tmp_path, response_timeout_s=1.0) as running:
        await running.start()
        running.look()
        stopped = ranks(running)[1]
        os.kill(stopped, signal.SIGSTOP)

        end = await running.ask(b"abc")

        assert isinstance(end, WorkerDied)
        assert end.cause == "response_timeout"
        assert running.pool.last_death is not None
        assert "rank 1: the process is stopped" in running.pool.last_death.detail
        assert await running.ask_body(b"abc") == b"6"


@pytest.mark.parametrize(
    ("what", "cause", "then"),
    [
        ("raise FileNotFoundError('half of the weights')", "missing_file", "dist.barrier()"),
        ("os.abort()", "signal", "dist.barrier()"),
        ("time.sleep(0.1); sys.exit(3)", "exit", "pass"),
    ],
    ids=["raises", "aborts", "exits when rank 0 has loaded"],
)
async def test_a_rank_that_cannot_load_fails_the_load_with_its_own_words(
    tmp_path: Path, what: str, cause: str, then: str
) -> None:
    """Rank 0 would wait for it for ever, or complain of it; nothing of the group is left."""
    source = f"""
    import os, sys, time
    import torch.distributed as dist
    class Handler:
        def initialize(self, context):
            dist.init_process_group("gloo")
            if os.environ["RANK"] == "1":
                {what}
            {then}
        def handle(self, data, context):
            return ["x" for _ in data]
    """
    async with group(tmp_path, source) as running:
        with pytest.raises(LoadFailed) as caught:
            await running.start()

        assert caught.value.cause == cause
        death = running.pool.last_death
        assert death is not None
        assert death.detail.startswith("rank 1: ")
        words = [*death.traceback.splitlines(), *death.last_lines]
        assert cause == "exit" or any("in initialize" in line for line in words)


# ------------------------------------------------------------------------------------------- a worker like any other


async def test_ranks_in_new_interpreters_and_their_recycling(tmp_path: Path) -> None:
    """`workerStart: fresh`; the replacement group is there before the first one goes, and no request fails."""
    source = """
    import os
    def handle(data, context):
        return [f"{os.getpid()} {os.environ['WORLD_SIZE']}" for _ in data] if data else None
    """
    async with group(tmp_path, source, start="fresh", max_requests_per_worker=20) as running:
        await running.start()
        first = ranks(running)
        answers: set[bytes] = set()

        end = time.monotonic() + 30
        while len(answers) < 2 and time.monotonic() < end:
            running.look()
            answers.add(await running.ask_body(b"x"))
            await asyncio.sleep(0.01)

        assert len(answers) == 2
        assert f"{first[0]} 2".encode() in answers
        assert running.metrics.worker_recycles["requests"] == 1
        assert running.metrics.worker_deaths == {}


async def test_a_group_that_cannot_be_formed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is there already when there is no descriptor left for the next; the second try succeeds."""
    real, failures = group_module._start_follower, []

    async def fail_once(*arguments: Any) -> None:
        if not failures:
            failures.append(1)
            raise OSError(24, "Too many open files")
        await real(*arguments)

    monkeypatch.setattr(group_module, "_start_follower", fail_once)
    async with group(tmp_path) as running:
        running.pool.start()
        await until(lambda: running.pool.ready_workers == 1, "the second try")

        assert await running.ask_body(b"abc") == b"6"
        assert running.metrics.worker_deaths == {"load_failed": 1}


async def test_a_group_is_never_forked_after_loading(tmp_path: Path) -> None:
    """Its ranks hold halves of a model, and connections to each other."""
    async with group(tmp_path, start="fork") as running:
        with pytest.raises(LoadFailed) as caught:
            await running.start()

        assert caught.value.cause == "fork_refused"
