"""Runs what a file of deployment says a container runs, on this machine and without one: its command, its variables.

Folders of the image and of volumes become folders of the test, ports become free ones; all else stays to the letter.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from support.pages import ROOT
from support.prepared import COMMANDS, Kind, Prepared
from support.processes import left_of
from support.server import free_ports, poll

PORTS = (8080, 8081, 8082, 7070, 7071)
_FOREIGN = ("TS_", "MARSERVE_", "AIP_", "SAGEMAKER_", "AWS_")


def image_environment() -> dict[str, str]:
    """What every image sets, by `docker/Dockerfile`, but for the search path."""
    recipe = (ROOT / "docker/Dockerfile").read_text()
    common = recipe[recipe.index(" AS common") :]
    said = re.findall(r"^ENV ((?:.*\\\n)*.*)", common[: common.index("\nFROM ")], re.MULTILINE)
    pairs: dict[str, str] = {}
    for word in shlex.split(" ".join(said).replace("\\\n", " ")):
        name, value = word.split("=", 1)
        pairs[name] = re.sub(r"\$\{(\w+)\}", lambda found: pairs[found[1]], value)
    del pairs["PATH"]
    return pairs


class ImageProgram(Prepared):
    """A program of the image: Python is told there what it is told nowhere else."""

    kind = Kind(
        COMMANDS.entry,
        COMMANDS.imports,
        {name: value for name, value in image_environment().items() if name.startswith("PYTHON")},
        indifferent=("HOME", "USER", "XDG_CACHE_HOME"),
    )


@dataclass
class Container:
    """A container's file system below `folder`, and its ports."""

    folder: Path
    volumes: Mapping[str, Path] = field(default_factory=dict)
    ports: Mapping[int, int] = field(default_factory=lambda: dict(zip(PORTS, free_ports(len(PORTS)), strict=True)))

    def __post_init__(self) -> None:
        for name in ("tmp", "logs", "model-store", "wf-store", "config"):
            (self.folder / "home/model-server" / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "tmp").mkdir(exist_ok=True)
        self.write("/etc/marserve/defaults.properties", (ROOT / "docker/defaults.properties").read_text())

    def path(self, inside: str) -> Path:
        """Where a path of the container is here."""
        for mount in sorted(self.volumes, key=len, reverse=True):
            if inside == mount or inside.startswith(f"{mount}/"):
                return self.volumes[mount] / inside[len(mount) :].lstrip("/")
        return self.folder / inside.lstrip("/")

    def write(self, inside: str, text: str) -> None:
        """Put a file there, its paths and ports translated."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.translate(text))

    def translate(self, text: str) -> str:
        """A text in which paths and ports of the container stand, as it is here."""
        inside = sorted({*self.volumes, "/home/model-server", "/etc/marserve", "/mnt/models"}, key=len, reverse=True)
        text = re.sub(
            rf"(?<![\w./-])(?:{'|'.join(map(re.escape, inside))})(?![\w.-])",
            lambda found: str(self.path(found[0])),
            text,
        )
        addresses = re.sub(
            r"(https?://(?:0\.0\.0\.0|127\.0\.0\.1)):(\d+)",
            lambda found: f"{found[1]}:{self.ports.get(int(found[2]), found[2])}",
            text,
        )
        return re.sub(
            r"^(grpc_\w+_port)=(\d+)",
            lambda found: f"{found[1]}={self.ports.get(int(found[2]), found[2])}",
            addresses,
            flags=re.MULTILINE,
        )

    def url(self, port: int, path: str = "") -> str:
        """The address of a port of the container."""
        return f"http://127.0.0.1:{self.ports[port]}{path}"

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The container's environment: the image's and these."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        inherited["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', '')}"
        said = {key: self.translate(value) for key, value in {**image_environment(), **variables}.items()}
        for name, port in (("MARSERVE_GRPC_INFERENCE_PORT", 7070), ("MARSERVE_GRPC_MANAGEMENT_PORT", 7071)):
            said[name] = str(self.ports[int(variables.get(name, port))])
        return {**inherited, "TMPDIR": str(self.folder / "tmp"), **said}

    def run(self, arguments: Sequence[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a container that ends by itself, through the image's entry point."""
        process = ImageProgram(
            self._command(arguments),
            cwd=self.path("/home/model-server"),
            env=self.environment(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def here(self, command: Sequence[str]) -> list[str]:
        """A command of the image as it is typed here."""
        return [sys.executable if word == "/home/venv/bin/python" else self.translate(word) for word in command]

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-P", "-m", "marserve.cli.container", *(self.translate(word) for word in arguments)]

    @contextlib.contextmanager
    def running(self, arguments: Sequence[str], variables: Mapping[str, str]) -> Iterator[Running]:
        """Run it while the block runs, through the image's entry point; then end it in a hurry, and well."""
        with (self.folder / "console.log").open("wb") as console:
            process = ImageProgram(
                self._command(arguments),
                cwd=self.path("/home/model-server"),
                env=self.environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running = Running(process, self)
        try:
            yield running
            if process.poll() is None:
                assert running.hurry() == 0, running.output()
        finally:
            running.kill()


@dataclass
class Running:
    """A container that was started here."""

    process: subprocess.Popen[bytes]
    container: Container

    def output(self) -> str:
        """What it printed."""
        return (self.container.folder / "console.log").read_text(errors="replace")

    def get(self, port: int, path: str) -> httpx.Response:
        """One GET of a port of the container."""
        return httpx.get(self.container.url(port, path), timeout=30)

    def wait_until(self, port: int, path: str, status: int = 200) -> httpx.Response:
        """Ask until the answer has this status."""
        for _ in poll(60, f"{path} answers {status}"):
            assert self.process.poll() is None, self.output()
            with contextlib.suppress(httpx.TransportError):
                answer = self.get(port, path)
                if answer.status_code == status:
                    return answer
        raise AssertionError

    def hurry(self) -> int:
        """SIGTERM to process 1, and again: it drains no longer. Proves that nothing of it is left; its status."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        for _ in poll(10, "the server drains"):
            if "SIGTERM: draining" in self.output():
                break
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        alive = left_of(family, 10)
        assert not alive, f"left running: {alive}"
        return status

    def kill(self) -> None:
        """End it at once, whatever it does."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
