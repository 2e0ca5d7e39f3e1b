"""Looks through an exported program (`.pt2`) before torch opens it, so that loading and running it is only that.

The pickles in it are checked when an archive is unpacked. What remains, and what torch 2.13 trusts: it resolves an
operator's name by walking attributes from the module `torch` (`torch.os.system` is found), evaluates shape expressions
as Python, imports modules that a tree specification names, and opens compiled libraries that lie in the file. An
honest export has none of these. Pure: reads a zip, knows no torch.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Iterator
from typing import IO, Any

from marserve_handlers.errors import ModelNotLoadable

MAX_GRAPH_BYTES = 256 * 2**20
"""The largest graph description that is read; a real one is some kilobytes a layer."""

_OPERATOR = re.compile(
    r"torch\.ops(\.[A-Za-z][A-Za-z0-9_]*|\.__(?:i?and|i?or|i?xor|i?lshift|i?rshift|not)__|\._[A-Za-z0-9][A-Za-z0-9_]*){2,3}"
    r"|torch\.sym_[a-z]+"
    r"|torch\._sym_[a-z]+"
    r"|math\.[a-z][a-z0-9]*"
    r"|_operator\.(?:add|and_|contains|eq|floordiv|ge|getitem|gt|index|inv|invert|is_|is_not|le|lshift|lt|matmul|mod|mul"
    r"|ne|neg|not_|or_|pos|pow|rshift|sub|truediv|truth|xor)"
)

# Functions that sympy's own notation, and torch's, write into shape expressions.
_FUNCTION_NAMES = """
Abs Add And BooleanFalse BooleanTrue CeilDiv CeilToInt CleanDiv Eq Equality ExprCondPair Float FloatPow
FloatTrueDiv FloorDiv FloorToInt Ge GreaterThan Gt Identity IntInfinity IntTrueDiv Integer
IsNonOverlappingAndDenseIndicator LShift Le LessThan Lt Max Min Mod ModularIndexing Mul Ne NegativeIntInfinity
Not Or Piecewise Pow PowByNatural PythonMod RShift Rational RoundDecimal RoundToInt StrictGreaterThan
StrictLessThan Symbol ToFloat TruncToFloat TruncToInt Tuple Unequality Where Xor ceiling floor
"""
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_NODES = (
    ast.Expression,
    ast.Load,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.Tuple,
    ast.keyword,
)
_PLAIN = re.compile(r"[A-Za-z0-9_.+-]{0,64}")


def check_exported_program(file: str | IO[bytes]) -> None:
    """Raise ModelNotLoadable if the exported program would do more, when loaded and run, than compute.

    `file` is a path or a seekable file. The message names the member and what is wrong with it.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                _check_member(archive, info)
    except zipfile.BadZipFile as error:
        raise ModelNotLoadable(f"The exported program is no zip file: {error}") from error


def is_native_package(path: str) -> bool:
    """Whether a file is a package of native code and no exported program. Nothing of it is run."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(map(_is_native, archive.namelist()))
    except (OSError, zipfile.BadZipFile):
        return False


def _is_native(member: str) -> bool:
    return "/data/aotinductor/" in f"/{member}"


def _check_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    name = info.filename
    if _is_native(name) or name.endswith((".so", ".dll", ".dylib", ".pyd")):
        raise ModelNotLoadable(f"The exported program holds compiled code ({name}), which is not run.")
    if re.search(r"/constants/(opaque|custom)_obj", f"/{name}"):
        raise ModelNotLoadable(f"The exported program holds an object that is no tensor ({name}).")
    if not name.endswith(".json"):
        return
    if info.file_size > MAX_GRAPH_BYTES:
        raise ModelNotLoadable(f"{name} of the exported program is larger than {MAX_GRAPH_BYTES} bytes.")
    text = archive.read(info)
    if b"__enum__" in text or b"default_factory_module" in text:
        raise ModelNotLoadable(f"{name} of the exported program names a module to import.")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelNotLoadable(f"{name} of the exported program is no JSON: {error}") from error
    for key, value in _strings(document):
        if key == "target" and not _is_operator(value):
            raise ModelNotLoadable(f"{name} of the exported program calls {value!r}, which is no operator of torch.")
        if key == "expr_str" and not _is_shape_expression(value):
            raise ModelNotLoadable(f"{name} of the exported program has a shape {value!r}, which is no arithmetic.")


def _strings(document: Any) -> Iterator[tuple[str, str]]:
    """Every string that stands under a key, with the key; without recursion, since depth is the file's choice."""
    waiting: list[Any] = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                if isinstance(inner, str):
                    yield key, inner
                else:
                    waiting.append(inner)
        elif isinstance(value, list):
            waiting.extend(value)


def _is_operator(target: str) -> bool:
    # Under other keys of that name (what an output stands for, a buffer's path) there are plain dotted names; only
    # what begins like this is looked up by torch.
    if not target.startswith(("torch", "_operator", "math", "#")):
        return True
    return _OPERATOR.fullmatch(target) is not None


def _is_shape_expression(text: str) -> bool:
    if len(text) > 100_000:
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(_is_arithmetic(node) for node in ast.walk(tree))


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            # sympy reads such an argument as an expression of its own
            return _PLAIN.fullmatch(node.value) is not None and "__" not in node.value
        return isinstance(node.value, (int, float))
    if isinstance(node, ast.Name):
        return "__" not in node.id
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        return name in _FUNCTIONS or name.startswith("OpaqueUnaryFn_")
    return isinstance(node, _NODES)
