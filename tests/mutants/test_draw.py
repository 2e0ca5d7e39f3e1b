"""Making mutants: what is changed, and what is never changed."""

from __future__ import annotations

import ast

import pytest

from mutants.draw import all_mutants


def changed(source: str) -> list[str]:
    """The source after each of its changes, a line each."""
    return [ast.unparse(mutant.apply(source)) for mutant in all_mutants(source)]


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("a < b", ["a <= b", "a >= b"]),
        ("a == b", ["a != b"]),
        ("a in b", ["a not in b"]),
        ("a and b", ["a or b", "b", "a"]),
        ("not a", ["a"]),
        ("a + b", ["a - b"]),
        ("7", ["8", "6"]),
        ("True", ["False"]),
        ("'word'", ["'XXword'"]),
        ("a if b else c", ["c if b else a"]),
        ("a[b:c]", ["a[:c]", "a[b:]"]),
        ("[a for a in b if c]", ["[a for a in b]"]),
        ("f(a, b)", ["f(b, a)"]),
        ("f(a=b)", ["f()"]),
        ("min(a, b)", ["max(a, b)"]),
        ("a.popleft()", ["a.pop()"]),
        ("suppress(KeyError)", ["suppress()"]),
    ],
)
def test_an_expression_has_these_mutants(source: str, mutants: list[str]) -> None:
    """One change each, and nothing else."""
    assert changed(f"x = {source}") == [f"x = {mutant}" for mutant in mutants]


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("f()", ["if False:\n    f()"]),
        ("a.b = c", ["if False:\n    a.b = c"]),
        ("a += b", ["if False:\n    a += b", "a -= b"]),
        ("if a:\n    b", ["if not a:\n    b"]),
        ("raise E('text', 7)", ["if False:\n    raise E('text', 7)"]),
        ("for a in b:\n    continue", ["for a in b:\n    break"]),
        ("def f():\n    return a", ["def f():\n    return None"]),
        ("def f():\n    return False", ["def f():\n    return True"]),
        ("def f(a=7):\n    pass", ["def f(a=8):\n    pass", "def f(a=6):\n    pass"]),
        (
            "try:\n    a\nexcept (B, C):\n    d",
            [
                "try:\n    a\nexcept (B, C):\n    raise",
                "try:\n    a\nexcept (C,):\n    d",
                "try:\n    a\nexcept (B,):\n    d",
                "try:\n    a\nexcept BaseException:\n    d",
            ],
        ),
    ],
)
def test_a_statement_has_these_mutants(source: str, mutants: list[str]) -> None:
    """A statement that goes is kept where it is never run, so that a name in it stays what it was."""
    assert changed(source) == mutants


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        'def f():\n    """A docstring."""',
        "import a",
        "a: list[int]",
        "def f(a: Literal[1]) -> Literal[2]:\n    pass",
        "@decorated(1)\ndef f():\n    pass",
        "class A(B, frozen=True):\n    pass",
        "if TYPE_CHECKING:\n    a = 1",
        "log.info('text %s', 1)",
        "self._log.warning(f'text {1}')",
        "a = f'text {1}'",
        "__slots__ = ('a',)",
        "a = cast('B', c)",
        "zip(a, strict=True)[c]",
        "x = None",
        "X = Literal['a', 'b']",
    ],
)
def test_what_no_test_need_notice_is_not_changed(source: str) -> None:
    """Words for people and for the type checker, and what only guards."""
    assert changed(source) in ([], ["if False:\n    " + source])


def test_the_lines_are_those_of_the_statement_or_of_a_compound_ones_head() -> None:
    """Tests that reach them are the ones that are run; what is run at import is told apart."""
    source = "A = 1\ndef f(\n    a=2,\n):\n    if (\n        a > 3\n    ):\n        return 4\n"

    found = {(mutant.change, mutant.lines, mutant.is_in_function) for mutant in all_mutants(source)}

    assert ("1 → 2", (1, 1), False) in found
    assert ("2 → 3", (2, 4), False) in found
    assert ("a > 3 → a >= 3", (5, 7), True) in found
    assert ("4 → 5", (8, 8), True) in found
