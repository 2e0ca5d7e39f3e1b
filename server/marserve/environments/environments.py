"""A model's own requirements: installed once for all models with the same ones, in folders beside each other.

An environment is a folder named by a digest of everything that its content depends on: the checked requirements, the
packages that the archive itself holds, the interpreter and the system; for a virtual environment also the server's
packages. It is made in a temporary folder beside it and renamed when it is whole, so it is either complete or absent,
however the server ends. The installing process holds an exclusive lock on a file beside it, users share the lock: two
servers, or two models, never install the same twice, and an environment in use is never deleted.

    {folder}/{digest}/            packages/ or venv/, environment.json, requirements.lock
    {folder}/{digest}.log         pip's output, also of a failed installation
    {folder}/{digest}.lock        locked (flock)
    {folder}/{digest}.*.tmp/      an installation under way; with its lock free, a leftover of a killed server

pip runs in a process group of its own, with the environment that workers get, and ends with the server. This file
knows nothing of registrations; `environments/requirements.py` makes pip's input.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import shutil
import signal
import site
import sys
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from marserve.environments.pip_place import NOT_THERE, find_pip
from marserve.environments.requirements import Requirements
from marserve.errors import DependencyFailed, VenvNotMade
from marserve.files.leased_folders import Lease, LeasedFolders, bytes_below, discard, find_stranger
from marserve.lineage import VARIABLE
from marserve.pool.launchers.leftovers import Leftovers

log = logging.getLogger("marserve.pool.environments")

Kind = Literal["packages", "venv"]

RECORD, LOCK_LIST = "environment.json", "requirements.lock"
# The version of the layout and of the digest's input; raised when either changes.
LAYOUT = 1
PARALLEL_INSTALLATIONS = 2
LOG_BYTES = 4 << 20
TAIL_LINES = 40
TAIL_LINE_CHARACTERS = 500
LOGS_OF_FAILURES = 20
LOOK_AT_LOCK_S = 0.1
REST_OF_OUTPUT_S = 2.0
KILL_TIMEOUT_S = 10.0

# The distributions of the modules that are imported once for many models (`messages.py: HEAVY_MODULES`).
SHARED_DISTRIBUTIONS = ("torch", "transformers", "numpy", "pillow", "msgspec")

# pip ends with the thread that started it (PR_SET_PDEATHSIG), since no other process would end it.
_RUN = """\
import ctypes, os, runpy, sys
parent, place, module = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != parent:
    os._exit(1)
sys.argv[:] = [module, *sys.argv[4:]]
sys.path[:0] = [place] if place else []
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
# Variables that would change where pip installs, or into what.
_NOT_FOR_PIP = (
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_REQUIREMENT", "PIP_EDITABLE", "PIP_REPORT", "PIP_DRY_RUN"),
    *("PIP_PYTHON", "PIP_LOG", "PIP_UPGRADE_STRATEGY", "PYTHONHOME", "__PYVENV_LAUNCHER__"),
)
# The same for settings of a pip.conf, which may well name the index.
_FOR_PIP = {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}


@dataclass(frozen=True, slots=True)
class Package:
    """One installed distribution. `sha256` is the digest of its file, empty if pip does not report it."""

    name: str
    version: str
    sha256: str = ""

    def __str__(self) -> str:
        pinned = f"{self.name}=={self.version}"
        return f"{pinned} --hash=sha256:{self.sha256}" if self.sha256 else pinned


class Environment:
    """A complete environment, in use until `release`.

    `packages` is the folder for `sys.path`; None for a virtual environment, whose `python` runs the workers. `modules`
    is the folder of its modules in either case. `seconds` is how long its installation took, `log` pip's output.
    """

    def __init__(self, folder: Path, lease: Lease | None, *, was_there: bool, log_file: Path) -> None:
        record = _read_record(folder)
        if record is None:
            raise FileNotFoundError(errno.ENOENT, "it is not whole", str(folder))
        self.folder = folder
        self.kind: Kind = record["kind"]
        self.packages = folder / "packages" if self.kind == "packages" else None
        self.modules = self.packages or _site_packages(folder / "venv")
        self.python = folder / "venv" / "bin" / "python" if self.kind == "venv" else None
        self.installed = tuple(Package(*each) for each in record["installed"])
        self.seconds = float(record["seconds"])
        self.was_there = was_there
        self.log = log_file
        self._lease = lease

    @property
    def may_share_imports(self) -> bool:
        """Whether a process that has imported torch for many models may become a worker of this one."""
        return self.python is None and not brings_shared(package.name for package in self.installed)

    def release(self) -> None:
        """End the use: from now on it may be deleted. May be called twice."""
        if self._lease is not None:
            self._lease.release()


