"""Makes mutants of a Python source: each differs from it by one small change that some test should notice.

Pure: text in, syntax trees out. What no test should be asked to notice is never changed: docstrings, annotations, the
texts of log lines and errors, imports, decorators, `if TYPE_CHECKING`, and changes known to leave the meaning as it is.
"""

from __future__ import annotations

import ast
import collections
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

Path = tuple[tuple[str, int | None], ...]

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_METHODS = {
    "append": "appendleft",
    "appendleft": "append",
    "popleft": "pop",
    "startswith": "endswith",
    "endswith": "startswith",
    "partition": "rpartition",
    "rpartition": "partition",
    "lower": "upper",
    "removeprefix": "removesuffix",
    "removesuffix": "removeprefix",
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# A keyword that only guards what the code around it already holds, or is about speed.
_KEPT_KEYWORDS = {"strict", "exc_info", "stacklevel", "name", "maxlen"}
_CONSTANT_NAMES = {"__slots__", "__all__"}


@dataclass(frozen=True)
class Mutant:
    """One change: the node at `place` becomes `new`. `lines` are those of its statement, or of a compound one's head.

    `is_in_function` is False for what runs at import: constants, defaults, bodies of classes. `key` names it by its
    function, its statement and its change, and stays the same when other parts of the source change.
    """

    place: Path
    new: ast.AST
    lines: tuple[int, int]
    is_in_function: bool
    change: str
    key: str = ""

    def apply(self, source: str) -> ast.Module:
        """The source with this change."""
        changed = ast.parse(source)
        *way, (field, index) = self.place
        owner: ast.AST = changed
        for name, number in way:
            owner = getattr(owner, name) if number is None else getattr(owner, name)[number]
        if index is None:
            setattr(owner, field, copy.deepcopy(self.new))
        else:
            getattr(owner, field)[index] = copy.deepcopy(self.new)
        return ast.fix_missing_locations(changed)


def all_mutants(source: str) -> list[Mutant]:
    """Every mutant of the source, in the order of its text."""
    tree = ast.parse(source)
    found = list(_Finder().body(tree, "body", (), (1, 1), is_in_function=False))
    keys: collections.Counter[str] = collections.Counter()
    named = []
    for mutant in found:
        key = f"{_where(tree, mutant.place)}: {mutant.change}"
        keys[key] += 1
        named.append(replace(mutant, key=f"{key} ({keys[key]})"))
    return named


def _where(tree: ast.Module, place: Path) -> str:
    """The names of the classes and functions around a place, and the first line of its statement."""
    node: ast.AST = tree
    names, text = [], ""
    for field, index in place:
        node = getattr(node, field) if index is None else getattr(node, field)[index]
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            text = _first_line(node)
    return f"{'.'.join(names)} | {text}"


class _Finder:
    """Walks a tree and yields what may be changed in it."""

    def body(
        self, node: ast.AST, field: str, place: Path, lines: tuple[int, int], *, is_in_function: bool
    ) -> Iterator[Mutant]:
        for index, statement in enumerate(getattr(node, field, ())):
            if index == 0 and field == "body" and _is_text(statement):
                continue
            yield from self.statement(statement, (*place, (field, index)), is_in_function=is_in_function)

    def statement(self, node: ast.stmt, place: Path, *, is_in_function: bool) -> Iterator[Mutant]:
        lines = _head(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("defaults", "kw_defaults"):
                for index, default in enumerate(getattr(node.args, name)):
                    if default is not None:
                        where = (*place, ("args", None), (name, index))
                        yield from self.expression(default, where, lines, is_in_function=is_in_function)
            yield from self.body(node, "body", place, lines, is_in_function=True)
            return
        if isinstance(node, ast.ClassDef):
            yield from self.body(node, "body", place, lines, is_in_function=is_in_function)
            return
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal | ast.Assert):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Expr) and (_is_text(node) or _is_log(node.value)):
            return
        if isinstance(node, ast.Assign) and _CONSTANT_NAMES & {ast.unparse(target) for target in node.targets}:
            return

        def made(new: ast.AST, change: str, at: Path = place) -> Mutant:
            return Mutant(at, new, lines, is_in_function, change)

        text = _first_line(node)
        if _can_go(node):
            yield made(_never(node), f"without: {text}")
        if isinstance(node, ast.Return) and node.value is not None and not _is_nothing(node.value):
            yield made(ast.Return(ast.Constant(None)), f"{text} → return None")
        if isinstance(node, ast.Continue | ast.Break):
            other: ast.stmt = ast.Break() if isinstance(node, ast.Continue) else ast.Continue()
            yield made(other, f"{text} → {ast.unparse(other)}")
        if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
            new = copy.copy(node)
            new.op = _ARITHMETIC[type(node.op)]()
            yield made(new, f"{text} → {ast.unparse(new)}")
        if isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare | ast.UnaryOp | ast.Constant):
            yield made(_not(node.test), f"{text} → if not", (*place, ("test", None)))
        if isinstance(node, ast.Try):
            yield from self.handlers(node, place, is_in_function=is_in_function)
        for field, value in ast.iter_fields(node):
            if isinstance(node, ast.AnnAssign) and field == "annotation":
                continue
            if isinstance(node, ast.Raise) and field == "cause":
                continue
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield from self.body(node, field, place, lines, is_in_function=is_in_function)
                continue
            quiet = isinstance(node, ast.Raise)
            for where, child in _children(field, value):
                if isinstance(child, ast.expr):
                    yield from self.expression(
                        child, (*place, where), lines, is_in_function=is_in_function, is_message=quiet
                    )
                elif isinstance(child, ast.withitem):
                    at = (*place, where, ("context_expr", None))
                    yield from self.expression(child.context_expr, at, lines, is_in_function=is_in_function)
                elif isinstance(child, ast.match_case):
                    yield from self.body(child, "body", (*place, where), lines, is_in_function=is_in_function)

    def handlers(self, node: ast.Try, place: Path, *, is_in_function: bool) -> Iterator[Mutant]:
        for index, handler in enumerate(node.handlers):
            at = (*place, ("handlers", index))
            lines = (handler.lineno, handler.lineno)
            # Reached by what the block raises: the tests are those that reach the block.
            near = (node.body[0].lineno, node.body[-1].end_lineno or node.lineno)
            name = ast.unparse(handler.type) if handler.type else ""
            if not (len(handler.body) == 1 and isinstance(handler.body[0], ast.Raise) and handler.body[0].exc is None):
                new = copy.copy(handler)
                new.body = [ast.Raise()]
                yield Mutant(at, new, lines, is_in_function, f"except {name}: → raised again")
            if isinstance(handler.type, ast.Tuple):
                for number in range(len(handler.type.elts)):
                    fewer = copy.deepcopy(handler)
                    assert isinstance(fewer.type, ast.Tuple)
                    del fewer.type.elts[number]
                    yield Mutant(at, fewer, near, is_in_function, f"except {name}: → {ast.unparse(fewer.type)}")
            if name not in ("Exception", "BaseException", ""):
                wider = copy.copy(handler)
                wider.type = ast.Name("BaseException", ast.Load())
                yield Mutant(at, wider, near, is_in_function, f"except {name}: → except BaseException")
            yield from self.body(handler, "body", at, lines, is_in_function=is_in_function)

    def expression(
        self,
        node: ast.expr,
        place: Path,
        lines: tuple[int, int],
        *,
        is_in_function: bool,
        is_message: bool = False,
    ) -> Iterator[Mutant]:
        """What may be changed in an expression; in a message nothing but what is computed for it is looked at."""
        if isinstance(node, ast.JoinedStr) or _is_type(node):
            return
        for new in _variants(node, is_message=is_message):
            change = f"{_short(node)} → {_short(new)}"
            yield Mutant(place, new, lines, is_in_function, change)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("cast", "TypeVar", "field", "ParamSpec", "logging.getLogger") or _is_log(node):
                return
        if isinstance(node, ast.Lambda):
            yield from self.expression(node.body, (*place, ("body", None)), lines, is_in_function=is_in_function)
            return
        for field, value in ast.iter_fields(node):
            for where, child in _children(field, value):
                at = (*place, where)
                if isinstance(child, ast.expr):
                    yield from self.expression(child, at, lines, is_in_function=is_in_function, is_message=is_message)
                elif isinstance(child, ast.keyword) and child.arg not in _KEPT_KEYWORDS:
                    at = (*at, ("value", None))
                    yield from self.expression(
                        child.value, at, lines, is_in_function=is_in_function, is_message=is_message
                    )
                elif isinstance(child, ast.comprehension):
                    for name in ("iter", "ifs"):
                        for inner, part in _children(name, getattr(child, name)):
                            yield from self.expression(part, (*at, inner), lines, is_in_function=is_in_function)


