"""What a handler imports, and whether that exists here: in the archive, installed, or under the name `ts`.

It parses sources and imports nothing. An import inside a `try` that catches its absence is not judged.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

TS = "ts"
INTERNALS = "marserve_handlers.support.torchserve.internals"
_CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


@dataclass(frozen=True, slots=True)
class Import:
    """One import: a module's full name, what is taken from it (empty for `import m`), and its line."""

    module: str
    names: tuple[str, ...]
    line: int


def read_imports(source: bytes) -> list[Import]:
    """Imports that must succeed. Raises SyntaxError (with `lineno`), and ValueError for bytes that are no text."""
    found: list[Import] = []
    _collect(ast.parse(source), found)
    return found


def _collect(node: ast.AST, found: list[Import]) -> None:
    if isinstance(node, ast.Import):
        found.extend(Import(alias.name, (), node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        if not node.level and node.module:
            found.append(Import(node.module, tuple(alias.name for alias in node.names), node.lineno))
    elif isinstance(node, ast.Try) and any(_catches_absence(handler) for handler in node.handlers):
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            _collect(part, found)
    elif isinstance(node, ast.If) and isinstance(node.test, ast.Name | ast.Attribute) and _is_typing(node.test):
        for part in node.orelse:
            _collect(part, found)
    else:
        for child in ast.iter_child_nodes(node):
            _collect(child, found)


def _catches_absence(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(each, ast.Name) and each.id in _CAUGHT for each in types)


def _is_typing(test: ast.expr) -> bool:
    name = test.id if isinstance(test, ast.Name) else test.attr if isinstance(test, ast.Attribute) else ""
    return name == "TYPE_CHECKING"


def is_there(module: str, folder: Path) -> bool:
    """Whether the first part of a module's name is in the archive's folder, in Python or installed."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or (folder / f"{top}.py").is_file() or (folder / top).is_dir():
        return True
    if any(folder.glob(f"{top}.*.so")) or (folder / f"{top}.so").is_file():
        return True
    return _is_installed(top)


@cache
def _is_installed(top: str) -> bool:
    try:
        return find_spec(top) is not None
    except (ImportError, ValueError, OSError):
        return False


def missing_in_ts(wanted: Import) -> Iterator[str]:
    """The parts of an import from TorchServe's `ts` that do not exist here: the module, or names in it."""
    folder = _ts_folder()
    if folder is None:
        return
    path = folder.joinpath(*wanted.module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        yield wanted.module
        return
    if not wanted.names or "*" in wanted.names:
        return
    offered = names_of(file)
    for name in wanted.names:
        if name not in offered and not (path / f"{name}.py").is_file() and not (path / name).is_dir():
            yield f"{wanted.module}.{name}"


@cache
def _ts_folder() -> Path | None:
    """The folder of modules under TorchServe's names. They are only read here; workers import them."""
    spec = find_spec("marserve_handlers")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) / "ts_compat" / TS if locations else None


def _file_in_ts(module: str) -> Path | None:
    """The file of a module under TorchServe's name `ts`, or None."""
    folder = _ts_folder()
    if folder is None:
        return None
    path = folder.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file if file.is_file() else None


def internal_in_ts(wanted: Import) -> Iterator[str]:
    """Names under `ts` that can be imported, but refuse to be called."""
    file = _file_in_ts(wanted.module)
    if file is not None:
        internals = _internals_of(file)
        yield from (f"{wanted.module}.{name}" for name in wanted.names if name in internals)


def refusing_in_ts(source: bytes, wanted: Import) -> Iterator[str]:
    """Names that a source takes from a module under `ts` and that raise whenever they are called.

    `source` has the import; for `import m` the attributes that it uses count.
    """
    file = _file_in_ts(wanted.module)
    if file is not None:
        refusing = _refusing_of(file)
        used = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
        names = used if not wanted.names else refusing if "*" in wanted.names else set(wanted.names)
        yield from (f"{wanted.module}.{name}" for name in sorted(refusing & names))


@cache
def _refusing_of(file: Path) -> frozenset[str]:
    """The names that a module under TorchServe's names re-exports and that are declared never to return."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module != INTERNALS:
            defined = _functions_without_return(node.module)
            found.update(alias.asname or alias.name for alias in node.names if alias.name in defined)
    return frozenset(found)


@cache
def _functions_without_return(module: str) -> frozenset[str]:
    folder = _ts_folder()
    package, _, rest = module.partition(".")
    if folder is None or package != "marserve_handlers":
        return frozenset()
    file = folder.parents[1].joinpath(*rest.split(".")).with_suffix(".py")
    if not file.is_file():
        return frozenset()
    return frozenset(
        node.name
        for node in ast.parse(file.read_bytes()).body
        if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name) and node.returns.id == "NoReturn"
    )


@cache
def _internals_of(file: Path) -> frozenset[str]:
    return frozenset(
        alias.asname or alias.name
        for node in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(node, ast.ImportFrom) and node.module == INTERNALS
        for alias in node.names
    )


@cache
def names_of(file: Path) -> frozenset[str]:
    """The names that a module defines, imports or assigns at its top. Raises SyntaxError, ValueError, OSError."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    if "__getattr__" in names:
        return _Everything(names)
    return frozenset(names)


class _Everything(frozenset[str]):
    """Contains every name: for a module with `__getattr__`."""

    def __contains__(self, name: object) -> bool:
        return True
