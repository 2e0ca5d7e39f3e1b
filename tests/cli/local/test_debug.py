"""`marserve debug` on real archives and a real terminal."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from support.command_line import marserve
from support.on_terminal import on_terminal
from support.processes import living
from support.server import make_archive

HANDLER = """
class Shout:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        text = bytes(data[0]["body"]).decode()
        print("handling")
        BREAK
        with context.span("shout"):
            loud = text.upper()
        if loud == "BAD":
            raise ValueError("a bad word")
        return [loud]
"""


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """No file in the temporary folder, however the command ends."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


def archive_of(folder: Path, line: str = "pass") -> Path:
    """The handler with that line in the middle."""
    return make_archive(folder / "shout.mar", HANDLER.replace("BREAK", line))


def request(folder: Path, text: str = "hello") -> Path:
    """A request body."""
    path = folder / "request.bin"
    path.write_text(text)
    return path


def test_the_answer_and_where_the_time_went_are_told(tmp_path: Path) -> None:
    """Spans of the handler among the times; as JSON what the code prints goes aside."""
    ran = marserve("debug", archive_of(tmp_path), request(tmp_path), "--json")

    assert ran.status == 0, ran.err
    assert (ran.document["status"], ran.document["answer"], ran.document["modelName"]) == (200, "HELLO", "shout")
    assert [span["name"] for span in ran.document["spans"]] == ["shout"]
    assert ran.document["handlerSeconds"] > 0
    assert ran.document["loadSeconds"] > 0


@pytest.mark.system
def test_breakpoint_opens_the_debugger_on_the_terminal(tmp_path: Path) -> None:
    """Variables can be looked at and set; then the call goes on, and the answer has what was set."""
    with on_terminal("debug", str(archive_of(tmp_path, "breakpoint()")), str(request(tmp_path))) as terminal:
        terminal.screen.wait_for("(Pdb)")
        terminal.press("p text\n")
        terminal.screen.wait_for("'hello'")
        terminal.press("text = 'other'\n")
        terminal.press("c\n")
        status = terminal.ended()
        terminal.screen.wait_for("answer written")

    said = terminal.screen.text
    assert status == 0
    assert "handling" in said
    assert "200, " in said
    assert "OTHER" in said
    assert "  shout" in said


@pytest.mark.system
def test_the_debugger_can_be_left_and_control_c_reaches_the_code(tmp_path: Path) -> None:
    """Either way the command ends with status 1, and says how it came."""
    path = str(request(tmp_path))
    with on_terminal("debug", str(archive_of(tmp_path, "breakpoint()")), path) as terminal:
        terminal.screen.wait_for("(Pdb)")
        terminal.press("q\n")
        left = terminal.ended()
        terminal.screen.wait_for("The debugger was left.")
    endless = archive_of(tmp_path, "print('waits'); __import__('threading').Event().wait()")
    with on_terminal("debug", str(endless), path) as waiting:
        waiting.screen.wait_for("waits")
        waiting.press("\x03")
        interrupted = waiting.ended()
        waiting.screen.wait_for("KeyboardInterrupt")

    assert (left, interrupted) == (1, 1)


@pytest.mark.system
def test_tracebacks_are_whole_and_the_status_is_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a request, and of a load; an end of the process is told as well."""
    path = request(tmp_path, "bad")
    failed = marserve("debug", archive_of(tmp_path), path)
    of_request = capfd.readouterr().err
    archive = make_archive(tmp_path / "broken.mar", "import nothing_of_that_name\n")
    unloaded = marserve("debug", archive, path)
    of_load = capfd.readouterr().err
    dead = marserve("debug", archive_of(tmp_path, "__import__('os')._exit(7)"), path)

    assert [failed.status, unloaded.status, dead.status] == [1, 1, 1]
    assert 'raise ValueError("a bad word")' in of_request
    assert "500, 0 bytes" in failed.out
    assert "ModuleNotFoundError: No module named 'nothing_of_that_name'" in of_load
    assert "broken 1.0: it does not load: " in unloaded.err
    assert "shout 1.0: its process ended with status 7, before there was an answer." in dead.err


@pytest.mark.system
def test_a_daemon_of_the_code_ends_with_the_command(tmp_path: Path) -> None:
    """Though it has left the process group, and nobody waits for it."""
    line = "print(__import__('subprocess').Popen(['sleep', '600'], start_new_session=True).pid, file=open('%s', 'w'))"
    left = tmp_path / "pid"
    ran = marserve("debug", archive_of(tmp_path, line % left), request(tmp_path))

    assert ran.status == 0, ran.err
    assert living({int(left.read_text())}) == set()


def test_wrong_words_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """Exit 2."""
    path = request(tmp_path)

    runs = [
        marserve("debug", tmp_path / "none.mar", path),
        marserve("debug", archive_of(tmp_path), tmp_path / "none.json"),
        marserve("debug", archive_of(tmp_path)),
    ]

    assert [ran.status for ran in runs] == [2, 2, 2]
