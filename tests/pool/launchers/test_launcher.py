"""Tests for how workers come to life: forked after loading, forked before it where that is not safe, or fresh."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from marserve.environments.environments import Environments
from marserve.environments.interpreters import Interpreters
from marserve.environments.requirements import Requirements
from marserve.errors import LoadFailed, WorkerDied
from marserve.model_options import ModelOptions
from marserve.pool.interpreter import Interpreter
from marserve.pool.launchers.forked import END_GRACE_S
from marserve.pool.launchers.fresh import launch_fresh
from marserve.pool.launchers.launcher import MAX_REASONS, Launchers, StartFailed, WorkerEnds
from marserve.pool.launchers.process import WorkerProcess
from marserve.pool.pool import Pool
from marserve.pool.slots.life import STOP_GRACE_S
from marserve.pool.worker_end.cause_of_death import Cause
from marserve.settings.interpreters import AllowedInterpreter
from support.other_python import make_environment
from support.processes import living, until
from support.running_pool import RunningPool, worker_environment
from support.worker_logs import KeptLines

pytestmark = [
    pytest.mark.true_starts,
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked"),
]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


# ------------------------------------------------------------------------------------------- forked after loading

TORCH_MODEL = """
import random
import numpy
import torch

class Handler:
    def initialize(self, context):
        self.model = torch.nn.Linear(4, 2)

    def handle(self, data, context):
        with torch.no_grad():
            answer = self.model(torch.ones(1, 4)).tolist()
        drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(1))]
        return [{"answer": answer, "drawn": drawn, "threads": torch.get_num_threads()} for _ in data]
"""


@pytest.mark.torch
async def test_a_plain_torch_model_is_loaded_once_and_forked(tmp_path: Path) -> None:
    """Workers share its weights, have threads of their own again, and draw different random numbers."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("the model needs the extra `torch`")
    async with RunningPool(tmp_path, TORCH_MODEL, workers=2, load={"threads": 2}) as running:
        await running.start()
        views = running.pool.workers()

        told: dict[int, dict[str, object]] = {}
        for stopped, asked in (views, views[::-1]):
            os.kill(stopped.pid, signal.SIGSTOP)  # so that the other one answers
            answers = [running.send(b"x") for _ in range(2)]
            await until(lambda answers=answers: any(answer.end for answer in answers), "an answer")  # type: ignore[misc]
            os.kill(stopped.pid, signal.SIGCONT)
            [first, *_] = [answer.body for answer in answers if answer.body]
            for answer in answers:
                await answer.told()
            told[asked.pid] = json.loads(first)

        one, two = told.values()
        assert [view.how_started for view in views] == ["forked, model loaded"] * 2
        assert running.pool.warnings == []
        assert one["answer"] == two["answer"]
        assert (one["threads"], two["threads"]) == (2, 2)
        assert not set(one["drawn"]) & set(two["drawn"])  # type: ignore[call-overload]