def _variants(node: ast.expr, *, is_message: bool) -> Iterator[ast.expr]:
    """What an expression may become."""
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            for other in _COMPARISONS[type(op)]:
                ops = [other() if number == index else one for number, one in enumerate(node.ops)]
                yield ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        for index in range(len(node.values)):
            rest = node.values[:index] + node.values[index + 1 :]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.BinOp):
        is_text = any(isinstance(side, ast.JoinedStr) or _is_constant(side, str) for side in (node.left, node.right))
        if type(node.op) in _ARITHMETIC and not is_text and not is_message:
            yield ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant) and not is_message:
        yield from map(ast.Constant, _other_values(node.value))
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and node.slice.step is None:
        if node.slice.lower is not None:
            yield ast.Subscript(node.value, ast.Slice(None, node.slice.upper), node.ctx)
        if node.slice.upper is not None:
            yield ast.Subscript(node.value, ast.Slice(node.slice.lower, None), node.ctx)
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        for index, loop in enumerate(node.generators):
            if loop.ifs:
                new = copy.deepcopy(node)
                new.generators[index].ifs = []
                yield new
    elif isinstance(node, ast.Call) and not is_message:
        yield from _call_variants(node)


def _call_variants(node: ast.Call) -> Iterator[ast.Call]:
    name = ast.unparse(node.func)
    if name in ("cast", "isinstance", "TypeVar", "field", "range", "getattr", "ParamSpec") or _is_log(node):
        return
    if name.endswith("suppress"):
        yield ast.Call(node.func, [], [])
        return
    args = node.args
    can_swap = len(args) > 1 and not any(isinstance(arg, ast.Starred) for arg in args[:2])
    if can_swap and name not in ("min", "max") and ast.dump(args[0]) != ast.dump(args[1]):
        yield ast.Call(node.func, [args[1], args[0], *args[2:]], node.keywords)
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in _KEPT_KEYWORDS:
            yield ast.Call(node.func, args, node.keywords[:index] + node.keywords[index + 1 :])
    if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        yield ast.Call(ast.Name(_FUNCTIONS[node.func.id], ast.Load()), args, node.keywords)
    elif isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        other = ast.Attribute(node.func.value, _METHODS[node.func.attr], ast.Load())
        # A list has no appendleft; what raises at once is found by every test and shows nothing.
        if node.func.attr != "append":
            yield ast.Call(other, args, node.keywords)


