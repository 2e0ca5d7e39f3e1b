"""Tests for what handlers do to their workers: the stated outcome, and a pool that is none the worse (C7, C12).

`RunningPool` looks, at the end of each, that no process and no descriptor is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from marserve.errors import HandlerFailed, OutOfMemory, WorkerDied
from marserve.messages import Answer
from marserve.pool.worker_end.memory import resident_bytes
from support.processes import living, until
from support.running_pool import RunningPool

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="its tricks are Linux's"),
]

# What is left behind is found by the environment of its start.
leaves_processes = pytest.mark.true_starts

BAD = Path(__file__).parents[1] / "support" / "bad_handler.py"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


async def is_well(running: RunningPool) -> bool:
    """Whether the next request is answered, and the server still reads its workers' output."""
    return await running.ask_body(b"well") == b"well"


NO_ANSWERS = {
    "nothing": "Invalid model predict output",
    "text": "Invalid model predict output",
    "mapping": "Invalid model predict output",
    "tuple": "Invalid model predict output",
    "generator": "Invalid model predict output",
    "none": "number of batch response mismatched",
    "two": "number of batch response mismatched",
    "deep": "Unsupported model output data type.",
    "itself": "Unsupported model output data type.",
    "surrogate": "Unsupported model output data type.",
    "touchy": "Unsupported model output data type.",
    "callback": "Unsupported model output data type.",
    "unspeakable": "Prediction failed",
    "cancelled": "Prediction failed",
    "interrupt": "Prediction failed",
    "recursion": "Prediction failed",
}


async def test_what_is_no_answer_fails_for_itself_alone(tmp_path: Path) -> None:
    """In a batch with others, who are answered; no worker is lost."""
    async with RunningPool(tmp_path, BAD, batch_size=4) as running:
        running.pool.start()

        for kind, said in NO_ANSWERS.items():
            sent = [running.send(body) for body in (kind.encode(), b"one", b"two of them")]
            ends = [await one.told() for one in sent]

            assert isinstance(ends[0], HandlerFailed), kind
            assert (ends[0].message, ends[0].code) == (said, None), kind
            assert [end.body for end in ends[1:]] == [b"one", b"two of them"], kind  # type: ignore[union-attr]
        assert not running.metrics.worker_deaths


async def test_running_out_of_memory_is_told_and_the_worker_lives(tmp_path: Path) -> None:
    """An exception in a living worker is better than a dead one."""
    async with RunningPool(tmp_path, BAD) as running:
        await running.start()

        end = await running.ask(b"memory")

        assert isinstance(end, OutOfMemory)
        assert not running.metrics.worker_deaths
        assert await is_well(running)


LEAVES = ["child", "fork", "daemon", "session"]


@leaves_processes
@pytest.mark.parametrize("start", ["fork", "fresh"])
@pytest.mark.parametrize(
    "kinds",
    [
        ["thread", *LEAVES],
        ["print_binary", "print_much", "lose_folder"],
        ["close_streams"],
        ["no_stdout"],
        ["deaf"],
    ],
    ids=lambda kinds: kinds[0],
)
async def test_what_leaves_the_worker_alive_is_answered(tmp_path: Path, kinds: list[str], start: str) -> None:
    """And what it left behind goes with the worker."""
    async with RunningPool(tmp_path, BAD, start=start) as running:
        await running.start()
        pids = running.pids

        for kind in kinds:
            first = await running.ask(kind.encode())
            running.look()

            assert isinstance(first, Answer), kind
            assert await is_well(running), kind
            assert running.pids == pids, kind


@leaves_processes
@pytest.mark.parametrize("start", ["fork", "fresh"])
async def test_what_a_killed_worker_left_behind_goes_with_it(tmp_path: Path, start: str) -> None:
    """In the worker's process group or out of it; nobody has to stop the pool for it."""
    async with RunningPool(tmp_path, BAD, start=start) as running:
        await running.start()
        [pid] = running.pids
        left = [int(await running.ask_body(kind.encode())) for kind in LEAVES]
        running.look()

        os.kill(pid, signal.SIGKILL)

        await until(lambda: not living(left), "what was left is gone")
        assert await is_well(running)


