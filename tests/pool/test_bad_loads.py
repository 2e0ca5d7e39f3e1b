"""Tests for the thirty kinds of bad handler (C7): each a source with its outcome, and a pool that is none the worse.

`test_bad_handlers.py` has what one request does to a worker. Here a handler as a whole is bad, at loading or in every
batch: the table says what whoever loads it is told, or what its client is told.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from marserve.errors import HandlerFailed, LoadFailed, OutOfMemory, WorkerDied
from marserve.messages import Answer
from support.running_pool import RunningPool

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="its tricks are Linux's"),
]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


@dataclass(frozen=True)
class Bad:
    """A kind: the handler's source; the cause of a failed load, or how a request for `bad` ends.

    `end` is a type of error, or None for an answer; `said` is in the error's message. `lives`: the worker survives it.
    """

    source: str
    load: str | None = None
    end: type[Exception] | None = None
    said: str = ""
    lives: bool = True


def on_bad(*lines: str, before: str = "", answer: str = "rows") -> str:
    """A handler that does `lines` when a row says `bad`; else it echoes."""
    body = "\n".join(f"        {line}" for line in lines)
    return f"""
import ctypes, gc, os, resource, signal, subprocess, sys, threading, time
{before}
def handle(data, context):
    if data is None:
        return None
    rows = [bytes(row["body"]) for row in data]
    if b"bad" in rows:
{body}
    return {answer}
"""


KINDS = {
    # at load
    "syntax error": Bad("def handle(data, context:\n", load="load_failed"),
    "raises at import": Bad("raise ValueError('no')\n", load="load_failed"),
    "missing package": Bad("import no_such_package_anywhere\n", load="missing_module"),
    "version clash": Bad("from json import from_a_newer_version\n", load="import_error"),
    "import loop": Bad("from handler import handle\n", load="import_error"),
    "missing file": Bad("open('weights.bin', 'rb')\n", load="missing_file"),
    "no handler": Bad("x = 1\n", load="load_failed"),
    "two classes": Bad("class A: pass\nclass B: pass\n", load="load_failed"),
    "a class without handle": Bad("class A: pass\n", load="load_failed"),
    "initialize raises": Bad(
        "class A:\n    def initialize(self, c): raise RuntimeError('weights')\n    def handle(self, d, c): return d\n",
        load="load_failed",
    ),
    "sys.exit at import": Bad("import sys; sys.exit(5)\n", load="exit"),
    "crash at import": Bad("import ctypes; ctypes.string_at(0)\n", load="signal"),
    "never loads": Bad("import time; time.sleep(60)\n", load="startup_timeout"),
    "takes everything at import": Bad("x = bytearray(10 ** 12)\n", load="out_of_memory"),
    "closes the wire at import": Bad("import os; os.closerange(3, 256)\n", load="any"),
    # answers
    "wrong count": Bad(
        on_bad("pass", answer="rows[:0] if b'bad' in rows else rows"), end=HandlerFailed, said="mismatched"
    ),
    "wrong type": Bad(on_bad("return {'a': 1}"), end=HandlerFailed, said="Invalid model predict output"),
    "unserialisable": Bad(on_bad("return [object()] * len(rows)"), end=HandlerFailed, said="Unsupported"),
    "an answer over the limit": Bad(
        on_bad("return [b'x' * 7_000_000] * len(rows)"), end=HandlerFailed, said="max_resp"
    ),
    "raises": Bad(on_bad("raise KeyError('secret')"), end=HandlerFailed, said="Prediction failed"),
    "out of memory": Bad(on_bad("bytearray(10 ** 13)"), end=OutOfMemory, said="Out of resources"),
    # the process
    "sys.exit": Bad(on_bad("sys.exit(0)"), end=WorkerDied, said="Worker died.", lives=False),
    "os.abort": Bad(on_bad("os.abort()"), end=WorkerDied, said="Worker died.", lives=False),
    "crash": Bad(on_bad("ctypes.string_at(0)"), end=WorkerDied, said="Worker died.", lives=False),
    "kills its group": Bad(on_bad("os.killpg(0, 9)"), end=WorkerDied, said="Worker died.", lives=False),
    "hangs": Bad(on_bad("time.sleep(60)"), end=WorkerDied, said="Worker died.", lives=False),
    "spins and catches everything": Bad(
        on_bad(
            "while True:", "    try: signal.signal(signal.SIGTERM, signal.SIG_IGN)", "    except BaseException: pass"
        ),
        end=WorkerDied,
        said="Worker died.",
        lives=False,
    ),
    "closes 0 to 2": Bad(on_bad("os.closerange(0, 3)")),
    "changes its directory": Bad(on_bad("os.chdir('/')")),
    "changes its limits": Bad(on_bad("resource.setrlimit(resource.RLIMIT_CORE, (0, 0))", "os.nice(5)")),
    "leaves a thread": Bad(on_bad("threading.Thread(target=time.sleep, args=(60,)).start()")),
    "leaves children": Bad(on_bad("subprocess.Popen(['sleep', '60'])", "os.fork() or time.sleep(60)")),
    "takes the signals": Bad(on_bad("[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 10, 12, 15, 17)]")),
    "writes without end of line": Bad(on_bad("os.write(1, b'\\xff' * 300_000)", "os.write(2, b'\\0' * 1000)")),
    "switches the collector off": Bad(on_bad("gc.disable()", "sys.setrecursionlimit(60)")),
    "takes modules away": Bad(on_bad("sys.modules.clear()", "sys.path.clear()")),
}


def test_there_are_at_least_thirty_kinds() -> None:
    """The promise's number."""
    assert len(KINDS) >= 30