@pytest.mark.parametrize("module", ["numpy", pytest.param("torch", marks=[pytest.mark.torch, pytest.mark.long])])
async def test_a_model_that_must_not_be_forked_still_saves_the_import(tmp_path: Path, module: str) -> None:
    """Its workers are forked from a template that has imported what is heavy, and load for themselves."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"the model needs {module}")
    source = f"""
    import sys
    was_there = "{module}" in sys.modules
    import os, socket, {module}
    opened = socket.socket()
    here = os.getpid()
    def handle(data, context):
        return [f"{{was_there}} {{here}}" for row in data] if data else None
    """
    async with RunningPool(tmp_path, source) as running:
        await running.start()
        [view] = running.pool.workers()

        answer = await running.ask_body(b"x")

        assert view.how_started == "forked before loading"
        assert answer == f"True {view.pid}".encode()
        [warning] = running.pool.warnings
        assert "a socket was opened" in warning


async def test_one_load_serves_all_workers(tmp_path: Path) -> None:
    """`initialize` runs once, in the template; scaling up does not run it again."""
    source = """
    import os
    class Handler:
        def initialize(self, context):
            with open("loads", "a") as loads:
                loads.write("x")
        def handle(self, data, context):
            return ["ok"] * len(data)
    """
    async with RunningPool(tmp_path, source, start="fork", workers=2) as running:
        await running.start()
        running.pool.scale(4, 4)
        await running.pool.wait_until_ready()
        os.kill(running.pids[0], signal.SIGKILL)
        await until(lambda: running.metrics.worker_deaths["killed"] == 1, "the death is seen")
        await until(lambda: running.pool.ready_workers == 4, "the replacement")

        assert running.file("loads").read_text() == "x"


HARMLESS = {
    "a file read": "opened = open('handler.py')",
    "devices": "opened = open('/dev/null', 'w'), open('/dev/urandom', 'rb')",
    "a file written and closed": "open('made', 'w').close()",
    "a thread that ended": "import threading; t = threading.Thread(target=int); t.start(); t.join()",
    "a child that ended": "import subprocess, sys; subprocess.run([sys.executable, '-c', ''])",
    "an event loop that ended": "import asyncio; asyncio.run(asyncio.sleep(0))",
    "numpy": "import numpy; x = numpy.ones((300, 300)) @ numpy.ones((300, 300))",
    "another way to hear of children": "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "a progress bar's monitor": "import io, tqdm; tqdm.tqdm(total=1, file=io.StringIO()).close()",
    "no way to hear of signals": "import signal; signal.set_wakeup_fd(-1)",
}


@pytest.mark.parametrize(
    "line",
    ["\n".join(HARMLESS.values()), *(pytest.param(line, marks=pytest.mark.long) for line in HARMLESS.values())],
    ids=["all of it", *HARMLESS],
)
async def test_what_is_over_or_harmless_does_not_stand_in_the_way(tmp_path: Path, line: str) -> None:
    """And the template still hears of its workers' ends."""
    source = f"{line}\ndef handle(data, context): return ['ok'] if data else None\n"
    async with RunningPool(tmp_path, source, start="fork") as running:
        await running.start()
        [pid] = running.pids

        os.kill(pid, signal.SIGKILL)
        await until(lambda: running.metrics.worker_deaths["killed"] == 1, "the death is seen", timeout_s=2.0)

        assert await running.ask_body(b"x") == b"ok"


async def test_an_executor_that_was_idle_works_in_each_worker(tmp_path: Path) -> None:
    """Its threads end before the fork, and the next work starts others."""
    source = """
    from concurrent.futures import ThreadPoolExecutor
    executor = ThreadPoolExecutor(2)
    assert list(executor.map(abs, [-1, -2])) == [1, 2]
    def handle(data, context):
        return [str(executor.submit(abs, -7).result(10)) for row in data] if data else None
    """
    async with RunningPool(tmp_path, source, start="fork", workers=2) as running:
        await running.start()

        assert [view.how_started for view in running.pool.workers()] == ["forked, model loaded"] * 2
        assert [await running.ask_body(b"x") for _ in range(4)] == [b"7"] * 4


# ------------------------------------------------------------------------------------------- refusals

REFUSALS = {
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "2 threads run",
    ),
    "socket": ("import socket\nopened = socket.socket()", "a socket was opened (descriptor"),
    "socket pair": ("import socket\nopened = socket.socketpair()", "a socket was opened"),
    "pipe": ("import os\nopened = os.pipe()", "a pipe was opened (descriptor"),
    "named pipe": (
        "import os\nos.path.exists('fifo') or os.mkfifo('fifo')\nopened = os.open('fifo', os.O_RDWR)",
        "a named pipe was opened",
    ),
    "file written": ("opened = open('made', 'w')", "a file was opened for writing"),
    "file appended": ("opened = open('made', 'a')", "a file was opened for writing"),
    "database": (
        "import sqlite3\nopened = sqlite3.connect('base')\nopened.execute('create table if not exists t (x)')",
        "a file was opened for writing",
    ),
    "memory map": (
        "import mmap\nopen('made', 'wb').write(bytes(4096))\n"
        "with open('made', 'r+b') as file:\n    opened = mmap.mmap(file.fileno(), 0)",
        "a file was opened for writing",
    ),
    "poll": ("import select\nopened = select.epoll()", "a kernel object was opened"),
    "child": (
        "import subprocess, sys\nopened = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
        "child processes run",
    ),
    "in place of standard input": (
        "import os, socket\nos.close(0)\nopened = socket.socket()\nassert opened.fileno() == 0",
        "a socket was opened (descriptor 0)",
    ),
}


