"""TorchServe itself: installed from the package index into an environment of its own, started on ports of its own.

It needs Java, and torch, which is taken from the environment of the tests. Where one of them is missing the test is
skipped and says so. What is started is ended by its process id.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from support.server import free_ports, poll

TORCHSERVE = (
    *("torchserve==0.12.0", "torch-model-archiver==0.12.0", "torch-workflow-archiver==0.2.15"),
    *("setuptools<81", "wheel", "psutil", "packaging", "pillow", "numpy", "pyyaml", "requests"),
)
INSTALL_S = 300
START_S = 120


def install(folder: Path, *packages: str) -> Path:
    """An environment with these packages; the test is skipped, saying so, where they cannot be had. Its programs."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S)
    run = subprocess.run(
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages],
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_S,
    )
    if run.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed here: {run.stderr.strip().splitlines()[-1:]}")
    return folder / "bin"


def install_torchserve(folder: Path) -> Path:
    """TorchServe 0.12 and its two archivers, with the torch of the tests; the folder of their programs."""
    if shutil.which("java") is None:
        pytest.skip("TorchServe needs Java, and there is none here")
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("TorchServe needs torch, and there is none here")
    programs = install(folder, *TORCHSERVE)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "torch_of_the_tests.pth").write_text(str(Path(torch.origin).parents[1]))
    return programs


@dataclass(frozen=True, slots=True)
class RealTorchServe:
    """A running one: where it listens, and the folder that it runs in."""

    inference: str
    management: str
    folder: Path


@contextlib.contextmanager
def running(
    programs: Path, folder: Path, settings: Mapping[str, str], arguments: Sequence[str]
) -> Iterator[RealTorchServe]:
    """Start it in this folder, with `config.properties` written from `settings`, and end it with all its processes."""
    ports = free_ports(5)
    inference, management, metrics = (f"http://127.0.0.1:{port}" for port in ports[:3])
    addresses = {
        "inference_address": inference,
        "management_address": management,
        "metrics_address": metrics,
        "grpc_inference_port": str(ports[3]),
        "grpc_management_port": str(ports[4]),
    }
    (folder / "config.properties").write_text("".join(f"{k}={v}\n" for k, v in (addresses | dict(settings)).items()))
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TS_", "MARSERVE_"))}
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "TEMP": str(temporary), "TMPDIR": str(temporary)}
    command = [str(programs / "torchserve"), "--start", "--foreground", "--ts-config", "config.properties"]
    with (folder / "console.log").open("wb") as console:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=folder,
            env=environment,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        for _ in poll(START_S, "TorchServe answers"):
            assert process.poll() is None, (folder / "console.log").read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{inference}/ping", timeout=5).status_code in (200, 400):
                    break
        yield RealTorchServe(inference, management, folder)
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        _, alive = psutil.wait_procs(family, timeout=60)
        for left in alive:
            left.kill()


def register(server: RealTorchServe, url: str, **parameters: str) -> httpx.Response:
    """Register an archive of its store and wait for one worker."""
    query = {"url": url, "initial_workers": "1", "synchronous": "true", **parameters}
    return httpx.post(f"{server.management}/models", params=query, timeout=120)
