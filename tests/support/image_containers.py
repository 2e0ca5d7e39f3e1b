"""Containers of an image, run with podman and runc: started, asked, looked into, ended, and nothing left of them."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from support.images import ROOT, RUN_FLAGS, run
from support.server import free_ports, poll

HOME = "/home/model-server"
STORE = f"{HOME}/model-store"
MODELS = {STORE: ROOT / "model_store"}


class Running:
    """A container of the image under the strictest rules that a platform has, on ports of its own.

    `user` is a user and a group, `volumes` are folders here by their place in it, `flags` more words for podman.
    """

    def __init__(
        self,
        image: str,
        folder: Path,
        *arguments: str,
        user: str = "12345:0",
        volumes: Mapping[str, Path] = MODELS,
        flags: Sequence[str] = (),
        **settings: str,
    ) -> None:
        ports = free_ports(5)
        names = ("inference_address", "management_address", "metrics_address")
        lines = {name: f"http://0.0.0.0:{port}" for name, port in zip(names, ports, strict=False)}
        lines |= {"grpc_inference_port": str(ports[3]), "grpc_management_port": str(ports[4])} | settings
        config = folder / "config.properties"
        config.write_text(
            (ROOT / "docker/config.properties").read_text() + "".join(f"{k}={v}\n" for k, v in lines.items())
        )
        config.chmod(0o644)
        folder.chmod(0o755)
        self.address, self.management = (f"http://127.0.0.1:{port}" for port in ports[:2])
        self.image, self.name = image, f"marserve-test-{ports[0]}"
        self.said: list[str] = []
        self._start(
            *("run", *RUN_FLAGS, "--name", self.name, "--user", user, "--passwd=false"),
            *("--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
            *(word for place, here in volumes.items() for word in ("--volume", f"{here}:{place}:ro")),
            *("--volume", f"{config}:{HOME}/config.properties:ro"),
            *(*flags, image, *arguments),
        )

    def again(self) -> None:
        """Start it once more, after its end."""
        self._start("start", "--attach", self.name)

    def _start(self, *words: str) -> None:
        self.began = time.monotonic()
        self.process = subprocess.Popen(["podman", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def output(self) -> str:
        """What it has printed so far."""
        return "".join(self.said)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.said.extend(lines)

    def wait_until_ready(self) -> None:
        """Wait until its models are loaded."""
        for _ in poll(90, "the container is ready"):
            assert self.process.poll() is None, self.output()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.address}/readyz").status_code == 200:
                    return

    def inside(self, *command: str, check: bool = True) -> str:
        """What a command prints that is run in it."""
        return run("podman", "exec", self.name, *command, check=check)

    def signal(self, number: int) -> None:
        """Send its first process a signal."""
        run("podman", "kill", "--signal", str(number), self.name)

    def wait(self) -> int:
        """Its status, once it has ended."""
        status = self.process.wait(60)
        self._reader.join(10)
        return status

    def remove(self) -> None:
        """Have nothing left of it."""
        run("podman", "rm", "--force", "--time", "0", "--volumes", self.name, check=False)
        self.process.wait(30)
        self._reader.join(10)