LOOKS = """
import json, os, sys
from marserve.worker.template import open_descriptors, refusals
for name, lines in json.loads(sys.argv[1]).items():
    os.mkdir(name)
    if (pid := os.fork()) == 0:
        os.chdir(name)
        known = open_descriptors()
        exec(lines, globals())
        found = "; ".join(refusals(known))
        with open("found", "w") as file:
            file.write(found)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_what_must_not_be_shared_is_found_by_its_name(tmp_path: Path) -> None:
    """Each in a process of its own, and each by its name alone."""
    cases = {name.replace(" ", "_"): lines for name, (lines, _) in REFUSALS.items()}
    cases |= {"nothing": ""}

    with subprocess.Popen(
        [sys.executable, "-P", "-c", LOOKS, json.dumps(cases)],
        cwd=tmp_path,
        env=worker_environment(),
        start_new_session=True,
    ) as process:
        process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the case `child`

    found = {name: (tmp_path / name / "found").read_text() for name in cases}
    assert process.returncode == 0
    assert found.pop("nothing") == ""
    for name, (_, said) in REFUSALS.items():
        told = found[name.replace(" ", "_")]
        assert said in told, name
        assert told.count(";") == (name in ("pipe", "socket pair")), told  # these have two ends


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        pytest.param(*case, id=name, marks=() if name in ("thread", "socket") else pytest.mark.long)
        for name, case in REFUSALS.items()
    ],
)
async def test_what_must_not_be_shared_is_refused_by_name(tmp_path: Path, lines: str, said: str) -> None:
    """`workerStart: fork` refuses to load then, and says why."""
    source = f"{lines}\ndef handle(data, context): return ['ok'] if data else None\n"
    async with RunningPool(tmp_path, source, start="fork") as running:
        with pytest.raises(LoadFailed) as caught:
            await running.start()

        assert said in caught.value.reason
        assert "workerStart is fork" in caught.value.reason
        assert "Set workerStart: auto" in caught.value.reason
        assert running.pool.last_death is not None
        assert running.pool.last_death.cause == Cause.FORK_REFUSED
        assert running.pids == []


@pytest.mark.parametrize("start", ["auto", "fresh"])
@pytest.mark.parametrize(
    "kind", ["thread", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("socket", "child"))]
)
async def test_such_a_model_is_loaded_by_each_worker(tmp_path: Path, kind: str, start: str) -> None:
    """`auto` forks before loading and warns; `fresh` starts new interpreters and has nothing to warn of."""
    lines, said = REFUSALS[kind]
    source = f"{lines}\nimport os\ndef handle(data, context): return [str(os.getpid())] if data else None\n"
    async with RunningPool(tmp_path, source, start=start, workers=2) as running:
        await running.start()
        views = running.pool.workers()

        answer = int(await running.ask_body(b"x"))

        assert answer in [view.pid for view in views]
        if start == "auto":
            assert [view.how_started for view in views] == ["forked before loading"] * 2
            [warning] = running.pool.warnings
            assert said in warning
        else:
            assert [view.how_started for view in views] == ["fresh"] * 2
            assert running.pool.warnings == []


async def test_an_initialised_cuda_context_is_refused(tmp_path: Path) -> None:
    """Here a module of the archive's stands in for torch; and it is the archive's that each worker then imports."""
    fake = (
        "class cuda:\n"
        "    @staticmethod\n"
        "    def is_initialized(): return True\n"
        "def set_num_threads(count): pass\n"
        "def manual_seed(seed): pass\n"
        "class Tensor: pass\n"
        "name = 'the archive\\'s own'\n"
    )
    source = "import torch\ndef handle(data, context): return [torch.name] if data else None\n"
    async with RunningPool(tmp_path, source) as running:
        running.file("torch.py").write_text(fake)
        await running.start()

        answer = await running.ask_body(b"x")

        assert answer == b"the archive's own"
        [view] = running.pool.workers()
        assert view.how_started == "forked before loading"
        [warning] = running.pool.warnings
        assert warning.endswith("a CUDA context is initialised")


@pytest.mark.onnx
async def test_an_open_onnx_session_is_refused(tmp_path: Path) -> None:
    """Though it was told to use one thread; its workers load for themselves."""
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(name, kind, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    source = """
    import numpy, onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])
    def handle(data, context):
        return [str(session.run(None, {"x": numpy.array([7], "float32")})[0][0])] if data else None
    """
    async with RunningPool(tmp_path, source) as running:
        onnx.save(model, str(running.file("model.onnx")))
        await running.start()

        answer = await running.ask_body(b"x")

        assert answer == b"7.0"
        [view] = running.pool.workers()
        assert view.how_started == "forked before loading"
        assert running.pool.warnings == []  # nobody could mend it


async def test_workers_with_devices_are_never_forked_after_loading(tmp_path: Path) -> None:
    """A CUDA context does not survive it; each gets its own device, in turn."""
    source = """
    def handle(data, context):
        return [str(context.system_properties["gpu_id"])] if data else None
    """
    async with RunningPool(tmp_path, source, start="fresh", workers=2, gpu_ids=(3, 1)) as running:
        await running.start()

        views = running.pool.workers()
        answers = {await running.ask_body(b"x")}
        os.kill(views[0].pid, signal.SIGSTOP)
        sent = [running.send(b"x") for _ in range(2)]
        await until(lambda: any(one.end for one in sent), "the other answers")
        os.kill(views[0].pid, signal.SIGCONT)
        answers |= {(await one.told()).body for one in sent}  # type: ignore[union-attr]

        assert [view.gpu_id for view in views] == [3, 1]
        assert answers == {b"3", b"1"}


async def test_fork_with_devices_refuses_to_load(tmp_path: Path) -> None:
    """The operator asked for what cannot be."""
    async with RunningPool(tmp_path, start="fork", gpu_ids=(0,)) as running:
        with pytest.raises(LoadFailed) as caught:
            await running.start()

        assert "its workers use devices" in caught.value.reason


# ------------------------------------------------------------------------------------------- templates


async def test_models_that_cannot_be_forked_share_one_template(tmp_path: Path) -> None:
    """It has imported the same modules for all of them, and outlives each."""
    lines, _ = REFUSALS["socket"]
    source = f"{lines}\ndef handle(data, context): return ['ok'] if data else None\n"
    async with RunningPool(tmp_path, source) as running:
        await running.start()
        second = Pool(running.options, running.load, running.launchers, running.log)
        second.start()
        await second.wait_until_ready()
        [other] = second.workers()
        [shared] = running.look() - {*running.pids, other.pid}

        await second.stop()

        assert living([shared, other.pid]) == {shared}
        assert await running.ask_body(b"x") == b"ok"


async def test_a_shared_template_that_died_is_replaced(tmp_path: Path) -> None:
    """The next worker opens another."""
    lines, _ = REFUSALS["socket"]
    source = f"{lines}\ndef handle(data, context): return ['ok'] if data else None\n"
    async with RunningPool(tmp_path, source) as running:
        await running.start()
        [shared] = running.look() - set(running.pids)

        os.kill(shared, signal.SIGKILL)
        await until(lambda: running.metrics.worker_starts == 2, "the worker went with it")

        assert await running.ask_body(b"x") == b"ok"


async def test_a_shared_template_that_hangs_while_it_imports_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All models whose workers are forked before loading would wait for it, for as long as the server runs."""
    monkeypatch.setattr("marserve.pool.launchers.launcher.IMPORT_TIMEOUT_S", 2.0)
    counted = tmp_path / "imports"
    (tmp_path / "numpy.py").write_text(
        "import pathlib, time\n"
        f"counted = pathlib.Path({str(counted)!r})\n"
        "count = counted.stat().st_size if counted.exists() else 0\n"
        "counted.write_text('x' * (count + 1))\n"
        "if count == 1:\n"
        "    time.sleep(600)\n"
        "class random:\n"
        "    seed = staticmethod(lambda seed: None)\n"
    )
    packages = worker_environment()["PYTHONPATH"]
    environment = worker_environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{packages}")
    source = "import numpy, socket\nopened = socket.socket()\ndef handle(data, context): return data and ['ok']\n"
    async with RunningPool(tmp_path, source, environment=environment) as running:
        running.pool.start()
        await until(lambda: running.pool.ready_workers == 1, "the next try", timeout_s=30.0)

        assert set(running.metrics.worker_deaths) == {"startup_timeout"}
        assert running.pool.last_death is not None
        assert "imports numpy for several models did not do so within 2 s" in running.pool.last_death.detail
        assert await running.ask_body(b"x") == b"ok"


