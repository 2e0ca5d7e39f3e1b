"""Workers whose handlers say whether they are well, with real workers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import WorkerDied
from marserve.pool.checks.health import HealthView
from support.processes import until
from support.running_pool import RunningPool

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc"),
]

OFTEN_S = 0.1
# Bodies say what becomes of the worker; files in the model's folder tell what was called.
HANDLER = """
import os, time, pathlib

class Handler:
    def __init__(self):
        self.sick = ""

    def initialize(self, context):
        self.folder = pathlib.Path(context.system_properties["model_dir"])

    def note(self, word):
        with (self.folder / "notes").open("a") as file:
            file.write(word + "\\n")

    def handle(self, rows, context):
        self.note("batch")
        for row in rows:
            word = bytes(row["body"]).decode()
            if word.startswith("sick:"):
                self.sick = word[5:]
            if word == "hang":
                time.sleep(1000)
            if word == "slow":
                time.sleep(0.01)
        return [str(os.getpid()).encode()] * len(rows)

    def health(self):
        self.note("health")
        if self.sick == "once":
            self.sick = ""
            return False
        if self.sick == "no":
            return False
        if self.sick == "raises":
            raise ValueError("the index is gone")
        if self.sick == "naps":
            time.sleep(0.2)
        if self.sick == "hangs":
            time.sleep(1000)
        if self.sick == "dies":
            os._exit(3)
"""
LOOSE = """
import pathlib
def handle(rows, context):
    return None if rows is None else [b"answered"] * len(rows)
"""
MODULE = (
    LOOSE
    + """
def health():
    return len(list(pathlib.Path(".").glob("sick"))) == 0
"""
)
DECLARED = """
from marserve_handlers import model

@model
class Echo:
    def load(self, context):
        self.is_well = True

    def predict(self, text: str) -> str:
        self.is_well = text != "sick"
        return text

    async def health(self):
        return self.is_well
"""
COROUTINES = """
import asyncio, pathlib

class Handler:
    def initialize(self, context):
        self.calls = 0

    async def handle(self, rows, context):
        word = bytes(rows[0]["body"]).decode()
        if word == "wait":
            while not pathlib.Path("go").exists():
                await asyncio.sleep(0.01)
        self.hangs = word == "hang"
        return [word.encode()] * len(rows)

    async def health(self):
        self.calls += 1
        pathlib.Path("health").write_text(str(self.calls))
        if getattr(self, "hangs", False):
            await asyncio.sleep(1000)
"""
STEPS = """
import os, pathlib

class Handler:
    def initialize(self, context):
        self.calls = 0

    def handle(self, rows, context):
        for index, row in enumerate(rows):
            goes_on = not pathlib.Path("go").exists()
            context.set_response_header(index, "ts_stream_next", "true" if goes_on else "false")
        return [b"x"] * len(rows)

    def health(self):
        self.calls += 1
        pathlib.Path("health").write_text(str(self.calls))
"""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


def running(folder: Path, source: str = HANDLER, **more: Any) -> RunningPool:
    """A pool whose workers are asked often."""
    return RunningPool(folder, source, **{"health_interval_s": OFTEN_S, **more})


def views(pool: RunningPool) -> list[HealthView | None]:
    """What describe says of each worker's health."""
    return [worker.health for worker in pool.pool.workers()]


def checks(pool: RunningPool) -> Mapping[str, int]:
    """How many calls passed and failed."""
    return pool.metrics.health_checks


@pytest.mark.parametrize("start", ["fork", "fresh"])
async def test_an_idle_worker_is_asked_whether_it_is_well(tmp_path: Path, start: str) -> None:
    """Again and again; describe and metrics say so."""
    async with running(tmp_path, workers=2, start=start) as pool:
        await pool.start()
        await until(lambda: checks(pool)["passed"] >= 6, "each worker was asked")

        for view in views(pool):
            assert view is not None
            assert (view.state, view.failures, view.reason) == ("well", 0, "")
            assert view.checked_at is not None
        assert pool.metrics.read_gauges().failing == 0
        assert checks(pool)["failed"] == 0
        assert pool.metrics.busy_seconds == 0
        assert pool.pool.dispatcher.is_empty


