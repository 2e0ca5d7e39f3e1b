"""One archive under comparison: taken in as a server would, and loaded in a process of its own, which obeys orders."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import msgspec

from marserve.archive.reading.reader import Limits
from marserve.errors import MarserveError
from marserve.lineage import VARIABLE, end_families, end_with_family
from marserve.optimise.inputs import Input
from marserve.optimise.recording import Recording, read_recording
from marserve.optimise.taken import Taken
from marserve.registry.catalogue.plan import Plan
from marserve.registry.intake.intake import Intake
from marserve.registry.intake.plan import make_plan
from marserve.registry.intake.registration import RegisterParameters, RegistryOptions
from marserve.store.sources.local import LocalStore

LOAD_S: Final = 600.0
_MOST_PRINTED: Final = 4_000
# How long what was printed is waited for: a process that goes on never ends it.
_PRINTED_WITHIN_S: Final = 0.2
# Of one answer, which has a few hundred for each of 100,000 inputs.
_MOST_ANSWER: Final = 256 << 20
# How long the process may take beyond what an order allows, to end its last call.
GRACE_S = 60.0


class Facts(msgspec.Struct, frozen=True):
    """What a process says of its model: `torch`, `torchscript`, `onnx` or nothing; `why_not` it cannot be built anew.

    `build` is the name of the build that serves in the archive's own model's place; `why_parent` is what the load said
    of one that was to serve and does not.
    """

    kind: str
    why_not: str
    build: str
    weight_bytes: int
    cpu: list[str]
    versions: dict[str, str]
    why_parent: str = ""


class Built(msgspec.Struct, frozen=True):
    """A build that was made, in seconds, with so many bytes of weights while it serves; or why it was `refused`.

    `notes` are sentences, without a full stop, about what an exporter baked, with the author's lines.
    """

    seconds: float = 0.0
    bytes: int = 0
    refused: str = ""
    notes: list[str] = []


class SubjectFailed(MarserveError):
    """The process of an archive did not do what it was told to: it said why, or it died, or it took too long."""


def take_in(archive: Path, scratch: Path, threads: int, trusted: Collection[str]) -> Plan:
    """Take an archive in as a server does, into a folder of its own in `scratch`. Raises as `Subject` does."""
    folder = scratch / "unpacked"
    folder.mkdir()
    intake = Intake(LocalStore(archive.absolute().parent), folder, Limits(), trusted)
    unpacked = intake.take_in(archive.name)
    return make_plan(RegisterParameters(archive.name), unpacked, RegistryOptions(threads=threads))


class Subject:
    """An archive and the process that has loaded it. Use it as a context: it leaves neither process nor files."""

    def __init__(
        self,
        archive: Path,
        *,
        threads: int = 1,
        trusted: Collection[str] = (),
        memory_bytes: int = 0,
        taken: Taken | None = None,
        build: str = "",
        patience: float = 1.0,
    ) -> None:
        """Take the archive in, and begin to load it. `trusted` are names of archives whose pickles may hold anything.

        The process may allocate `memory_bytes`, 0 for no bound. `taken` is of an archive that is taken in
        already. `build` is as `Load` has it. All limits of time are `patience` times as long, for a process that is
        stopped in between.

        Raises BadArchive, UnsafeArchive, ArchiveNotFound and what else a registration would be refused for.
        """
        self.archive, self.threads = archive, threads
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._printing: _Printing | None = None
        above = os.environ.get(VARIABLE)
        self._lineage = f"{above}/{secrets.token_hex(8)}" if above else secrets.token_hex(8)
        self._rest = bytearray()
        self._last_order = 0
        self._scratch = Path(tempfile.mkdtemp(prefix="marserve-compare-"))
        try:
            self.taken = taken or Taken.of(take_in(archive, self._scratch, threads, trusted))
            self.load = msgspec.structs.replace(self.taken.load, threads=threads, build=build)
            self._start(memory_bytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Model and version, as messages name it."""
        return f"{self.load.model} {self.load.version}"

    @property
    def batch_size(self) -> int:
        """The batch size that the archive asks for."""
        return self.load.batch_size

    def loaded(self, within_s: float = LOAD_S) -> float:
        """Wait until the model is loaded; the seconds that it took there. Raises SubjectFailed."""
        return float(self._answer(0, within_s)["load_s"])

    def record(self, inputs: Sequence[Input], folder: Path, batch_size: int, within_s: float) -> Recording:
        """Have every input answered, and what reached the model run in batches. Raises SubjectFailed."""
        order = {
            "do": "record",
            "folder": str(folder),
            "inputs": _as_document(inputs),
            "batch_size": batch_size,
            "within_s": within_s,
        }
        return read_recording(self.ask(order, within_s))

    def facts(self) -> Facts:
        """What the model is. Raises SubjectFailed."""
        return msgspec.convert(self.ask({"do": "facts"}, GRACE_S), Facts)

    def flops(self) -> dict[str, Any] | None:
        """What the recorded model takes, as a proof holds it; None where that is not known. Raises SubjectFailed."""
        said = self.ask({"do": "flops"}, GRACE_S)
        return None if "why_not" in said else said

    def build(self, name: str, folder: Path, inputs: Sequence[Input], most_rows: int, within_s: float) -> Built:
        """Have another build of the model made and put into its place. Raises SubjectFailed."""
        order = {
            "do": "build",
            "build": name,
            "folder": str(folder),
            "inputs": _as_document(inputs),
            "most_rows": most_rows,
        }
        return msgspec.convert(self.ask(order, within_s), Built)

    def export(self, kind: str, file: Path, inputs: Sequence[Input], most_rows: int, within_s: float) -> Built:
        """Have the model written as `onnx`, `pt2` or `aoti`. Raises SubjectFailed."""
        order = {
            "do": "export",
            "to": kind,
            "file": str(file),
            "inputs": _as_document(inputs),
            "most_rows": most_rows,
        }
        return msgspec.convert(self.ask(order, within_s), Built)

    def write_samples(self, folder: Path, most: int) -> int:
        """Have samples of what was recorded written; how many. Raises SubjectFailed."""
        return int(self.ask({"do": "samples", "folder": str(folder), "most": most}, GRACE_S)["samples"])

    def time(self, rows: int, seconds: float) -> float:
        """The model's seconds for one batch of so many rows, from calls that take `seconds`. Raises SubjectFailed."""
        said = self.ask({"do": "time", "rows": rows, "seconds": seconds}, seconds)
        return float(said["seconds"]) / int(said["calls"])

    def use_threads(self, threads: int, within_s: float) -> None:
        """Have the model compute with so many threads from now on. Raises SubjectFailed."""
        if threads != self.threads:
            self.threads = 0  # not known until it has said so
            self.ask({"do": "threads", "threads": threads}, within_s)
            self.threads = threads

    def ask(self, order: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        """Send an order and wait for its answer; those to earlier orders, which came too late, are left out.

        Raises SubjectFailed.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._last_order += 1
        try:
            self._process.stdin.write(json.dumps({**order, "number": self._last_order}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._died() from None
        return self._answer(self._last_order, within_s + GRACE_S)

    def close(self) -> None:
        """End the process with all that it started, and delete what was unpacked. May be called twice."""
        process = self._process
        if process is not None:
            if process.poll() is None:
                end_with_family(process.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
            end_families({self._lineage: 0})
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # an order that nobody read
                        pipe.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _start(self, memory_bytes: int) -> None:
        file = self._scratch / "load"
        # Batches of the model itself are compared, not what it is filled up to.
        load = msgspec.structs.replace(self.load, memory_limit_bytes=memory_bytes, allowed_batch_sizes=[])
        file.write_bytes(msgspec.msgpack.encode(load))
        # What it puts there goes with it, even if it is killed.
        temporary = self._scratch / "tmp"
        temporary.mkdir()
        program = "marserve.worker.without_server.compared"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", program, str(file), str(os.getpid()), str(temporary)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, VARIABLE: self._lineage},
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self._printing = _Printing(self._process.stderr)

    def _answer(self, order: int, within_s: float) -> dict[str, Any]:
        within_s *= self._patience
        until = time.monotonic() + within_s
        while True:
            number, said = self._read_answer(until, within_s)
            if number == order:
                break
            if number > order:  # the author's code found the descriptor
                raise self._no_answer()
        if "fault" in said:
            raise SubjectFailed(f"{self.name}: {said['fault']}.{self._printed()}")
        return said

    def _read_answer(self, until: float, within_s: float) -> tuple[int, dict[str, Any]]:
        """The next answer, and the number of the order that it belongs to; the load's is 0."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        chunk = bytes(self._rest)
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in chunk:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise SubjectFailed(f"{self.name} did not answer within {within_s:g} s.")
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    raise self._died()
                self._rest += chunk
                if len(self._rest) > _MOST_ANSWER:
                    raise SubjectFailed(f"{self.name}: its answer has more than {_MOST_ANSWER} bytes.")
        line, _, rest = self._rest.partition(b"\n")
        self._rest = bytearray(rest)
        try:
            said = msgspec.json.decode(line, type=dict[str, Any])
            return msgspec.convert(said.pop("number", None), int), said
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # the author's code found the descriptor
            raise self._no_answer() from None

    def _no_answer(self) -> SubjectFailed:
        return SubjectFailed(f"{self.name}: its process wrote what is no answer.{self._printed()}")

    def _died(self) -> SubjectFailed:
        assert self._process is not None
        try:
            status = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return SubjectFailed(f"{self.name} closed its output and goes on.{self._printed()}")
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return SubjectFailed(f"{self.name}: its process ended with {how}.{self._printed()}")

    def _printed(self) -> str:
        """The last lines that the process printed, on lines of their own; empty for none."""
        text = "" if self._printing is None else self._printing.last.decode("utf-8", "replace").strip()
        return f"\nIt printed:\n{text}" if text else ""


class _Printing:
    """Reads what a process prints, however much that is, and keeps the end of it."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._last = b""
        self._thread = threading.Thread(target=self._read, args=(pipe,), name="printed", daemon=True)
        self._thread.start()

    @property
    def last(self) -> bytes:
        """The last bytes, also of a process that has just ended."""
        self._thread.join(_PRINTED_WITHIN_S)
        return self._last

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while piece := os.read(pipe.fileno(), 1 << 16):
                self._last = (self._last + piece)[-_MOST_PRINTED:]


def _as_document(inputs: Sequence[Input]) -> list[dict[str, str]]:
    return [{"path": str(each.path), "content_type": each.content_type} for each in inputs]
