"""Which names can newly be given, and how those that cannot are shown."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest

from marserve.errors import BadName
from marserve.names import check_new_name, escaped, json_escaped, name_fault

REFUSED_CLASSES = {"Cc", "Cs", "Zl", "Zp"}
BIDIRECTIONAL = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def test_exactly_the_classes_and_the_bidirectional_controls_are_refused() -> None:
    """Every character of Unicode is looked at inside of a name: those that are taken all in one."""
    everything = list(map(chr, range(sys.maxunicode + 1)))
    refused = {character for character in everything if unicodedata.category(character) in REFUSED_CLASSES}
    refused |= set(BIDIRECTIONAL)
    taken = "".join(character for character in everything if character not in refused)

    assert name_fault("model", f"a{taken}b") is None
    assert [character for character in refused if name_fault("model", f"a{character}b") is None] == []


@pytest.mark.parametrize("name", ["m", "...", ".m", "a b", "名前", "ü/é%", "a\u200db", "1.0", "😀"])
def test_other_names_are_taken(name: str) -> None:
    """Joiners too: scripts need them."""
    check_new_name("model", name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".", "The model name '.' is lost in paths, so nothing"),
        ("..", "The model name '..' is lost in paths, so nothing"),
        ("a/../b", "The model name 'a/../b' is lost in paths, for its part '..', so nothing"),
        ("a/.", "The model name 'a/.' is lost in paths, for its part '.', so nothing"),
        ("a\x1b[2J", r"The model name 'a\x1b[2J' holds U+001B (a control), so nothing"),
        ("\u202egpj.m", r"The model name '\u202egpj.m' holds U+202E (RIGHT-TO-LEFT OVERRIDE), so nothing"),
        ("\ud800", r"The model name '\ud800' holds U+D800 (half of a surrogate pair), so nothing"),
    ],
)
def test_a_refusal_names_the_character_and_shows_the_name_escaped(name: str, words: str) -> None:
    """So the sentence itself misleads nobody."""
    with pytest.raises(BadName) as refused:
        check_new_name("model", name)

    assert refused.value.message.startswith(words)


def test_text_is_shown_escaped_but_for_what_is_to_stay() -> None:
    """Line ends in a log would be lines of their own; those of a command's output are its layout."""
    assert escaped("a\n\tb\u2028\u202e\x85") == r"a\n\tb\u2028\u202e\x85"
    assert escaped("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"
    assert escaped("plain ü") == "plain ü"


def test_json_means_the_same_when_it_is_escaped() -> None:
    """And holds none of the characters any more; half a surrogate pair, which few can read, is a question mark."""
    value = {"name": "a\u202e\u2028\x85\x7f\x1b\nü😀"}
    document = json_escaped(json.dumps(value, indent=2, ensure_ascii=False))

    assert json.loads(document) == value
    assert escaped(document, keep="\n") == document
    assert "ü😀" in document
    assert json_escaped('"\ud800"') == '"?"'