@pytest.mark.parametrize("kind", ["close_everything", "no_descriptors", "alarm"])
async def test_what_breaks_the_worker_costs_no_other_request(tmp_path: Path, kind: str) -> None:
    """It may still answer or not; who comes next is served."""
    async with RunningPool(tmp_path, BAD, workers=2) as running:
        await running.start()

        end = await running.ask(kind.encode())

        assert isinstance(end, Answer | WorkerDied)
        for _ in range(5):
            assert await is_well(running)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["print_a_gigabyte", "answer_a_gigabyte"])
async def test_a_gigabyte_of_anything_costs_the_server_nothing(tmp_path: Path, kind: str) -> None:
    """Lines are passed on as they come, and an answer over its limit never leaves the worker (C7)."""
    async with RunningPool(tmp_path, BAD) as running:
        await running.start()
        running.log.write = lambda *_, **__: None  # type: ignore[method-assign]  # else the test keeps what a log writes
        pids, before = running.pids, resident_bytes(os.getpid())

        end = await running.ask(kind.encode(), timeout_s=200.0)

        if kind == "answer_a_gigabyte":
            assert isinstance(end, HandlerFailed)
            assert "max_response_size" in end.message
        else:
            assert isinstance(end, Answer)
        assert resident_bytes(os.getpid()) - before < 50_000_000
        assert await is_well(running)
        assert running.pids == pids


@leaves_processes
async def test_a_worker_whose_end_is_hidden_is_noticed(tmp_path: Path) -> None:
    """A process that it left holds its end of the wire open; the worker's own end must be enough."""
    async with RunningPool(tmp_path, BAD, retry_on_worker_death=False) as running:
        await running.start()

        began = time.monotonic()
        end = await running.ask(b"escape_and_exit")
        took = time.monotonic() - began
        escaped = int(running.file("escaped").read_text())

        assert isinstance(end, WorkerDied)
        assert took < 5.0
        async with asyncio.timeout(10):
            while living([escaped]):
                await asyncio.sleep(0.01)
        assert await is_well(running)


@leaves_processes
@pytest.mark.parametrize("kind", ["daemon", "session"])
async def test_what_a_worker_left_behind_is_told_from_its_neighbours(tmp_path: Path, kind: str) -> None:
    """The daemon of a worker that lives stays, though another worker of the same template ends."""
    async with RunningPool(tmp_path, BAD, start="fork", workers=2) as running:
        await running.start()
        asked = [running.send(b"slowly " + kind.encode()) for _ in range(2)]
        left = {}
        for sent in asked:
            answer = await sent.told()
            assert isinstance(answer, Answer)
            worker, process = map(int, answer.body.split())
            left[worker] = process
        running.look()
        assert len(left) == 2
        (dead, gone), (_, stays) = left.items()

        os.kill(dead, signal.SIGKILL)

        await until(lambda: not living([gone]), "what was left is gone")
        assert living([stays])


@leaves_processes
@pytest.mark.parametrize("kind", ["daemon", "session"])
async def test_what_loading_left_behind_goes_with_the_model(tmp_path: Path, kind: str) -> None:
    """A template's own daemons are nobody's after it."""
    handler = tmp_path / "loads.py"
    handler.write_text(
        f"import pathlib, sys\nsys.path.insert(0, {str(BAD.parent)!r})\nimport bad_handler\n"
        f"pathlib.Path('left').write_text(bad_handler.{kind}(b''))\n"
        "def handle(data, context):\n    return data and [bytes(row['body']) for row in data]\n"
    )
    async with RunningPool(tmp_path, handler) as running:
        await running.start()
        left = int(running.file("left").read_text())

    assert not living([left])


@leaves_processes
async def test_killing_the_template_is_deadly_for_who_asked_for_it_alone(tmp_path: Path) -> None:
    """All workers go with it, and come back; the others' requests are run again."""
    async with RunningPool(tmp_path, BAD, start="fork", workers=2) as running:
        await running.start()

        end = await running.ask(b"kill_parent")

        assert isinstance(end, WorkerDied)
        assert await is_well(running)


def frame(message: bytes, bodies: Sequence[bytes] = (), **header: int) -> bytes:
    """A frame, spelled out; `header` puts another number into its head."""
    fields = {"version": 1, "metadata": len(message), "count": len(bodies), "total": sum(map(len, bodies))} | header
    head = b"mW" + struct.pack("<HIIQ", fields["version"], fields["metadata"], fields["count"], fields["total"])
    return head + b"".join(struct.pack("<I", len(body)) for body in bodies) + message + b"".join(bodies)


