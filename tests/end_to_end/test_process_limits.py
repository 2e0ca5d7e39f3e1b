"""Limits of processes, threads and files, also when they are set at run time, never end a server by a signal."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from support.pids import PidsGroup, pids_group
from support.server import Server, make_archive, poll

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups and prlimit are Linux's")

MODEL = """
import os, time
def handle(rows, context):
    if rows is None:
        return None
    word = bytes(rows[0]["body"])
    if word == b"die":
        os._exit(3)
    if word == b"environment":
        return [os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "unset")]
    if word == b"fork":
        until = time.monotonic() + 15
        while time.monotonic() < until:
            try:
                pid = os.fork()
            except OSError:
                time.sleep(0.05)
                continue
            if pid == 0:
                os.setsid()
                time.sleep(60)
                os._exit(0)
    return [word]
"""
# With a fresh start every worker is a fork of the server's own, and a program that measures is one of the loop's.
CONFIG = "workerStart: fresh\nretryOnWorkerDeath: false\n"


def limited_server(folder: Path, **environment: str) -> Server:
    """A server with a model, gRPC, and a program that it starts each second."""
    (folder / "figures.py").write_text("print()")
    server = Server(
        folder,
        settings={"system_metrics_cmd": str(folder / "figures.py"), "metric_time_interval": "1"},
        environment=environment,
    )
    make_archive(server.store / "m.mar", MODEL, config=CONFIG)
    return server


def die(server: Server) -> None:
    """Have the model's worker end."""
    assert server.predict("m", b"die").status_code == 500


def wait_for_death(server: Server, *words: str) -> None:
    """Wait until describe says of the model's worker why it cannot be started."""
    said = ""
    for _ in poll(30, f"a death that says {words}"):
        said = str(server.describe("m")["workers"])
        if all(word in said for word in words):
            return


def wait_for_worker(server: Server) -> None:
    """Wait until the model answers again."""
    for _ in poll(40, "a worker"):
        if server.predict("m", b"x").status_code == 200:
            return


@pytest.mark.system
def test_a_server_whose_limits_are_lowered_goes_on_and_ends_well(tmp_path: Path) -> None:
    """Forks fail with the limit named; with room the worker comes again; SIGTERM needs no new thread."""
    with limited_server(tmp_path) as server:
        server.register("m.mar")
        assert server.process is not None
        pid = server.process.pid

        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (24, before[1]))
        die(server)
        wait_for_death(server, "no worker could be started", "may open 24 files (RLIMIT_NOFILE)")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        wait_for_worker(server)

        with pids_group(server.family()) as group:
            group.allow_none()
            die(server)
            wait_for_death(server, "no worker could be started", "pids.max of its control group is")
            assert server.client.get(f"{server.management}/models").status_code == 200
            group.allow_all()
            wait_for_worker(server)

            group.allow_none()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (24, before[1]))
            server.stop()


def test_a_start_with_too_few_files_is_one_sentence(tmp_path: Path) -> None:
    """It names the limit and how it is raised."""
    server = Server(tmp_path)

    ended = subprocess.run(
        ["sh", "-c", 'ulimit -n 24; exec "$@"', "sh", *server.command()],
        env=server.environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    server.client.close()
    assert ended.returncode == 1
    (line,) = (ended.stdout + ended.stderr).strip().splitlines()
    assert "This process may open 24 files (RLIMIT_NOFILE), and a server needs 64 at least" in line


@pytest.mark.long
@pytest.mark.parametrize("time", [1, 2, 3])
def test_a_handler_that_forks_as_long_as_it_can_does_not_end_the_server(tmp_path: Path, time: int) -> None:
    """It ended by SIGABRT after 12 s, three times of three, while a library had handlers of forks in it."""
    with limited_server(tmp_path) as server:
        make_archive(server.store / "forks.mar", MODEL)
        server.register("m.mar")
        server.register("forks.mar")
        with pids_group(server.family()) as group:
            group.allow(60)
            asked = threading.Thread(target=_fork, args=(server.inference,))
            asked.start()
            for _ in poll(30, "all processes taken"):
                if group.is_full:
                    break
            die(server)
            # Its place is taken by the handler's next fork; by the worker's successor, if that was quicker.
            for _ in poll(30, "a death for want of processes"):
                if "pids.max" in str(server.describe("m")["workers"]):
                    break
                server.predict("m", b"die")
            assert "no worker could be started" in str(server.describe("m")["workers"])
            asked.join()

            assert server.process is not None
            assert server.process.poll() is None
            kill_forks(group, server)
            wait_for_worker(server)
            server.stop()


def _fork(inference: str) -> None:
    httpx.post(f"{inference}/predictions/forks", content=b"fork", timeout=60)


def kill_forks(group: PidsGroup, server: Server) -> None:
    """End what the handler forked, as an operator would."""
    group.allow_all()
    for process in server.family():
        if process.pid != server.process.pid and os.getpgid(process.pid) == process.pid and process.ppid() == 1:  # type: ignore[union-attr]
            process.kill()
