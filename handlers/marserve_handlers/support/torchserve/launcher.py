"""Starts and stops a server from Python, by the commands that a person would type; for tests and notebooks.

Needs the command `torchserve` of marserve beside this Python or on the PATH.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

STARTED = "Model server started"
MAX_LINES = 1000
MANAGEMENT_URL = "http://localhost:8081"


class Answer(NamedTuple):
    """What the management API answered."""

    status_code: int
    text: str

    @property
    def content(self) -> bytes:
        """The body."""
        return self.text.encode()

    @property
    def ok(self) -> bool:
        """Whether the status is below 400."""
        return self.status_code < 400

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.text)

    def raise_for_status(self) -> None:
        """Raise RuntimeError with the answer's text where the status is 400 or above."""
        if not self.ok:
            raise RuntimeError(f"The server answered {self.status_code}: {self.text}")


class Tee(threading.Thread):
    """Reads lines to their end, into two queues at once; None follows the last one.

    A queue that holds `MAX_LINES` takes no more lines until some are taken out: a server prints for weeks.
    """

    def __init__(self, reader: Iterable[str]) -> None:
        super().__init__(daemon=True)
        self.reader = reader
        self.queue1: queue.Queue[str | None] = queue.Queue()
        self.queue2: queue.Queue[str | None] = queue.Queue()

    def run(self) -> None:
        """Read."""
        for line in self.reader:
            for each in (self.queue1, self.queue2):
                if each.qsize() < MAX_LINES:
                    each.put(line)
        self.queue1.put(None)
        self.queue2.put(None)


class PrintTillTheEnd(threading.Thread):
    """Writes a queue's lines to standard output until None comes."""

    def __init__(self, queue: queue.Queue[str | None]) -> None:
        super().__init__(daemon=True)
        self._queue = queue

    def run(self) -> None:
        """Write."""
        while (line := self._queue.get()) is not None:
            sys.stdout.write(line)
        sys.stdout.flush()


def start(
    model_store: str | os.PathLike[str] | None = None,
    snapshot_file: str | os.PathLike[str] | None = None,
    no_config_snapshots: bool = False,
    plugin_folder: str | os.PathLike[str] | None = None,
    disable_token: bool = False,
    models: str | None = None,
    enable_model_api: bool = False,
) -> queue.Queue[str | None]:
    """Stop the server that runs, start another one, and wait until it serves: the queue of what it prints from then on.

    The parameters are the flags of `torchserve`: `model_store`, `ts_config`, `ncs`, `plugins_path`,
    `disable_token_auth`, `models`, `enable_model_api`. A server that does not start has printed why, and the queue
    holds None alone, as under TorchServe: tests find out by their first request.
    """
    stop()
    command = [find_command(), "--start", "--foreground"]
    for flag, value in (
        ("--model-store", model_store),
        ("--ts-config", snapshot_file),
        ("--plugins-path", plugin_folder),
    ):
        if value is not None:
            command += [flag, os.fspath(value)]
    command += ["--ncs"] if no_config_snapshots else []
    command += ["--disable-token-auth"] if disable_token else []
    command += ["--enable-model-api"] if enable_model_api else []
    command += ["--models", *models.split(",")] if models else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = _lines_of(process)
    for line in lines:
        sys.stdout.write(line)
        if STARTED in line:
            break
    sys.stdout.flush()
    tee = Tee(lines)
    tee.start()
    PrintTillTheEnd(tee.queue1).start()
    return tee.queue2


def stop(wait: bool = True) -> None:
    """Stop the server that runs, if any; with `wait` until it is gone."""
    subprocess.run(
        [find_command(), "--stop", *(["--foreground"] if wait else [])], check=False, stdout=subprocess.DEVNULL
    )


def register_model(model_name: str, url: str) -> Answer:
    """Register the archive of `url` under that name, with one worker, and wait for it."""
    return register_model_with_params(
        {"model_name": model_name, "url": url, "initial_workers": "1", "synchronous": "true"}
    )


def register_model_with_params(params: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Answer:
    """Register a model with these query parameters of `POST /models`."""
    query = urllib.parse.urlencode(dict(params))
    request = urllib.request.Request(f"{MANAGEMENT_URL}/models?{query}", method="POST")
    try:
        with urllib.request.urlopen(request) as response:
            return Answer(response.status, response.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode("utf-8", "replace"))


def find_command(name: str = "torchserve") -> str:
    """The path of marserve's command of that name: beside this Python, else on the PATH. Raises FileNotFoundError."""
    beside = os.path.join(os.path.dirname(sys.executable), name)
    found = beside if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"There is no command {name} here; it comes with marserve: pip install marserve.")
    return found


def run_torchserve() -> int:
    """Run the command `torchserve` with this process's arguments: its exit status."""
    return subprocess.run([find_command(), *sys.argv[1:]], check=False).returncode


def load_properties(file_path: str | os.PathLike[str]) -> dict[str, str]:
    """The keys and values of a properties file, one `key=value` a line; lines that begin with # are left out."""
    with open(file_path, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip() for key, value in pairs}


def _lines_of(process: subprocess.Popen[str]) -> Iterable[str]:
    """The lines that the process prints; it is reaped at their end."""
    assert process.stdout is not None
    with process.stdout:
        yield from process.stdout
    process.wait()
