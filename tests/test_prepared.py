"""Programs that are forked from a process that has imported them: each is what a start of its own would have made."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.prepared import COMMANDS, Prepared, prepare, run
from support.server import poll

VERSION = [sys.executable, "-m", "marserve.cli.torchserve", "--version"]
SERVES = [sys.executable, "-m", "marserve.cli.torchserve", "--start", "--foreground", "--ncs", "--model-store", "store"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux alone")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands that were started as any other is."""
    started: list[Any] = []
    monkeypatch.setattr("subprocess.Popen._execute_child", lambda self, *given: started.append(given[0]) or 1 / 0)
    return started


def test_a_command_runs_with_its_arguments_and_gives_its_output_and_status() -> None:
    """In a process of its own, without a new interpreter."""
    first = run(VERSION, timeout=60, text=True)

    assert (first.returncode, first.stdout) == (0, "TorchServe Version is 0.12.0\n")
    assert run([*VERSION[:-1], "--nonsense"], timeout=60).returncode == 2


def test_a_program_is_a_child_of_the_test_in_its_folder_and_session(tmp_path: Path) -> None:
    """It takes signals and its status is read as that of any child; of ours it has no descriptor."""
    (tmp_path / "store").mkdir()
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "TEMP": str(tmp_path / "tmp")}
    lines = [f"{kind}_address=unix://{tmp_path}/{kind}" for kind in ("inference", "management", "metrics")]
    lines += ["grpc_inference_port=0", "grpc_management_port=0", "disable_token_authorization=true"]
    (tmp_path / "config.properties").write_text("\n".join(lines))
    with (tmp_path / "kept").open("wb") as kept, (tmp_path / "out").open("wb") as out:
        process = Prepared(
            [*SERVES, "--ts-config", "config.properties"],
            cwd=tmp_path,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            seen = psutil.Process(process.pid)
            assert (seen.ppid(), seen.cwd()) == (os.getpid(), str(tmp_path))
            for _ in poll(60, "the server starts"):
                assert process.poll() is None, (tmp_path / "out").read_text()
                if "Model server started" in (tmp_path / "out").read_text():
                    break
            assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
            assert kept.name not in {Path(link).resolve().name for link in Path(f"/proc/{process.pid}/fd").iterdir()}
            assert "org.pytorch.serve.ModelServer" in " ".join(seen.cmdline())

            process.send_signal(signal.SIGTERM)

            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "words",
    [
        [sys.executable, "-W", "error", *VERSION[1:]],
        [sys.executable, "-c", "pass"],
        ["/usr/bin/env", *VERSION[1:]],
        [sys.executable, "-m", "json.tool"],
    ],
)
def test_other_programs_and_options_are_started_as_ever(words: list[str], starts: list[Any]) -> None:
    """Only modules of the command line, without options of the interpreter, are forked."""
    with pytest.raises(ZeroDivisionError):
        Prepared(words)

    assert starts == [words]


@pytest.mark.parametrize("name", ["PYTHONPATH", "HOME", "LC_ALL", "LD_LIBRARY_PATH", "PYDANTIC_DISABLE_PLUGINS"])
def test_an_environment_that_an_import_read_is_a_start_of_its_own(name: str, starts: list[Any]) -> None:
    """What was imported under another one would not have followed it."""
    prepare(COMMANDS)

    with pytest.raises(ZeroDivisionError):
        Prepared(VERSION, env={**os.environ, name: "other"})

    assert starts == [VERSION]


CONTAINER = [sys.executable, "-P", "-m", "marserve.cli.container"]


@pytest.mark.parametrize(
    ("words", "status", "out"),
    [
        (["torchserve", "--version"], 0, "TorchServe Version is 0.12.0\n"),
        (["marserve", "--no-such-option"], 2, ""),
        (["torchserve --version && exit 3"], 3, "TorchServe Version is 0.12.0\n"),
    ],
    ids=["torchserve", "marserve", "shell"],
)
def test_what_a_container_runs_ends_with_its_own_status(words: list[str], status: int, out: str) -> None:
    """Whether its script is run in a fork, or by a shell."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    ended = run([*CONTAINER, *words], timeout=60, text=True, env={**os.environ, "PATH": programs})

    assert (ended.returncode, ended.stdout) == (status, out)


def test_a_script_of_another_environment_is_executed(tmp_path: Path) -> None:
    """Though it has the name of ours."""
    script = tmp_path / "torchserve"
    script.write_text("#!/bin/sh\necho another $1\nexit 5\n")
    script.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    ended = run([*CONTAINER, "torchserve", "--version"], timeout=60, text=True, env=environment)

    assert (ended.returncode, ended.stdout) == (5, "another --version\n")
