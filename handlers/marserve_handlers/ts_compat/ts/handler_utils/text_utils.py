"""TorchServe's name for `marserve_handlers.support.tokens`."""

from marserve_handlers.support.tokens import (
    _basic_english_normalize,
    _patterns,
    _patterns_dict,
    _replacements,
    _split_tokenizer,
    get_tokenizer,
    ngrams_iterator,
)

__all__ = [
    "_basic_english_normalize",
    "_patterns",
    "_patterns_dict",
    "_replacements",
    "_split_tokenizer",
    "get_tokenizer",
    "ngrams_iterator",
]