async def test_a_system_that_will_not_fork_costs_no_worker_that_serves(tmp_path: Path) -> None:
    """The template says so and lives on; the slot tries again."""
    source = """
    import os
    real_fork, forks = os.fork, []
    def fork():
        forks.append(1)
        if len(forks) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real_fork()
    os.fork = fork
    def handle(data, context): return [str(os.getpid())] if data else None
    """
    async with RunningPool(tmp_path, source, start="fork") as running:
        await running.start()
        [first] = running.pids

        running.pool.scale(2, 2)
        await until(lambda: running.pool.ready_workers == 2, "the second came at the second try")

        assert running.pids[0] == first
        assert running.metrics.worker_deaths == {"load_failed": 1}
        assert any("cannot fork a worker" in text for text in running.log.texts)


async def test_a_template_that_does_not_fork_is_ended_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once. Describe says so, and the worker that it forked before is replaced before it goes."""
    monkeypatch.setattr("marserve.pool.launchers.forked.FORK_TIMEOUT_S", 1.0)
    async with RunningPool(tmp_path, start="fork") as running:
        await running.start()
        [template] = running.look() - set(running.pids)
        [first] = running.pids

        os.kill(template, signal.SIGSTOP)
        running.pool.scale(2, 2)
        await until(lambda: running.metrics.worker_deaths["startup_timeout"] == 1, "the slot gave this try up")
        assert running.pool.ready_workers == 1
        assert await running.ask_body(b"served by the first one") == b"served by the first one"
        await until(lambda: not living([template, first]), "the template and its worker are gone")
        await until(lambda: running.pool.ready_workers == 2, "both workers")

        assert await running.ask_body(b"x") == b"x"
        [other] = running.look() - set(running.pids) - {template, first}
        await until(lambda: running.pool.template_pids == [other], "one template")
        assert running.metrics.worker_deaths == {"startup_timeout": 1}
        assert running.metrics.worker_recycles == {"template": 1}
        [warning] = running.pool.warnings
        said = f"(process {template}) did not fork a worker within 1 s and was replaced"
        assert said in warning
        assert running.pool.last_death is not None
        assert f"(process {template}) did not fork a worker within 1 s; it is replaced" in (
            running.pool.last_death.detail
        )


async def test_what_a_template_forks_too_late_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for longer than the server waits, and comes back while a worker of its own still serves."""
    monkeypatch.setattr("marserve.pool.launchers.forked.FORK_TIMEOUT_S", 1.0)
    monkeypatch.setattr("marserve.pool.pool.Pool._leave_lost_templates", lambda self: None)
    async with RunningPool(tmp_path, start="fork") as running:
        await running.start()
        [template] = running.look() - set(running.pids)

        os.kill(template, signal.SIGSTOP)
        running.pool.scale(2, 2)
        await until(lambda: running.metrics.worker_deaths["startup_timeout"] == 1, "the slot gave this try up")
        os.kill(template, signal.SIGCONT)
        await until(lambda: running.pool.ready_workers == 2, "the next try")

        assert await running.ask_body(b"x") == b"x"
        wanted = set(running.pids) | set(running.pool.template_pids)
        assert template in wanted
        await until(lambda: living(running.look()) == wanted, "no worker that nobody asked for")


