"""The operator's own program: what is read of it, and that nothing of it stays."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from marserve.machine.measuring_program import MAX_OUTPUT_BYTES, ProgramFailed, run_program

pytestmark = pytest.mark.anyio


def program(folder: Path, code: str) -> list[str]:
    """The words that run this code."""
    (folder / "measure.py").write_text(code)
    return ["measure.py"]


async def test_lines_up_to_an_empty_one_are_read(tmp_path: Path) -> None:
    """Run by this interpreter, in the folder, with its arguments; its standard input ends."""
    code = (
        "import sys, os\nsys.stdin.read()\nprint(sys.argv[1], os.getcwd())\n"
        "print(sys.executable)\nprint()\nprint('1:2')"
    )
    words = [*program(tmp_path, code), "--gpu"]

    first, second = await run_program(words, tmp_path, 60)

    assert first == f"--gpu {tmp_path}"
    assert os.path.basename(second).startswith("python")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ValueError('no sensor')", "status 1: ValueError: no sensor"),
        ("import os\nos._exit(3)", "status 3"),
        (f"print('x' * {MAX_OUTPUT_BYTES + 1})", "printed more than"),
    ],
)
async def test_a_program_that_fails_is_told(tmp_path: Path, code: str, why: str) -> None:
    """With its status and the last line of what it complained of."""
    with pytest.raises(ProgramFailed, match=why):
        await run_program(program(tmp_path, code), tmp_path, 60)


async def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    """Nothing can be started in it."""
    with pytest.raises(ProgramFailed, match="cannot be started"):
        await run_program(["x.py"], tmp_path / "none", 60)


async def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """Its whole group goes; a child that holds its output open does not keep the reader."""
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('pids', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "time.sleep(600)\n"
    )

    with pytest.raises(ProgramFailed, match="did not end within 2 s"):
        await run_program(program(tmp_path, code), tmp_path, 2)

    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    assert not alive
