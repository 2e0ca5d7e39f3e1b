"""Traps of exporting, with the author's file and line: what an exporter bakes, or refuses, by a line of `forward`.

    branch on a size   `if x.shape[0] > 4:` splits the sizes; torch says for which ones it holds, without a line
    branch on data     `if x.sum() > 0:` is refused by torch.export, and baked by a trace with a warning
    state              `self.n += 1` runs once, at the export, and never again

Lines of torch's own files are passed over: the last line that is not torch's is the author's.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import os
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

MOST_LINES = 3
_OF_TORCH = os.path.dirname(torch.__file__) + os.sep
_OF_TRACE = "TracerWarning"
_OF_STATE = "side effects happened"
# Methods that change what they are called on.
_CHANGING = {
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "clear",
    "remove",
    "copy_",
    "add_",
    "zero_",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the author's file, `path` as the author knows it."""

    path: str
    number: int
    code: str

    @classmethod
    def at(cls, path: str, number: int) -> Line:
        """The line there, with its text where the file can be read."""
        return cls(_short(path), number, linecache.getline(path, number).strip())

    def __str__(self) -> str:
        return f"{self.path}, line {self.number}: {self.code}" if self.code else f"{self.path}, line {self.number}"


@dataclass(slots=True)
class Traps:
    """What was seen while a model was exported. `guards` are lines that split the sizes, with what torch decided."""

    guards: list[tuple[str, Line]] = field(default_factory=list)
    traced: list[tuple[str, Line]] = field(default_factory=list)
    state: list[Line] = field(default_factory=list)
    has_state: bool = False

    def notes(self) -> list[str]:
        """Sentences about what was baked without a refusal; without a full stop."""
        found = [f"{line} is baked as it went for the example: {words}" for words, line in self.traced[:MOST_LINES]]
        if self.state:
            lines = "; ".join(str(line) for line in self.state[:MOST_LINES])
            found.append(f"forward changes state, which runs once, at the export, and never again: {lines}")
        elif self.has_state:
            found.append("forward changes state, which runs once, at the export, and never again")
        return found

    def refusal(self, error: BaseException) -> str:
        """What torch refused, in a line, and the author's line where one is known."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = lines[0] if lines else type(error).__name__
        frames = getattr(error, "real_stack", None) or ()
        line = _last_of_author((frame.filename, frame.lineno or 0) for frame in frames) or _line_named_in(lines)
        if line is not None:
            return f"{said}; {line}"
        fixes = [each for each in lines[1:] if "= Dim(" in each or (" = " in each and each.split(" = ")[-1].isdigit())]
        if self.guards:
            where = "; ".join(f"{line} (taken with {words})" for words, line in self.guards[:MOST_LINES])
            range_ = f", it would hold for {fixes[0]} alone" if fixes else ""
            return f"a branch depends on a size{range_}: {where}"
        return "; ".join([said, *fixes[:1]])


@contextlib.contextmanager
def watching(model: Any) -> Iterator[Traps]:
    """Note what is baked while `model` is exported or traced; its warnings are not shown."""
    traps = Traps()
    with warnings.catch_warnings(record=True) as caught, _watching_guards(traps.guards):
        warnings.simplefilter("always")
        yield traps
    for warning in caught:
        if warning.category.__name__ == _OF_TRACE:
            note_traced(traps, warning)
        elif _OF_STATE in str(warning.message):
            traps.has_state = True
    if traps.has_state:
        traps.state = lines_of_state(model)


def note_traced(traps: Traps, warning: warnings.WarningMessage) -> None:
    """Keep a TracerWarning: it names the line by itself. One of torch's own lines says nothing to the author."""
    if warning.filename.startswith(_OF_TORCH):
        return
    words = str(warning.message).partition(".")[0].strip()
    found = (words, Line.at(warning.filename, warning.lineno))
    if found not in traps.traced:
        traps.traced.append(found)


@contextlib.contextmanager
def _watching_guards(found: list[tuple[str, Line]]) -> Iterator[None]:
    """Note each decision that narrows the sizes, with the author's line.

    `ShapeEnv.evaluate_expr` is no public name: where torch has another one, lines are missing, and nothing else.
    """
    try:
        # here: the name may go
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        evaluate = ShapeEnv.evaluate_expr
    except (ImportError, AttributeError):
        yield
        return

    def evaluate_and_note(self: Any, expression: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(self.guards)
        decided = evaluate(self, expression, *args, **kwargs)
        if len(self.guards) > before:
            with contextlib.suppress(Exception):  # a line that is not found is not worth an export
                line = _last_of_author(_stack())
                if line is not None and line not in [each for _, each in found]:
                    found.append((f"{expression} {decided}".replace("Eq", "equal"), line))
        return decided

    kind: Any = ShapeEnv
    kind.evaluate_expr = evaluate_and_note
    try:
        yield
    finally:
        kind.evaluate_expr = evaluate


def _stack() -> list[tuple[str, int]]:
    """The author's frames as dynamo knows them, which interprets them; else those of Python, the outermost first."""
    told = [(frame.filename, frame.lineno or 0) for frame in torch._guards.TracingContext.extract_stack()]
    if told:
        return told
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward":
            frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]  # None ends it
    return frames[::-1]


def _last_of_author(frames: Iterable[tuple[str, int]]) -> Line | None:
    found = [(path, number) for path, number in frames if not path.startswith(_OF_TORCH) and os.path.isfile(path)]
    return Line.at(*found[-1]) if found else None


def _line_named_in(lines: Sequence[str]) -> Line | None:
    """The last `File "…", line N` of a message that is not of torch."""
    frames = []
    for line in lines:
        _, quote, rest = line.lstrip("# ").partition('File "')
        path, _, after = rest.partition('", line ')
        number = after.partition(",")[0]
        if quote and number.isdigit():
            frames.append((path, int(number)))
    return _last_of_author(frames)


def lines_of_state(model: Any) -> list[Line]:
    """The lines of `forward`, of the model and its parts, that change attributes, items, or globals."""
    found: list[Line] = []
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        path = inspect.getsourcefile(kind.forward) if inspect.isfunction(kind.forward) else None
        if path is None or path.startswith(_OF_TORCH):
            continue
        try:
            lines, first = inspect.getsourcelines(kind.forward)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, SyntaxError):
            continue
        found += [Line.at(path, first + number - 1) for number in sorted(set(_changing_lines(tree)))]
    return found


def _changing_lines(tree: ast.AST) -> Iterator[int]:
    outer = {name for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and _is_changing_call(node):
            yield node.lineno
        for target in targets:
            if _is_of_self(target) or (isinstance(target, ast.Name) and target.id in outer):
                yield target.lineno


def _is_changing_call(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING and _is_of_self(node.func.value)


def _is_of_self(node: ast.expr) -> bool:
    """Whether it is `self.x`, `self.x[0]`, `self.x.y`, but not `self` alone."""
    is_deeper = False
    while isinstance(node, ast.Attribute | ast.Subscript):
        node, is_deeper = node.value, True
    return is_deeper and isinstance(node, ast.Name) and node.id == "self"


def _short(path: str) -> str:
    """The path below the folder that it is imported from, such as the model's."""
    for folder in sorted({os.path.realpath(each or os.curdir) for each in sys.path}, key=len, reverse=True):
        real = os.path.realpath(path)
        if real.startswith(folder + os.sep):
            return real[len(folder) + 1 :]
    return path
