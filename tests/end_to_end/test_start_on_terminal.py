"""`marserve start --foreground` as a person sees it: on a terminal, and through a pipe with a terminal beside it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.on_terminal import LIMIT_S, Reader
from support.workplace import Workplace

LAST = "Ctrl-C stops the server."


@contextmanager
def started(place: Workplace, *, through_pipe: bool) -> Iterator[tuple[subprocess.Popen[bytes], Reader]]:
    """A start from a terminal, with what comes on its standard output."""
    master, slave = os.openpty()
    out, written = os.pipe() if through_pipe else (master, slave)
    left_out = ("MARSERVE_", "TS_", "NO_COLOR", "TERM")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    process = subprocess.Popen(
        [sys.executable, "-m", "marserve.cli", "start", "--foreground"],
        cwd=place.folder,
        stdin=slave,
        stdout=written,
        stderr=slave,
        env={**inherited, "TERM": "xterm", "TMPDIR": str(place.temporary)},
    )
    os.close(slave)
    terminal = Reader(master)
    output = terminal
    if through_pipe:
        os.close(written)
        output = Reader(out)
    try:
        yield process, output
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(LIMIT_S)
        for reader in {output, terminal}:
            reader.close()


@pytest.mark.system
@pytest.mark.parametrize("through_pipe", [False, True])
def test_a_person_sees_one_block_and_no_log_lines(tmp_path: Path, through_pipe: bool) -> None:
    """In colours on the terminal alone; the logs are in files, and Ctrl-C ends the server."""
    with Workplace(tmp_path) as place, started(place, through_pipe=through_pipe) as (process, output):
        output.wait_for(LAST)
        process.send_signal(signal.SIGINT)
        status = process.wait(LIMIT_S)

    plain = re.sub(r"\x1b\[\d+m", "", output.text)
    assert status == 0
    assert re.match(r"\s+marserve \d\S+ ", plain)
    assert "Inference" in plain
    assert "no model is loaded; `marserve register ARCHIVE` adds one" in plain
    assert not re.search(r"^\d{4}-\d\d-\d\d", plain, re.MULTILINE), plain
    assert ("\x1b[" in output.text) is not through_pipe
    assert list((tmp_path / "logs").iterdir())
