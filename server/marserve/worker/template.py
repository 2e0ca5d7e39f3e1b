"""A template: a process that has loaded a model, never serves, and forks workers that find it loaded already.

Forking is refused for what is found (`refusals`): threads, an open accelerator, an ONNX Runtime session, and sockets,
pipes, writable files or child processes that appeared while loading. Threads that only wait for work are ended first
(`process/idle_threads.py`). A template may also only import modules; the workers that it forks then load for
themselves. It reaps its workers and reports their wait statuses; when it ends, they end (`PR_SET_PDEATHSIG`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, recv_fds, socket, socketpair
from typing import NoReturn

from marserve import wire
from marserve.allocator import give_back_free_memory
from marserve.errors import BadFrame
from marserve.lineage import VARIABLE as LINEAGE
from marserve.messages import (
    HEAVY_MODULES,
    OPEN_SESSION,
    Exited,
    Fork,
    Forked,
    Load,
    Preload,
    SetLevel,
    Stop,
    Templated,
    ToServer,
)
from marserve.shared_page import Page
from marserve.worker.connection import Connection
from marserve.worker.load import LoadedModel, enter_model_folder, load_model
from marserve.worker.loop import WorkerLoop
from marserve.worker.outgoing import not_loaded
from marserve.worker.process.idle_threads import describe_threads, end_idle_threads
from marserve.worker.process.memory_limit import limit_memory
from marserve.worker.process.own_process import exit_status, leave, use_inter_threads, use_threads
from marserve.worker.process.parent import die_with_parent, end_the_parents_family, wake_at_parents_end
from marserve.worker.process.printed_lines import configure_output, set_level

# The device files that runtimes of accelerators open (CUDA, also on Jetson and under WSL, ROCm, Level Zero): a driver
# that was opened before a fork does not work after it.
DEVICE_FILES = ("/dev/nvidia", "/dev/nvmap", "/dev/nvhost", "/dev/dxg", "/dev/kfd", "/dev/dri/", "/dev/accel/")

# The descriptors of a `Fork`, before those of a rank: wire, standard output, standard error, page.
FORK_DESCRIPTORS = 4
MOST_DESCRIPTORS = 200
# The most reasons against forking in a message: the server's bound on a template's message is small.
MOST_REFUSALS = 500
THREAD_END_LOOKS, THREAD_END_LOOK_S = 20, 0.01

log = logging.getLogger("marserve.worker.template")


class Template:
    """The template's loop: one control connection to the server, single-threaded by need."""

    def __init__(self, control: socket) -> None:
        self._control = control
        self._decoder = wire.worker_decoder()
        self._descriptors: list[int] = []
        self._model: LoadedModel | None = None
        self._known: dict[int, str] = {}
        self._server = os.getppid()
        self._wake_read, self._wake_write = socketpair(AF_UNIX, SOCK_STREAM)

    def run(self) -> NoReturn:
        """Serve the server's orders until it is gone or says stop."""
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._hear_of_children()
        self._known = open_descriptors()
        # poll: select takes no descriptor above 1023, and these have the numbers of a server with many models.
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        waiting.register(self._wake_read, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in waiting.poll()]
            if self._wake_read.fileno() in ready:
                self._wake_read.recv(4096)
                self._reap()
            if self._control.fileno() in ready:
                data, descriptors, _, _ = recv_fds(self._control, 65536, MOST_DESCRIPTORS)
                if not data:
                    end_the_parents_family(self._server)
                    leave(0)
                self._descriptors.extend(descriptors)
                try:
                    messages = self._decoder.feed(data)
                except BadFrame:
                    leave(1)
                for message, _ in messages:
                    self._obey(message)

    def _hear_of_children(self) -> None:
        """Have the loop woken when a worker ends. Called again after the author's code, which may have undone it."""
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _obey(self, message: object) -> None:
        if isinstance(message, Load):
            began = time.monotonic()
            try:
                limit_memory(message.loading_limit_bytes, is_template=True)
                enter_model_folder(message)
                self._model = load_model(message)
            except SystemExit as error:  # the author's code asked to end; the server gets its status
                leave(exit_status(error))
            except BaseException as error:
                self._send(not_loaded(error))
                leave(1)
            self._report(began, [message.model_dir, message.packages, *message.import_paths])
        elif isinstance(message, Preload):
            began = time.monotonic()
            for name in message.modules:
                try:
                    importlib.import_module(name)
                except ImportError:
                    continue
            self._report(began, [])
        elif isinstance(message, SetLevel):
            set_level(message.level)
        elif isinstance(message, Fork):
            self._fork(message)
        elif isinstance(message, Stop):
            leave(0)

    def _report(self, began: float, own_folders: list[str]) -> None:
        self._hear_of_children()
        # From now on the loop notices the server's end at once, and can end what other processes left behind.
        wake_at_parents_end(self._server)
        gc.collect()
        end_idle_threads()
        give_back_free_memory()
        found = refusals(self._known)[:MOST_REFUSALS]
        gc.freeze()  # so that a collection in a worker does not copy the pages of what is loaded
        self._send(Templated(time.monotonic() - began, found, heavy_modules(own_folders)))

    def _fork(self, order: Fork) -> None:
        count = FORK_DESCRIPTORS + order.more
        descriptors, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # no further process is possible: workers that serve must not end for that
            log.error("cannot fork a worker: %s", error)
            pid = -1
        if pid == 0:
            try:
                self._become_worker(order, descriptors, parent)
            except BaseException:
                traceback.print_exc()
            finally:
                leave(1)
        for descriptor in descriptors:
            os.close(descriptor)
        self._send(Forked(order.worker_id, max(pid, 0)))

    def _become_worker(self, order: Fork, descriptors: list[int], parent: int) -> NoReturn:
        os.setsid()
        die_with_parent(parent)
        os.environ[LINEAGE] = order.lineage
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        self._wake_read.close()
        self._wake_write.close()
        for descriptor in self._descriptors:  # another worker's, whose order was read with this one's
            os.close(descriptor)
        wire_descriptor, out, err, page_descriptor, *more = descriptors
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        page = Page(page_descriptor)
        os.close(page_descriptor)
        reseed(order.seed)
        if self._model is not None:
            limit_memory(self._model.load.memory_limit_bytes)
        use_threads(order.threads)
        if self._model is not None:
            self._model.context.threads = order.threads
            use_inter_threads(self._model.load.inter_threads)
        WorkerLoop(Connection(socket(fileno=wire_descriptor)), page, self._model, more).run()

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            # Until it is reaped its number cannot be given to another group, so what it left in its own can be ended.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            pid, status = os.waitpid(ended.si_pid, 0)
            self._send(Exited(pid, status))

    def _send(self, message: ToServer) -> None:
        try:
            for buffer in wire.encode(message):
                self._control.sendall(buffer)
        except OSError:
            leave(0)