async def test_a_busy_worker_is_asked_between_two_batches(tmp_path: Path) -> None:
    """It always has a next batch, and every request is answered."""
    async with running(tmp_path, queue_size=1000) as pool:
        await pool.start()
        is_enough = asyncio.Event()

        async def client() -> None:
            while not is_enough.is_set():
                await pool.ask_body(b"slow")

        clients = [asyncio.create_task(client()) for _ in range(8)]
        await until(lambda: checks(pool)["passed"] >= 5, "it was asked though it was busy")
        is_enough.set()
        await asyncio.gather(*clients)

        assert not pool.metrics.errors


@pytest.mark.parametrize(("word", "reason"), [("no", "returned False"), ("raises", "ValueError('the index is gone')")])
async def test_a_worker_that_is_not_well_twice_is_replaced(tmp_path: Path, word: str, reason: str) -> None:
    """Its replacement is there first; one that is well again is kept."""
    async with running(tmp_path) as pool:
        await pool.start()
        sick = int(await pool.ask_body(f"sick:{word}".encode()))

        await until(lambda: checks(pool)["failed"] >= 1, "it said so")
        view = views(pool)[0]
        assert view is not None
        if view.state == "failing":  # not replaced yet
            assert reason in view.reason
        await until(lambda: pool.metrics.worker_recycles["unhealthy"] == 1, "it was replaced")
        well = int(await pool.ask_body(b"who"))
        await until(lambda: pool.pids == [well], "the first one is gone")

        assert well != sick
        assert not pool.metrics.worker_deaths
        assert not pool.metrics.errors
        passed = checks(pool)["passed"]
        await until(lambda: checks(pool)["passed"] > passed + 2, "the replacement is well")
        assert pool.metrics.worker_recycles["unhealthy"] == 1


async def test_one_failure_is_forgiven(tmp_path: Path) -> None:
    """A check may meet a moment."""
    async with running(tmp_path) as pool:
        await pool.start()
        pid = await pool.ask_body(b"sick:once")

        await until(lambda: checks(pool)["failed"] == 1 and checks(pool)["passed"] >= 3, "it was well again")

        assert await pool.ask_body(b"who") == pid
        assert not pool.metrics.worker_recycles


async def test_a_call_that_hangs_has_the_response_limit(tmp_path: Path) -> None:
    """An idle worker: no request waits behind it, and another worker answers."""
    async with running(tmp_path, workers=2, response_timeout_s=1.0) as pool:
        await pool.start()
        sick = int(await pool.ask_body(b"sick:hangs"))

        await until(lambda: pool.metrics.worker_deaths["response_timeout"] == 1, "it was ended")

        assert not pool.metrics.errors
        answered = {int(await pool.ask_body(b"who")) for _ in range(5)}
        assert sick not in answered


async def test_requests_behind_a_call_that_hangs_are_answered_by_the_next_worker(tmp_path: Path) -> None:
    """The worker was busy when it was asked: what was sent behind the question is not to blame."""
    async with running(tmp_path, response_timeout_s=1.0, queue_size=1000) as pool:
        await pool.start()
        is_enough = asyncio.Event()

        async def client() -> None:
            while not is_enough.is_set():
                await pool.ask_body(b"slow")

        clients = [asyncio.create_task(client()) for _ in range(8)]
        await until(lambda: checks(pool)["passed"] >= 1, "it is asked though it is busy")
        await pool.ask_body(b"sick:hangs")
        await until(lambda: pool.metrics.worker_deaths["response_timeout"] == 1, "it was ended")
        is_enough.set()
        await asyncio.gather(*clients)

        assert not pool.metrics.errors
        death = pool.pool.last_death
        assert death is not None
        assert "responseTimeout" in death.detail


async def test_a_batch_that_hangs_before_the_call_is_to_blame_itself(tmp_path: Path) -> None:
    """The worker was asked behind it: its request fails, and is not run again."""
    async with running(tmp_path, response_timeout_s=1.0) as pool:
        await pool.start()

        told = await pool.ask(b"hang")

        assert isinstance(told, WorkerDied)
        assert pool.metrics.retried == 0
        death = pool.pool.last_death
        assert death is not None
        assert "health()" not in death.detail


