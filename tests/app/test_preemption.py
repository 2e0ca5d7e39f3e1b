"""Who says that the machine goes, how often it is asked, and what is refused."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from marserve.app.building.cannot_start import CannotStart
from marserve.app.preemption import FileNotice, Preemption, find_notices, notice_signal
from marserve.errors import BadSettings
from marserve.settings import Settings, load_settings
from support.plugin_packages import Installation

pytestmark = pytest.mark.anyio

WITHIN_S = 10.0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings without a notice."""
    return load_settings("marserve", {}, {}, tmp_path)


class Scripted:
    """A notice that says one thing after the other, and then the last for ever; an exception is raised."""

    where = "the script"

    def __init__(self, *script: str | Exception | None) -> None:
        self._script: Iterator[str | Exception | None] = iter(script)
        self._last: str | Exception | None = None
        self.asked = threading.Semaphore(0)

    def notice(self) -> str | None:
        """The next line."""
        self._last = next(self._script, self._last)
        self.asked.release()
        if isinstance(self._last, Exception):
            raise self._last
        return self._last


async def told_by(*notices: Scripted | FileNotice) -> list[str]:
    """What is told, from the first word until all is quiet."""
    told: list[str] = []
    heard = asyncio.Event()

    def tell(sentence: str) -> None:
        told.append(sentence)
        heard.set()

    preemption = Preemption(notices, 0.001, tell)
    preemption.start()
    try:
        await asyncio.wait_for(heard.wait(), WITHIN_S)
    finally:
        preemption.stop()
    return told


async def test_a_notice_is_told_once_with_its_name() -> None:
    """Whoever says so first; the others are asked no more."""
    assert await told_by(Scripted(None, None, "in 2 minutes")) == ["This machine is to go: the script: in 2 minutes"]
    assert len(await told_by(Scripted("now"), Scripted("now"))) == 1


async def test_a_file_is_a_notice_as_soon_as_it_is_there(tmp_path: Path) -> None:
    """Whatever it holds."""
    notice = FileNotice(tmp_path / "going")
    assert notice.notice() is None

    (tmp_path / "going").touch()

    assert await told_by(notice) == [f"This machine is to go: the file {tmp_path / 'going'}: it has appeared"]


async def test_who_cannot_be_asked_is_asked_again_and_stands_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    """A metadata address that is away for an hour is two lines, not 3,600."""
    failing = OSError("no route")

    with caplog.at_level(logging.INFO):
        told = await told_by(Scripted(failing, failing, failing, None, "now"))

    assert len(told) == 1
    lines = [record.message for record in caplog.records if "Asks every" not in record.message]
    assert lines == ["the script could not be asked (OSError: no route); asked again", "the script answers again"]


async def test_nobody_is_asked_after_the_end_and_nobody_waited_for() -> None:
    """One who never answers holds up nothing."""
    told: list[str] = []
    gate = threading.Event()

    class Stuck(Scripted):
        def notice(self) -> str | None:
            super().notice()
            gate.wait(WITHIN_S)
            return "too late"

    stuck = Stuck()
    preemption = Preemption([stuck], 0.001, told.append)
    preemption.start()
    assert await asyncio.to_thread(stuck.asked.acquire, timeout=WITHIN_S)
    preemption.stop()
    gate.set()

    assert not stuck.asked.acquire(blocking=False)
    await asyncio.sleep(0)
    assert told == []


def test_without_a_setting_and_a_plug_in_there_is_none(settings: Settings) -> None:
    """Nothing is asked, and no signal means it."""
    assert find_notices(settings) == []
    assert notice_signal(settings) is None


def test_a_file_that_is_there_already_stops_the_start(settings: Settings, tmp_path: Path) -> None:
    """A server that drains at once, restarted again and again, would tell nobody why."""
    file = tmp_path / "going"
    file.touch()

    with pytest.raises(CannotStart, match=r"going', and that file is there already.*Remove the file"):
        find_notices(replace(settings, preemption_file=file))


def test_a_folder_that_is_missing_stops_the_start(tmp_path: Path) -> None:
    """Nobody could ever put the file there."""
    wish = {"preemption_file": str(tmp_path / "nowhere" / "going")}
    with pytest.raises(BadSettings, match=r"preemption_file is '.*going', and its folder is not there"):
        load_settings("marserve", wish, {}, tmp_path)


def test_a_signal_that_is_none_stops_the_start(tmp_path: Path) -> None:
    """Names, and what may be named."""
    with pytest.raises(BadSettings, match=r"preemption_signal.*SIGKILL.*SIGUSR1"):
        load_settings("marserve", {"preemption_signal": "SIGKILL"}, {}, tmp_path)


@pytest.mark.parametrize("spelled", ["SIGUSR1", "sigusr1"])
def test_a_signal_is_known_by_its_name(spelled: str, tmp_path: Path) -> None:
    """In capitals or not."""
    settings = load_settings("marserve", {"preemption_signal": spelled}, {}, tmp_path)
    assert notice_signal(settings) is signal.SIGUSR1


def test_a_plug_in_gives_notice(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that cannot is named."""
    installation = Installation(tmp_path)
    monkeypatch.syspath_prepend(str(installation.folder))
    source = "class Cloud:\n    where = 'the cloud'\n    def notice(self):\n        return None\n"
    installation.install("acme-cloud", source, {"marserve.preemption": {"cloud": "{module}:Cloud"}})

    assert [notice.where for notice in find_notices(settings)] == ["the cloud"]

    installation.install(
        "acme-mute", "class Mute:\n    where = 1\n", {"marserve.preemption": {"mute": "{module}:Mute"}}
    )
    with pytest.raises(BadSettings, match=r"the plug-in mute of acme-mute .* gives no notice that the machine goes"):
        find_notices(settings)
