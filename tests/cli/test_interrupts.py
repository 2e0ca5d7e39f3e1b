"""Ctrl-C at any moment of any command line: status 130, no traceback, nothing left half done."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

import marserve.cli
from marserve.cli import Interruptible, Tidied

# Stops the import of a module of the command, says so, and goes on: the moment at which Ctrl-C comes.
STOPPED_IMPORT = """
import importlib.abc, os, runpy, sys, time

class Stop(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.write(1, b"importing\\n")
            time.sleep(30)

sys.meta_path.insert(0, Stop())
sys.argv = {argv!r}
{run}
"""
SCRIPT = "from {module} import main\nsys.exit(main())"
AS_MODULE = "runpy._run_module_as_main({module!r}, alter_argv=True)"


def interrupted(program: Sequence[str], *, at: bytes, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    """Run a program, send it SIGINT once it has written `at`, and give how it ended."""
    process = subprocess.Popen(program, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert line.strip() == at, (line, err)
    return subprocess.CompletedProcess(program, process.returncode, out, err)


@pytest.mark.parametrize(
    ("name", "module", "stopped_at"),
    [
        ("marserve", "marserve.cli", "typer"),
        ("torchserve", "marserve.cli.torchserve.torchserve", "marserve.cli.server.pid_file"),
        ("torch-model-archiver", "marserve.cli.torchserve.torch_model_archiver", "marserve.archive.writing.writer"),
        ("torch-workflow-archiver", "marserve.cli.torchserve.torch_workflow_archiver", "marserve.workflows.spec"),
        ("-m", "marserve.cli", "marserve.cli.command_list"),
        ("-m", "marserve.cli.torchserve", "marserve.cli.server.pid_file"),
        ("-m", "marserve.cli.torchserve.torch_model_archiver", "marserve.archive"),
        ("-m", "marserve.cli.container", "marserve.cli.platforms.sagemaker"),
        ("-m", "marserve.cli.healthcheck", "marserve.settings"),
    ],
)
def test_ctrl_c_while_a_command_is_imported_is_silent(name: str, module: str, stopped_at: str, tmp_path: Path) -> None:
    """As a script and as a module: an import takes up to a second, and prints a traceback by itself."""
    run = (AS_MODULE if name == "-m" else SCRIPT).format(module=module)
    program = STOPPED_IMPORT.format(module=stopped_at, argv=[name, "models"], run=run)

    ended = interrupted([sys.executable, "-c", program], at=b"importing", cwd=tmp_path)

    assert (ended.returncode, ended.stderr) == (130, b"")


def test_ctrl_c_while_a_command_waits_is_130_too(tmp_path: Path) -> None:
    """A server that takes a connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-m", "marserve.cli", "models", "--management", address]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        listener.settimeout(30)
        connection, _ = listener.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)

    assert (process.returncode, out, err) == (130, b"", b"")


def test_an_interrupt_that_python_would_swallow_ends_the_command(tmp_path: Path) -> None:
    """It falls into a destructor, whose exceptions Python prints and forgets."""
    program = textwrap.dedent("""
        import signal, sys
        sys.argv = ["marserve"]
        from marserve.cli import Interruptible, Tidied

        class Late:
            def __del__(self):
                signal.raise_signal(signal.SIGINT)

        with Interruptible():
            late = Late()
            del late
            print("went on")
    """)

    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=False)

    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


def test_an_archiver_that_is_interrupted_leaves_no_half_archive(tmp_path: Path) -> None:
    """The file beside the archive is removed."""
    (tmp_path / "h.py").write_text("def handle(data, context): ...\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(1000))
    program = textwrap.dedent("""
        import os, signal, sys, zipfile
        sys.argv = ["torch-model-archiver", "--model-name", "m", "--version", "1", "--handler", "h.py",
                    "--serialized-file", "w.bin", "--export-path", "out"]
        from marserve.cli.torchserve.torch_model_archiver import main
        import marserve.archive.writing.writer as writer
        real = os.fsync
        os.fsync = os.replace = os.rename = lambda *given: signal.raise_signal(signal.SIGINT)
        os.link = os.fsync
        sys.exit(main())
    """)

    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=False)

    assert (ended.returncode, ended.stderr) == (130, b"")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_signal_that_the_shell_ignores_stays_ignored() -> None:
    """A command in the background of a script goes on at the terminal's Ctrl-C, as any program does."""
    program = "import sys, signal; sys.argv = ['marserve']\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    program += "import marserve.cli\nprint(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ended.stdout == "True\n"


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_tidies_up_and_no_further_one_hinders_it(number: signal.Signals) -> None:
    """Shells send a second one; afterwards all is as before."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    done = []

    def work() -> None:
        with Tidied():
            try:
                with Tidied():  # a block inside of another leaves it with the first
                    signal.raise_signal(number)
            finally:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGHUP)
                done.append("tidied")

    with pytest.raises(SystemExit) as raised:
        work()

    assert raised.value.code == 128 + number
    assert done == ["tidied"]
    assert {each: signal.getsignal(each) for each in handlers} == handlers


def test_a_hang_up_that_nohup_ignores_stays_ignored() -> None:
    """The command goes on when its terminal closes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Tidied():
            signal.raise_signal(signal.SIGHUP)
    finally:
        assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN


def test_a_program_that_imports_the_commands_keeps_its_own_handler() -> None:
    """Its Ctrl-C is not this package's."""
    before = signal.getsignal(signal.SIGINT)

    with Interruptible():
        assert signal.getsignal(signal.SIGINT) is before

    assert before is not marserve.cli._leave
    assert os.path.basename(sys.argv[0]) not in marserve.cli.PROGRAMS


def test_the_version_needs_no_import_but_the_package() -> None:
    """Which is why it is told within a third of a second on a slow machine."""
    program = "import sys; sys.argv = ['marserve', '--version']\nfrom marserve.cli import main\nimport atexit\n"
    program += "atexit.register(lambda: print(sorted(name for name in sys.modules if name.partition('.')[0] in "
    program += "('marserve', 'typer', 'rich', 'httpx', 'numpy', 'asyncio', 'email'))))\nmain()"

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ended.stdout.splitlines() == [f"marserve {marserve.__version__}", "['marserve', 'marserve.cli']"]
