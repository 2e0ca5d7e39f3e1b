"""Tokens, n-grams and contractions."""

from __future__ import annotations

import pytest

from marserve_handlers.support.contractions import CONTRACTION_MAP
from marserve_handlers.support.tokens import get_tokenizer, ngrams_iterator


def test_ngrams_follow_the_tokens() -> None:
    """All of length 1, then all pairs, and so on."""
    assert list(ngrams_iterator(["a", "b", "c"], 1)) == ["a", "b", "c"]
    assert list(ngrams_iterator(["a", "b", "c"], 3)) == ["a", "b", "c", "a b", "b c", "a b c"]
    assert list(ngrams_iterator(iter(["a"]), 2)) == ["a"]


def test_basic_english_sets_punctuation_apart() -> None:
    """In small letters; quotes go, line breaks are blanks."""
    tokenize = get_tokenizer("basic_english")

    assert tokenize('Hello, "World"! It\'s (me):<br />1; 2.') == [
        *("hello", ",", "world", "!", "it", "'", "s", "(", "me", ")", "1", "2", ".")
    ]


def test_other_tokenizers_may_be_named_or_given() -> None:
    """None splits at blanks; a callable is used as it is; another word is refused."""
    assert get_tokenizer(None)("a  b") == ["a", "b"]
    assert get_tokenizer(list)("ab") == ["a", "b"]
    with pytest.raises(ValueError, match="no tokenizer 'moses'"):
        get_tokenizer("moses")
    with pytest.raises(ValueError, match="knows the language en, not 'de'"):
        get_tokenizer("basic_english", "de")


def test_contractions_are_written_out() -> None:
    """In small letters, none onto another contraction."""
    assert CONTRACTION_MAP["can't"] == "cannot"
    assert CONTRACTION_MAP["they'll"] == "they will"
    assert len(CONTRACTION_MAP) > 100
    assert all(key == key.lower() and "'" not in value for key, value in CONTRACTION_MAP.items())
