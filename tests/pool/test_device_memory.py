"""A worker whose device runs out of memory: the batch is halved, what still fails gets 507, and the worker lives.

No device is here: a stand-in of torch's module for one counts what is asked of it, but for the last test.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from marserve.errors import MarserveError, OutOfMemory
from marserve.messages import Answer
from support.running_pool import RunningPool, Sent

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc"),
]

# A device with memory for two rows. What failed is only free again when nothing refers to it and the cache is emptied.
TWO_ROWS = """
import sys, types, weakref
from pathlib import Path

class OutOfMemoryError(RuntimeError):
    pass

class Tensor:
    pass

class Device:
    kept = weakref.WeakSet()
    is_full = False
    def is_initialized(self): return True
    def device_count(self): return 1
    def max_memory_reserved(self, device): return 7 << 20
    def empty_cache(self):
        note("emptied")
        self.is_full = bool(self.kept)
    def synchronize(self, device): pass

torch = types.ModuleType("torch")
torch.Tensor, torch.cuda = Tensor, Device()
torch.set_num_threads = lambda count: None

def note(word):
    with Path(__file__).with_name("notes").open("a") as notes:
        notes.write(word + "\\n")

def handle(rows, context):
    if rows is None:
        sys.modules["torch"] = torch
        return
    device = torch.cuda
    bodies = [bytes(row["body"]) for row in rows]
    note(f"ran {len(bodies)}")
    activations = Tensor()
    device.kept.add(activations)
    if device.is_full or len(bodies) > 2 or b"large" in bodies:
        device.is_full = True
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    return bodies
"""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


def notes(pool: RunningPool) -> list[str]:
    """What happened in the worker, in order."""
    path = pool.file("notes")
    return path.read_text().splitlines() if path.exists() else []


async def ask_together(pool: RunningPool, *bodies: bytes) -> list[Answer | MarserveError]:
    """Send them so that they leave as one batch."""
    sent: list[Sent] = [pool.send(body) for body in bodies]
    return await asyncio.gather(*(each.told(10.0) for each in sent))


def outcome(told: list[Answer | MarserveError]) -> list[bytes | str]:
    """Bodies, and the classes of errors."""
    return [each.body if isinstance(each, Answer) else type(each).__name__ for each in told]


def fixed(pool_folder: Path, size: int, **options: object) -> RunningPool:
    """One worker, batches of exactly `size`."""
    given = {"batch_size": size, "batch_policy": "fixed", "max_batch_delay_s": 5.0, "batch_isolation": False, **options}
    return RunningPool(pool_folder, TWO_ROWS, start="fresh", **given)  # type: ignore[arg-type]


async def test_a_batch_that_does_not_fit_is_run_in_halves(tmp_path: Path) -> None:
    """Both halves fit, and what the first try left was given back before."""
    async with fixed(tmp_path, 4) as pool:
        await pool.start()
        pid = pool.pids[0]

        told = await ask_together(pool, b"a", b"b", b"c", b"d")

        assert outcome(told) == [b"a", b"b", b"c", b"d"]
        assert notes(pool) == ["ran 4", "emptied", "ran 2", "ran 2"]
        assert pool.pids == [pid]
        assert (pool.metrics.out_of_memory, pool.metrics.isolated) == (1, 1)


async def test_a_batch_is_halved_once_where_items_are_not_isolated(tmp_path: Path) -> None:
    """What still fails is answered; it is not run smaller and smaller. The worker serves the next ones."""
    async with fixed(tmp_path, 8) as pool:
        await pool.start()

        told = await ask_together(pool, *[b"x"] * 8)

        assert outcome(told) == ["OutOfMemory"] * 8
        assert [str(error) for error in told] == ["Out of resources"] * 8
        assert notes(pool) == ["ran 8", "emptied", "ran 4", "emptied", "ran 4", "emptied"]
        assert [life.is_ready for life in pool.pool.lives.by_key.values()] == [True]


async def test_one_that_is_too_large_by_itself_costs_its_mates_nothing(tmp_path: Path) -> None:
    """With isolation, as models have it unless they say otherwise, halves are halved until it stands alone."""
    async with fixed(tmp_path, 4, batch_isolation=True) as pool:
        await pool.start()
        pid = pool.pids[0]

        told = await ask_together(pool, b"a", b"b", b"large", b"d")

        assert outcome(told) == [b"a", b"b", "OutOfMemory", b"d"]
        assert pool.pids == [pid]
        assert outcome(await ask_together(pool, *[b"again"] * 4)) == [b"again"] * 4


async def test_a_model_with_state_is_never_run_again(tmp_path: Path) -> None:
    """A sequence's step has happened, or half of it: halving would let it happen twice."""
    async with fixed(tmp_path, 4, halves_without_memory=False) as pool:
        await pool.start()

        assert outcome(await ask_together(pool, *[b"x"] * 4)) == ["OutOfMemory"] * 4
        assert notes(pool) == ["ran 4", "emptied"]


async def test_a_worker_says_how_much_of_a_device_it_has_taken(tmp_path: Path) -> None:
    """So that the next one of its model is only started where there is as much."""
    async with fixed(tmp_path, 1) as pool:
        await pool.start()

        assert [life.device_bytes for life in pool.pool.lives.by_key.values()] == [7 << 20]


REAL_TORCH = """
import torch
def handle(data, context):
    if data and bytes(data[0]["body"]) == b"large":
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return data and [b"fine"] * len(data)
"""


@pytest.mark.torch
async def test_torchs_own_error_is_told_by_its_name(tmp_path: Path) -> None:
    """On a machine without devices as well: the worker's loop never imports torch to know it."""
    pytest.importorskip("torch", reason="needs the extra `torch`")
    async with RunningPool(tmp_path, REAL_TORCH) as pool:
        await pool.start()
        pid = pool.pids[0]

        assert isinstance(await pool.ask(b"large"), OutOfMemory)
        assert await pool.ask_body(b"small") == b"fine"
        assert pool.pids == [pid]
