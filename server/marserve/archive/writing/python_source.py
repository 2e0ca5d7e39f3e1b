"""Reads a Python file's text, without running it: which models are in it, what it imports, which files it names.

A model is a class or function with `@model(…)` of `marserve_handlers`, a class of LitServe's `LitAPI`, or a handler in
TorchServe's shape. Pure: text in, facts out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from marserve.errors import CannotArchive, without_stop

Shape = Literal["declared", "litserve", "handler"]

# A module that is imported from these brings a class of a handler in TorchServe's shape.
_HANDLER_HOUSES = ("ts.torch_handler", "marserve_handlers")
# What is guessed to be in `marserve`, and is in `marserve_handlers`.
_AUTHORS_NAMES = ("BadInput", "Event", "PredictionException", "Tensor", "model")
_DECLARATION = re.compile(r"marserve_handlers(\.\w+)*\.model")
_LIT_API = re.compile(r"litserve(\.api)?\.LitAPI")
_LIT_SERVER = re.compile(r"litserve(\.server)?\.LitServer")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MOST_NAME_LENGTH = 255


@dataclass(frozen=True, slots=True)
class Found:
    """A model in a file: `name` as the module has it. `model_name` is what `@model(name=…)` says, None if nothing.

    `is_entry`: it is what TorchServe's rules find, without a name behind the file's.
    """

    name: str
    shape: Shape
    line: int
    model_name: str | None = None
    is_entry: bool = False


@dataclass(frozen=True, slots=True)
class Imported:
    """A module that a file imports: its dotted name, `level` dots before it, and the line.

    `names` are what `from … import` takes of it. `may_fail`: it stands in a `try`, in a function, or under a condition.
    """

    module: str
    line: int
    level: int = 0
    names: tuple[str, ...] = ()
    may_fail: bool = False


@dataclass(frozen=True, slots=True)
class LitOptions:
    """What a file says to LitServe's server and API in literals: keyword arguments of the first call of each.

    `arguments` are the API's without a keyword. `others` are the keywords whose values are no literals.
    """

    server: Mapping[str, Any] = field(default_factory=dict)
    api: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PythonSource:
    """The facts about one file. `bound` has every name that the module binds at its top, with its line.

    `file_names` are texts that may name files beside it, parts of paths joined. `marks_a_model`: somewhere it uses
    `model` of `marserve_handlers`.
    """

    label: str
    found: tuple[Found, ...]
    bound: Mapping[str, int]
    imports: tuple[Imported, ...]
    file_names: tuple[str, ...]
    lit_options: LitOptions = LitOptions()
    marks_a_model: bool = False


def read_python(text: str | bytes, label: str) -> PythonSource:
    """Read a file that messages call `label`. Raises CannotArchive for one that is no Python."""
    try:
        tree = ast.parse(text, label)
    except SyntaxError as error:
        raise CannotArchive(f"{label}, line {error.lineno or 1}: {without_stop(error.msg)}.") from None
    except (ValueError, RecursionError, MemoryError) as error:  # NUL bytes; expressions nested too deeply
        raise CannotArchive(f"{label} cannot be read as Python ({error or type(error).__name__}).") from None
    origins: dict[str, str] = {}
    imports = tuple(_imports(tree, origins))
    top = list(_top_level(tree.body))
    return PythonSource(
        label,
        tuple(_models(top, origins, tree)),
        _bound(top),
        imports,
        tuple(dict.fromkeys(_file_names(tree))),
        _lit_options(tree, origins),
        _marks_a_model(tree, origins),
    )


def choose(source: PythonSource, name: str | None) -> Found:
    """The model of this name, else the only one. Raises CannotArchive for none, several, or an unknown name."""
    if name is not None:
        for found in source.found:
            if found.name == name:
                return found
        if name in source.bound:
            return Found(name, "handler", source.bound[name])
        there = _listed([found.name for found in source.found] or [n for n in source.bound if not n.startswith("_")])
        raise CannotArchive(f"{source.label} has no {name}; it has {there or 'no class or function'}.")
    if not source.found:
        for line, wanted in _misplaced(source):
            raise CannotArchive(
                f"{source.label}, line {line}: marserve has no {' or '.join(wanted)}: import them from "
                f"marserve_handlers: from marserve_handlers import {', '.join(wanted)}."
            )
        raise CannotArchive(
            f"{source.label} has no model: no class or function with @model of marserve_handlers, no LitAPI, no "
            "handle(data, context). Name the object behind a colon, or declare one."
        )
    shape = source.found[0].shape
    alike = [found for found in source.found if found.shape == shape]
    if len(alike) > 1:
        names = _listed([f"{found.name} (line {found.line})" for found in alike])
        raise CannotArchive(
            f"{source.label} has {len(alike)} models: {names}. Name one, as in {source.label}:{alike[0].name}."
        )
    return alike[0]


def _misplaced(source: PythonSource) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Imports of the server's package for what `marserve_handlers` has: the line, and the names of that."""
    for each in source.imports:
        if each.module == "marserve" and not each.level:
            names = tuple(name for name in each.names if name in _AUTHORS_NAMES)
            if names or each.names in ((), ("*",)):
                yield each.line, names or ("Tensor", "model")