def _other_values(value: object) -> tuple[object, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 1, value - 1)
    if isinstance(value, float):
        return (value + 1.0,)
    if isinstance(value, str):
        return ("XX" + value,) if value else ("XX",)
    if isinstance(value, bytes):
        return (b"XX" + value,) if value else (b"XX",)
    return ()


def _can_go(node: ast.stmt) -> bool:
    """Whether the statement may be left out and the rest still makes sense."""
    if isinstance(node, ast.Raise | ast.AugAssign | ast.Delete):
        return True
    if isinstance(node, ast.Return):
        return node.value is None
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)


def _never(node: ast.stmt) -> ast.stmt:
    """The statement, never run: its names stay what they are to the compiler."""
    return ast.If(ast.Constant(False), [node], [])


def _head(node: ast.stmt) -> tuple[int, int]:
    """The lines of a simple statement, or of a compound one up to its body."""
    inner = getattr(node, "body", None)
    if inner and isinstance(inner, list) and isinstance(inner[0], ast.stmt):
        return node.lineno, max(node.lineno, inner[0].lineno - 1)
    return node.lineno, node.end_lineno or node.lineno


def _children(field: str, value: object) -> Iterator[tuple[tuple[str, int | None], ast.AST]]:
    if isinstance(value, ast.AST):
        yield (field, None), value
    elif isinstance(value, list):
        for index, one in enumerate(value):
            if isinstance(one, ast.AST):
                yield (field, index), one


def _is_type(node: ast.expr) -> bool:
    """An alias such as `Literal["a", "b"]`."""
    return isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and _is_constant(node.value, str)


def _is_constant(node: ast.AST, kind: type) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, kind)


def _is_nothing(node: ast.expr) -> bool:
    """None, and False: who asks a question takes one for the other."""
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def _is_log(node: ast.expr) -> bool:
    """A call of a logger's method, or of `warnings.warn`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = ast.unparse(node.func.value)
    return owner == "warnings" or owner.rpartition(".")[2].strip("_").endswith("log")


def _not(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else text[:87] + "..."


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0][:90]