def results(number: bytes, *, count: int = 1, handler_s: bytes = b"\xcb" + struct.pack(">d", 0.1)) -> bytes:
    """A `Results` message that says `count` items went well."""
    item = b"\x94\xcc\xc8\xa0\x90\xc0"
    return frame(b"\x94\xa7results" + number + handler_s + bytes([0x90 + count]) + item * count, [b"crossed"] * count)


FRAMES = {
    "noise": os.urandom(7) + b"\x00" * 100,
    "http": b"GET / HTTP/1.1\r\nHost: marserve\r\n\r\n",
    "a pickle": b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94",
    "another version": frame(b"\xc0", version=2),
    "metadata over its bound": frame(b"", metadata=2**31),
    "bodies over their bound": frame(b"", count=1, total=7_000_000),
    "bodies past every bound": frame(b"", count=2**32 - 1, total=2**64 - 1),
    "a count past its bound": frame(b"", count=2_000_000, total=1),
    "no message": frame(b"\x91\xa4evil"),
    "nested": frame(b"\x94\xa5hello\x07\xa1x" + b"\x91" * 100_000 + b"\xc0"),
    "another batch": results(b"\x63"),
    "a batch of last year": results(b"\x00"),
    "too many results": results(b"\x01", count=2),
    "no results": results(b"\x01", count=0),
    "a time that is none": results(b"\x01", handler_s=b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"),
    "a piece of nothing": frame(b"\x93\xa5piece\x63\x90"),
    "raised by nobody": frame(b"\x97\xa6raised\x63\xcb" + bytes(8) + b"\xa1k\xa1m\xcd\x01\xf7\xa1t"),
}


@pytest.mark.parametrize("data", FRAMES.values(), ids=FRAMES.keys())
async def test_a_worker_that_breaks_the_protocol_is_killed(tmp_path: Path, data: bytes) -> None:
    """C12: the pool goes on, and whoever made it happen twice is refused from then on."""
    async with RunningPool(tmp_path, BAD, workers=2) as running:
        await running.start()

        end = await running.ask(b"wire " + data)

        assert isinstance(end, WorkerDied)
        assert end.cause == "bad_frame"
        assert dict(running.metrics.worker_deaths) == {"bad_frame": 2}
        assert running.pool.last_death is not None
        assert "broke the protocol" in running.pool.last_death.detail
        assert await is_well(running)


@pytest.mark.parametrize(
    "data",
    [frame(b"\x91\xa4evil")[:10], results(b"\x01")[:-3], frame(b"", metadata=5)],
    ids=["in the header", "in a body", "in the metadata"],
)
async def test_a_worker_that_ends_within_a_frame_has_died(tmp_path: Path, data: bytes) -> None:
    """What it began to say is nobody's answer."""
    async with RunningPool(tmp_path, BAD, workers=2) as running:
        await running.start()

        end = await running.ask(b"wire_and_exit " + data)

        assert isinstance(end, WorkerDied)
        assert end.cause == "exit"
        assert await is_well(running)


async def test_a_frame_that_is_never_finished_ends_with_the_response_limit(tmp_path: Path) -> None:
    """Its head is honest, so there is nothing to see but time."""
    async with RunningPool(tmp_path, BAD, response_timeout_s=0.4) as running:
        await running.start()

        end = await running.ask(b"wire " + frame(b"", metadata=1000))

        assert isinstance(end, WorkerDied)
        assert end.cause == "response_timeout"
        assert await is_well(running)


async def test_a_worker_that_floods_the_wire_is_killed(tmp_path: Path) -> None:
    """What it writes is looked at as soon as a frame is whole, and is no message."""
    async with RunningPool(tmp_path, BAD, workers=2) as running:
        await running.start()

        end = await running.ask(b"flood")

        assert isinstance(end, WorkerDied)
        assert end.cause == "bad_frame"
        assert await is_well(running)


async def test_an_answer_to_a_batch_that_still_runs_or_has_not_begun_is_none(tmp_path: Path) -> None:
    """A handler that writes answers itself, for its own batch and for the next, is believed neither."""
    async with RunningPool(tmp_path, BAD, retry_on_worker_death=False) as running:
        await running.start()

        own, other = running.send(b"wire " + results(b"\x01") + results(b"\x02")), running.send(b"other")
        died = await own.told()

        assert isinstance(died, WorkerDied)
        assert died.cause == "bad_frame"
        assert await other.told() == Answer(b"other")
        assert await is_well(running)
