"""Judges what starts the server: shell scripts, Dockerfiles, units, files of variables. It reads lines and runs none.

`deployment_findings.py` uses its judges of commands and variables.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from marserve.migration.findings import Finding, Spot
from marserve.migration.judges.package_findings import INSTEAD
from marserve.migration.layout import SCRIPT_ENDINGS, Layout
from marserve.migration.overview import Overview, judge_location
from marserve.settings import KEYS
from marserve.settings.values import Reading, Wrong

_ENDS_COMMAND = {"&&", "||", ";", "|", "&", ">", ">>", "2>&1"}
_INSTALLS = re.compile(r"\bpip3?\b.*\binstall\b.*?\b(torchserve(?:-nightly)?)\b")
_IMAGE = re.compile(r"\b(pytorch/torchserve(?:-nightly|-kfs)?(?::[\w.\-]+)?)")
_JAVA = re.compile(r"\b(openjdk-[\w\-]+|default-jre\S*|default-jdk\S*|JAVA_HOME|JAVA_OPTS|java -jar)")
_ARCHIVERS = re.compile(r"\bpip3?\b.*\binstall\b.*?\b(torch-(?:model|workflow)-archiver)")
# `NAME=value` and `NAME: value`, and Docker's `ENV NAME value`.
_VARIABLE = re.compile(
    r"(?:\bENV\s+(?=TS_\w+\s+[^=\s])|(?<![${\w])(?=TS_\w+\s*[=:]))(TS_[A-Z0-9_]+)\s*[=:]?\s*"
    r"(?:\"([^\"]*)\"|'([^']*)'|([^\s\"']*))"
)
# A command that runs or looks for Java. If it fails and ends the script, the server does not start.
_RUNS_JAVA = re.compile(
    r"(?:^|[;&|(`!]|\$\(|\bif|\bthen|\bRUN|\bdo)\s*(?:(?:command\s+-v|which|type|hash)\s+)?"
    r"(?:[\w./${}\-]*/)?(java|keytool)(?=\s|$|[;&|)])"
)
_ENDS_WITHOUT = re.compile(r"\|\|\s*(?:\{[^}]*)?(?:exit|return|false|die)\b|&&\s*\S|^\s*RUN\b|\bif\s+!")
_GOES_ON = re.compile(r"\|\|\s*(?:true|:|echo)\b")
_ENDS_AT_ONCE = re.compile(r"^\s*set\s+-[a-z]*e|^\s*set\s+-o\s+errexit|^#!.*sh\s+-[a-z]*e", re.MULTILINE)
_WANTS_JAVA_HOME = re.compile(
    r"\$\{JAVA_HOME:?\?|(?:-z\s+\"?\$\{?JAVA_HOME\b|!\s*-[dxn]\s+\"?\$\{?JAVA_HOME\b).*\b(?:exit|return|then)\b"
)
_REGISTERS = re.compile(r"/models/?\?(?:[^\"'\s]*&)?url=([^&\"'\s]+)")
_ASKS = {"-v", "--version", "-h", "--help"}
FOLDERS = ("model_store", "workflow_store")
_ALWAYS_READ = {"TS_CONFIG_FILE", "TS_OPEN_INFERENCE_PROTOCOL", "TS_MODEL_SERVER_HOME"}
_WITHOUT_EFFECT = {
    "--log-config": "is accepted without effect: see log_level, log_format and log_location",
    "--cpp-log-config": "is accepted without effect: there is no C++ backend",
}
_PLUGIN_FLAGS = ("--plugins-path", "--ppath")
# Jars that come with TorchServe, or that a setting replaces.
_KNOWN_JARS = re.compile(r"sagemaker|torchserve-plugins-sdk", re.IGNORECASE)
# A path with one of these depends on variables or commands of a shell or a template.
_ELSEWHERE = ("$", "{{", "`")


@dataclass(frozen=True, slots=True)
class Starts:
    """How to judge commands that start the server: by the `flags` of `torchserve` here, and by a trial.

    `try_command` takes the words of a valid command and where it stands.
    """

    flags: Collection[str]
    try_command: Callable[[list[str], Spot], Iterator[Finding]]


def judge_lines(text: str, before: Spot, layout: Layout, overview: Overview, starts: Starts) -> Iterator[Finding]:
    """Findings about every line that concerns the server, of a text that begins on the line after `before`."""
    for line, words in logical_lines(text):
        if not words.lstrip().startswith(("#", "REM ", "//")):
            yield from _judge_line(Spot(before.file, before.line + line), words, layout, overview, starts, text)


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines joined with their continuations, each with the number of its first line."""
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


