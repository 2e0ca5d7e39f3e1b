"""The process that searches, run as a server does: what it says, and that nothing of it is left however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from marserve.archive.contents.manifest import Manifest
from marserve.archive.contents.model_config import ModelConfig
from marserve.optimise.background.order import Order
from marserve.optimise.background.searching import PROGRAM, Searching
from marserve.optimise.taken import Taken
from marserve.option_values import Optimising, Sample
from marserve.pool.launchers.leftovers import Leftovers
from marserve.registry.catalogue.plan import Unpacked
from marserve.registry.intake.plan import make_plan
from marserve.registry.intake.registration import RegisterParameters, RegistryOptions
from support.processes import left_of

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="what is left is found on Linux"),
]

PLAIN = "def handle(data, context):\n    return [row['body'] for row in data or []]\n"
HANGS = "import subprocess, time\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\ntime.sleep(600)\n"


def order_for(folder: Path, source: str) -> Order:
    """The order for a model of this handler, to be carried out in a folder of its own."""
    model, made = folder / "model", folder / "made"
    model.mkdir()
    made.mkdir()
    (model / "h.py").write_text(source)
    plan = make_plan(
        RegisterParameters("m", model_name="m", handler="h.py"),
        Unpacked(model, Manifest(), ModelConfig()),
        RegistryOptions(),
    )
    taken = Taken(plan.load, Optimising(("bf16",), is_asked=True), (Sample(body=b"1"),) * 4, (), 1)
    order = Order(taken, str(made), 4.0, batch_size=4, threads=1, within_s=60.0, memory_bytes=1 << 32)
    return replace(order, priority=0)  # by the lowest one a test would wait for what other tests leave of the machine


def below(pid: int) -> list[psutil.Process]:
    """A process that searches, this one or one that it started, and its own, once there is a handler's `sleep`."""
    found: list[psutil.Process] = []
    for each in (psutil.Process(pid), *psutil.Process(pid).children()):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if PROGRAM in each.cmdline():
                found += [each, *each.children(recursive=True)]
    for each in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "sleep" in each.name():
                return found
    return []


async def until_it_hangs() -> list[psutil.Process]:
    """What `below` finds of this process, once there is something."""
    async with asyncio.timeout(60):
        while not (found := below(os.getpid())):
            await asyncio.sleep(0.02)
    return found


async def test_a_model_that_nothing_can_be_made_of_is_told_in_a_sentence(tmp_path: Path) -> None:
    """After the steps on the way; the process has ended, and with it what it needed meanwhile."""
    steps: list[str] = []
    order = order_for(tmp_path, PLAIN)

    why = await Searching(os.environ, Leftovers()).run(order, steps.append)

    assert "m 1.0 cannot be built anew: the handler holds no module of torch" in why
    assert steps == ["loading m 1.0"]
    assert not (tmp_path / "made" / "whole").exists()
    assert list((tmp_path / "made" / "tmp").iterdir()) == []


@pytest.mark.parametrize("how", ["cancel", pytest.param("kill", marks=pytest.mark.system)])
async def test_a_search_that_is_ended_leaves_no_process(how: str, tmp_path: Path) -> None:
    """Given up by the server, or killed: what handlers started in sessions of their own ends as well.

    A server that gives it up also ends what took no environment along.
    """
    source = HANGS.replace("=True", "=True, env={}") if how == "cancel" else HANGS
    run = asyncio.ensure_future(Searching(os.environ, Leftovers()).run(order_for(tmp_path, source), lambda step: None))
    family = await until_it_hangs()

    if how == "cancel":
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    else:
        next(each for each in family if PROGRAM in each.cmdline()).kill()
        assert "the process that searches ended with signal 9" in await run

    assert left_of(family, 10) == []


@pytest.mark.system
def test_a_search_whose_server_ended_deletes_what_it_made(tmp_path: Path) -> None:
    """The end of its input is the server's; a stopped process ends as well."""
    order = order_for(tmp_path, HANGS)
    made = Path(order.folder)
    (made / "half").write_text("half")
    environment = os.environ | {"_MARSERVE_LINEAGE": "otest", "TMPDIR": str(made)}
    command = [sys.executable, "-P", "-m", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment) as process:
        assert process.stdin is not None
        process.stdin.write(order.write())
        process.stdin.flush()
        until = time.monotonic() + 60
        while not (family := below(process.pid)):
            assert time.monotonic() < until
            time.sleep(0.02)
        family[-1].suspend()
        process.stdin.close()
        process.wait(20)

    assert left_of(family, 10) == []
    assert not made.exists()


@pytest.mark.system
def test_without_a_server_it_says_so() -> None:
    """Typed by hand."""
    ran = subprocess.run([sys.executable, "-m", PROGRAM], input=b"", capture_output=True, timeout=60, check=False)

    assert ran.returncode == 1
    assert b"is started by a server" in ran.stderr
