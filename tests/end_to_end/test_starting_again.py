"""Starting again: after a kill at any moment, on folders that are half-written or gone, and while it loads."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import psutil
import pytest

from marserve.app.server import LOAD_MODELS_FIRST_S
from support.file_server import Answer, file_server
from support.prepared import Prepared
from support.processes import left_of
from support.prompt_end import kept_waiting_s, run_to_end
from support.server import Server, make_archive, poll

ECHO = """
def handle(rows, context):
    if rows is None:
        return None
    return [bytes(row["body"]) for row in rows]
"""
# Python code, all the time: what a large model's loading does to a machine of few cores.
HARD_TO_LOAD = """
import time
class Hard:
    def initialize(self, context):
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
    def handle(self, data, context):
        return ["answered"] * len(data)
"""
SHARED_MEMORY = Path("/dev/shm")
STARTS_WITHIN_S = 30.0
# RELIABILITY F6: what a start that fails, or leaves a model out, may take of a machine that does nothing else.
LIMIT_S = 2.0
COMPILED = {
    "PYTHONDONTWRITEBYTECODE": ""
}  # what Python imports is compiled once, also where one has asked for the other


class Killed(Server):
    """A server with snapshots and a socket file beside its addresses, that may be killed at any time."""

    def __init__(self, folder: Path, origin: str) -> None:
        settings = {
            "load_models": "echo.mar",
            "state_folder": str(folder / "state"),
            "download_cache": str(folder / "cache"),
            "allowed_urls": re.escape(origin) + "/.*",
        }
        super().__init__(folder, settings=settings)
        make_archive(self.store / "echo.mar", ECHO)
        make_archive(self.store / "further.mar", ECHO)
        (folder / "state").mkdir()
        self._settings["metrics_address"] = f"unix:{folder / 'metrics.sock'}"

    def command(self) -> list[str]:
        """Snapshots are kept."""
        return [word for word in super().command() if word != "--ncs"]

    def begin(self) -> subprocess.Popen[bytes]:
        """Start it, and wait for nothing."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("TS_", "MARSERVE_"))}
        with self._output.open("ab") as output:
            return subprocess.Popen(
                self.command(),
                cwd=self.folder,
                env={**environment, "TMPDIR": str(self.temporary), "TEMP": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def trickle(data: bytes, closing: threading.Event) -> Answer:
    """An archive that takes its time to come."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):  # who asked was killed
            handler.send_response(200)
            handler.send_header("content-length", str(len(data)))
            handler.end_headers()
            for begin in range(0, len(data), 4096):
                handler.wfile.write(data[begin : begin + 4096])
                closing.wait(0.004)

    return answer


def keep_busy(server: Server, url: str, is_over: threading.Event) -> None:
    """Predict, fetch, register, scale and unregister, whatever comes of it."""
    with httpx.Client(timeout=5) as client:
        while not is_over.is_set():
            for method, target in (
                ("POST", f"{server.inference}/predictions/echo"),
                ("POST", f"{server.management}/models?url=further.mar&initial_workers=1"),
                ("POST", f"{server.management}/models?url={url}&initial_workers=0"),
                ("PUT", f"{server.management}/models/echo?min_worker=2&max_worker=2"),
                ("PUT", f"{server.management}/models/echo?min_worker=1&max_worker=1"),
                ("DELETE", f"{server.management}/models/further"),
            ):
                with contextlib.suppress(httpx.HTTPError):
                    client.request(method, target)
            is_over.wait(0.01)


def kill_at_random(folder: Path, *, times: int, seed: int) -> None:
    """Start and kill, again and again; the last start serves as the first one did and leaves nothing."""
    with file_server() as files:
        archive = make_archive(folder / "fetched.mar", ECHO, weights=random.Random(0).randbytes(200_000)).read_bytes()
        urls = [files.on(f"/fetched{number}.mar", trickle(archive, files.closing)) for number in range(times + 1)]
        kill_while_it_fetches(Killed(folder, files.url), urls, archive, seed)


def kill_while_it_fetches(server: Killed, urls: list[str], archive: bytes, seed: int) -> None:
    """A kill for each address but the last, which the last start fetches whole."""
    dice = random.Random(seed)
    folder = server.folder
    segments = set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()
    server.start()
    took_s = 1.0  # the start that follows may be interrupted at any point of its way
    server.stop(check=False)
    family: list[psutil.Process] = []
    for url in urls[:-1]:
        began = time.monotonic()
        process = server.begin()
        is_over = threading.Event()
        busy = threading.Thread(target=keep_busy, args=(server, url, is_over))
        busy.start()
        is_over.wait(dice.uniform(0, 2 * took_s))
        family += server.family(process.pid)
        process.kill()
        process.wait()
        is_over.set()
        busy.join()
        assert time.monotonic() - began < STARTS_WITHIN_S
        for path in server.store.glob("fetched*"):
            assert path.read_bytes() == archive, f"{path.name} is not whole; seed {seed}"
    alive = left_of(family, 10)
    assert not alive, f"left running: {alive}"

    server.start()
    for _ in poll(STARTS_WITHIN_S, "the model of the start serves"):
        if server.client.get(f"{server.inference}/readyz").status_code == 200:
            break
    assert server.predict("echo", b"x").content == b"x", f"seed {seed}"
    fetched = server.register(urls[-1], model_name="fetched")
    assert fetched.status_code == 200, f"seed {seed}: {fetched.text}"
    assert server.predict("fetched", b"x").content == b"x", f"seed {seed}"
    server.metrics = server.inference  # a socket file has no port that `stop` could look at
    server.stop()
    server.client.close()
    assert not (folder / "metrics.sock").exists()
    if SHARED_MEMORY.is_dir():
        assert {name for name in set(os.listdir(SHARED_MEMORY)) - segments if "marserve" in name} == set()


@pytest.mark.system
def test_a_kill_at_any_moment_keeps_no_start_from_working(tmp_path: Path) -> None:
    """PID file, sockets, unpacked archives, snapshots, shared memory: the next start finds its way with all of them."""
    kill_at_random(tmp_path, times=3, seed=random.SystemRandom().randrange(1_000_000))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_hundred_kills_keep_no_start_from_working(tmp_path: Path) -> None:
    """The same, until rare moments have come."""
    kill_at_random(tmp_path, times=100, seed=random.SystemRandom().randrange(1_000_000))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_hundred_starts_and_stops_leave_nothing(tmp_path: Path) -> None:
    """RELIABILITY F4: exit 0 each, no file, socket, segment or process; `stop` looks at all of that."""
    server = Server(tmp_path, arguments=["--models", "echo.mar"])
    make_archive(server.store / "echo.mar", ECHO)
    segments = set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()
    descriptors = psutil.Process().num_fds()
    left: list[set[Path]] = []
    with contextlib.closing(server.client):
        for number in range(100):
            try:
                server.start()
                for _ in poll(STARTS_WITHIN_S, "the model serves"):
                    # Each second one is stopped as soon as it listens, while the model loads.
                    if server.predict("echo", b"x").status_code == 200 or number % 2:
                        break
            except BaseException:
                server.stop(check=False)
                raise
            server.stop()
            left.append({path.relative_to(tmp_path) for path in tmp_path.rglob("*")})
    assert left[-1] == left[0]
    assert str(tmp_path) not in Path("/proc/net/unix").read_text()
    assert psutil.Process().num_fds() <= descriptors + 2
    if SHARED_MEMORY.is_dir():
        assert {name for name in set(os.listdir(SHARED_MEMORY)) - segments if "marserve" in name} == set()


# ------------------------------------------------------------------------------------------- folders that are odd


def ends_with_one_sentence(server: Server, program: type[subprocess.Popen[bytes]] = Prepared) -> str:
    """Start what cannot: what it says last, after a few seconds, with a status of failure and nothing left behind."""
    server.client.close()
    folders = {"TMPDIR": str(server.temporary), "TEMP": str(server.temporary)}
    for _ in range(2):
        with (server.folder / "said").open("w+") as said:
            status, took_s = run_to_end(
                server.command(),
                folder=server.folder,
                environment={**os.environ, **folders, **({} if program is Prepared else COMPILED)},
                stdout=said,
                stderr=said,
                timeout_s=30,
                program=program,
            )
            said.seek(0)
            text = said.read()
        if took_s < LIMIT_S:
            break  # else Python may have had to compile what it imports; it has by now
    assert took_s < LIMIT_S
    assert status in (1, 2)
    assert "Traceback" not in text
    assert not list(server.temporary.glob("marserve-*"))
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize("entry", ["torchserve", "marserve"])
def test_a_store_that_is_gone_is_one_sentence(tmp_path: Path, entry: str) -> None:
    """A volume that was not mounted: the key or the flag, and the folder."""
    server = Server(tmp_path, entry=entry)
    shutil.rmtree(server.store)

    said = ends_with_one_sentence(server, subprocess.Popen)  # its imports are within the limit, too

    assert re.search("model.store", said)
    assert str(server.store) in said


def test_a_store_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    """It is no folder, whatever it holds."""
    server = Server(tmp_path)
    server.store.rmdir()
    server.store.write_text("not a folder")

    assert str(server.store) in ends_with_one_sentence(server)


def test_folders_that_cannot_be_written_are_one_sentence(tmp_path: Path) -> None:
    """The log folder lies below a file here: also root cannot make it."""
    (tmp_path / "file").touch()
    server = Server(tmp_path, settings={"log_location": str(tmp_path / "file" / "logs")})

    said = ends_with_one_sentence(server)

    assert "log_location" in said
    assert str(tmp_path / "file" / "logs") in said


def test_a_preemption_file_that_is_there_is_one_sentence(tmp_path: Path) -> None:
    """Else it would drain as soon as it has begun, and be started again, for ever."""
    (tmp_path / "going").touch()

    said = ends_with_one_sentence(Server(tmp_path, settings={"preemption_file": str(tmp_path / "going")}))

    assert f"preemption_file is '{tmp_path / 'going'}', and that file is there already" in said


def test_half_an_archive_is_left_out_and_named_and_the_others_serve(tmp_path: Path) -> None:
    """A copy that was interrupted, and a store that lost a file: `/startupz` says which."""
    server = Server(tmp_path, arguments=["--models", "half.mar", "gone.mar", "echo.mar"])
    make_archive(server.store / "echo.mar", ECHO)
    whole = make_archive(tmp_path / "whole.mar", ECHO, weights=random.Random(0).randbytes(100_000)).read_bytes()
    (server.store / "half.mar").write_bytes(whole[: len(whole) // 2])
    for _ in range(2):
        server.stop()
        began = time.monotonic()
        server.start()
        assert server.process is not None
        took_s = time.monotonic() - began - kept_waiting_s(server.process.pid)
        if took_s < LIMIT_S:
            break
    try:
        for _ in poll(20, "the model serves"):
            if server.predict("echo", b"x").status_code == 200:
                break
        started = server.client.get(f"{server.inference}/startupz")
        reasons = " ".join(started.json()["reasons"])
    finally:
        server.stop()
        server.client.close()

    assert took_s < LIMIT_S
    assert "half.mar was not loaded" in reasons
    assert "gone.mar was not loaded" in reasons


# ------------------------------------------------------------------------------------------- while it loads


@contextlib.contextmanager
def loading(folder: Path, models: int) -> Iterator[Server]:
    """A server that was just started with so many models that take their time."""
    server = Server(folder, arguments=["--models", "all"])
    for number in range(models):
        make_archive(server.store / f"hard{number}.mar", HARD_TO_LOAD, config="minWorkers: 1\nmaxWorkers: 1\n")
    with server:
        yield server


@pytest.mark.system
def test_liveness_answers_while_eight_models_load_side_by_side(tmp_path: Path) -> None:
    """A kubelet's probe waits one second: each is answered in that, and readiness is not said too early."""
    spans: list[float] = []
    with loading(tmp_path, 8) as server, ThreadPoolExecutor(1):
        not_ready = server.client.get(f"{server.inference}/readyz")
        processes = 0
        for _ in poll(60, "all are loaded"):
            began = time.monotonic()
            assert server.client.get(f"{server.inference}/livez", timeout=5).status_code == 200
            spans.append(time.monotonic() - began)
            processes = max(processes, len(server.family()))
            if server.client.get(f"{server.inference}/readyz").status_code == 200:
                break
        assert server.predict("hard7").text == "answered"

    assert not_ready.status_code == 503
    assert sum(span > 1 for span in spans) <= len(spans) // 100
    assert len(spans) >= 3


SHORT_LOAD = """
import time


def handle(rows, context):
    if rows is None:
        time.sleep(0.3)
        return None
    return ["answered"] * len(rows)
"""


def test_nobody_is_let_in_before_a_model_that_loads_in_a_moment_answers(tmp_path: Path) -> None:
    """What spreads requests over two servers is refused until then, and asks the other one.

    A moment is a second: on a machine that is busy for longer, connections are accepted before the model is loaded.
    """
    server = Server(tmp_path, arguments=["--models", "all"])
    make_archive(server.store / "short.mar", SHORT_LOAD, config="minWorkers: 1\nmaxWorkers: 1\n")

    began = time.monotonic()
    with server:  # begun, and seen to accept
        waited_s = time.monotonic() - began
        ready = server.client.get(f"{server.inference}/readyz")
        if ready.status_code == 200:
            [version] = server.client.get(f"{server.management}/models/short").json()
            assert [worker["status"] for worker in version["workers"]] == ["READY"]

    assert ready.status_code == 200 or waited_s > LOAD_MODELS_FIRST_S, ready.text
