"""Which module of server, handlers and client names which, by the text of its imports: nothing is imported for it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Of all imports, at whatever depth and under whatever condition: parsing all files would take ten times as long.
STATEMENT = re.compile(r"^[ \t]*(?:from[ \t]+[\w.]+[ \t]+import\b|import\b)[^\n(]*(?:\([^)]*\))?", re.MULTILINE)


@functools.cache
def modules() -> dict[str, Path]:
    """Each module of the server, of the handlers and of the client, and its file."""
    return {
        ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): file
        for folder, package in (
            (ROOT / "server", "marserve"),
            (ROOT / "handlers", "marserve_handlers"),
            (ROOT / "client", "marserve_client"),
        )
        for file in sorted((folder / package).rglob("*.py"))
    }


def imported(statement: ast.stmt, module: str, *, is_package: bool) -> Iterator[str]:
    """The full names of what an import statement of `module` takes: modules, or what is in them."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        own = module.split(".") if is_package else module.split(".")[:-1]
        above = own[: len(own) - statement.level + 1] if statement.level else []
        source = ".".join([*above, *([statement.module] if statement.module else [])])
        yield from (f"{source}.{alias.name}" for alias in statement.names)


def named_by(text: str, module: str, known: Collection[str], *, is_package: bool) -> set[str]:
    """The modules of `known` that this text imports, and the packages around them, whose `__init__` runs before.

    The packages around `module` itself count where it names them.
    """
    found = set()
    for words in STATEMENT.findall(text):
        for name in imported(ast.parse(words.strip()).body[0], module, is_package=is_package):
            parts = name.split(".")
            around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
            *packages, named = [each for each in around if each in known] or [module]
            found |= {named} | {each for each in packages if not module.startswith(f"{each}.")}
    return found - {module}


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules of a circle, the first of them at both ends; empty where the graph has none."""
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        ahead = [iter((start,))]
        while ahead:
            node = next(ahead[-1], None)
            if node is None:
                ahead.pop()
                if path:
                    done.add(path.pop())
            elif node in path:
                return [*path[path.index(node) :], node]
            elif node not in done:
                path.append(node)
                ahead.append(iter(sorted(graph.get(node, ()))))
    return []


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Imports inside of functions and for types alone count: they only hide that two modules need each other."""
    graph = {
        module: named_by(file.read_text("utf-8"), module, modules(), is_package=file.name == "__init__.py")
        for module, file in modules().items()
    }
    assert sum(map(len, graph.values())) > len(graph)

    found = circle(graph)

    assert not found, "a circle: " + "\n    imports ".join(found)


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": ["b", "c"], "b": ["c"], "c": []}, []),
        ({"a": ["a"]}, ["a", "a"]),
        ({"a": ["b"], "b": ["c"], "c": ["d"], "d": ["b"]}, ["b", "c", "d", "b"]),
        ({"a": ["b", "c"], "b": [], "c": ["a"]}, ["a", "c", "a"]),
        ({"a": [], "b": ["c"], "c": ["b"]}, ["b", "c", "b"]),
    ],
)
def test_a_circle_is_found_wherever_it_begins(graph: dict[str, list[str]], found: list[str]) -> None:
    """And is shown without the way that leads to it."""
    assert circle(graph) == found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import a.b.d", {"a.b.d"}),
        ("from a.b import d as e, thing", {"a.b", "a.b.d"}),
        ("from a.x import (\n    f,\n    g,\n)", {"a.x"}),
        ("if TYPE_CHECKING:\n    from a.x import f", {"a.x"}),
        ("def f():\n    import a.x.y, os", {"a.x", "a.x.y"}),
        ("from . import d\nfrom .. import x\nfrom .d import f\n", {"a.b.d", "a.x"}),
        ("from a.b import thing\nfrom a import b\nfrom a.b.c import f", {"a.b"}),
        ("from a import thing", {"a"}),
        ("imported = 'from a import x'\n# import a.x", set()),
    ],
)
def test_what_a_module_imports_is_read_from_its_text(text: str, names: set[str]) -> None:
    """Of module `a.b.c`."""
    known = ["a", "a.b", "a.b.c", "a.b.d", "a.x", "a.x.y"]

    assert named_by(text, "a.b.c", known, is_package=False) == names


# What is imported inside of a function without a word about it: packages that need not be there, and what needs them.
OPTIONAL = {
    *("boto3", "certifi", "cryptography", "httpx2", "huggingface_hub", "obstore", "opentelemetry", "ray"),
    *("tqdm", "uvloop"),
    "marserve.api.grpc",
}
# For handlers, what a model may do without: a worker loads the one runtime that its model needs.
OF_HANDLERS = {
    "numpy",
    "safetensors",
    "torch",
    "yaml",
    "marserve_handlers.runtimes",
    "marserve_handlers.support.metrics_file",
}
COMMENT = re.compile(r"#(?! *noqa\b) *\w")


def late_imports(text: str) -> list[ast.Import | ast.ImportFrom]:
    """The import statements inside of functions, from top to bottom."""
    found = {
        node.lineno: node
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return [found[line] for line in sorted(found)]


def unexplained(text: str, optional: Collection[str]) -> list[str]:
    """The late imports that have no comment, beside them or above their lines, and are of nothing optional."""
    lines = ["", *text.splitlines()]
    found = []
    begin = end = 0
    for statement in late_imports(text):
        begin = begin if statement.lineno == end + 1 else statement.lineno
        end = statement.end_lineno or statement.lineno
        names = imported(statement, "", is_package=True)
        above = lines[begin - 1].strip()
        if not (
            all(any(f"{name}.".startswith(f"{package}.") for package in optional) for name in names)
            or COMMENT.match(above)
            or COMMENT.search(lines[statement.lineno])
        ):
            found.append(f"line {statement.lineno}: {lines[statement.lineno].strip()}")
    return found


def test_an_import_inside_of_a_function_says_why_it_is_there() -> None:
    """It is for a quicker start, or of a package that need not be installed; else it belongs to the top of the file."""
    indented = re.compile(r"^[ \t]+(?:from [\w.]+ )?import ", re.MULTILINE)
    texts = {file: file.read_text("utf-8") for file in modules().values()}
    found = [
        f"{file.relative_to(ROOT)}, {each}"
        for file, text in texts.items()
        if indented.search(text)
        for each in unexplained(text, OPTIONAL | OF_HANDLERS if "handlers" in file.parts else OPTIONAL)
    ]

    assert not found, "a comment is missing that says why it is not at the top:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("import a", [2]),
        ("import ray", []),
        ("from ray.util import x", []),
        ("import rayon", [2]),
        ("import a  # for a quicker start", []),
        ("import a  # noqa: F401", [2]),
        ("# For a quicker start.\n    import a\n    import b", []),
        ("# For a quicker start.\n    import a\n\n    import b", [5]),
        ("# For a quicker start.\n    from a import (\n        b,\n    )\n    import c", []),
        ("x = 1\n    import a", [3]),
        ("def g():\n        import a", [3]),
    ],
)
def test_a_reason_stands_beside_an_import_or_above_its_block(body: str, lines: list[int]) -> None:
    """What ruff is told about it is none, and a name that begins like an optional package's is another's."""
    text = f"def f():\n    {body}\n\nif True:\n    import top\n"

    assert [int(each.split()[1].rstrip(":")) for each in unexplained(text, ["ray"])] == lines