async def test_a_worker_whose_template_is_stopped_is_seen_to_end(tmp_path: Path) -> None:
    """The template reaps it and cannot; the pool's end does not wait for that, either."""
    async with RunningPool(tmp_path, start="fork", workers=2) as running:
        await running.start()
        [template] = running.look() - set(running.pids)
        first, second = running.pids

        os.kill(template, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        await until(lambda: running.metrics.worker_deaths["killed"] == 1, "its end is seen", timeout_s=5.0)
        assert await running.ask_body(b"x") == b"x"
        began = asyncio.get_running_loop().time()
        await running.pool.stop()

        assert asyncio.get_running_loop().time() - began < 3 * (2 * STOP_GRACE_S + END_GRACE_S)
        assert not living([second, template])


async def test_a_model_whose_forks_hang_is_loaded_by_each_worker_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for a lock in every fork waits there for ever; after two templates no third is tried."""
    monkeypatch.setattr("marserve.pool.launchers.forked.FORK_TIMEOUT_S", 1.0)
    source = """
    import os, sys, threading
    lock = threading.Lock()
    lock.acquire()
    if sys.argv[1:2] == ["template"] and "fork_hangs" not in os.environ:
        os.register_at_fork(before=lock.acquire)
    os.environ["fork_hangs"] = "no more"
    def handle(data, context): return ["ok"] if data else None
    """
    async with RunningPool(tmp_path, source) as running:
        running.pool.start()
        await until(lambda: running.pool.ready_workers == 1, "a worker", timeout_s=30.0)

        assert await running.ask_body(b"x") == b"ok"
        assert running.metrics.worker_deaths == {"startup_timeout": 2}
        [view] = running.pool.workers()
        assert view.how_started == "forked before loading"
        assert "Each worker loads the model for itself: templates that have loaded it do not fork" in (
            running.pool.warnings
        )


async def test_a_template_cannot_have_others_import_what_it_likes(tmp_path: Path) -> None:
    """What it names beyond the modules that are slow to import would make one more template each time."""
    source = """
    import socket
    from marserve.messages import Templated
    from marserve.worker import template
    send = template.Template._send
    def lie(self, message):
        if type(message) is Templated:
            message = Templated(0.1, ["x" * 100_000], ["this", "numpy", "antigravity", "os.path"])
        send(self, message)
    template.Template._send = lie
    def handle(data, context): return ["ok"] if data else None
    """
    async with RunningPool(tmp_path, source) as running:
        await running.start()

        assert list(running.launchers._import_templates) == [("numpy",)]
        [warning] = running.pool.warnings
        assert len(warning) < MAX_REASONS + 100


async def test_a_template_that_speaks_of_strangers_without_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of honest messages keeps the server as busy as one of noise."""
    monkeypatch.setattr("marserve.pool.launchers.forked.MOST_STRANGERS", 100)
    source = """
    from marserve.messages import Exited, Forked
    from marserve.worker import template
    send = template.Template._send
    def lie(self, message):
        send(self, message)
        if type(message) is Forked:
            for _ in range(101):
                send(self, Exited(2, 0))
    template.Template._send = lie
    def handle(data, context): return ["ok"] if data else None
    """
    async with RunningPool(tmp_path, source, start="fork") as running:
        running.pool.start()

        await until(lambda: running.metrics.worker_deaths, "its workers end with it")


async def test_a_template_that_announces_a_body_is_ended(tmp_path: Path) -> None:
    """It sends none: a head of 4 GiB must not have the server make room for it."""
    source = """
    from marserve import wire
    from marserve.messages import Templated
    from marserve.worker import template
    send = template.Template._send
    def lie(self, message):
        if type(message) is Templated:
            size = 2**32 - 1
            head = wire.HEADER.pack(wire.MAGIC, wire.VERSION, 1, 1, size) + size.to_bytes(4, "little") + b"x"
            self._control.sendall(head)
        send(self, message)
    template.Template._send = lie
    def handle(data, context): return ["ok"] if data else None
    """
    async with RunningPool(tmp_path, source, start="fork", max_restarts=0) as running:
        running.pool.start()

        with pytest.raises(LoadFailed) as caught:
            await running.pool.wait_until_ready()

    assert "the template broke the protocol: a frame announces 1 bytes of metadata and 1 bodies" in caught.value.reason


async def test_a_template_may_name_its_own_children_alone(tmp_path: Path) -> None:
    """The author's code runs in it, and could otherwise have the server send signals to whatever it likes."""
    victim = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    source = f"""
    import os, socket
    from marserve import wire
    from marserve.messages import Forked
    from marserve.worker import template
    send = template.Template._send
    def lie(self, message):
        if type(message) is Forked:
            message = Forked(message.worker_id, {victim.pid})
        send(self, message)
    template.Template._send = lie
    def handle(data, context): return ["ok"] if data else None
    """
    try:
        async with RunningPool(tmp_path, source, start="fork", max_restarts=1) as running:
            running.pool.start()
            with pytest.raises(LoadFailed) as caught:
                await running.pool.wait_until_ready()

            assert "the template ended while it forked" in caught.value.reason
        assert victim.returncode is None
    finally:
        victim.kill()
        await victim.wait()


async def test_a_long_order_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    """A megabyte of configuration waits for the new interpreter to read it, and nobody else does."""
    source = """
    def handle(data, context): return [str(len(context.model_yaml_config["words"]))] if data else None
    """
    config = {"words": ["word"] * 300_000}
    async with RunningPool(tmp_path, source, start="fork", load={"model_config": config}) as running:
        running.pool.start()
        turns, longest, last = 0, 0.0, asyncio.get_running_loop().time()
        while running.pool.ready_workers == 0:
            await asyncio.sleep(0)
            now = asyncio.get_running_loop().time()
            turns, longest, last = turns + 1, max(longest, now - last), now

        assert await running.ask_body(b"x") == b"300000"
        assert turns > 100


async def test_a_template_that_ends_while_it_is_told_a_long_order_has_failed(tmp_path: Path) -> None:
    """It never reads the rest."""
    environment = worker_environment(PYTHONPATH=str(tmp_path))
    (tmp_path / "marserve").mkdir()
    (tmp_path / "marserve" / "__init__.py").write_text("raise SystemExit(9)")
    async with RunningPool(
        tmp_path, start="fork", environment=environment, load={"model_config": {"words": ["word"] * 300_000}}
    ) as running:
        with pytest.raises(LoadFailed) as caught:
            await running.start()

        assert "exit status 9" in caught.value.reason


async def test_a_worker_forked_with_others_holds_none_of_their_ends(tmp_path: Path) -> None:
    """Otherwise the death of one would not be seen while another lives."""
    async with RunningPool(tmp_path, start="fork", workers=4) as running:
        await running.start()

        sockets = {
            pid: [
                target
                for name in os.listdir(f"/proc/{pid}/fd")
                if (target := os.readlink(f"/proc/{pid}/fd/{name}")).startswith("socket:")
            ]
            for pid in running.pids
        }

        assert [len(held) for held in sockets.values()] == [1] * 4
        assert len({held[0] for held in sockets.values()}) == 4


# ------------------------------------------------------------------------------------------- processes


async def test_a_process_is_ended_by_force_after_its_grace(tmp_path: Path) -> None:
    """SIGTERM first; its wait status says which it was."""
    ends = [os.open(os.devnull, os.O_RDWR) for _ in range(4)]
    try:
        process = launch_fresh(WorkerEnds(*ends), worker_environment(), 1)
    finally:
        for descriptor in ends:
            os.close(descriptor)

    status = await process.end(5.0)

    assert status is not None
    assert not living([process.pid])
    assert await process.end(0.0) == status
    process.signal_group(signal.SIGKILL)  # it is gone: nobody else must be hit


async def test_a_process_that_cannot_be_ended_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stuck in a driver, say: waiting for it would stop the server from stopping."""
    monkeypatch.setattr("marserve.pool.launchers.process.KILL_TIMEOUT_S", 0.01)
    never: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
    process = WorkerProcess(2**22 + 1, never)  # no system has such a number

    assert await process.end(0.01) is None

    assert "left behind" in caplog.text


async def test_without_pidfds_a_thread_waits_for_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old kernels have none, some sandboxes forbid them, and descriptors run out."""

    def no_pidfd(pid: int, flags: int = 0) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    async with RunningPool(tmp_path, start="fresh", retry_on_worker_death=False) as running:
        await running.start()

        end = await running.ask(b"exit 7")

        assert isinstance(end, WorkerDied)
        assert await running.ask_body(b"x") == b"x"


async def test_a_lack_of_descriptors_is_a_failed_start(tmp_path: Path) -> None:
    """Nothing of the try is left, and the next one succeeds."""
    async with RunningPool(tmp_path, start="fresh") as running:
        await running.start()
        real, failures = os.memfd_create, []

        def no_memfd(*arguments: object) -> int:
            if not failures:
                failures.append(1)
                raise OSError(24, "Too many open files")
            return real(*arguments)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "memfd_create", no_memfd)
            running.pool.scale(2, 2)
            await until(lambda: running.pool.ready_workers == 2, "the second try")

        assert running.metrics.worker_deaths == {"load_failed": 1}


