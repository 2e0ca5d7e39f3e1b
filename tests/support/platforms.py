"""Servers started as platforms start them: `docker run IMAGE serve` without a container, and TorchServe's command.

`ImageHome` is what an image's file system holds for its entry point, laid out in a folder of the test's.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from support.prepared import Prepared
from support.processes import left_of
from support.server import free_ports, poll

DOCKER = Path(__file__).resolve().parents[2] / "docker"
PLATFORMS_VARIABLES = ("TS_", "MARSERVE_", "AIP_", "SAGEMAKER_", "AWS_", "GOOGLE_")


@dataclass
class Started:
    """A server that was started as the platform starts it."""

    process: subprocess.Popen[bytes]
    base: str
    folder: Path

    def get(self, path: str, **more: str) -> httpx.Response:
        """One GET."""
        return httpx.get(f"{self.base}{path}", timeout=30, **more)  # type: ignore[arg-type]

    def post(self, path: str, content: bytes = b"", **headers: str) -> httpx.Response:
        """One POST of these bytes."""
        return httpx.post(f"{self.base}{path}", content=content, headers=headers, timeout=60)

    def wait_until(self, path: str, status: int = 200) -> None:
        """Ask until the answer has this status."""
        for _ in poll(60, f"{path} answers {status}"):
            assert self.process.poll() is None, self.console()
            with contextlib.suppress(httpx.TransportError):
                if self.get(path).status_code == status:
                    return

    def console(self) -> str:
        """What it printed."""
        return (self.folder / "console.log").read_text(errors="replace")

    def server_pid(self) -> int:
        """The server itself, where another program looks after it."""
        words = {"org.pytorch.serve.ModelServer", "marserve.server"}
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        (server,) = [each.pid for each in family if words & set(each.cmdline())]
        return server


@contextlib.contextmanager
def started(
    folder: Path, base: str, words: Sequence[str], environment: Mapping[str, str], *, module: str | None = None
) -> Iterator[Started]:
    """Run `torchserve WORDS…` in this folder, in front, or a module of ours; end it with SIGTERM, as platforms do.

    Proves that it ends with status 0 and leaves no process.
    """
    process = begin(folder, words, environment, module=module)
    family: list[psutil.Process] = []
    try:
        yield Started(process, base, folder)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, Started(process, base, folder).console()
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    alive = left_of(family, 10)
    assert not alive, f"left running: {alive}"


def begin(
    folder: Path, words: Sequence[str], environment: Mapping[str, str], *, module: str | None = None
) -> subprocess.Popen[bytes]:
    """The process of such a server; who calls ends it. Nothing of the test's own environment speaks of a platform."""
    (folder / "tmp").mkdir(exist_ok=True)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(PLATFORMS_VARIABLES)}
    inherited["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', '')}"
    program = [module] if module is not None else ["marserve.cli.torchserve", "--start", "--foreground"]
    with (folder / "console.log").open("wb") as console:
        return Prepared(
            [sys.executable, "-m", *program, *words],
            cwd=folder,
            env=inherited | {"TMPDIR": str(folder / "tmp"), "TEMP": str(folder / "tmp")} | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_to_end(
    folder: Path, words: Sequence[str], environment: Mapping[str, str], *, module: str | None = None
) -> tuple[int, str]:
    """The exit status of such a server that does not start, and what it said."""
    process = begin(folder, words, environment, module=module)
    try:
        status = process.wait(30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, (folder / "console.log").read_text(errors="replace")


class ImageHome:
    """What the images' entry point finds: its working directory with `config.properties`, and the image's defaults.

    Ports are free ones in place of those of the image: `port` for inference, and four more in `further`.
    """

    module = "marserve.cli.container"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model-store").mkdir()
        (folder / "wf-store").mkdir()
        found = sorted(free_ports(5))
        while found[-1] - found[0] != 4:  # so that a range of ports means these
            found = sorted(free_ports(5))
        self.port, *self.further = found
        text = self._lay("config.properties", folder)
        assert text
        (folder / "etc").mkdir()
        defaults = self._lay("defaults.properties", folder / "etc")
        for before, port in zip(("8080", "8081", "8082"), (self.port, *self.further), strict=False):
            defaults = re.sub(rf":{before}$", f":{port}", defaults, flags=re.MULTILINE)
        defaults += f"grpc_inference_port={self.further[2]}\ngrpc_management_port={self.further[3]}\n"
        (folder / "etc" / "defaults.properties").write_text(defaults)
        self.environment = {
            "MARSERVE_DEFAULTS_FILE": str(folder / "etc" / "defaults.properties"),
            "MARSERVE_DRAIN_DELAY": "0",  # nobody sends on to these
        }

    def serve(self, port: int | None = None, **environment: str) -> contextlib.AbstractContextManager[Started]:
        """`docker run -e … IMAGE serve`, to be called at `port`, the image's own if not given."""
        base = f"http://127.0.0.1:{port or self.port}"
        return started(self.folder, base, ["serve"], self.environment | environment, module=self.module)

    def fail(self, **environment: str) -> tuple[int, str]:
        """The exit status of a container that does not start, and what it said."""
        return run_to_end(self.folder, ["serve"], self.environment | environment, module=self.module)

    def _lay(self, name: str, folder: Path) -> str:
        text = (DOCKER / name).read_text("utf-8").replace("/home/model-server", str(self.folder))
        (folder / name).write_text(text)
        return text


def write_properties(path: Path, lines: Mapping[str, object]) -> Path:
    """A settings file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    return path