class Environments:
    """The environments of one server. All methods are called on the event loop.

    They are kept in `folder`, over restarts and for all servers that name it. If that cannot be written they are made
    in `fallback`, whose owner deletes it. Unused environments are deleted, the longest unused first, when all together
    hold more than `limit_bytes` (0: never). An installation may take `timeout_s`. pip is started with `environment` and
    the interpreter `python`.
    """

    def __init__(
        self,
        folder: Path | None,
        fallback: Path,
        environment: Mapping[str, str],
        *,
        limit_bytes: int = 0,
        timeout_s: float = 1800.0,
        leftovers: Leftovers | None = None,
        python: str = sys.executable,
    ) -> None:
        self._folder = folder
        self._fallback = fallback
        self._environment = {name: value for name, value in environment.items() if name not in _NOT_FOR_PIP}
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._leftovers = leftovers or Leftovers()
        self._python = python
        self._turn = asyncio.Semaphore(PARALLEL_INSTALLATIONS)
        self._writable: LeasedFolders | None = None
        self._readable: Path | None = None
        self._choosing = asyncio.Lock()

    async def obtain(self, model: str, requirements: Requirements, kind: Kind = "packages") -> Environment:
        """Find the environment that holds these requirements, or make it; the caller releases it.

        Raises DependencyFailed, in TorchServe's words, with pip's last lines as its reason. When cancelled, every
        process that was started for it is ended, and nothing is left.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                digest = await asyncio.to_thread(digest_of, requirements, kind, self._python)
                environment = await self._obtain(model, requirements, kind, digest)
        except TimeoutError:
            sentence = f"it was not finished within environment_timeout, {self._timeout_s:g} s, and was ended"
            log.error("Requirements of model %s: %s", model, sentence)
            raise _failed(model, sentence) from None
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            sentence = "no space is left for it" if full else f"its folder cannot be used: {error}"
            log.error("Requirements of model %s: %s", model, sentence)
            raise _failed(model, sentence) from error
        how = "found" if environment.was_there else "installed"
        log.info(
            "Requirements of model %s: %d packages %s in %.1f s, in %s",
            model,
            len(environment.installed),
            how,
            time.monotonic() - began,
            environment.folder,
        )
        return environment

    async def _obtain(self, model: str, requirements: Requirements, kind: Kind, digest: str) -> Environment:
        kept = await self._choose_folder()
        if self._readable is not None and _is_whole(self._readable / digest):
            # The folder cannot be written, so no server deletes from it either: no lock is needed.
            log_file = self._readable / f"{digest}.log"
            return Environment(self._readable / digest, None, was_there=True, log_file=log_file)
        was_there = True
        while True:
            while (lease := kept.lease(digest)) is None:
                await asyncio.sleep(LOOK_AT_LOCK_S)  # a wait in a thread could not be cancelled
            try:
                if lease.is_exclusive:
                    was_there = False
                    async with self._turn:
                        await self._install(model, requirements, kind, kept, lease)
                    if not kept.share(lease):
                        continue
                log_file = kept.folder / f"{digest}.log"
                environment = Environment(lease.folder, lease, was_there=was_there, log_file=log_file)
                break
            except BaseException:
                lease.release()
                raise
        if not was_there:
            await asyncio.to_thread(_prune, kept, self._limit_bytes)
        return environment

    async def _choose_folder(self) -> LeasedFolders:
        """The folder that environments are made in, determined once; a second choice is logged."""
        async with self._choosing:
            if self._writable is None:
                self._writable = _leased(await asyncio.to_thread(self._find_folder))
                await asyncio.to_thread(_prune, self._writable, self._limit_bytes)
            return self._writable

    def _find_folder(self) -> Path:
        if self._folder is not None:
            defect, whose = _find_defect(self._folder), find_stranger(self._folder)
            if defect is None and whose is None:
                return self._folder
            if whose is None:
                self._readable = self._folder
            log.warning(
                "environment_folder %s is not used to install into, %s; what models require is installed into a folder "
                "that ends with this server",
                self._folder,
                whose or defect,
            )
        self._fallback.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._fallback

    # ------------------------------------------------------------------------------------------- installing

    async def _install(
        self, model: str, requirements: Requirements, kind: Kind, kept: LeasedFolders, lease: Lease
    ) -> None:
        """Make the environment, under an exclusive lease; complete or not at all."""
        began = time.monotonic()
        final, lock = lease.folder, lease.descriptor
        staging = await asyncio.to_thread(kept.stage, final.name)
        try:
            whole = staging / "environment"
            whole.mkdir()
            await asyncio.to_thread((staging / "tmp").mkdir)
            output = _Output(staging / "install.log")
            try:
                await self._fill(model, requirements, kind, staging, whole, output, lock)
            finally:
                output.close()
                with contextlib.suppress(OSError):
                    os.replace(staging / "install.log", final.with_name(f"{final.name}.log"))
            await asyncio.to_thread(_finish, whole, final, kind, staging / "report.json", time.monotonic() - began)
            await asyncio.to_thread(kept.publish, whole, final.name)
        finally:
            # Shielded from a second cancel, so that the folder is always removed.
            await asyncio.shield(asyncio.to_thread(discard, staging))

    async def _fill(
        self,
        model: str,
        requirements: Requirements,
        kind: Kind,
        staging: Path,
        whole: Path,
        output: _Output,
        lock: int,
    ) -> None:
        python = self._python
        if kind == "venv":
            venv = whole / "venv"
            words = ["venv", "--without-pip", str(venv)]
            if await self._run(python, words, staging, output, lock) != 0:
                raise VenvNotMade(f"Virtual environment creation failed for model {model}", _report(model, output))
            python = str(venv / "bin" / "python")
            await asyncio.to_thread(_append_servers_packages, venv)
        if not requirements.asks_for_something:
            if kind == "packages":
                (whole / "packages").mkdir()
            return
        place = await asyncio.to_thread(find_pip)
        if place is None:
            sentence = NOT_THERE.format(python=self._python)
            log.error("Requirements of model %s: %s", model, sentence)
            raise _failed(model, sentence)
        await asyncio.to_thread(_write_for_pip, requirements, staging)
        words = pip_words(requirements, kind, staging, whole)
        log.info("Requirements of model %s: pip installs %s", model, requirements.file)
        if await self._run(python, words, staging, output, lock, place) != 0:
            raise _failed(model, _report(model, output))

    async def _run(
        self, python: str, words: Sequence[str], staging: Path, output: _Output, lock: int, place: str = ""
    ) -> int:
        """Run a module of Python, found in `place` first, in a process group of its own. Returns its exit code.

        The process holds the lock, too: if the server is killed, the next one waits until the process has ended.
        """
        lineage = self._leftovers.child("environment")
        process = await asyncio.create_subprocess_exec(
            python,
            "-P",
            "-c",
            _RUN,
            str(os.getpid()),
            place,
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**self._environment, **_FOR_PIP, "TMPDIR": str(staging / "tmp"), VARIABLE: lineage},
            cwd=staging / "tmp",
            start_new_session=True,
            pass_fds=(lock,),
        )
        assert process.stdout is not None
        reading = asyncio.create_task(output.read(process.stdout))
        is_over = False
        try:
            code = await process.wait()
            await asyncio.wait([reading], timeout=REST_OF_OUTPUT_S)
            is_over = reading.done()
            return code
        finally:
            reading.cancel()
            if not is_over:
                await asyncio.shield(asyncio.create_task(self._end(process, lineage)))

    async def _end(self, process: asyncio.subprocess.Process, lineage: str) -> None:
        """Kill the process, and those that it left in other process groups; returns when it is reaped."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await process.wait()
        await self._leftovers.end(lineage)


