"""Every message ends with one full stop: a sentence that is put into another one gives up its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from marserve.errors import without_stop

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    file
    for folder in ("server/marserve", "handlers/marserve_handlers", "client/marserve_client")
    for file in (ROOT / folder).rglob("*.py")
)
# Names of values that are sentences, or errors whose text is one.
SENTENCES = re.compile(
    r"\b(error|exc|exception|failure|failures|reason|reasons|why|told|said|message|sentence|sentences|cause|note|warning"
    r"|warnings|detail|details|problem|problems|trouble|what)\b"
)
# What of an error is no sentence, and what takes the full stop away.
NO_SENTENCE = re.compile(
    r"without_stop\(|rstrip\(|removesuffix\(|_without_stop\(|\.(strerror|pid|name|lineno|errno|returncode|reason_phrase)\b"
    r"|DESCRIPTOR|type\(|__name__|!r|\['version'\]"
)


@pytest.mark.parametrize("text", ["It is gone.", "It is gone", "It is gone.\n", ValueError("It is gone.")])
def test_a_sentence_gives_up_its_full_stop(text: object) -> None:
    """However it comes."""
    assert without_stop(text) == "It is gone"
    assert without_stop("up to…") == "up to…"


# A value and a full stop behind it, in one literal or from one to the next: other files need not be parsed.
STOPS = re.compile(r"""(?:\}|%[^%]*?[a-z])(?:["']+\s*[rRfF]*["']+)?\.(?:\s|\\|["')]|$)""", re.MULTILINE)


def stops(path: Path) -> Iterator[tuple[int, str]]:
    """Places where a value that may be a sentence is followed by a full stop; in formats of logging, too."""
    text = path.read_text("utf-8")
    if not STOPS.search(text):
        return
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for value, after in zip(node.values, node.values[1:], strict=False):
                text = after.value if isinstance(after, ast.Constant) else ""
                if isinstance(value, ast.FormattedValue) and re.match(r"\.(\s|$|\"|\))", str(text)):
                    yield node.lineno, ast.unparse(value.value) + ("!r" if value.conversion == ord("r") else "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            form = node.args[0].value
            if not isinstance(form, str) or getattr(node.func, "attr", "") not in LEVELS:
                continue
            for given, directive in zip(node.args[1:], re.finditer(r"%[^%]*?[a-z]", form), strict=False):
                if re.match(r"\.(\s|$)", form[directive.end() :]):
                    yield node.lineno, ast.unparse(given)


LEVELS = ("debug", "info", "warning", "error", "exception")


def test_no_message_ends_with_two_full_stops() -> None:
    """Walked over the whole source: f-strings, and what logging puts together."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {value}"
        for path in SOURCES
        for line, value in stops(path)
        if SENTENCES.search(value) and not NO_SENTENCE.search(value)
    ]

    assert found == []


def test_the_walk_finds_what_it_is_for(tmp_path: Path) -> None:
    """In both forms; a full stop inside of a number or a path is none."""
    (tmp_path / "a.py").write_text(
        'f"{error}."\nf"{why}. Next."\nlog.error("%s gave up: %s. Again", name, death.detail)\nf"{error}.txt"\n'
    )

    assert [value for _, value in stops(tmp_path / "a.py")] == ["error", "why", "death.detail"]
