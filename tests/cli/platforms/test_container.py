"""What the arguments of `docker run` start."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.cli.platforms.container import command_of, is_server, refuse_unwritable, with_defaults
from marserve.errors import BadSettings


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder that a container works in, with its file of settings."""
    (tmp_path / "config.properties").write_text("")
    return tmp_path


@pytest.mark.parametrize("arguments", [[], ["serve"]])
def test_serve_starts_the_server_with_the_file_of_the_folder(home: Path, arguments: list[str]) -> None:
    """As the entry point of TorchServe's image, but in front."""
    assert command_of(arguments, home) == [
        *("torchserve", "--start", "--foreground", "--ts-config", str(home / "config.properties"))
    ]


def test_serve_needs_no_file(tmp_path: Path) -> None:
    """A volume may hide it."""
    assert command_of(["serve"], tmp_path) == ["torchserve", "--start", "--foreground"]


@pytest.mark.parametrize("flags", [["--ts-config", "/mine"], ["--ts-config=/mine"]])
def test_what_follows_serve_goes_to_the_server(home: Path, flags: list[str]) -> None:
    """A file that is named there is the only one."""
    assert command_of(["serve", *flags, "--models", "all"], home) == [
        *("torchserve", "--start", "--foreground", *flags, "--models", "all")
    ]


def test_a_server_that_would_go_into_the_background_stays_in_front(home: Path) -> None:
    """TorchServe's users start it so, and its image then sleeps beside it."""
    words = ["torchserve", "--start", "--model-store", "model-store", "--models", "a=a.mar"]

    assert command_of(words, home) == [*words, "--foreground"]
    assert command_of(["marserve", "start", "--models", "all"], home) == [
        *("marserve", "start", "--models", "all", "--foreground")
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["torchserve", "--start", "--foreground"],
        ["torchserve", "--version"],
        ["torchserve", "--stop"],
        ["marserve", "start", "--help"],
        ["marserve", "status"],
        ["bash"],
        ["python", "-c", "import marserve; print(marserve.__version__)"],
        ["ls", "-l", "/home/model-server"],
    ],
)
def test_every_other_command_is_run_as_it_stands(home: Path, words: list[str]) -> None:
    """Its words are not torn apart a second time."""
    assert command_of(words, home) == words


@pytest.mark.parametrize(
    "words",
    [
        ["torchserve --start --models all"],
        ["torchserve", "--start", "--model-store=$STORE"],
        ["mkdir", "x", "&&", "torchserve", "--start"],
        ["torchserve", "--start", ";", "tail", "-f", "/dev/null"],
    ],
)
def test_what_only_a_shell_understands_goes_to_a_shell(home: Path, words: list[str]) -> None:
    """TorchServe's image evaluates its arguments as a command line."""
    shell, flag, line = command_of(words, home)

    assert Path(shell).name in ("bash", "sh")
    assert (flag, line) == ("-c", " ".join(words))


def test_serve_switches_tokens_off_unless_somebody_says() -> None:
    """As TorchServe's image does on its command line; other commands keep their own default."""
    name = "MARSERVE_DISABLE_TOKEN_AUTHORIZATION"

    assert with_defaults(["serve"], {})[name] == "true"
    assert with_defaults([], {})[name] == "true"
    assert with_defaults(["serve"], {name: "false"})[name] == "false"
    assert name not in with_defaults(["torchserve", "--start"], {})


def test_a_user_who_may_not_write_the_temporary_folder_is_told_how_he_may(tmp_path: Path) -> None:
    """With the folder, the variable that names it, who he is, and the flag; what starts no server needs no folder."""
    with pytest.raises(BadSettings, match=r"\(TEMP\) may not be written by user \d+ of group \d+.*--user \d+:0") as bad:
        refuse_unwritable({"TEMP": str(tmp_path)}, lambda folder: folder != str(tmp_path))

    assert bad.value.message.startswith(str(tmp_path))
    refuse_unwritable({"TEMP": str(tmp_path)}, lambda folder: True)
    refuse_unwritable({"TEMP": str(tmp_path / "none")}, lambda folder: False)
    refuse_unwritable({}, lambda folder: False)
    assert [is_server(words) for words in (["marserve", "status"], ["bash"], ["torchserve", "--stop"])] == [False] * 3
    assert is_server(command_of(["serve"], tmp_path))