async def test_with_job_tickets_the_call_has_no_request_refused(tmp_path: Path) -> None:
    """The only worker is asked nearly all the time, and takes requests meanwhile."""
    async with running(tmp_path, use_job_ticket=True) as pool:
        await pool.start()
        await pool.ask_body(b"sick:naps")

        async with asyncio.timeout(30):
            while checks(pool)["passed"] < 4:
                await pool.ask_body(b"who")
                await asyncio.sleep(0.03)  # the worker is idle when it is asked

        assert not pool.metrics.refused
        assert not checks(pool)["failed"]


async def test_a_worker_that_ends_in_the_call_is_started_again(tmp_path: Path) -> None:
    """As any that crashes."""
    async with running(tmp_path) as pool:
        await pool.start()
        await pool.ask_body(b"sick:dies")

        await until(lambda: sum(pool.metrics.worker_deaths.values()) == 1, "it ended")

        await pool.ask_body(b"who")
        assert not pool.metrics.errors


async def test_a_function_of_the_handlers_module_will_do(tmp_path: Path) -> None:
    """Where the handler is a function itself."""
    async with running(tmp_path, MODULE) as pool:
        await pool.start()
        await until(lambda: checks(pool)["passed"] >= 1, "it is well")

        pool.file("sick").touch()

        await until(lambda: checks(pool)["failed"] >= 1, "it is not")
        pool.file("sick").unlink()


async def test_a_declared_handler_has_it_too_as_a_coroutine(tmp_path: Path) -> None:
    """It runs to its end."""
    async with running(tmp_path, DECLARED) as pool:
        await pool.start()
        await until(lambda: checks(pool)["passed"] >= 1, "it is well")

        assert await pool.ask_body(b"sick") == b"sick"

        await until(lambda: pool.metrics.worker_recycles["unhealthy"] == 1, "it was replaced")


async def test_a_handler_without_the_method_is_warned_of_and_not_asked(tmp_path: Path) -> None:
    """The key alone does nothing."""
    async with running(tmp_path, LOOSE) as pool:
        await pool.start()

        assert pool.pool.warnings == ["healthInterval is not used: the handler has no health()"]
        assert views(pool) == [None]


async def test_without_the_key_a_method_of_that_name_is_never_called(tmp_path: Path) -> None:
    """It may mean something else in handlers that were written before."""
    async with running(tmp_path, health_interval_s=0.0) as pool:
        await pool.start()
        for _ in range(20):
            await pool.ask_body(b"slow")

        assert "health" not in pool.file("notes").read_text().split()
        assert views(pool) == [None]
        assert pool.metrics.read_gauges().failing is None


async def test_a_worker_of_coroutines_is_asked_beside_its_batches(tmp_path: Path) -> None:
    """A request that runs for long keeps no check waiting; a check that hangs ends the worker."""
    async with running(
        tmp_path, COROUTINES, is_concurrent=True, load={"is_concurrent": True}, response_timeout_s=2.0
    ) as pool:
        await pool.start()
        waits = pool.send(b"wait")
        await until(lambda: checks(pool)["passed"] >= 3, "it was asked while a request runs")
        pool.file("go").touch()
        await waits.told()
        await until(lambda: checks(pool)["passed"] >= 5, "and while none does")

        assert await pool.ask_body(b"hang") == b"hang"
        await until(lambda: pool.metrics.worker_deaths["response_timeout"] == 1, "it was ended")
        assert await pool.ask_body(b"again") == b"again"


async def test_a_worker_in_steps_is_asked_between_two_of_them(tmp_path: Path) -> None:
    """Though it always has a request that goes on."""
    async with running(tmp_path, STEPS, continuous_batching=True, batch_size=2, load={"is_continuous": True}) as pool:
        await pool.start()
        endless = pool.send(b"x")
        await endless.piece()

        await until(lambda: checks(pool)["passed"] >= 3, "it was asked between steps")

        pool.file("go").touch()
        await endless.told()
        assert not pool.metrics.errors