def snake_case(name: str) -> str:
    """`DigitsNet` as `digits_net`, `MyLitAPI` as `my_lit_api`."""
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().strip("_")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of the module, and those inside of its conditions and attempts."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and not _is_main_guard(statement):
            yield from _top_level([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handlers = [inner for handler in statement.handlers for inner in handler.body]
            yield from _top_level([*statement.body, *handlers, *statement.orelse, *statement.finalbody])
        elif isinstance(statement, ast.With):
            yield from _top_level(statement.body)


def _is_main_guard(statement: ast.If) -> bool:
    """Whether it is `if __name__ == "__main__":`, which a worker never runs."""
    names = {node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)}
    return "__name__" in names


def _imports(tree: ast.Module, origins: dict[str, str]) -> Iterator[Imported]:
    """Every import, outermost first; `origins` gets what each imported name stands for."""
    sure = {id(statement) for statement in tree.body}
    skipped = {
        id(node)
        for statement in tree.body
        if isinstance(statement, ast.If) and _is_main_guard(statement)
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                origins.setdefault(alias.asname or top, alias.name if alias.asname else top)
                if id(node) not in skipped:
                    yield Imported(alias.name, node.lineno, may_fail=id(node) not in sure)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for alias in node.names:
                if not node.level and alias.name == "*":
                    origins.setdefault("model", f"{module}.model")
                elif not node.level:
                    origins.setdefault(alias.asname or alias.name, f"{module}.{alias.name}")
            if id(node) not in skipped:
                names = tuple(alias.name for alias in node.names)
                yield Imported(module, node.lineno, node.level, names, may_fail=id(node) not in sure)


def _origin(node: ast.expr, origins: Mapping[str, str]) -> str:
    """What an expression such as `ls.LitAPI` or `model(…)` stands for, by the imports; empty for anything else."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Subscript):
        node = node.value
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([origins.get(node.id, node.id), *reversed(parts)])


def _models(top: Sequence[ast.stmt], origins: Mapping[str, str], tree: ast.Module) -> Iterator[Found]:
    """The models, the clearest shape first: declared ones, then LitServe's, then handlers."""
    definitions = {node.name: node for node in top if isinstance(node, _DEFINITIONS)}
    yield from _declared(top, origins)
    classes = {name: node for name, node in definitions.items() if isinstance(node, ast.ClassDef)}
    yield from _lit_apis(classes, origins, tree)
    entry = definitions.get("handle")
    if entry is not None and not isinstance(entry, ast.ClassDef) and len(entry.args.posonlyargs + entry.args.args) > 1:
        yield Found("handle", "handler", entry.lineno, is_entry=True)
        return
    handlers = [node for node in classes.values() if _is_handler(node, classes, origins)]
    bases = {base.id for node in handlers for base in node.bases if isinstance(base, ast.Name)}
    for node in handlers:
        if node.name not in bases:
            yield Found(node.name, "handler", node.lineno, is_entry=len(classes) == 1)


def _declared(top: Sequence[ast.stmt], origins: Mapping[str, str]) -> Iterator[Found]:
    for node in top:
        if isinstance(node, _DEFINITIONS):
            for decorator in node.decorator_list:
                if _DECLARATION.fullmatch(_origin(decorator, origins)):
                    yield Found(node.name, "declared", node.lineno, _name_given(decorator))
                    break
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = node.value.func  # Digits = model(inputs=…)(Net)
            if isinstance(made, ast.Call) and _DECLARATION.fullmatch(_origin(made, origins)):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        yield Found(target.id, "declared", node.lineno, _name_given(made))


def _marks_a_model(tree: ast.Module, origins: Mapping[str, str]) -> bool:
    """Whether `model` of `marserve_handlers` is called or decorates something."""
    for node in ast.walk(tree):
        words = node.decorator_list if isinstance(node, _DEFINITIONS) else [node] if isinstance(node, ast.Call) else []
        if any(_DECLARATION.fullmatch(_origin(word, origins)) for word in words):
            return True
    return False


def _name_given(call: ast.expr) -> str | None:
    for keyword in call.keywords if isinstance(call, ast.Call) else []:
        if keyword.arg == "name" and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
            return keyword.value.value
    return None


def _lit_apis(classes: Mapping[str, ast.ClassDef], origins: Mapping[str, str], tree: ast.Module) -> Iterator[Found]:
    """Classes of LitServe's API that no other one of the file builds on; of several those that a server is made of."""
    lit: dict[str, ast.ClassDef] = {}
    for name, node in classes.items():  # a base stands before what builds on it
        words = [_origin(base, origins) for base in node.bases]
        if any(_LIT_API.fullmatch(word) or word in lit for word in words):
            lit[name] = node
    bases = {_origin(base, origins) for node in lit.values() for base in node.bases}
    leaves = [name for name in lit if name not in bases]
    if len(leaves) > 1:
        used = _served_by_litserve(tree, origins)
        leaves = [name for name in leaves if name in used] or leaves
    for name in leaves:
        yield Found(name, "litserve", lit[name].lineno)


def _served_by_litserve(tree: ast.Module, origins: Mapping[str, str]) -> set[str]:
    """The names in the first argument of the calls of LitServer, variables followed once."""
    given: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            names = _names_in(node.value)
            for target in node.targets:
                if isinstance(target, ast.Name):
                    given.setdefault(target.id, set()).update(names)
    used: set[str] = set()
    for call in _calls(tree, origins, _LIT_SERVER):
        for argument in call.args[:1] or [word.value for word in call.keywords if word.arg == "lit_api"]:
            for name in _names_in(argument):
                used |= {name} | given.get(name, set())
    return used


def _names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _calls(tree: ast.Module, origins: Mapping[str, str], of: re.Pattern[str]) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and of.fullmatch(_origin(node, origins))]


def _is_handler(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef], origins: Mapping[str, str]) -> bool:
    """Whether a class has `handle(data, context)`, by itself or from a handler that marserve or TorchServe brings."""
    seen: set[str] = set()
    left = [node]
    while left:
        each = left.pop()
        if each.name in seen:
            continue
        seen.add(each.name)
        if any(
            isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name == "handle" for inner in each.body
        ):
            return True
        for base in each.bases:
            word = _origin(base, origins)
            if word.startswith(tuple(f"{house}." for house in _HANDLER_HOUSES)):
                return True
            if word in classes:
                left.append(classes[word])
    return False


