"""Starting a server as a process of its own session."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from marserve.cli.server.background import start_server

REPORT = """
import json, os, sys
print(json.dumps({"session": os.getsid(0), "pid": os.getpid(), "arguments": sys.argv[1:], "path": sys.path}))
print("a warning", file=sys.stderr)
"""


def test_a_server_has_a_session_and_gets_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives the terminal of the command that started it, and its output goes where it was told to."""
    (tmp_path / "reporter.py").write_text(REPORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    process = start_server(
        "reporter", ["--start", "a b"], "some.word", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    out, _ = process.communicate(timeout=30)

    report = json.loads(out)
    assert process.returncode == 0
    assert report["session"] == report["pid"] == process.pid != os.getsid(0)
    assert report["arguments"] == ["--start", "a b"]


def test_a_server_does_not_import_what_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's json.py is no part of the server."""
    package = tmp_path / "installed"
    package.mkdir()
    (package / "reporter.py").write_text(REPORT)
    (tmp_path / "json.py").write_text("raise ImportError('the wrong json')\n")
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.chdir(tmp_path)

    process = start_server("reporter", [], "some.word", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    out, _ = process.communicate(timeout=30)

    assert process.returncode == 0
    assert str(tmp_path) not in json.loads(out)["path"]
