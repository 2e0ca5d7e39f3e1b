"""Judges files of Docker compose, Kubernetes and KServe that deploy the server. They are parsed as YAML.

Templates, which are not YAML until they are filled in, are read line by line, like scripts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from marserve.migration.findings import Finding, Spot
from marserve.migration.judges.script_findings import Starts, judge_command, judge_image, judge_lines, judge_variable
from marserve.migration.judges.settings_findings import judge_text
from marserve.migration.layout import Layout
from marserve.migration.overview import Overview

MAX_DEPTH = 64
# In the order of a container's command line: an image's or compose's program, then Kubernetes' arguments.
_COMMANDS = ("entrypoint", "command", "args")
_PROGRAM = "torchserve"
_SPEAKS_OF_IT = (_PROGRAM, "TS_")


def judge_deployment(text: str, shown: str, layout: Layout, overview: Overview, starts: Starts) -> Iterator[Finding]:
    """Findings about every image, command, variable and settings file in it that concerns the server."""
    if not any(word in text for word in _SPEAKS_OF_IT):
        return
    try:
        documents = [node for node in yaml.compose_all(text, yaml.SafeLoader) if node is not None]
    except (yaml.YAMLError, RecursionError):
        yield from judge_lines(text, Spot(shown), layout, overview, starts)
        return
    judge = _Judge(shown, text, layout, overview, starts, set())
    for document in documents:
        yield from judge.walk(document, 0)


@dataclass(frozen=True)
class _Judge:
    shown: str
    text: str
    layout: Layout
    overview: Overview
    starts: Starts
    walked: set[int]  # ids of nodes: a node with several names is walked once

    def walk(self, node: yaml.Node, depth: int) -> Iterator[Finding]:
        if depth > MAX_DEPTH or id(node) in self.walked:
            return
        self.walked.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for each in node.value:
                yield from self.walk(each, depth + 1)
        if not isinstance(node, yaml.MappingNode):
            return
        members = {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}
        yield from self._command([members[name] for name in _COMMANDS if name in members])
        for name, value in members.items():
            if name in _COMMANDS:
                continue
            if name == "image" and isinstance(value, yaml.ScalarNode):
                yield from judge_image(value.value, self._spot(value))
            elif name in ("environment", "env"):
                yield from self._environment(value)
            elif name.endswith(".properties") and isinstance(value, yaml.ScalarNode) and "log4j" not in name:
                yield from judge_text(value.value.encode(), self._before(value), self.layout, self.overview)
            else:
                yield from self.walk(value, depth + 1)

    def _command(self, parts: list[yaml.Node]) -> Iterator[Finding]:
        words: list[yaml.ScalarNode] = []
        for part in parts:
            if isinstance(part, yaml.SequenceNode):
                words += [each for each in part.value if isinstance(each, yaml.ScalarNode)]
            elif isinstance(part, yaml.ScalarNode):
                words.append(part)
        for at, word in enumerate(words):
            if " " in word.value.strip():
                yield from judge_lines(word.value, self._before(word), self.layout, self.overview, self.starts)
            elif Path(word.value).name == _PROGRAM:
                yield from self._judge_words(word, words[at + 1 :])

    def _judge_words(self, program: yaml.ScalarNode, following: list[yaml.ScalarNode]) -> Iterator[Finding]:
        """Findings about a command, each on the line of its word."""
        given = [each.value for each in following]
        judged = judge_command(given, self._spot(program), self.layout, self.overview, self.starts, self.text)
        for found in judged:
            about = [each for each in following if found.verdict != "works" and found.what.startswith(_flag_of(each))]
            line = _line(about[0]) if about else found.line
            yield replace(found, line=line)

    def _environment(self, node: yaml.Node) -> Iterator[Finding]:
        for name, value in _variables(node):
            if name.value.startswith("TS_"):
                yield judge_variable(name.value, value, self._spot(name), self.layout, self.overview)

    def _spot(self, node: yaml.Node) -> Spot:
        return Spot(self.shown, _line(node))

    def _before(self, node: yaml.ScalarNode) -> Spot:
        """The line before a node's text: a block's begins on the line after its mark."""
        return Spot(self.shown, node.start_mark.line + (1 if node.style in ("|", ">") else 0))


def _variables(node: yaml.Node) -> Iterator[tuple[yaml.ScalarNode, str]]:
    """Compose's mapping and list of `NAME=value`, and Kubernetes' list of names with values."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                yield key, value.value if isinstance(value, yaml.ScalarNode) else ""
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            if isinstance(each, yaml.ScalarNode):
                name, _, text = each.value.partition("=")
                yield yaml.ScalarNode(each.tag, name, each.start_mark, each.end_mark), text
            elif isinstance(each, yaml.MappingNode):
                members = {key.value: value for key, value in each.value if isinstance(key, yaml.ScalarNode)}
                if isinstance(members.get("name"), yaml.ScalarNode):
                    value = members.get("value")
                    yield members["name"], value.value if isinstance(value, yaml.ScalarNode) else ""


def _flag_of(word: yaml.ScalarNode) -> str:
    flag: str = word.value.partition("=")[0]
    return flag if flag.startswith("-") else "\0"


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line + 1
    return line