async def test_closing_the_launchers_ends_who_waits_for_a_shared_template(tmp_path: Path) -> None:
    """The server stops while a first model is just being started."""
    launchers = Launchers(worker_environment(), KeptLines())
    waiting = [asyncio.ensure_future(launchers.import_template(())) for _ in range(2)]
    await asyncio.sleep(0.01)

    await launchers.close()

    for end in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(end, StartFailed)


# ------------------------------------------------------------------------------------------- environments of their own

SAYS_WHERE = """
import sys
import msgspec
def handle(data, context):
    return None if data is None else [f"{sys.prefix} {sys.executable}"]
"""


async def test_workers_of_a_virtual_environment_run_in_its_interpreter(tmp_path: Path) -> None:
    """Each in a new one; that their start is not what was asked for is said where it matters only."""
    environment = await Environments(tmp_path / "e", tmp_path / "f", os.environ).obtain("m", Requirements(), "venv")
    python = str(environment.python)
    async with RunningPool(tmp_path, SAYS_WHERE, python=python) as running:
        await running.start()

        prefix, executable = (await running.ask_body(b"x")).decode().split()

        assert (prefix, executable) == (str(environment.folder / "venv"), python)
        assert [view.how_started for view in running.pool.workers()] == ["fresh"]
    environment.release()