def _report(model: str, output: _Output) -> str:
    """Log pip's last lines, and return them."""
    tail = "\n".join(output.tail())
    log.error("Requirements of model %s were not installed; pip said last:\n%s", model, tail)
    return tail


def _failed(model: str, reason: str) -> DependencyFailed:
    return DependencyFailed(f"Custom pip package installation failed for model {model}", reason)


class _Output:
    """pip's output: a bounded file, and the last lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._room = LOG_BYTES
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._rest = b""

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read the stream to its end."""
        while data := await stream.read(65536):
            if self._room > 0:
                with contextlib.suppress(OSError):  # pip reports a full disk, too
                    self._file.write(data[: self._room])
                self._room -= len(data)
            *lines, rest = (self._rest + data).split(b"\n")
            self._rest = rest[-65536:]
            self._lines.extend(_plain(line) for line in lines if line.strip())

    def tail(self) -> list[str]:
        """The last lines."""
        return [*self._lines, *([_plain(self._rest)] if self._rest.strip() else [])]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _plain(line: bytes) -> str:
    text = line.decode("utf-8", "replace").rstrip()
    shown = "".join(each if each.isprintable() else " " for each in text)
    # An index's address may contain a password, also in pip's output.
    return re.sub(r"(://)[^/@\s]+@", r"\1****@", shown)[:TAIL_LINE_CHARACTERS]


