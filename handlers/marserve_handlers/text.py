"""`TextHandler`: what handlers of text share: a vocabulary, and cleaning of English text."""

from __future__ import annotations

import os
import re
import string
import unicodedata
from typing import Any

from marserve_handlers.base import BaseHandler
from marserve_handlers.context import Context
from marserve_handlers.support.contractions import CONTRACTION_MAP
from marserve_handlers.support.tokens import get_tokenizer

CLEANUP_REGEX = re.compile("<.*?>")
"""Markup tags."""

CONTRACTIONS_PATTERN = re.compile(
    "(" + "|".join(map(re.escape, sorted(CONTRACTION_MAP, key=len, reverse=True))) + ")",
    flags=re.IGNORECASE | re.DOTALL,
)
"""Any of the known contractions, longer ones first."""


class TextHandler(BaseHandler):
    """A handler of text with a vocabulary, `source_vocab`: token to number, from `source_vocab.pt` of the archive.

    The manifest's `sourceVocab` names another file. What an archive without a vocabulary does is the subclass's matter.
    """

    source_vocab: Any = None
    is_vocabulary_needed = False
    """Whether `initialize` fails without a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab = None
        self.input_text: Any = None
        self.tokenizer = get_tokenizer("basic_english")

    def initialize(self, context: Context) -> None:
        """Load the model and the vocabulary. Raises ModelNotLoadable."""
        super().initialize(context)
        path = self.get_source_vocab_path(context)
        if self.is_vocabulary_needed or os.path.isfile(path):
            from marserve_handlers.runtimes.vocabulary import load_vocabulary

            self.source_vocab = load_vocabulary(path)

    def get_source_vocab_path(self, ctx: Any) -> str:
        """Where the vocabulary lies: the manifest's `sourceVocab`, else `source_vocab.pt`, in the archive's folder."""
        entry = (ctx.manifest or {}).get("model") or {}
        name = entry.get("sourceVocab") or "source_vocab.pt"
        return os.path.join(str(ctx.system_properties.get("model_dir")), str(name))

    def get_word_token(self, input_tokens: list[str]) -> list[str]:
        """Tokens of byte-pair and word-piece tokenizers without the marks of where words begin and go on."""
        return [token.replace("Ġ", "").replace("▁", "").removeprefix("##") for token in input_tokens]

    def summarize_attributions(self, attributions: Any) -> Any:
        """One number a token from attributions [1, tokens, embedding], scaled to length 1."""
        summed = attributions.sum(dim=-1).squeeze(0)
        return summed / summed.norm()

    def _remove_html_tags(self, text: str) -> str:
        return CLEANUP_REGEX.sub("", text)

    def _expand_contractions(self, text: str) -> str:
        """Contractions as the words that they stand for, a capital first letter kept."""

        def expand(found: re.Match[str]) -> str:
            short = found.group(0)
            words = CONTRACTION_MAP[short.lower()]
            return short[0] + words[1:] if short[0].isupper() and short[0].lower() == words[0] else words

        return CONTRACTIONS_PATTERN.sub(expand, text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))

    def _remove_accented_characters(self, text: str) -> str:
        decomposed = unicodedata.normalize("NFKD", text)
        return decomposed.encode("ascii", "ignore").decode("ascii")

    def _remove_punctuation(self, text: str) -> str:
        return text.translate(_PUNCTUATION)

    def _remove_puncutation(self, *args: Any, **kwargs: Any) -> str:
        """TorchServe's former spelling of `_remove_punctuation`."""
        return self._remove_punctuation(*args, **kwargs)

    def _tokenize(self, text: str) -> list[str]:
        return self.tokenizer(text)


_PUNCTUATION = str.maketrans("", "", string.punctuation)