@pytest.mark.parametrize("kind", [name for name, bad in KINDS.items() if bad.load], ids=lambda name: name)
async def test_a_handler_that_cannot_be_loaded_is_told_with_its_cause(tmp_path: Path, kind: str) -> None:
    """Whoever registers it hears the class and, in describe, the detail."""
    bad = KINDS[kind]
    async with RunningPool(tmp_path, bad.source, startup_timeout_s=1.0) as running:
        with pytest.raises(LoadFailed) as caught:
            await running.start()

        assert running.pool.last_death is not None
        assert caught.value.cause == running.pool.last_death.cause
        assert bad.load in (caught.value.cause, "any")
        assert running.pool.last_death.detail


@pytest.mark.parametrize("kind", [name for name, bad in KINDS.items() if not bad.load], ids=lambda name: name)
async def test_a_handler_that_behaves_badly_has_its_stated_outcome(tmp_path: Path, kind: str) -> None:
    """The client's error or answer, the worker's fate, and the next request answered."""
    bad = KINDS[kind]
    async with RunningPool(tmp_path, bad.source, response_timeout_s=1.5, retry_on_worker_death=False) as running:
        await running.start()

        end = await running.ask(b"bad")
        running.look()

        if bad.end is None:
            assert end == Answer(b"bad")
        else:
            assert isinstance(end, bad.end), end
            assert bad.said in end.message
        assert await running.ask_body(b"good") == b"good"
        assert bool(running.metrics.worker_deaths) is not bad.lives


async def test_what_a_handler_notes_for_describe_after_its_load_is_kept_and_bounded(tmp_path: Path) -> None:
    """Once each, though it says the same again and again, and as many as after a load."""
    source = """
def handle(data, context):
    for row in data or ():
        context.load_warnings += [bytes(row["body"]).decode()] * 2
    return data and [b"x"] * len(data)
"""
    async with RunningPool(tmp_path, source) as running:
        await running.start()
        for number in range(15):
            await running.ask_body(b"%d" % (number // 2))

        assert running.pool.warnings == ["0", "1", "2", "3", "4"]  # of twenty
        assert running.metrics.worker_deaths == {}