def _bound(top: Sequence[ast.stmt]) -> dict[str, int]:
    """The names of classes, functions, variables and imports at the top of the module."""
    bound: dict[str, int] = {}
    for node in top:
        if isinstance(node, _DEFINITIONS):
            bound.setdefault(node.name, node.lineno)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for each in ast.walk(target):
                    if isinstance(each, ast.Name):
                        bound.setdefault(each.id, node.lineno)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            bound.setdefault(node.target.id, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                bound.setdefault(alias.asname or alias.name, node.lineno)
    return bound


def _file_names(tree: ast.Module) -> Iterator[str]:
    """Texts that may name files: each by itself, and parts that `/` or `join` put together."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _as_file_name(node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield from _as_file_name("/".join(_parts(node)))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("join", "joinpath")
        ):
            words = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            yield from _as_file_name("/".join(words))


def _parts(node: ast.expr) -> list[str]:
    """The texts of `folder / "a" / "b"`, in order."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return [*_parts(node.left), *_parts(node.right)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def _as_file_name(text: str) -> Iterator[str]:
    text = text.removeprefix("./")
    leads_out = text.startswith(("/", "~")) or ".." in text.split("/")
    if len(text) <= _MOST_NAME_LENGTH and text.strip("./ ") and text.isprintable() and not leads_out:
        yield text


def _lit_options(tree: ast.Module, origins: Mapping[str, str]) -> LitOptions:
    servers = _calls(tree, origins, _LIT_SERVER)
    if not servers:
        return LitOptions()
    server = servers[0]
    apis: dict[str, ast.Call] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            apis.update({target.id: node.value for target in node.targets if isinstance(target, ast.Name)})
    first = server.args[0] if server.args else next((w.value for w in server.keywords if w.arg == "lit_api"), None)
    if isinstance(first, ast.Name):
        first = apis.get(first.id)
    said, others = _literals(server)
    if not isinstance(first, ast.Call):
        return LitOptions(said, others=others)
    keywords, further = _literals(first)
    arguments = []
    for argument in first.args:
        try:
            arguments.append(ast.literal_eval(argument))
        except ValueError:
            break
    return LitOptions(said, keywords, tuple(arguments), (*others, *further))


def _literals(call: ast.Call) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The keyword arguments that are literals, and the names of the others."""
    found: dict[str, Any] = {}
    others = []
    for keyword in call.keywords:
        try:
            if keyword.arg is not None:
                found[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            others.append(str(keyword.arg))
    return found, tuple(others)