# ------------------------------------------------------------------------------------------------ refusals


def refusals(known_descriptors: Mapping[int, str]) -> list[str]:
    """The reasons why this process must not be forked, a sentence each; empty if it may be.

    `known_descriptors` are those that were open before the model was loaded, with their targets.
    """
    if not Path("/proc/self/task").is_dir():
        return ["this system does not show a process's threads and files, so that forking it cannot be judged"]
    found = []
    threads = lasting_threads()
    if len(threads) > 1:
        found.append(f"{len(threads)} threads run, the main one and {', '.join(describe_threads())}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found.append("a CUDA context is initialised")
    if torch is not None and getattr(torch, "xpu", None) is not None and torch.xpu.is_initialized():
        found.append("an XPU context is initialised")
    if "onnxruntime" in sys.modules and any(type(thing).__name__ == "InferenceSession" for thing in gc.get_objects()):
        found.append(OPEN_SESSION)
    for descriptor, target in sorted(open_descriptors().items()):
        if known_descriptors.get(descriptor) != target:
            reason = _unshareable(descriptor, target)
            if reason is not None:
                found.append(reason)
    children = child_processes()
    if children:
        found.append(f"child processes run: {', '.join(map(str, children))}")
    return found


def heavy_modules(own_folders: Iterable[str]) -> list[str]:
    """Which of the heavy modules are loaded, without those from `own_folders`, which the archive brings itself."""
    folders = tuple(os.path.join(os.path.realpath(folder), "") for folder in own_folders if folder)
    found = []
    for name in HEAVY_MODULES:
        module = sys.modules.get(name)
        origin = getattr(module, "__file__", None)
        if origin is not None and not os.path.realpath(origin).startswith(folders):
            found.append(name)
    return found


def lasting_threads() -> list[str]:
    """The names of this process's threads, without those that are about to end.

    Python's `join` returns a moment before the system has ended a thread; this waits briefly for that.
    """
    for _ in range(THREAD_END_LOOKS):
        names = thread_names()
        if len(names) == 1 or threading.active_count() > 1:
            break
        time.sleep(THREAD_END_LOOK_S)
    return names


def thread_names() -> list[str]:
    """The names of this process's threads."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # it ended meanwhile
            continue
    return names


def open_descriptors() -> dict[int, str]:
    """This process's open descriptors and their targets (`socket:[1]`, `pipe:[2]`, a path)."""
    found = {}
    try:
        entries = os.listdir("/proc/self/fd")
    except FileNotFoundError:
        return {}
    for entry in entries:
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the listing's own
            continue
    return found


def child_processes() -> list[int]:
    """Process ids of this process's children."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found.extend(int(word) for word in (task / "children").read_text().split())
        except OSError:
            continue
    return sorted(found)


def _unshareable(descriptor: int, target: str) -> str | None:
    """Why a descriptor that appeared while loading must not be shared by forks, or None if it may be."""
    if target.startswith(DEVICE_FILES):
        return f"an accelerator was opened (descriptor {descriptor}, {target})"
    if target.startswith("socket:"):
        return f"a socket was opened (descriptor {descriptor})"
    if target.startswith("pipe:"):
        return f"a pipe was opened (descriptor {descriptor})"
    if target.startswith("anon_inode:"):
        return f"a kernel object was opened (descriptor {descriptor}, {target.removeprefix('anon_inode:')})"
    try:
        flags = _open_flags(descriptor)
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return None
    if stat.S_ISFIFO(mode):
        return f"a named pipe was opened: {target}"
    if stat.S_ISREG(mode) and flags & os.O_ACCMODE != os.O_RDONLY:
        return f"a file was opened for writing: {target}"
    return None


def _open_flags(descriptor: int) -> int:
    for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8)
    return os.O_RDONLY


def reseed(seed: int) -> None:
    """Give this worker random numbers of its own: otherwise all forks would draw the same.

    A library that is imported later is seeded by itself.
    """
    random = sys.modules.get("random")
    if random is not None:
        random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


def run_template(descriptor: int) -> NoReturn:
    """Be a template whose control connection is `descriptor`."""
    configure_output()
    Template(socket(fileno=descriptor)).run()
