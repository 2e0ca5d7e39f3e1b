"""Splits English text into tokens, and tokens into n-grams. Pure; needs nothing installed."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# How the tokenizer `basic_english` normalises a line: what is looked for, and what is put in its place.
_REPLACEMENTS = (
    (r"\'", " '  "),
    (r"\"", ""),
    (r"\.", " . "),
    (r"<br \/>", " "),
    (r",", " , "),
    (r"\(", " ( "),
    (r"\)", " ) "),
    (r"\!", " ! "),
    (r"\?", " ? "),
    (r"\;", " "),
    (r"\:", " "),
    (r"\s+", " "),
)
_patterns = [pattern for pattern, _ in _REPLACEMENTS]
_replacements = [replacement for _, replacement in _REPLACEMENTS]
_patterns_dict = [(re.compile(pattern), replacement) for pattern, replacement in _REPLACEMENTS]


def ngrams_iterator(token_list: Iterable[str], ngrams: int) -> Iterator[str]:
    """The tokens, then their neighbours joined by blanks: all pairs, all triples, up to `ngrams` of them."""
    tokens = list(token_list)
    yield from tokens
    for length in range(2, ngrams + 1):
        for at in range(len(tokens) - length + 1):
            yield " ".join(tokens[at : at + length])


def get_tokenizer(tokenizer: Any, language: str = "en") -> Callable[[str], list[str]]:
    """What splits a line into tokens.

    None: at blanks. `basic_english`: in small letters, punctuation marks as tokens of their own. `spacy`: spaCy's
    pipeline of `language`, where that is installed. A callable is given back. Raises ValueError for another word, and
    for `basic_english` with another language.
    """
    if tokenizer is None:
        return _split_tokenizer
    if callable(tokenizer):
        found: Callable[[str], list[str]] = tokenizer
        return found
    if tokenizer == "basic_english":
        if language != "en":
            raise ValueError(f"The tokenizer basic_english knows the language en, not {language!r}.")
        return _basic_english_normalize
    if tokenizer == "spacy":
        pipeline = importlib.import_module("spacy").load(language)
        return lambda line: [token.text for token in pipeline.tokenizer(line)]
    raise ValueError(f"There is no tokenizer {tokenizer!r}; choose basic_english or spacy, or give a callable.")


def _basic_english_normalize(line: str) -> list[str]:
    line = line.lower()
    for pattern, replacement in _patterns_dict:
        line = pattern.sub(replacement, line)
    return line.split()


def _split_tokenizer(x: str) -> list[str]:
    return x.split()
