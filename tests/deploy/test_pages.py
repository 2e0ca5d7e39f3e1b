"""Whatever the pages in `docs/deploy/` tell to type or to write into a file is run or checked by a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pages import ROOT, Block, block, blocks

PAGES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/deploy").glob("*.md"))


def asked_for() -> Iterator[tuple[str, str]]:
    """The page and the name in every `block("page", "name")` of the tests; a module's constants count as well."""
    for path in (ROOT / "tests").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "support.pages" in source:
            yield from calls_of(path, source)


def calls_of(path: Path, source: str) -> Iterator[tuple[str, str]]:
    """The pages and names in one file of the tests."""
    tree = ast.parse(source, filename=str(path))
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "block":
            said = [
                argument.value if isinstance(argument, ast.Constant) else constants.get(getattr(argument, "id", ""))
                for argument in node.args
            ]
            if len(said) == 2 and all(isinstance(word, str) for word in said):
                yield str(said[0]), str(said[1])


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_on_deploying_is_asked_for_by_a_test(page: str) -> None:
    """So a command that stopped working is found here, not by a reader."""
    asked = set(asked_for())
    untested = [f"line {one.line}: {one.name or 'no name'}" for one in blocks(page) if (page, one.name) not in asked]
    assert not untested, f"blocks of {page} that no test runs or checks: {untested}"


@pytest.mark.parametrize("page", PAGES)
def test_names_of_blocks_stand_once_in_their_page(page: str) -> None:
    """A test would not know which one it has got."""
    names = [one.name for one in blocks(page) if one.name]
    assert len(names) == len(set(names))


def test_a_block_is_found_by_its_name_and_without_the_indent_of_its_fence(tmp_path: Path) -> None:
    """Blocks stand in lists, too; what is typed from them begins at the line's first column."""
    page = tmp_path / "page.md"
    lines = ["Text", "", "- item", "", "  ```sh name=start", "  one", "    two", "  ```", "", "```", "no name", "```"]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert list(blocks(str(page))) == [Block("sh", "start", "one\n  two\n", 5), Block("", None, "no name\n", 10)]
    assert block(str(page), "start") == "one\n  two\n"
    with pytest.raises(LookupError, match="0 blocks named stop"):
        block(str(page), "stop")
