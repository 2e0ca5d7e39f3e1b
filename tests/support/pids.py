"""A control group of a server's own that bounds how many processes and threads it and its workers may be."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

_PLACES = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))


class PidsGroup:
    """A control group with the processes that were put into it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def allow(self, more: int) -> None:
        """Let there be so many processes and threads more than now."""
        (self._folder / "pids.max").write_text(str(int((self._folder / "pids.current").read_text()) + more))

    def allow_none(self) -> None:
        """Let no further one begin, however many end."""
        (self._folder / "pids.max").write_text("1")

    @property
    def is_full(self) -> bool:
        """Whether no further process or thread can begin."""
        used, most = ((self._folder / name).read_text().strip() for name in ("pids.current", "pids.max"))
        return most != "max" and int(used) >= int(most)

    def allow_all(self) -> None:
        """Bound nothing."""
        (self._folder / "pids.max").write_text("max")


@contextmanager
def pids_group(family: Sequence[psutil.Process]) -> Iterator[PidsGroup]:
    """Put these processes into a new group; skips where none can be made. What is left in it at the end is killed."""
    folder = next((place / f"marserve-test-{os.getpid()}" for place in _PLACES if os.access(place, os.W_OK)), None)
    if folder is None:
        pytest.skip("no control group can be made here")
    try:
        folder.mkdir()
        for process in family:
            (folder / "cgroup.procs").write_text(str(process.pid))
        has_pids = (folder / "pids.max").exists()
    except OSError as error:
        has_pids = False
        pytest.skip(f"no control group can be used here: {error}")
    finally:
        if not (folder / "pids.max").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
    if not has_pids:
        pytest.skip("control groups here bound no processes")
    group = PidsGroup(folder)
    try:
        yield group
    finally:
        group.allow_all()
        limit = time.monotonic() + 10
        while folder.exists():
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                folder.rmdir()
            assert time.monotonic() < limit, "the control group is not empty"
