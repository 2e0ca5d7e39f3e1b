"""A real server in a process of its own, on ports that the system gave, in a folder of its own; and what it leaves.

`Server` starts `python -m marserve.cli.torchserve` (or `marserve start`) the way users do, waits until it is ready,
and on `stop()` proves that its processes, sockets and temporary folders are gone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from support.patience import pause_s
from support.prepared import Prepared
from support.processes import left_of

START_LIMIT_S = 60.0
STOP_LIMIT_S = 30.0


FIRST_PORT = 10_000
PORTS_IN_BLOCK = 400


def _first_system_port() -> int:
    """Where the ports begin that the system gives to outgoing connections and to who asks for any."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32_768


class _Ports:
    """A block of ports that is this process's until it ends: neither the system nor another test gives one of them to
    somebody else while a server that is to have it starts. The claim is a UDP socket at the block's first number, which
    is in nobody's way.
    """

    def __init__(self) -> None:
        self._turn: Iterator[int] = iter(())
        blocks = list(range(FIRST_PORT, _first_system_port() - PORTS_IN_BLOCK, PORTS_IN_BLOCK))
        random.SystemRandom().shuffle(blocks)
        for first in blocks:
            claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                claim.bind(("127.0.0.1", first))
            except OSError:
                claim.close()
                continue
            self._claim = claim
            self._turn = itertools.cycle(range(first, first + PORTS_IN_BLOCK))
            return

    def take(self, stack: contextlib.ExitStack) -> int:
        """The next port that nobody is bound to; where there is no block left, any that the system gives."""
        for port in itertools.chain(itertools.islice(self._turn, PORTS_IN_BLOCK), (0,)):
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                return int(sock.getsockname()[1])
        raise AssertionError("there is no free port")


