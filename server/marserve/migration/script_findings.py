"""Judges what starts the server: shell scripts, Dockerfiles, units, compose files. Reads lines; runs none of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path

from marserve.migration.findings import Finding
from marserve.migration.layout import Layout
from marserve.settings import KEYS

MAX_BYTES = 1_000_000
_ENDS_COMMAND = {"&&", "||", ";", "|", "&", ">", ">>", "2>&1"}
_INSTALLS = re.compile(r"\bpip3?\b.*\binstall\b.*?\b(torchserve(?:-nightly)?)\b")
_IMAGE = re.compile(r"\b(pytorch/torchserve(?:-nightly|-kfs)?(?::[\w.\-]+)?)")
_JAVA = re.compile(r"\b(openjdk-[\w\-]+|default-jre\S*|default-jdk\S*|JAVA_HOME|JAVA_OPTS|java -jar)")
_VARIABLE = re.compile(r"\b(TS_[A-Z0-9_]+)\s*[=:]")
_ALWAYS_READ = {"TS_CONFIG_FILE", "TS_OPEN_INFERENCE_PROTOCOL", "TS_MODEL_SERVER_HOME"}
_WITHOUT_EFFECT = {
    "--log-config": "is accepted without effect: see log_level, log_format and log_location",
    "--cpp-log-config": "is accepted without effect: there is no C++ backend",
}


def judge_script(file: Path, layout: Layout, flags: Collection[str]) -> Iterator[Finding]:
    """Every line that has to do with the server. `flags` are those that `torchserve` takes here."""
    shown = layout.shown(file)
    try:
        if file.stat().st_size > MAX_BYTES:
            return
        text = file.read_text("utf-8", "replace")
    except OSError as error:
        yield Finding("action", shown, 0, f"it cannot be read: {error.strerror}", "look at it yourself")
        return
    for line, words in _logical_lines(text):
        if words.lstrip().startswith("#"):
            continue
        yield from _judge_line(shown, line, words, layout, flags)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations, and where each begins."""
    begun, parts = 0, []
    for number, line in enumerate(text.splitlines(), 1):
        begun = begun or number
        if line.rstrip().endswith("\\"):
            parts.append(line.rstrip()[:-1])
            continue
        parts.append(line)
        yield begun, " ".join(parts)
        begun, parts = 0, []
    if parts:
        yield begun, " ".join(parts)


def _judge_line(shown: str, line: int, text: str, layout: Layout, flags: Collection[str]) -> Iterator[Finding]:
    image = _IMAGE.search(text)
    if image:
        yield Finding(
            *("action", shown, line, f"the image {image[1]} is TorchServe's"),
            "build one of marserve's (docker/Dockerfile) and name it here",
        )
    installs = _INSTALLS.search(text)
    if installs:
        yield Finding(
            *("action", shown, line, f"installs {installs[1]}"),
            'install "marserve[torch,grpc,onnx,ts]" in its place; both have a command torchserve',
        )
    java = _JAVA.search(text)
    if java:
        yield Finding("differs", shown, line, f"{java[1]}: there is no Java here; the line may go")
    for variable in sorted(set(_VARIABLE.findall(text))):
        yield _judge_variable(variable, shown, line)
    if not installs and not image:
        for words in _commands(text, "torchserve"):
            yield from _judge_command(words, shown, line, layout, flags)


def _judge_variable(name: str, shown: str, line: int) -> Finding:
    known = {key.ts_env for key in KEYS.values()} | {key.always_env for key in KEYS.values()} | _ALWAYS_READ
    if name in _ALWAYS_READ:
        return Finding("works", shown, line, name)
    if name in known:
        return Finding("works", shown, line, f"{name} (read where enable_envvars_config=true stands in the file)")
    return Finding("action", shown, line, f"{name} is no variable that is read", "write the key in config.properties")


def _commands(text: str, program: str) -> Iterator[list[str]]:
    """The words of each command of that name in a line: what follows it, up to the command's end."""
    if program not in text:
        return
    plain = re.sub(r"[\[\],]", " ", text) if re.match(r"\s*(CMD|ENTRYPOINT|command:)", text) else text
    try:
        words = shlex.split(plain, comments=True)
    except ValueError:
        words = plain.split()
    words = [part for word in words for part in (word.split() if " " in word and program in word else [word])]
    for at, word in enumerate(words):
        if Path(word.removeprefix("ExecStart=")).name != program:
            continue
        command = []
        for following in words[at + 1 :]:
            if following in _ENDS_COMMAND:
                break
            command.append(following.rstrip(";"))
        if any(part.startswith("-") for part in command):
            yield command


def _judge_command(
    words: list[str], shown: str, line: int, layout: Layout, flags: Collection[str]
) -> Iterator[Finding]:
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words if word.startswith("-")}
    for at, word in enumerate(words):
        if word.startswith("-") and not given[word.partition("=")[0]] and at + 1 < len(words):
            following = words[at + 1]
            given[word] = "" if following.startswith("-") else following
    unknown = [flag for flag in given if flag not in flags]
    for flag in unknown:
        yield Finding("action", shown, line, f"{flag} is no flag of torchserve", "see torchserve --help")
    for flag, sentence in _WITHOUT_EFFECT.items():
        if flag in given:
            yield Finding("differs", shown, line, f"{flag} {sentence}")
    for flag in ("--model-store", "--workflow-store"):
        named = given.get(flag, "")
        if named and "$" not in named and layout.find_folder(named) is None:
            yield Finding("action", shown, line, f"{flag} {named}: there is no such folder here", "create or bring it")
    named = given.get("--ts-config", "")
    if named and "$" not in named and layout.find_file(named) is None:
        yield Finding("action", shown, line, f"--ts-config {named}: there is no such file here", "bring it")
    if not unknown:
        yield Finding("works", shown, line, "torchserve " + " ".join(words))
