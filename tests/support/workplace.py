"""A folder that `marserve` and `torchserve` are run in, as a user does: own settings, store, ports, temporary folder.

Commands run as processes of their own. `Workplace.leave()` ends servers that a failed test left running, and proves
that nothing else is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import psutil

from support.prepared import Prepared
from support.prompt_end import run_to_end
from support.server import free_ports, make_archive, poll

# How long what a server forked may have its command line at the most.
FORKED_S = 5.0

ECHO = """
def handle(data, context):
    return [bytes(row["body"]) for row in data or []]
"""

BROKEN = """
raise ValueError("the weights are torn")
"""


class Workplace:
    """Use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_prepared = True  # whether commands are forked with their imports done (`support/prepared.py`)
        self.before: tuple[str, ...] = ()  # what commands are run by, a program that takes rights away for one
        self._commands = 0
        self.took_s = 0.0  # how long the last command took of a machine of its own
        self.store = folder / "store"
        self.temporary = folder / "tmp"
        self.store.mkdir()
        self.temporary.mkdir()
        self.inference, self.management, self.metrics = (f"http://127.0.0.1:{port}" for port in free_ports(3))
        self.grpc_ports = free_ports(2)
        self.configure()

    def __enter__(self) -> Workplace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(check=kind is None)

    def configure(self, **settings: str) -> None:
        """Write `config.properties`: addresses, store, everything allowed, and these."""
        lines = {
            "inference_address": self.inference,
            "management_address": self.management,
            "metrics_address": self.metrics,
            "grpc_inference_port": str(self.grpc_ports[0]),
            "grpc_management_port": str(self.grpc_ports[1]),
            "model_store": "store",
            "disable_token_authorization": "true",
            "enable_model_api": "true",
            "default_workers_per_model": "1",
            **settings,
        }
        text = "".join(f"{key}={value}\n" for key, value in lines.items())
        (self.folder / "config.properties").write_text(text)

    def add_echo(self, name: str = "echo", version: str = "1.0", handler: str = ECHO) -> None:
        """Put an archive into the store that answers what it is sent, or whose handler is this."""
        make_archive(self.store / f"{name}.mar", handler, version=version)

    def marserve(self, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `marserve WORDS…` to its end."""
        return self._run("marserve.cli", words, environment)

    def torchserve(self, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `torchserve WORDS…` to its end."""
        return self._run("marserve.cli.torchserve", words, environment)

    def server_pids(self) -> list[int]:
        """The processes of servers that run in this folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_server = {"marserve.server", "org.pytorch.serve.ModelServer"} & set(process.cmdline())
                if is_server and Path(process.cwd()) == self.folder.resolve():
                    found.append(process.pid)
        return found

    def wait_until_gone(self) -> None:
        """Wait until no server runs in this folder."""
        for _ in poll(30, f"the server in {self.folder} ends"):
            if not self.server_pids():
                return

    def pid_files(self) -> list[str]:
        """The names of the PID files there are."""
        return sorted(path.name for path in self.temporary.glob(".*.pid"))

    def leave(self, check: bool) -> None:
        """Kill what still runs; with `check`, raise when something did, or when files were left behind.

        What a server had just forked when it ended has its command line for a moment, until it runs its own program.
        """
        until = time.monotonic() + (FORKED_S if check else 0.0)
        while (running := self.server_pids()) and time.monotonic() < until:
            time.sleep(0.02)
        said = [_say(pid) for pid in running]
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if check:
            assert not running, f"servers were left running: {said}"
            left = [path.name for path in self.temporary.iterdir() if not path.name.startswith(("torch", "pymp"))]
            assert not left, f"left behind: {left}"

    def _run(
        self, module: str, words: tuple[object, ...], environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("TS_", "MARSERVE_"))}
        # Files and no pipes: a server in the background keeps them open after the command has ended.
        self._commands += 1
        console = self.folder / f"command-{self._commands}"
        with console.with_suffix(".out").open("w+") as out, console.with_suffix(".err").open("w+") as err:
            status, self.took_s = run_to_end(
                [*self.before, sys.executable, "-m", module, *map(str, words)],
                folder=self.folder,
                environment=inherited | {"TMPDIR": str(self.temporary), "TEMP": str(self.temporary)} | environment,
                stdout=out,
                stderr=err,
                timeout_s=90,
                program=Prepared if self.is_prepared else subprocess.Popen,
            )
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess([module, *map(str, words)], status, out.read(), err.read())


def _say(pid: int) -> str:
    """What tells a server from what it has just forked: its parent, its age, what it waits in."""
    try:
        process = psutil.Process(pid)
        told = process.as_dict(["pid", "ppid", "status", "cmdline", "num_threads"])
        age_s = time.time() - process.create_time()
        return f"{told}, {age_s:.1f} s old, in {Path(f'/proc/{pid}/wchan').read_text()}"
    except (psutil.Error, OSError) as error:
        return f"{pid}: {error}"