_PORTS = _Ports()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that nobody else is given. The sockets are held until all are known, so that no
    port comes twice.
    """
    with contextlib.ExitStack() as stack:
        return [_PORTS.take(stack) for _ in range(count)]


def make_archive(
    path: Path,
    handler: str,
    *,
    name: str | None = None,
    version: str = "1.0",
    config: str | None = None,
    **files: bytes,
) -> Path:
    """A `.mar` with one handler module `handler.py` holding this source, a YAML configuration, and further files."""
    model: dict[str, Any] = {"modelName": name or path.stem, "modelVersion": version, "handler": "handler.py"}
    if config is not None:
        model["configFile"] = "model-config.yaml"
    manifest = {"createdOn": "01/02/2026 03:04:05", "runtime": "python", "model": model, "archiverVersion": "0.12.0"}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("handler.py", handler)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        if config is not None:
            archive.writestr("model-config.yaml", config)
        for member, content in files.items():
            archive.writestr(member, content)
    return path


class Server:
    """A server under test. Use it as a context manager."""

    client_timeout_s = 30.0

    def __init__(
        self,
        folder: Path,
        *,
        entry: str = "torchserve",
        store: Path | None = None,
        settings: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls` is what a client of https addresses trusts; without it they are http."""
        self.folder = folder
        self.entry = entry
        self.store = store or folder / "store"
        self.store.mkdir(parents=True, exist_ok=True)
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        ports = free_ports(5)
        scheme = "http" if tls is None else "https"
        self.inference, self.management, self.metrics = (f"{scheme}://127.0.0.1:{port}" for port in ports[:3])
        self.grpc_inference, self.grpc_management = (f"127.0.0.1:{port}" for port in ports[3:])
        self._settings = {
            "inference_address": self.inference,
            "management_address": self.management,
            "metrics_address": self.metrics,
            "grpc_inference_port": str(ports[3]),
            "grpc_management_port": str(ports[4]),
            "disable_token_authorization": "true",
            "enable_model_api": "true",
            "metrics_mode": "prometheus",
            **(settings or {}),
        }
        self._arguments = list(arguments)
        self._environment = dict(environment or {})
        self._output = folder / "console.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(timeout=self.client_timeout_s, verify=True if tls is None else tls)

    # ---------------------------------------------------------------------------------------------- life

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop(check=kind is None)
        finally:
            self.client.close()

    def command(self) -> list[str]:
        """What is run."""
        config = self.folder / "config.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in self._settings.items()))
        if self.entry == "torchserve":
            program = [sys.executable, "-m", "marserve.cli.torchserve", "--start", "--foreground", "--ncs"]
        else:
            program = [sys.executable, "-m", "marserve.cli", "start", "--foreground"]
        return [*program, "--ts-config", str(config), "--model-store", str(self.store), *self._arguments]

    @property
    def environment(self) -> dict[str, str]:
        """Its environment: no variable of the server's but those given, and a temporary folder of its own."""
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith(("TS_", "MARSERVE_"))},
            "TMPDIR": str(self.temporary),
            "TEMP": str(self.temporary),
            **self._environment,
        }

    def start(self) -> None:
        """Start it and wait until it listens."""
        with self._output.open("ab") as output:
            self.process = Prepared(
                self.command(),
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        begun = time.monotonic()
        while time.monotonic() < begun + START_LIMIT_S:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.output()}")
            with contextlib.suppress(httpx.TransportError):
                if self.client.get(f"{self.inference}/livez").status_code == 200:
                    return
            time.sleep(pause_s(begun))
        raise AssertionError(f"the server does not listen:\n{self.output()}")

    def stop(self, *, check: bool = True, number: int = signal.SIGTERM) -> None:
        """End it; with `check`, prove that it ended well and left nothing."""
        process = self.process
        if process is None:
            return
        self.process = None
        family = self.family(process.pid)
        if process.poll() is None:
            process.send_signal(number)
        try:
            status = process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise AssertionError(f"the server did not stop:\n{self.output()}") from None
        if not check:
            return
        assert status == 0, f"exit status {status}:\n{self.output()}"
        alive = left_of(family, 5)
        assert not alive, f"left running: {alive}"
        left = [path for path in self.temporary.rglob("*") if not path.name.startswith(("torch", "pymp"))]
        assert not left, f"left behind: {left}"
        for address in (self.inference, self.management, self.metrics, self.grpc_inference, self.grpc_management):
            with socket.socket() as sock:
                assert sock.connect_ex(("127.0.0.1", int(address.rsplit(":", 1)[1]))) != 0, f"{address} still listens"

    def family(self, pid: int | None = None) -> list[psutil.Process]:
        """The server's process and all its descendants."""
        assert pid is not None or self.process is not None
        try:
            server = psutil.Process(pid if pid is not None else self.process.pid)  # type: ignore[union-attr]
            return [server, *server.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def output(self) -> str:
        """What it printed."""
        return self._output.read_text(errors="replace")

    # ---------------------------------------------------------------------------------------------- calls

    def register(self, url: str, **parameters: str | int) -> httpx.Response:
        """Register an archive of the store and wait for its workers."""
        query = {"url": url, "initial_workers": 1, "synchronous": "true", **parameters}
        return self.client.post(f"{self.management}/models", params=query)

    def predict(self, model: str, content: bytes | str = b"", **headers: str) -> httpx.Response:
        """One prediction."""
        return self.client.post(f"{self.inference}/predictions/{model}", content=content, headers=headers)

    def describe(self, model: str, version: str | None = None) -> dict[str, Any]:
        """What describe says of one version."""
        answer = self.client.get(f"{self.management}/models/{model}" + (f"/{version}" if version else ""))
        assert answer.status_code == 200, answer.text
        described: dict[str, Any] = answer.json()[0]
        return described

    def worker_pids(self, model: str) -> list[int]:
        """The process ids of a model's ready workers."""
        return [worker["pid"] for worker in self.describe(model)["workers"] if worker["status"] == "READY"]


def poll(limit_s: float, what: str) -> Iterator[None]:
    """Look again and again, for what gives no event: `for _ in poll(5, "the worker is back"): … break`."""
    begun = time.monotonic()
    while time.monotonic() < begun + limit_s:
        yield
        time.sleep(pause_s(begun))
    raise AssertionError(f"not within {limit_s} s: {what}")