def judge_image(text: str, spot: Spot) -> Iterator[Finding]:
    """An image that is TorchServe's own."""
    image = _IMAGE.search(text)
    if image:
        yield spot.action(
            f"the image {image[1]} is TorchServe's",
            "take one with Python and install marserve in it (docs/migrating.md, Docker)",
        )


def _judge_line(
    spot: Spot, text: str, layout: Layout, overview: Overview, starts: Starts, whole: str
) -> Iterator[Finding]:
    image = list(judge_image(text, spot))
    yield from image
    installs = _INSTALLS.search(text)
    if installs:
        yield spot.action(f"installs {installs[1]}", INSTEAD)
    archiver = _ARCHIVERS.search(text)
    if archiver:
        yield spot.differs(f"installs {archiver[1]}: marserve has this command; the line may go")
    java = _JAVA.search(text)
    if _insists_on_java(text, whole):
        yield spot.action("the script ends here where there is no Java", "delete the line: marserve needs none")
    elif java:
        yield spot.differs(f"{java[1]}: there is no Java here; the line may go")
    for name, *values in _VARIABLE.findall(text):
        if re.search(rf"\$\{{?{name}\b", whole):
            continue  # the script uses the variable itself
        yield judge_variable(name, "".join(values), spot, layout, overview)
    for address in _REGISTERS.findall(text):
        yield from judge_location(unquote(address), "registration", spot, layout, overview.allowed_urls)
    if not installs and not image:
        for words in _commands(text, "torchserve"):
            yield from judge_command(words, spot, layout, overview, starts, whole)


def _insists_on_java(text: str, whole: str) -> bool:
    """Whether this line ends the script, or the build of an image, if Java is missing."""
    if _WANTS_JAVA_HOME.search(text):
        return True
    if not _RUNS_JAVA.search(text) or _GOES_ON.search(text):
        return False
    is_only_asked = re.search(r"\bif\s+(?!!)|\bwhile\b|\buntil\b", text) is not None
    return bool(_ENDS_WITHOUT.search(text)) or (bool(_ENDS_AT_ONCE.search(whole)) and not is_only_asked)


def judge_variable(name: str, value: str, spot: Spot, layout: Layout, overview: Overview) -> Finding:
    """One of TorchServe's variables and what it is set to."""
    if name in _ALWAYS_READ:
        return spot.works(name)
    key = next((key for key in KEYS.values() if name in (key.ts_env, key.always_env)), None)
    if key is None:
        return spot.action(f"{name} is no variable that is read", "write the key in config.properties")
    if not overview.reads_variables and name == key.ts_env:
        return spot.differs(f"{name} is not read, as by TorchServe: no settings here say enable_envvars_config=true")
    warnings: list[str] = []
    if value and not any(mark in value for mark in _ELSEWHERE) and key.name not in FOLDERS:
        try:
            key.kind.read(value, Reading(key.name, layout.root, warnings.append, key.minimum, key.maximum, key.choices))
        except Wrong as wrong:
            return spot.action(f"{name}={value}: {wrong}", f"mend the value of {name}")
    return spot.works(f"{name}={value}" if value else name)


def _commands(text: str, program: str) -> Iterator[list[str]]:
    """The words after each command of that name in a line, up to the command's end."""
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