# ------------------------------------------------------------------------------------------------ what pip is given


def pip_words(requirements: Requirements, kind: Kind, staging: Path, whole: Path) -> list[str]:
    """`pip install` and its options, for the files that `_write_for_pip` wrote into `staging`."""
    words = ["pip", "install", "--no-input", "--disable-pip-version-check", "--no-color", "--progress-bar", "off"]
    words += ["--no-warn-script-location", "--upgrade", "--report", str(staging / "report.json")]
    if kind == "packages":
        words += ["--target", str(whole / "packages")]
    else:
        words += ["--upgrade-strategy", "only-if-needed"]
    if requirements.has_links:
        words += ["--find-links", str(staging / "links")]
    if requirements.constraints:
        words += ["--constraint", str(staging / "constraints.txt")]
    return [*words, "--requirement", str(staging / "requirements.txt")]


def _write_for_pip(requirements: Requirements, staging: Path) -> None:
    """Write the checked lines, and put the archive's packages into a folder that pip may change."""
    sources = staging / "sources"
    sources.mkdir()
    placed: dict[Path, Path] = {}

    def place(path: Path) -> Path:
        if path not in placed:
            target = sources / str(len(placed)) / path.name
            target.parent.mkdir()
            # A build writes into its folder, and the archive's may be one of the store.
            if path.is_dir():
                shutil.copytree(path, target, symlinks=True)
            else:
                target.symlink_to(path)
            placed[path] = target
        return placed[path]

    (staging / "links").mkdir()
    for path in requirements.links:
        (staging / "links" / path.name).symlink_to(path)
    for name, entries in (
        ("requirements.txt", requirements.entries),
        ("constraints.txt", requirements.constraints),
    ):
        (staging / name).write_text("".join(f"{entry.render(place)}\n" for entry in entries), "utf-8")


def digest_of(requirements: Requirements, kind: Kind, python: str = sys.executable) -> str:
    """The name of the environment: a digest of what its content depends on, 32 hex digits."""
    facts: list[Any] = [LAYOUT, kind, requirements.digest, sys.version, platform.machine(), sysconfig.get_platform()]
    if kind == "venv":
        # Only packages that the server lacks are installed there, so it depends on the server's.
        facts += [python, sys.prefix, sorted({f"{name}=={version}" for name, version in _distributions(None)})]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _append_servers_packages(venv: Path) -> None:
    """Let the virtual environment find the server's packages after its own.

    By `addsitedir`, since the server's own `.pth` files count, too: an editable installation is one.
    """
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    line = f"import site; list(map(site.addsitedir, {folders!r}))\n"
    (_site_packages(venv) / "_marserve_server.pth").write_text(line, "utf-8")


def _site_packages(venv: Path) -> Path:
    places = {"base": str(venv), "platbase": str(venv), "installed_base": str(venv), "installed_platbase": str(venv)}
    return Path(sysconfig.get_path("purelib", "venv", vars=places))


# ------------------------------------------------------------------------------------------------ what came of it


def _finish(whole: Path, final: Path, kind: Kind, report: Path, seconds: float) -> None:
    """Record what was installed; change the paths in a virtual environment to its final name."""
    place = whole / "packages" if kind == "packages" else _site_packages(whole / "venv")
    hashes = _read_hashes(report)
    installed = [
        Package(name, version, hashes.get((normalize(name), version), "")) for name, version in _distributions(place)
    ]
    if kind == "venv":
        _correct_scripts(whole / "venv", whole, final)
    (whole / LOCK_LIST).write_text("".join(f"{package}\n" for package in installed), "utf-8")
    record = {
        "layout": LAYOUT,
        "kind": kind,
        "python": sys.version.split()[0],
        "installed": [(package.name, package.version, package.sha256) for package in installed],
        "seconds": round(seconds, 3),
        "bytes": bytes_below(whole),
    }
    (whole / RECORD).write_text(json.dumps(record), "utf-8")


