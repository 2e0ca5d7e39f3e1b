"""Tests for workers whose model's folder was deleted under them: what is missing is unpacked again before a start."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import zipfile
from pathlib import Path

import pytest

from marserve.archive.reading.reader import Limits
from marserve.archive.reading.unpacked import UnpackedArchives
from support.processes import until
from support.running_pool import RunningPool

pytestmark = pytest.mark.anyio

SOURCE = """
import os
def handle(data, context):
    path = os.path.join(context.system_properties["model_dir"], "extra.txt")
    return [open(path).read() for row in data] if data else None
"""


class Unpacking(RunningPool):
    """A pool whose model's folder was unpacked from an archive of it."""

    def __init__(self, tmp_path: Path, start: str) -> None:
        super().__init__(tmp_path, SOURCE, start=start)
        (self.folder / "extra.txt").write_text("from the archive")
        self.archive = tmp_path / "m.mar"
        with zipfile.ZipFile(self.archive, "w") as archive:
            for each in self.folder.iterdir():
                archive.write(each, each.name)
        shutil.rmtree(self.folder)
        self.archives = UnpackedArchives()
        self.archives.unpack(self.archive, self.folder, Limits())

    async def __aenter__(self) -> Unpacking:
        await super().__aenter__()
        self.launchers.restore_folder = self.archives.restore
        return self

    async def lose_the_worker(self) -> None:
        """Kill it, and the template that it was forked from."""
        old = self.pids
        for pid in [*self.pool.launcher.template_pids, *old]:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: self.pids != old, "the death is seen")


@pytest.mark.parametrize("start", ["fresh", "fork"])
async def test_a_worker_that_starts_anew_finds_its_folder_again(
    tmp_path: Path, start: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the next request nor a later one notices; the log tells it once."""
    async with Unpacking(tmp_path, start) as running:
        await running.start()
        shutil.rmtree(running.folder)

        with caplog.at_level(logging.WARNING, "marserve.archive"):
            await running.lose_the_worker()
            answer = await running.ask_body(b"x")

        assert answer == b"from the archive"
        [told] = [each.getMessage() for each in caplog.records if each.name == "marserve.archive"]
        assert f"m.mar have been deleted from {running.folder}, and were unpacked again" in told


async def test_a_load_whose_archive_is_another_one_now_fails_and_says_so(tmp_path: Path) -> None:
    """The death names the archive; once the old one is back the next start finds its folder again."""
    async with Unpacking(tmp_path, "fresh") as running:
        await running.start()
        old = running.archive.read_bytes()
        running.archive.write_bytes(old + b"\0")
        (running.folder / "extra.txt").unlink()

        await running.lose_the_worker()
        await until(lambda: running.metrics.worker_deaths["load_failed"] > 0, "the load fails")
        [view] = running.pool.workers()

        assert view.last_death is not None
        assert f"{running.archive} has another SHA-256 digest now" in view.last_death.detail
        running.archive.write_bytes(old)
        assert await running.ask_body(b"x") == b"from the archive"


async def test_a_template_that_has_loaded_the_model_forks_without_the_archive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its worker needs no file to load, so an archive that is gone ends nothing; the log warns."""
    async with Unpacking(tmp_path, "fork") as running:
        await running.start()
        [old] = running.pids
        running.archive.unlink()
        for each in running.folder.glob("*.py"):
            each.unlink()

        os.kill(old, signal.SIGKILL)
        await until(lambda: running.pids not in ([old], []), "another worker")

        assert await running.ask_body(b"x") == b"from the archive"
        assert f"{running.archive} cannot be read (No such file or directory)" in caplog.text
        assert "its template has loaded it" in caplog.text
