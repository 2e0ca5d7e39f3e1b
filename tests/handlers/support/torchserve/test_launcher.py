"""A server started, asked and stopped from Python, as TorchServe's users do in tests and notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from marserve_handlers.support.torchserve import launcher
from support.server import make_archive
from support.workplace import Workplace


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """A folder with settings, and an environment of its own, as the commands find them."""
    commands = Path(sys.executable).parent
    if not (commands / "torchserve").exists():
        pytest.skip("marserve's commands are not installed beside this Python")
    with Workplace(tmp_path) as workplace:
        monkeypatch.setenv("TEMP", str(workplace.temporary))
        monkeypatch.setenv("TMPDIR", str(workplace.temporary))
        monkeypatch.setattr(launcher, "MANAGEMENT_URL", workplace.management)
        monkeypatch.chdir(tmp_path)
        yield workplace


def test_a_server_is_started_asked_and_stopped(workplace: Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    """What it prints is told on; the workplace proves that nothing is left running."""
    make_archive(workplace.store / "echo.mar", "def handle(data, context):\n    return data and [b'x' for _ in data]\n")

    printed = launcher.start(
        model_store=workplace.store, snapshot_file=workplace.folder / "config.properties", no_config_snapshots=True
    )
    try:
        answer = launcher.register_model("echo", "echo.mar")
        unknown = launcher.register_model_with_params({"url": "missing.mar"})
    finally:
        launcher.stop()
    lines = list(iter(lambda: printed.get(timeout=30), None))

    assert (answer.status_code, answer.ok) == (200, True)
    assert "registered with 1 initial workers" in answer.json()["status"]
    assert answer.content == answer.text.encode()
    assert unknown.status_code == 404
    with pytest.raises(RuntimeError, match="answered 404"):
        unknown.raise_for_status()
    assert any("stopped" in line.lower() for line in lines)
    assert launcher.STARTED in capfd.readouterr().out


def test_one_that_does_not_start_prints_why(workplace: Workplace, capfd: pytest.CaptureFixture[str]) -> None:
    """As under TorchServe the queue says that nothing follows; a test finds out by its first request."""
    printed = launcher.start(model_store=workplace.folder / "missing", snapshot_file=workplace.folder / "x.properties")

    assert printed.get(timeout=30) is None
    assert printed.empty()
    assert "x.properties" in capfd.readouterr().out


def test_lines_that_are_not_read_are_bounded() -> None:
    """And the end is told all the same."""
    tee = launcher.Tee(f"{number}\n" for number in range(launcher.MAX_LINES + 5))
    tee.start()
    tee.join(30)
    lines = list(iter(tee.queue1.get, None))

    assert (len(lines), lines[0]) == (launcher.MAX_LINES, "0\n")
    assert tee.queue1.empty()
    assert tee.queue2.qsize() == launcher.MAX_LINES + 1


def test_a_command_that_is_not_there_is_named() -> None:
    """With how to have it."""
    with pytest.raises(FileNotFoundError, match="pip install marserve"):
        launcher.find_command("no-such-command")


def test_properties_are_read(tmp_path: Path) -> None:
    """One `key=value` a line."""
    (tmp_path / "config.properties").write_text("# a=1\nb = 2=3\n\nnothing\n")

    assert launcher.load_properties(tmp_path / "config.properties") == {"b": "2=3"}