def judge_command(
    words: list[str], spot: Spot, layout: Layout, overview: Overview, starts: Starts, whole: str
) -> Iterator[Finding]:
    """Findings about the words after `torchserve`; `whole` is the script, which may make the named folders."""
    given = _by_flag(words, starts.flags)
    found: list[Finding] = []
    for flag in given:
        if not _is_elsewhere(flag):
            found += _judge_flag(flag, starts.flags, spot)
    for flag, sentence in _WITHOUT_EFFECT.items():
        if flag in given:
            found.append(spot.differs(f"{flag} {sentence}"))
    for flag in ("--model-store", "--workflow-store"):
        for named in given.get(flag, [])[:1]:
            is_made = whole.count(named.rstrip("/")) > 1
            volume = layout.docker_volume(named)
            there = layout.find_folder(named)
            if volume is not None or _is_elsewhere(named) or is_made:
                continue
            if there is None:
                said = f"{flag} {named}: there is no such folder here"
                found.append(spot.action(said, "create or bring it"))
            elif _is_misnamed(named, there, spot.file, whole, layout):
                said = f"{flag} {named}: there is no such folder, but {layout.shown(there)}"
                found.append(spot.action(said, "name the one that is there"))
    for flag in _PLUGIN_FLAGS:
        for named in given.get(flag, [])[:1]:
            found += judge_plugins(named, flag, spot, layout)
    for flag in ("--ts-config", "--log-config"):
        for named in given.get(flag, [])[:1]:
            is_of_machine = flag == "--log-config" and Path(named).is_absolute()
            if is_of_machine or layout.docker_volume(named) is not None or _is_elsewhere(named):
                continue
            file = layout.find_file(named)
            if file is None:
                said = f"{flag} {named}: there is no such file here"
                found.append(spot.action(said, "bring it, or leave the flag out"))
            elif _is_misnamed(named, file, spot.file, whole, layout):
                said = f"{flag} {named}: there is no such file, but {layout.shown(file)}"
                found.append(spot.action(said, "name the one that is there"))
    for location in given.get("--models", []):
        place = location.partition("=")[2] if re.match(r"[\w.\-]+=", location) else location
        found += judge_location(place, "--models", spot, layout, overview.allowed_urls)
    if "--model-store" not in given and "--stop" not in given and not given.keys() & _ASKS and not overview.has_store:
        said = "no model store is named, here or in the settings"
        found.append(spot.action(said, "give --model-store, or set model_store"))
    yield from found
    if not any(each.verdict == "action" for each in found):
        if "--stop" not in given and not given.keys() & _ASKS and not any(map(_is_elsewhere, words)):
            yield from starts.try_command(words, spot)
        yield spot.works("torchserve " + " ".join(words))


def judge_plugins(named: str, by: str, spot: Spot, layout: Layout) -> Iterator[Finding]:
    """Findings about a folder of Java plug-ins, whose jars need a replacement."""
    folder = None if not named or _is_elsewhere(named) else layout.find_folder(named)
    jars = sorted(file.name for file in layout.jars if folder is not None and file.is_relative_to(folder))
    custom = [name for name in jars if not _KNOWN_JARS.search(name)]
    instead = "write what it does as a Python package (docs/plugins.md), and leave the setting out"
    if folder is None:
        said = f"{by} {named}: Java plug-ins are not loaded, and the folder is not here, so its jars were not seen"
        yield spot.action(said, instead)
    elif custom:
        said = f"{by} {named}: {', '.join(custom)}: Java plug-ins are not loaded"
        yield spot.action(said, instead)
    else:
        yield spot.differs(f"{by} is accepted; Java plug-ins are not loaded (see plugins_path in docs/settings.md)")


def _by_flag(words: list[str], flags: Collection[str]) -> dict[str, list[str]]:
    """The flags of a command, spelled out if they are clear, each with the words up to the next flag."""
    given: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            meant = _meanings(flag, flags)
            flag = meant[0] if len(meant) == 1 else flag
            given.setdefault(flag, []).extend([value] if equals else [])
        elif flag:
            given[flag].append(word)
    return given


def _judge_flag(flag: str, flags: Collection[str], spot: Spot) -> Iterator[Finding]:
    meant = _meanings(flag, flags)
    if len(meant) > 1:
        said = f"{flag} may mean {' or '.join(sorted(meant))}"
        yield spot.action(said, "write the one that is meant in full")
    elif not meant:
        yield spot.action(f"{flag} is no flag of torchserve", "see torchserve --help")


def _meanings(flag: str, flags: Collection[str]) -> list[str]:
    """The flags that a word may stand for: itself, else those that begin with it."""
    if flag in flags:
        return [flag]
    return [each for each in flags if flag.startswith("--") and each.startswith(flag)]


def _is_misnamed(named: str, found: Path, shown: str, whole: str, layout: Layout) -> bool:
    """Whether a script's path does not lead to the file or folder that was found here.

    A path inside a container, or after a `cd`, may lead there and counts as right.
    """
    if Path(named).is_absolute() or not shown.endswith(SCRIPT_ENDINGS) or re.search(r"\b(?:cd|pushd)\s", whole):
        return False
    starts = (layout.root, (layout.root / shown).parent)
    return not any((start / named).resolve() == found.resolve() for start in starts)


def _is_elsewhere(named: str) -> bool:
    return any(mark in named for mark in _ELSEWHERE)
