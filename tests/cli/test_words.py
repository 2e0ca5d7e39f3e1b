"""How a command's words are read: several values behind one flag, and a flag where a value should be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from marserve.cli.command_list import COMMANDS
from marserve.cli.words import CALLED_OTHERWISE, FLAGS_OF_TORCHSERVE
from support.command_line import marserve
from support.server import free_ports


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["start", "--model-store", "--foreground"], "it takes a value, FOLDER; --foreground is a flag of its own"),
        (["start", "--dry-run", "--models"], "it takes a value, [NAME=]ARCHIVE"),
        (["models", "--management", "--json"], "it takes a value, URL; --json is a flag of its own"),
        (["tune", "digits", "--batch-size"], "it takes a value"),
        (["models", "--config", "--help"], "it takes a value, FILE; --help is a flag of its own"),
    ],
)
def test_an_option_without_its_value_says_what_it_takes(words: list[str], said: str) -> None:
    """Status 2; the next flag is not taken for the value."""
    ran = marserve(*words)

    assert (ran.status, ran.out) == (2, "")
    assert said in " ".join(ran.err.replace("│", " ").split())


def free_addresses() -> list[str]:
    """Options of a start that meets no server of this machine."""
    apis = ("inference", "management", "metrics")
    values = [f"{api}_address=http://127.0.0.1:{port}" for api, port in zip(apis, free_ports(3), strict=True)]
    values += ["grpc_inference_port=0", "grpc_management_port=0"]
    return [word for value in values for word in ("--set", value)]


@pytest.mark.parametrize(
    "words",
    [["--models", "a.mar", "b.mar"], ["--models=a.mar", "b.mar"], ["--models", "a.mar", "--models", "b.mar"]],
)
def test_several_archives_follow_one_flag(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for `torchserve`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_store").mkdir()

    ran = marserve("start", *words, "--dry-run", *free_addresses())

    assert "a.mar would not be loaded" in ran.err
    assert "b.mar would not be loaded" in ran.err


def test_a_word_that_belongs_to_no_flag_is_refused() -> None:
    """It is no archive because an archive stood before it."""
    ran = marserve("start", "--models", "a.mar", "--foreground", "b.mar")

    assert ran.status == 2
    assert "b.mar" in ran.err


def test_a_value_may_look_like_a_flag_of_another_command() -> None:
    """Only the command's own flags are told apart; behind `=` anything is a value."""
    ran = marserve("models", "--config=--json", "--management", "http://127.0.0.1:9")

    assert "takes a value" not in ran.err


def test_the_workflow_store_has_its_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page on workflows names it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flows").mkdir()
    (tmp_path / "model_store").mkdir()

    ran = marserve("start", "--workflow-store", "flows", "--dry-run", "--json", *free_addresses())

    assert any("--workflow-store" in line for line in ran.document["sources"])


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("describe", "`marserve models NAME`"),
        ("serve", "`marserve run FILE`"),
        ("predict", "`marserve infer NAME FILE`"),
        ("list", "`marserve models`"),
        ("deploy", "`marserve register ARCHIVE`"),
        ("log", "`marserve logs`"),
    ],
)
def test_what_others_call_a_command_leads_to_it(word: str, instead: str) -> None:
    """Status 2, and the words to type."""
    ran = marserve(word)

    said = " ".join(re.sub("[╭╮╰╯│─]", " ", ran.err).split())
    assert ran.status == 2
    assert f"No such command '{word}'. {instead}" in said


@pytest.mark.parametrize("word", FLAGS_OF_TORCHSERVE)
def test_a_flag_of_torchserve_leads_to_the_command_that_does_the_same(word: str) -> None:
    """Status 2, as for any wrong word; what follows it does not matter."""
    ran = marserve(word, "--model-store", ".")

    said = " ".join(ran.err.replace("│", " ").split())
    assert ran.status == 2
    assert f"No such option: {word}. {FLAGS_OF_TORCHSERVE[word]}" in said


def test_the_commands_that_others_names_lead_to_are_there() -> None:
    """None of them is a command itself."""
    texts = [*CALLED_OTHERWISE.values(), *FLAGS_OF_TORCHSERVE.values()]
    named = {word for text in texts for word in re.findall(r"`marserve ([a-z-]+)", text)}

    assert named <= set(COMMANDS)
    assert not set(CALLED_OTHERWISE) & set(COMMANDS)
