"""Tests with a server and a Ray cluster, both as users have them: refusals, a server killed, what the page says.

`tests/pool/launchers/remote/test_ray_launcher.py` follows the page: it has a cluster.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from marserve.app.server import LAST_WORKERS_S
from marserve.settings import load_settings
from support.commands import type_in
from support.pages import block
from support.processes import living, until_blocking
from support.ray_cluster import LocalCluster, needs_ray
from support.server import Server, make_archive

pytestmark = pytest.mark.system

PAGE = "docs/deploy/ray.md"
HANDLER = """
import os

def handle(data, context):
    return [f"{os.getpid()} {bytes(row['body']).decode()}" for row in data] if data else None
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A head, and two nodes with two CPUs each."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder, LocalCluster(Path(folder)) as made:
        made.add(2)
        made.add(2)
        yield made


@needs_ray
def test_the_commands_for_nodes_are_rays_own(tmp_path: Path) -> None:
    """Ray's command line takes them; they are not run, for nodes of one machine need more words than these."""
    (tmp_path / "parse.py").write_text(
        "import shlex, sys\n"
        "from ray.scripts.scripts import cli\n"
        "for line in sys.argv[1:]:\n"
        "    program, command, *words = shlex.split(line)\n"
        "    assert program == 'ray'\n"
        "    cli.commands[command].make_context(command, words)\n"
        "    print(command)\n"
    )
    head, node = block(PAGE, "head").strip(), block(PAGE, "node").strip()

    ran = type_in(f"python parse.py '{head}' '{node}'", tmp_path, Path(sys.executable).parent)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["start", "start"]


def test_the_extra_of_the_page_is_one_of_ours() -> None:
    """`pip install` would only warn of one that is not there."""
    import tomllib

    document = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))

    assert block(PAGE, "install").strip() == 'pip install "marserve[ray]"'
    assert any(each.startswith("ray") for each in document["project"]["optional-dependencies"]["ray"])


def test_the_settings_of_the_page_are_taken(tmp_path: Path) -> None:
    """Every key is one, every value may be."""
    file = tmp_path / "config.properties"
    (tmp_path / "store").mkdir()
    file.write_text(block(PAGE, "settings") + f"model_store={tmp_path / 'store'}\n")

    settings = load_settings("marserve", {"ts_config": str(file)}, {}, tmp_path)

    assert settings.ray_address == "10.0.0.5:6379"
    assert settings.ray_listen == "10.0.0.5:7443"
    assert settings.ray_cache == "/var/cache/marserve/node"


@pytest.mark.long
@needs_ray
def test_a_cluster_that_is_not_there_refuses_the_model_and_not_the_server(tmp_path: Path) -> None:
    """The sentence has the setting, its value and the next step; describe has it, too."""
    settings = {"ray_address": "127.0.0.1:1", "ray_connect_timeout": "3"}
    with Server(tmp_path, settings=settings) as server:
        make_archive(server.store / "m.mar", HANDLER, config="launcher: ray\nmaxRetryTimeoutInSec: 0\n")

        refused = server.register("m.mar")

        assert refused.status_code == 500
        until_blocking(lambda: "ray_address is 127.0.0.1:1" in server.output(), "the sentence in the log")
        assert "ray start --head" in server.output()
        assert server.client.get(f"{server.inference}/livez").status_code == 200


@needs_ray
def test_a_worker_of_several_processes_is_refused_with_a_reason(tmp_path: Path) -> None:
    """What cannot run on other machines says so, before the cluster is asked."""
    with Server(tmp_path, settings={"ray_address": "127.0.0.1:1"}) as server:
        config = "launcher: ray\nparallelType: tp\nparallelLevel: 2\n"
        make_archive(server.store / "group.mar", HANDLER, config=config)

        refused = server.register("group.mar")

        assert refused.status_code == 400
        assert "launcher is ray and parallelType tp" in refused.json()["message"]


@pytest.mark.long
@needs_ray
def test_a_server_that_is_killed_leaves_no_worker_on_the_nodes(cluster: LocalCluster, tmp_path: Path) -> None:
    """Agents hear nothing more and end what they had; the next server gets the resources."""
    settings = {"ray_address": cluster.address, "ray_cache": str(tmp_path / "nodes")}
    first = Server(tmp_path / "first", settings=settings)
    first.start()
    try:
        make_archive(first.store / "m.mar", HANDLER, config="launcher: ray\nworkerResources: {cpus: 2}\n")
        assert first.register("m.mar", initial_workers=2).status_code == 200
        described = first.client.get(f"{first.management}/models/m").json()[0]
        pids = [worker["pid"] for worker in described["workers"]]
        assert len({worker["node"] for worker in described["workers"]}) == 2
    finally:
        assert first.process is not None
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        first.client.close()
    until_blocking(lambda: not living(pids), "the workers' ends")

    (tmp_path / "second").mkdir()
    with Server(tmp_path / "second", store=first.store, settings=settings) as second:
        assert second.register("m.mar", initial_workers=2).status_code == 200
        answer = second.client.post(f"{second.inference}/predictions/m", content=b"again")
        assert answer.text.endswith(" again")


@pytest.mark.long
@needs_ray
def test_sigterm_ends_a_server_whose_agents_are_stopped_within_its_time(cluster: LocalCluster, tmp_path: Path) -> None:
    """By SIGSTOP, with their templates and workers and the server's own program for the cluster; nothing is left."""
    server = Server(tmp_path, settings={"ray_address": cluster.address, "ray_cache": str(tmp_path / "nodes")})
    with server:
        make_archive(server.store / "m.mar", HANDLER, config="launcher: ray\n")
        assert server.register("m.mar", initial_workers=2).status_code == 200
        stopped = {process.pid for process in server.family()[1:]}
        for pid in server.worker_pids("m"):
            worker = psutil.Process(pid)
            template, agent, *_ = worker.parents()
            stopped |= {worker.pid, template.pid, agent.pid}
        assert len(stopped) >= 4
        for pid in stopped:
            psutil.Process(pid).suspend()

        began = time.monotonic()
        server.stop()
        took = time.monotonic() - began

    assert took < LAST_WORKERS_S
    until_blocking(lambda: not living(stopped), "all that was stopped is gone", timeout_s=20)