async def test_a_virtual_environment_cannot_be_forked_into(tmp_path: Path) -> None:
    """`workerStart: fork` refuses to load instead, with the reason."""
    async with RunningPool(tmp_path, SAYS_WHERE, python=sys.executable, start="fork") as running:
        with pytest.raises(LoadFailed) as failed:
            await running.start()

    assert "useVenv" in failed.value.reason


async def test_packages_that_were_imported_for_many_are_not_met(tmp_path: Path) -> None:
    """Where forking the loaded model is not safe, such a worker is fresh, not forked from the shared template."""
    source = "import socket\nopened = socket.socket()\ndef handle(data, context): return data and ['ok']\n"
    async with RunningPool(tmp_path, source, may_share_imports=False) as running:
        await running.start()

        assert [view.how_started for view in running.pool.workers()] == ["fresh"]


# ------------------------------------------------------------------------------------------- other interpreters

SAYS_WHAT_IT_HAS = """
import json
import os
import subprocess
import sys

import marserve_handlers
from ts.torch_handler.base_handler import BaseHandler

THERE = "import json, sys; print(json.dumps([sys.prefix, __import__('marserve_handlers').__file__]))"

class Handler(BaseHandler):
    def initialize(self, context):
        self.child = subprocess.run([sys.executable, "-c", THERE], capture_output=True, text=True, check=True).stdout

    def handle(self, data, context):
        said = {"prefix": sys.prefix, "path": sys.path, "packages": marserve_handlers.__file__}
        said["absent"] = [name for name in ("fastapi", "uvicorn", "numpy", "torch") if not self.has(name)]
        said["child"] = json.loads(self.child)
        return [said] * len(data)

    def has(self, name):
        from importlib.util import find_spec
        return find_spec(name) is not None
"""


