"""The way to a first answer is counted as it is typed, walked in an empty folder, and leaves nothing running."""

from __future__ import annotations

import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.processes import until_blocking

SERVER = """\
import http.server, json, pathlib, subprocess, sys

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path("child").write_text(str(child.pid))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        x = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["x"]
        body = json.dumps({"scores": [sum(x) * 6.0, 70.0, 80.0]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


@pytest.fixture
def module() -> Any:
    """The benchmark."""
    return import_module("first_answer")


def has_ended(pid: int) -> bool:
    """Whether a process has ended, though it may not have been reaped."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def way(module: Any, server: str = SERVER, **more: Any) -> Any:
    """A way whose server is this one."""
    return module.Way("a peer", {"server.py": server}, ["mkdir a", "python server.py"], "/", **more)


def test_what_is_typed_and_written_is_counted(module: Any) -> None:
    """Lines that are not empty, and the request among the commands."""
    counted = module.Way("a peer", {"a.py": "x = 1\n\n \ny = 2\n", "b.yaml": "z: 3\n"}, ["mkdir a", "serve"], "/")

    assert (counted.lines, counted.typed) == (3, 3)


def test_a_way_is_walked_to_its_right_answer_and_nothing_is_left_running(module: Any, tmp_path: Path) -> None:
    """Its server's own processes end with it."""
    folder = tmp_path / "empty"
    folder.mkdir()

    walked = module.walk(way(module), module.install(way(module), tmp_path, print), folder)

    assert walked.seconds > 0
    assert walked.cpu_s > 0
    assert (folder / "a").is_dir()
    child = int((folder / "child").read_text())
    until_blocking(lambda: has_ended(child), "the end of the server's own process, which was killed")


@pytest.mark.parametrize(
    ("server", "said"),
    [("raise SystemExit('it is broken')\n", "it is broken"), (SERVER.replace("6.0", "7.0"), "no right answer")],
)
def test_a_way_without_a_right_answer_ends_with_what_was_said(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, said: str
) -> None:
    """A server that ends, and one that answers something else."""
    monkeypatch.setattr(module, "ANSWER_LIMIT_S", 2.0)
    folder = tmp_path / "empty"
    folder.mkdir()
    program = module.install(way(module), tmp_path, print)

    with pytest.raises(module.NoAnswer, match=said):
        module.walk(way(module, server), program, folder)


def test_what_cannot_be_installed_is_left_out_and_said(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of a program, or by pip."""

    def fail(step: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(step, 1, "", "no such package")

    monkeypatch.setattr(module.subprocess, "run", fail)

    with pytest.raises(module.CannotInstall, match="it needs no-such-program"):
        module.install(way(module, packages=["p"], needs=["no-such-program"]), tmp_path, print)
    with pytest.raises(module.CannotInstall, match="no such package"):
        module.install(way(module, packages=["p"]), tmp_path, print)


def test_every_way_writes_the_same_model(module: Any) -> None:
    """The scores are one product of the same weights."""
    for each in module.WAYS:
        [text] = each.files.values()
        assert "WEIGHTS = numpy.arange(12.0).reshape(4, 3)" in text
        assert "@ WEIGHTS).tolist()" in text
