"""`torchserve`: TorchServe's flags, texts and exit statuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from marserve.cli.torchserve import torchserve
from support.server import poll
from support.workplace import Workplace


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A folder to start servers in."""
    with Workplace(tmp_path) as place:
        yield place


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the working and the temporary folder of commands inside this process."""
    for variable in ("TEMP", "TS_CONFIG_FILE", "LOG_LOCATION"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit status and standard output of `torchserve WORDS…` inside this process."""
    with pytest.raises(SystemExit) as ended:
        torchserve.main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().out.strip()


@pytest.mark.parametrize("flag", ["-v", "--version", "--vers"])
def test_the_version_is_that_of_the_contract(flag: str, capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """Tools compare TorchServe's version, not marserve's."""
    assert said(capsys, flag) == (0, "TorchServe Version is 0.12.0")


@pytest.mark.parametrize(
    "words", [["--frobnicate"], ["--start", "--stop"], ["--model", "x"], ["--models"], ["--start", "extra"]]
)
def test_usage_errors_are_status_2(words: list[str], capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """As argparse has it; an ambiguous prefix is one of them."""
    assert said(capsys, *words) == (2, "")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "Missing mandatory parameter --model-store"),
        (["--model-store", "nowhere"], "--model-store directory not found: nowhere"),
        (["--model-store=nowhere"], "--model-store directory not found: nowhere"),
        (["--model-store", ".", "--workflow-store", "gone"], "--workflow-store directory not found: gone"),
        (["--model-store", ".", "--ts-config", "nope.properties"], "--ts-config file not found: nope.properties"),
        (["--model-store", ".", "--log-config", "log4j2.xml"], "--log-config file not found: log4j2.xml"),
        (["--model-store", ".", "--cpp-log-config", "cpp.xml"], "--cpp-log-config file not found: cpp.xml"),
    ],
)
@pytest.mark.parametrize("action", [["--start"], [], ["--start", "--foreground"]])
def test_what_is_missing_is_said_in_torchserves_words(
    action: list[str], words: list[str], text: str, capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    """Status 1, and no server is started; starting is the action where none is named."""
    assert said(capsys, *action, "--ncs", *words) == (1, text)


def test_a_temporary_folder_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TEMP decides where archives are unpacked."""
    monkeypatch.setenv("TEMP", "nowhere")

    assert said(capsys, "--start", "--model-store", ".") == (
        1,
        "Invalid temp directory: nowhere, please check TEMP environment variable.",
    )


def test_flags_become_settings() -> None:
    """Only those that were given; the names are the settings' keys."""
    flags = torchserve.parser().parse_args(
        ["--model-store", "s", "--models", "a=b.mar", "c.mar", "--dt", "--enable-model-api", "--ncs", "--ppath", "p"]
    )

    assert torchserve._as_settings(flags) == {
        "model_store": "s",
        "load_models": ["a=b.mar", "c.mar"],
        "plugins_path": "p",
        "disable_token_authorization": True,
        "enable_model_api": True,
        "config_snapshots": False,
    }


def test_stop_without_a_server_is_status_0(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """In TorchServe's words."""
    assert said(capsys, "--stop") == (0, "TorchServe is not currently running.")


def test_stop_with_the_file_of_a_dead_server_removes_it(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """A number that belongs to another program is no server; it is never signalled."""
    bystander = psutil.Process().pid
    (here / ".model_server.pid").write_text(f"{bystander}\n")

    assert said(capsys, "--stop") == (0, "TorchServe already stopped.")
    assert not (here / ".model_server.pid").exists()


def test_start_over_the_file_of_a_dead_server_says_so(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """And goes on."""
    (here / ".model_server.pid").write_text(f"{psutil.Process().pid}\n")

    status, text = said(capsys, "--start", "--ncs")

    assert status == 1
    assert text.splitlines() == ["Removing orphan pid file.", "Missing mandatory parameter --model-store"]


def test_a_server_starts_behind_the_command_and_stops_on_demand(place: Workplace) -> None:
    """At once in the background; a second start is refused; `--stop --foreground` waits for the end."""
    place.add_echo()
    words = ["--start", "--ncs", "--model-store", "store", "--models", "echo=echo.mar"]

    started = place.torchserve(*words)

    assert (started.returncode, started.stderr) == (0, "")
    assert place.pid_files() == [".model_server.pid"]
    refused = place.torchserve(*words)
    for _ in poll(30, "the model answers"):
        with contextlib.suppress(httpx.TransportError):
            if httpx.post(f"{place.inference}/predictions/echo", content=b"hello").status_code == 200:
                break
    (pid,) = place.server_pids()
    assert "org.pytorch.serve.ModelServer" in psutil.Process(pid).cmdline()
    stopped = place.torchserve("--stop", "--foreground")

    assert (refused.returncode, refused.stdout.strip()) == (
        1,
        "TorchServe is already running, please use torchserve --stop to stop TorchServe.",
    )
    assert (stopped.returncode, stopped.stdout) == (0, "")
    assert place.server_pids() == []
    assert place.pid_files() == []


def test_a_stop_that_follows_at_once_finds_the_server(place: Workplace) -> None:
    """Its PID file is there when the start returns, and believed before the server has named itself."""
    assert place.torchserve("--start", "--ncs", "--model-store", "store").returncode == 0
    (place.folder / "key_file.json").write_text("{}")

    stopped = place.torchserve("--stop")

    assert (stopped.returncode, stopped.stdout.strip()) == (0, "TorchServe has stopped.")
    assert not (place.folder / "key_file.json").exists()
    place.wait_until_gone()


def test_a_failing_server_says_so_in_its_status(place: Workplace) -> None:
    """With `--foreground` a service manager learns that it did not start."""
    place.configure(management_address=place.inference, inference_address="unix:/no/such/folder/socket")

    failed = place.torchserve("--start", "--foreground", "--ncs", "--model-store", "store")

    assert failed.returncode == 1
    assert "Failed to bind to address" in failed.stdout + failed.stderr
    assert "Traceback" not in failed.stderr