def look_at(folder: Path) -> Interpreter:
    """An environment with msgspec alone, as a model that names it gets it."""
    python = make_environment(folder / "e", "msgspec")
    allowed = [AllowedInterpreter(python, "other")]
    options = ModelOptions("m", "1.0", interpreter_name="other")
    interpreters = Interpreters(allowed, worker_environment(), folder / "packages")
    chosen = interpreters.choose(options)
    assert chosen is not None
    return interpreters.look_at(chosen, options)


async def test_workers_of_another_interpreter_have_its_packages_and_ours_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the server's environment or working directory, nor in the programs that its handler starts."""
    other = look_at(tmp_path)
    (tmp_path / "here").mkdir()
    for name in ("runpy", "msgspec", "marserve"):
        (tmp_path / "here" / f"{name}.py").write_text("raise SystemExit('imported from the working directory')\n")
    monkeypatch.chdir(tmp_path / "here")
    environment = {**worker_environment(), "PYTHONPATH": str(tmp_path)}
    async with RunningPool(
        tmp_path, SAYS_WHAT_IT_HAS, interpreter=other, workers=2, environment=environment
    ) as running:
        await running.start()

        said = json.loads(await running.ask_body(b"x"))

        assert said["prefix"] == str(tmp_path / "e")
        assert said["packages"] == f"{other.packages}/marserve_handlers/__init__.py"
        assert said["absent"] == ["fastapi", "uvicorn", "numpy", "torch"]
        assert said["child"] == [said["prefix"], said["packages"]]
        assert "" not in said["path"]
        assert not {str(tmp_path), os.getcwd()} & set(said["path"])
        assert [view.how_started for view in running.pool.workers()] == ["fresh"] * 2
        assert running.pool.template_pids == []


async def test_another_interpreter_cannot_be_forked_into(tmp_path: Path) -> None:
    """`workerStart: fork` refuses to load instead, with the reason."""
    async with RunningPool(tmp_path, SAYS_WHERE, interpreter=look_at(tmp_path), start="fork") as running:
        with pytest.raises(LoadFailed) as failed:
            await running.start()

    assert f"its workers run under an interpreter of their own, Python {platform.python_version()} (" in (
        failed.value.reason
    )


async def test_a_changed_interpreter_starts_no_worker_and_the_others_go_on(tmp_path: Path) -> None:
    """A further worker of the version is refused with the reason; the one that runs answers."""
    other = look_at(tmp_path)
    async with RunningPool(tmp_path, SAYS_WHERE, interpreter=other, most=2) as running:
        await running.start()
        os.utime(tmp_path / "e" / "pyvenv.cfg", ns=(1, 1))

        running.pool.scale(2, 2)
        await until(lambda: running.pool.last_death is not None, "a start that was refused")

        death = running.pool.last_death
        assert death is not None
        assert death.cause == "load_failed"
        assert f"Python {other.version} ({other.path}), has changed since the version was loaded" in death.detail
        assert f"{tmp_path}/e/pyvenv.cfg was replaced. Load the version anew" in death.detail
        assert (await running.ask_body(b"x")).decode().split()[0] == str(tmp_path / "e")
