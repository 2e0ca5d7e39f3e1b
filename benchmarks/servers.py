"""Servers to measure: marserve as its users start it, and the bare ASGI application. Starts, asks, weighs, stops them.

Everything a server writes lies in the folder it is given, and nothing of it runs on once it was stopped.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import yaml
from load_generator import CannotMeasure, Load, LoadGenerator

from marserve.archive.writing.writer import ArchiveSpec, write_archive

HERE = Path(__file__).parent
HANDLERS = HERE / "handlers"
BESIDE = HERE / "beside"
START_LIMIT_S = 120.0
STOP_LIMIT_S = 20.0
POLL_S = 0.003
SETTLE_LIMIT_S, SETTLE_POLL_S = 2.0, 0.1
# Of what a server that does not serve said last; our own questions' lines would fill all of it.
LAST_LINES, ACCESS_LINE = 12, "ACCESS_LOG - "
# What would change how marserve, torch or Python run: a benchmark sets what it needs itself.
LEFT_OUT = ("MARSERVE_", "TS_", "OMP_", "MKL_", "OPENBLAS_", "PYTHON")


@dataclass(frozen=True, slots=True)
class Sample:
    """A request that a server can answer: what it is asked until it serves."""

    body: bytes = b"hello"
    content_type: str = "application/octet-stream"


class Server:
    """One running server and its processes. A context manager: whoever leaves it leaves nothing behind.

    `start_s` is the time from the start of its process to its first good answer, in seconds.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        port: int,
        path: str,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        sample: Sample | None = None,
    ) -> None:
        self.name, self.port, self.path = name, port, path
        self._sample = sample or Sample()
        self._log = folder / "output.log"
        self.start_s = 0.0
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(LEFT_OUT)}
        began = time.monotonic()
        # Appending: `forget_output` may then cut the file short while the server writes.
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env={**inherited, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_for_answer(began + START_LIMIT_S)
            self.start_s = time.monotonic() - began
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def ask(self, body: bytes | None = None, *, path: str = "", timeout_s: float = 30.0) -> tuple[int, bytes]:
        """Post one request (not given: the sample): status and body of its answer. Raises OSError or HTTPException."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            headers = {"Content-Type": self._sample.content_type}
            connection.request("POST", path or self.path, self._sample.body if body is None else body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def pids(self) -> list[int]:
        """The ids of its processes as they are now."""
        return [process.pid for process in self._processes()]

    def pss_bytes(self) -> dict[str, int]:
        """Proportional set size (`smaps_rollup`) of each process of the server, by `name (pid)`."""
        sizes = {}
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes[f"{process.name()} ({process.pid})"] = int(process.memory_full_info().pss)
        return sizes

    def cpu_s(self) -> float:
        """Seconds of a core that the server's living processes have used since they began."""
        total = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def own_cpu_s(self) -> float:
        """Seconds of a core that its first process has used, without its workers; by Linux's clock of the process."""
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def settle(self) -> None:
        """Let it finish what a load left behind, its log above all, so that it takes nothing from whoever is next."""
        deadline = time.monotonic() + SETTLE_LIMIT_S
        before = self.cpu_s()
        while time.monotonic() < deadline:
            time.sleep(SETTLE_POLL_S)
            now = self.cpu_s()
            if now - before <= SETTLE_POLL_S / 5:
                return
            before = now

    def forget_output(self) -> None:
        """Throw away what the server has printed: its access log grows by megabytes a second."""
        os.truncate(self._log, 0)

    def stop(self) -> None:
        """SIGTERM; after a limit, and for whatever the server left behind, SIGKILL."""
        with contextlib.suppress(psutil.NoSuchProcess):
            everything = self._processes()
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                print(f"{self.name} did not stop within {STOP_LIMIT_S:g} s and was killed", file=sys.stderr)
                self._process.kill()
            _, left = psutil.wait_procs(everything, timeout=2.0)
            for process in left:
                print(f"{self.name} left process {process.pid} behind; it was killed", file=sys.stderr)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()

    def _processes(self) -> list[psutil.Process]:
        first = psutil.Process(self._process.pid)
        return [first, *first.children(recursive=True)]

    def _wait_for_answer(self, deadline: float) -> None:
        """Ask until there is a good answer. Raises CannotMeasure with the server's last words."""
        seen = "no answer"
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                seen = f"it ended with status {self._process.returncode}"
                break
            try:
                status, body = self.ask()
            except (OSError, http.client.HTTPException) as error:
                seen = repr(error)
            else:
                if status == 200:
                    return
                seen = f"status {status}: {body[:200]!r}"
            time.sleep(POLL_S)
        said = [line for line in self._log.read_text("utf-8", "replace").splitlines() if ACCESS_LINE not in line]
        words = "\n".join(said[-LAST_LINES:])
        raise CannotMeasure(f"{self.name} does not serve ({seen}). It said last:\n{words}")


class Marserve(Server):
    """`marserve start --foreground` with one model, metrics and access log on; the rest as marserve has it."""

    def __init__(
        self,
        name: str,
        archive: Path,
        folder: Path,
        *,
        settings: Mapping[str, str] | None = None,
        sample: Sample | None = None,
        program: Sequence[str] = ("-m", "marserve.cli"),
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`settings` are further lines of its config.properties; `program` is what Python runs in place of the CLI.

        `port` is for inference, any free one where it is not given.
        """
        folder.mkdir(parents=True)
        free_port, self.management_port, self.metrics_port, self.grpc_port, grpc_management_port = free_ports(5)
        port = port or free_port
        config = folder / "config.properties"
        lines = {
            "inference_address": f"http://127.0.0.1:{port}",
            "management_address": f"http://127.0.0.1:{self.management_port}",
            "metrics_address": f"http://127.0.0.1:{self.metrics_port}",
            "grpc_inference_port": str(self.grpc_port),
            "grpc_management_port": str(grpc_management_port),
            "load_models": archive.name,
            **(settings or {}),
        }
        config.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        command = [sys.executable, *program, "start", "--foreground"]
        command += ["--model-store", str(archive.parent), "--config", str(config)]
        self._model = archive.stem
        path = f"/predictions/{archive.stem}"
        super().__init__(name, command, port, path, folder, sample=sample, environment=environment)

    def manage(self, method: str, target: str) -> tuple[int, bytes]:
        """One request to the management API: status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.management_port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, target)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def worker_pids(self) -> list[int]:
        """The process ids of the workers that have loaded the model, from describe."""
        return [worker["pid"] for worker in self.describe()["workers"] if worker["status"] == "READY"]

    def describe(self) -> dict[str, Any]:
        """What the management API says of the model."""
        described: list[dict[str, Any]] = json.loads(self.manage("GET", f"/models/{self._model}")[1])
        return described[0]

    def wait_for_workers(self, count: int) -> None:
        """Wait until `count` workers have loaded the model. Raises CannotMeasure."""
        deadline = time.monotonic() + START_LIMIT_S
        while len(self.worker_pids()) < count:
            if time.monotonic() > deadline:
                raise CannotMeasure(f"{self.name} has not brought {count} workers up within {START_LIMIT_S:g} s")
            time.sleep(0.05)


class Bound(Server):
    """`beside/bound.py`: as little as Python and uvicorn allow between a connection and a worker process."""

    def __init__(
        self, name: str, batch: int, folder: Path, *, work: tuple[str, Path] | None = None, sample: Sample | None = None
    ) -> None:
        """`work` is a name of `handlers/workload.py` and the folder of its model; without it the worker echoes."""
        folder.mkdir(parents=True)
        (port,) = free_ports(1)
        command = [sys.executable, str(BESIDE / "bound.py"), str(port), str(batch), *map(str, work or ())]
        super().__init__(name, command, port, "/predictions/echo", folder, sample=sample)


class BareAsgi(Server):
    """`bare_asgi.py` on uvicorn, as fast as that goes: uvloop, httptools, no access log."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "uvicorn", "bare_asgi:app", "--app-dir", str(HERE)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--loop", "uvloop", "--http", "httptools"]
        command += ["--no-access-log", "--log-level", "warning"]
        super().__init__("bare ASGI", command, port, "/", folder)


def make_archive(
    store: Path,
    model: str,
    handler: str,
    config: Mapping[str, Any],
    serialized_file: Path | None = None,
    extra_files: tuple[str, ...] = (),
    *,
    version: str = "1.0",
) -> Path:
    """Write `{model}.mar` into `store`: a handler of `handlers/` with this `model-config.yaml`.

    Another version than 1.0 is written as `{model}-{version}.mar`.
    """
    store.mkdir(parents=True, exist_ok=True)
    config_file = store / f"{model}-config.yaml"
    config_file.write_text(yaml.safe_dump(dict(config)))
    spec = ArchiveSpec(
        model,
        version,
        str(HANDLERS / handler),
        serialized_file=serialized_file,
        extra_files=extra_files,
        config_file=config_file,
    )
    if version == "1.0":
        archive = write_archive(spec, store, archive_format="zip-store")
    else:
        folder = store / "versions"
        folder.mkdir()
        archive = write_archive(spec, folder, archive_format="zip-store").rename(store / f"{model}-{version}.mar")
        folder.rmdir()
    config_file.unlink()
    return archive


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def one_piece(generator: LoadGenerator, server: Server, **words: Any) -> Load:
    """A piece of load (`LoadGenerator.run`) on a server that must answer all of it, and that rests again afterwards.

    Raises CannotMeasure.
    """
    load = generator.run(server.port, server.path, **words).must_be_clean(server.name)
    server.settle()
    server.forget_output()
    return load