def _correct_scripts(venv: Path, made_in: Path, final: Path) -> None:
    """Correct the path of the interpreter in a virtual environment's programs: the folder will be renamed."""
    old, new = os.fsencode(made_in), os.fsencode(final)
    for path in [*(venv / "bin").iterdir(), venv / "pyvenv.cfg"]:
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if old in content:
            path.write_bytes(content.replace(old, new))


def _read_hashes(report: Path) -> dict[tuple[str, str], str]:
    """The digests of the files that pip installed from, by normalized name and version."""
    try:
        items = json.loads(report.read_text("utf-8"))["install"]
        return {
            (normalize(item["metadata"]["name"]), item["metadata"]["version"]): item["download_info"]["archive_info"][
                "hashes"
            ]["sha256"]
            for item in items
            if "sha256" in item["download_info"].get("archive_info", {}).get("hashes", {})
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _distributions(place: Path | None) -> list[tuple[str, str]]:
    """Name and version of every distribution in a folder (None: on this process's import path), by name."""
    found = importlib.metadata.distributions(path=[str(place)]) if place else importlib.metadata.distributions()
    pairs = {(each.metadata["Name"], each.version) for each in found if each.metadata["Name"]}
    return sorted(pairs, key=lambda pair: (normalize(pair[0]), pair[1]))


def normalize(name: str) -> str:
    """A distribution's name as packaging compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


# ------------------------------------------------------------------------------------------------ shared imports


def brings_shared(names: Iterable[str], shared: Collection[str] | None = None) -> bool:
    """Whether one of these distributions may be loaded already in a process that has imported the heavy modules.

    Judged by names: the heavy distributions of this machine (`shared`), and all that they require. A second copy of
    one of these cannot be imported beside the first.
    """
    taken = shared_closure() if shared is None else shared
    return any(normalize(name) in taken for name in names)


def shared_closure(
    roots: Iterable[str] = SHARED_DISTRIBUTIONS, requires: Callable[[str], Iterable[str]] | None = None
) -> frozenset[str]:
    """The distributions `roots` and all that they require, directly or not; `requires` gives the names for one."""
    look = requires or _required_names
    found: set[str] = set()
    waiting = [normalize(root) for root in roots]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(normalize(each) for each in look(name))
    return frozenset(found)


def _required_names(name: str) -> Iterator[str]:
    try:
        required = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for line in required:
        word, _, marker = line.partition(";")
        match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", word.strip())
        if match is not None and "extra" not in marker:
            yield match.group(0)


# ------------------------------------------------------------------------------------------------ clearing away


def _is_whole(folder: Path) -> bool:
    return _read_record(folder) is not None


def _read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a complete environment; None without one that can be read."""
    try:
        record = json.loads((folder / RECORD).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("layout") == LAYOUT else None


def _find_defect(folder: Path) -> str | None:
    """Why nothing can be installed into this folder; None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(prefix="probe.", dir=folder):
            return None
    except OSError as error:
        return f"it cannot be written ({error.strerror or error})"


def _leased(folder: Path) -> LeasedFolders:
    return LeasedFolders(folder, _bytes_of, suffix=".tmp", is_whole=_is_whole, beside=(".log",))


def _bytes_of(folder: Path) -> int | None:
    """The recorded size of an environment of any layout; None for other folders."""
    try:
        return int(json.loads((folder / RECORD).read_text("utf-8"))["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prune(folder: Path, limit_bytes: int) -> list[str]:
    """Delete leftovers of killed servers, and unused environments while all together hold more than `limit_bytes`.

    The longest unused is deleted first; with 0 none is. Returns their names. Blocks.
    """
    return _prune(_leased(folder), limit_bytes)


def _prune(kept: LeasedFolders, limit_bytes: int) -> list[str]:
    removed = kept.prune(limit_bytes or math.inf).unused
    if removed:
        log.info("cleared away %d environments that no model uses, over environment_cache_size", len(removed))
    _prune_logs(kept.folder)
    return removed


def _prune_logs(folder: Path) -> None:
    """Delete all but the latest logs of failed installations."""
    alone = []
    for path in folder.glob("*.log"):
        if not (folder / path.stem).exists():
            with contextlib.suppress(OSError):
                alone.append((path.stat().st_mtime, path))
    for _, path in sorted(alone)[:-LOGS_OF_FAILURES]:
        path.unlink(missing_ok=True)
