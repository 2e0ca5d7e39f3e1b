"""Tests for pools whose workers are on a Ray cluster of two real nodes: what becomes of requests when one is lost."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import psutil
import pytest

from marserve.errors import LoadFailed, MarserveError
from marserve.messages import Answer
from marserve.pool.launchers.remote import cluster as ray_cluster
from support.commands import addresses, type_in
from support.pages import block
from support.processes import living, until, until_blocking
from support.ray_cluster import LocalCluster, needs_ray
from support.remote_pools import Gate, RemotePool
from support.running_pool import Sent
from support.server import free_ports, make_archive

# The first test waits for the cluster, whose nodes have 90 s each to appear.
pytestmark = [pytest.mark.anyio, pytest.mark.system, needs_ray, pytest.mark.timeout(300)]

LONG_S = 60.0
# How soon a loss is noticed, as promised, and three times that beside whatever else this machine does.
NOTICED_S = 3.0
AT_MOST_S = 3 * NOTICED_S
PAGE = "docs/deploy/ray.md"
PAGES_HANDLER = """
import os

def handle(data, context):
    return [f"{os.getpid()} {bytes(row['body']).decode()}" for row in data] if data else None
"""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A head, and two nodes with two CPUs each."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder, LocalCluster(Path(folder)) as made:
        made.add(2)
        made.add(2)
        yield made


@pytest.fixture(autouse=True)
def _agents_may_start_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent is a new interpreter that imports ray: beside many others it took longer than a server waits."""
    monkeypatch.setattr(ray_cluster, "AGENT_START_S", 3 * ray_cluster.AGENT_START_S)


@dataclass
class Crowd:
    """Sends requests, each with a body of its own, until told to stop; afterwards says what became of them."""

    running: RemotePool
    sent: dict[str, Sent] = field(default_factory=dict)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Crowd:
        self._task = asyncio.create_task(self._send())
        await until(lambda: len(self.sent) > 20, "requests under way")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _send(self) -> None:
        while True:
            for _ in range(4):
                body = f"request {len(self.sent)}"
                self.sent[body] = self.running.send(body.encode())
            await asyncio.sleep(0.005)

    async def lost(self) -> list[object]:
        """What came of those that were not answered with what they had said."""
        told = {body: await sent.told(LONG_S) for body, sent in self.sent.items()}
        return [end for body, end in told.items() if not isinstance(end, Answer) or end.body != body.encode()]


async def test_workers_are_spread_over_the_nodes_and_answer(cluster: LocalCluster, tmp_path: Path) -> None:
    """Two workers are on two nodes, describe has each one's node, and what they print and raise is in the model log.

    Bodies that span many records pass both ways.
    """
    size = 5_000_000
    async with RemotePool(tmp_path, cluster.address, workers=2, load={"max_answer_bytes": 2 * size}) as running:
        await running.start()

        assert len(set(running.nodes)) == 2
        assert await running.ask_body(b"hello") == b"hello"
        assert {int(await running.ask_body(b"pid")) for _ in range(10)} <= set(running.pids)
        assert all("on node" in view.how_started for view in running.pool.workers())

        body = base64.b64encode(os.urandom(size))[:size]
        answer = await running.ask(body, timeout_s=LONG_S)

        assert isinstance(answer, Answer), answer
        assert answer.body == body
        assert isinstance(await running.ask(b"raise a question"), MarserveError)
        await until(lambda: any("told to raise a question" in line for line in running.log.texts), "the traceback")
        assert "initialising m" in running.log.texts


def test_whoever_follows_the_page_has_workers_on_two_nodes(cluster: LocalCluster, tmp_path: Path) -> None:
    """Its configuration and its commands, as they stand there."""
    store = tmp_path / "model_store"
    store.mkdir()
    make_archive(store / "digits.mar", PAGES_HANDLER, config=block(PAGE, "config"))
    variables = {
        **addresses(*free_ports(5)),
        "RAY_ADDRESS": cluster.address,  # what ray_address=auto finds
        "MARSERVE_RAY_CACHE": str(tmp_path / "nodes"),
        "TMPDIR": str(tmp_path),
    }
    programs = Path(sys.executable).parent
    try:
        started = type_in(block(PAGE, "start"), tmp_path, programs, variables)
        assert started.returncode == 0, started.stdout + started.stderr
        until_blocking(
            lambda: type_in(block(PAGE, "look"), tmp_path, programs, variables).stdout.count("READY") == 2,
            "two workers",
            timeout_s=60,
        )
        looked = type_in(block(PAGE, "look"), tmp_path, programs, {**variables, "COLUMNS": "200"})
    finally:
        stopped = type_in("marserve stop", tmp_path, programs, variables)

    nodes = {line.partition("(")[2].partition(")")[0] for line in looked.stdout.splitlines() if "READY" in line}
    assert "node" in looked.stdout
    assert len(nodes - {""}) == 2, looked.stdout
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr


@pytest.mark.long
async def test_packed_workers_share_a_node(cluster: LocalCluster, tmp_path: Path) -> None:
    """With `pack` the second worker goes where the first is."""
    async with RemotePool(tmp_path, cluster.address, workers=2, ray={"placement": "pack"}) as running:
        await running.start()

        assert len(set(running.nodes)) == 1


async def test_a_killed_worker_is_noticed_at_once_and_replaced_in_its_place(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Its agent says so and how it ended, and no request is lost; a wait for its silence would find a lost node."""
    async with RemotePool(tmp_path, cluster.address, workers=2) as running:
        await running.start()
        async with Crowd(running) as crowd:
            victim = running.pids[0]
            os.kill(victim, signal.SIGKILL)
            await until(lambda: running.deaths, "its death")
            await until(lambda: running.pool.ready_workers == 2, "its replacement", timeout_s=LONG_S)

        assert await crowd.lost() == []
        assert running.deaths == {"killed": 1}
        assert victim not in running.pids


async def test_a_lost_node_is_noticed_and_its_requests_run_elsewhere(cluster: LocalCluster, tmp_path: Path) -> None:
    """A node that loses its power takes workers with it, but no request; with room elsewhere they are replaced."""
    doomed = cluster.add(2, doomed=2)
    async with RemotePool(tmp_path, cluster.address, workers=1, most=3) as running:
        await running.start()
        running.pool.scale(3, 3)
        await running.pool.wait_until_ready()
        assert doomed[:8] in running.nodes
        lost_pids = [view.pid for view in running.pool.workers() if doomed[:8] in view.node]
        async with Crowd(running) as crowd:
            killed_at = time.monotonic()
            await asyncio.to_thread(cluster.kill, doomed)
            await until(lambda: running.deaths.get("node_lost", 0) >= len(lost_pids), "the loss")
            noticed_s = time.monotonic() - killed_at
            await until(lambda: running.pool.ready_workers == 3, "replacements elsewhere", timeout_s=LONG_S)

        assert await crowd.lost() == []
        assert noticed_s < AT_MOST_S
        assert doomed[:8] not in running.nodes
        assert not living(lost_pids)


async def test_a_connection_that_is_cut_without_a_word_is_noticed_on_both_sides(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Within 3 s the server has its requests run elsewhere, and the agent has ended its worker."""
    gate = Gate(lambda: running.cluster.listens_on)
    await gate.open()
    try:
        wish = {"advertise": f"127.0.0.1:{gate.port}"}
        async with RemotePool(tmp_path, cluster.address, workers=2, cluster=wish) as running:
            await running.start()
            cut_off = running.pids
            async with Crowd(running) as crowd:
                cut_at = time.monotonic()
                gate.freeze()
                await until(lambda: running.deaths.get("node_lost") == 2, "the loss")
                noticed_s = time.monotonic() - cut_at
                await until(lambda: not living(cut_off), "the ends of the workers that were cut off")
                await until(lambda: running.pool.ready_workers == 2, "new ones", timeout_s=LONG_S)

            assert await crowd.lost() == []
            assert noticed_s < AT_MOST_S
            assert gate.passed == 4
            await running.pool.stop()
            await gate.close()
    finally:
        await gate.close()


@pytest.mark.long
async def test_a_stopped_agent_counts_as_lost(cluster: LocalCluster, tmp_path: Path) -> None:
    """A machine that hangs closes nothing; its worker ends with its agent, by Ray."""
    async with RemotePool(tmp_path, cluster.address, workers=2) as running:
        await running.start()
        pid = running.pids[0]
        agent = next(each for each in psutil.Process(pid).parents() if "ray::" in " ".join(each.cmdline()))
        async with Crowd(running) as crowd:
            stopped_at = time.monotonic()
            agent.suspend()
            await until(lambda: running.deaths, "the loss")
            noticed_s = time.monotonic() - stopped_at
            await until(lambda: running.pool.ready_workers == 2, "its replacement", timeout_s=LONG_S)

        assert await crowd.lost() == []
        assert running.deaths == {"node_lost": 1}
        assert noticed_s < NOTICED_S
        await until(lambda: not living([pid, agent.pid]), "their ends")


async def test_a_worker_that_no_node_has_room_for_waits_and_says_why(cluster: LocalCluster, tmp_path: Path) -> None:
    """A node that joins takes it."""
    async with RemotePool(tmp_path, cluster.address, workers=1, ray={"resources": {"wanted": 1}}) as running:
        running.pool.start()
        await until(lambda: running.pool.workers()[0].waits_for, "the reason", timeout_s=LONG_S)
        reason = running.pool.workers()[0].waits_for
        joined = cluster.add(1, wanted=1)
        await until(lambda: running.pool.ready_workers == 1, "a worker on the new node", timeout_s=LONG_S)

        # Ray goes on naming a node that was killed for a while.
        assert re.fullmatch(
            r"it needs 1 CPU, 1 wanted; no node has that, the largest of \d has 2 CPU, 0 wanted", reason
        )
        assert running.nodes == [joined[:8]]


@pytest.mark.long
async def test_scaling_up_waits_for_resources_and_says_why(cluster: LocalCluster, tmp_path: Path) -> None:
    """A further worker waits for a further node, and meanwhile no request is lost."""
    async with RemotePool(tmp_path, cluster.address, workers=1, most=2, ray={"resources": {"bench": 1}}) as running:
        joined = cluster.add(1, bench=1)
        await running.start()
        async with Crowd(running) as crowd:
            running.pool.scale(2, 2)
            await until(lambda: running.pool.workers()[1].waits_for, "the reason of the second", timeout_s=LONG_S)
            assert "free now: " in running.pool.workers()[1].waits_for
            another = await asyncio.to_thread(cluster.add, 1, bench=1)
            await until(lambda: running.pool.ready_workers == 2, "a worker on a node that joins", timeout_s=LONG_S)

        assert await crowd.lost() == []
        assert running.nodes == [joined[:8], another[:8]]


@pytest.mark.long
async def test_a_node_on_which_no_worker_can_start_is_passed_over(cluster: LocalCluster, tmp_path: Path) -> None:
    """Its cache cannot be written: that is said, and the worker starts elsewhere. The load has not failed."""
    (tmp_path / "file").touch()
    unfit = cluster.add(4, variables={"XDG_CACHE_HOME": str(tmp_path / "file")})
    try:
        async with RemotePool(tmp_path, cluster.address, workers=1, cluster={"cache": ""}) as running:
            await running.start()

            (worker,) = running.pool.workers()
            assert unfit[:8] not in worker.node
            assert running.deaths == {"node_unfit": 1}
            assert worker.last_death is not None
            assert unfit[:8] in worker.last_death.detail
            assert "ray_cache" in worker.last_death.detail
    finally:
        cluster.kill(unfit)


@pytest.mark.long
async def test_where_every_node_is_unfit_the_load_fails_with_the_reason(cluster: LocalCluster, tmp_path: Path) -> None:
    """After a few tries, whatever nodes there are."""
    (tmp_path / "file").touch()
    async with RemotePool(tmp_path, cluster.address, workers=1, cluster={"cache": str(tmp_path / "file")}) as running:
        with pytest.raises(LoadFailed) as failed:
            await running.start()

        assert f"{tmp_path / 'file'} cannot be used (Not a directory)" in failed.value.reason
        assert running.deaths == {"node_unfit": 3}


@pytest.mark.long
async def test_a_node_that_leaves_while_a_worker_starts_there_does_not_fail_the_load(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Neither before nor after its agent has connected."""
    source = """
    import pathlib, time
    here = pathlib.Path(__file__).parent
    if not (here / "seen").exists():
        (here / "seen").touch()
        time.sleep(600)

    def handle(data, context):
        return [bytes(row["body"]) for row in data] if data else None
    """
    doomed = cluster.add(2, loading=1)
    async with RemotePool(tmp_path, cluster.address, source, workers=1, ray={"resources": {"loading": 1}}) as running:
        starting = asyncio.create_task(running.start())
        await until(
            lambda: list((tmp_path / "nodes" / "models").glob("*/seen")), "a model that loads", timeout_s=LONG_S
        )
        await asyncio.to_thread(cluster.kill, doomed)
        await until(lambda: running.deaths.get("node_lost") == 1, "the loss", timeout_s=LONG_S)
        cluster.add(2, loading=1)
        await starting

        assert await running.ask_body(b"here") == b"here"
        assert not starting.exception()


@pytest.mark.long
async def test_a_cluster_that_is_not_there_refuses_with_the_setting(tmp_path: Path) -> None:
    """The error has the setting, its value, and what to do; soon, and nothing is left."""
    began = time.monotonic()
    async with RemotePool(
        tmp_path, "127.0.0.1:1", workers=1, cluster={"connect_timeout_s": 3.0}, max_restarts=1
    ) as running:
        with pytest.raises(LoadFailed):
            await running.start()

        death = running.pool.last_death
        assert death is not None
        assert death.cause == "load_failed"
        assert "ray_address is 127.0.0.1:1" in death.detail
        assert "ray start --head" in death.detail
    assert time.monotonic() - began < 20


@pytest.mark.long
async def test_what_a_model_that_does_not_load_prints_and_raises_is_told(cluster: LocalCluster, tmp_path: Path) -> None:
    """Lines, their levels, and the traceback of a model that does not load come from the node."""
    source = """
    import sys
    print("on its way")
    raise ValueError("no weights here")
    """
    async with RemotePool(tmp_path, cluster.address, source, workers=1, max_restarts=1) as running:
        with pytest.raises(LoadFailed):
            await running.start()

        death = running.pool.last_death
        assert death is not None
        assert "no weights here" in death.detail
        assert "Traceback" in death.traceback
        assert "on its way" in running.log.texts


async def test_a_workers_page_says_on_its_node_what_the_server_knows(cluster: LocalCluster, tmp_path: Path) -> None:
    """The handler hears that a request was cancelled; a worker past its response limit is ended."""
    async with RemotePool(tmp_path, cluster.address, workers=1, response_timeout_s=3.0) as running:
        await running.start()
        sent = running.send(b"until_cancelled")
        model = next((tmp_path / "nodes" / "models").glob("*[0-9a-f]"))
        await until((model / "working").exists, "its start")
        sent.job.cancel()
        await until((model / "noticed").exists, "the handler's notice")
        (pid,) = running.pids

        end = await running.ask(b"sleep 20")

        assert isinstance(end, MarserveError)
        await until(lambda: not living([pid]), "its end")
        await until(lambda: running.pool.ready_workers == 1, "its replacement")
        assert running.deaths == {"response_timeout": 1}


@pytest.mark.long
async def test_two_servers_front_one_cluster(cluster: LocalCluster, tmp_path: Path) -> None:
    """Neither sees, or ends, what is the other's."""
    async with RemotePool(tmp_path / "a", cluster.address, workers=1) as first:
        await first.start()
        async with RemotePool(tmp_path / "b", cluster.address, workers=1) as second:
            await second.start()
            assert await second.ask_body(b"second") == b"second"
        assert await first.ask_body(b"first") == b"first"
        assert first.deaths == {}


@pytest.mark.long
async def test_without_tls_it_works_too(cluster: LocalCluster, tmp_path: Path) -> None:
    """`ray_tls` false: the token alone says who an agent is."""
    async with RemotePool(tmp_path, cluster.address, workers=1, cluster={"is_encrypted": False}) as running:
        await running.start()

        assert await running.ask_body(b"plain") == b"plain"


async def test_an_archive_that_no_node_can_see_is_sent_by_the_server_once(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """What comes over the connection is checked, unpacked and kept by its digest."""
    running = RemotePool(tmp_path, cluster.address, workers=2, ray={"placement": "pack"})
    assert running.options.ray is not None
    assert running.options.ray.archive is not None
    with running.archive.open("rb") as file:  # of this process alone: what it leads to elsewhere is something else
        ref = msgspec.structs.replace(running.options.ray.archive, path=f"/proc/self/fd/{file.fileno()}")
        running.options = replace(running.options, ray=replace(running.options.ray, archive=ref))
        async with running:
            await running.start()

            assert await running.ask_body(b"here") == b"here"
            kept = [path.name for path in (tmp_path / "nodes" / "models").iterdir() if path.is_dir()]
            assert kept == [ref.sha256]
            assert list((tmp_path / "nodes" / "incoming").iterdir()) == []
