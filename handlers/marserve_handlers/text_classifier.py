"""The built-in handler `text_classifier`: English text in, a probability for each label out."""

from __future__ import annotations

import importlib
from typing import Any

from marserve_handlers.base import value_of
from marserve_handlers.context import Context
from marserve_handlers.errors import ModelNotLoadable, PredictionException
from marserve_handlers.support.labels import map_class_to_label
from marserve_handlers.support.targets import read_target
from marserve_handlers.support.timing import timed
from marserve_handlers.support.tokens import ngrams_iterator
from marserve_handlers.text import TextHandler


class TextClassifier(TextHandler):
    """Answers each text with a dict of label to probability over all classes.

    The text is cleaned (markup, capitals, contractions, accents, punctuation), cut into tokens and their n-grams up to
    `ngrams`, and looked up in the vocabulary; a token that it lacks counts as its `<unk>`, or not at all where it has
    none. The model is called with the numbers of all texts in one row and the offset at which each text begins, as
    `torch.nn.EmbeddingBag` takes them, and gives scores [B, classes].
    """

    names_classes = True
    ngrams = 2
    is_vocabulary_needed = True

    def initialize(self, context: Context) -> None:
        """Load model and vocabulary, and take `ngrams` from `handler` of the configuration. Raises ModelNotLoadable."""
        super().initialize(context)
        if self.takes_arrays:
            raise ModelNotLoadable(
                "text_classifier runs models of torch; for an ONNX model write a handler of your own."
            )
        section = self.model_yaml_config.get("handler")
        if isinstance(section, dict) and "ngrams" in section:
            if type(section["ngrams"]) is not int or section["ngrams"] < 1:
                raise ModelNotLoadable(
                    f"handler.ngrams of the model's configuration is {section['ngrams']!r}; it must be a whole number "
                    "above 0."
                )
            self.ngrams = section["ngrams"]

    @timed
    def preprocess(self, data: list[Any]) -> Any:
        """B rows in; the numbers of all tokens, int64 [tokens], and the offsets of the rows, int64 [B], out.

        Raises PredictionException (400) for a row that is no text, and for one that has no known token.
        """
        from marserve_handlers.runtimes.tensors import as_tensor

        texts = [_text_of(row) for row in data]
        self.input_text = texts[0]
        numbers: list[int] = []
        offsets: list[int] = []
        for text in texts:
            offsets.append(len(numbers))
            found = self._numbers(self._words(text))
            if not found:
                raise PredictionException("The request holds no text that this model knows a word of.", 400)
            numbers += found
        return as_tensor(numbers, self.device), as_tensor(offsets, self.device)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model on numbers and offsets: scores [B, classes]."""
        numbers, offsets = data
        return super().inference(numbers, offsets, *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Scores [B, classes] in, one dict a row out."""
        # For a quicker start of models of text that answer no classes.
        from marserve_handlers.image_classifier import as_scores, softmax

        return list(map_class_to_label(softmax(as_scores(data)).tolist(), self.mapping))

    def get_insights(self, text_preprocess: Any, raw_data: Any, target: Any = 0) -> list[dict[str, Any]]:
        """How much each word of the first text spoke for class `target`: `words`, `importances`, `delta`.

        Integrated gradients over the model's layer `embedding`. Needs the package captum and an eager model; answers
        501 without.
        """
        try:
            importlib.import_module("captum.attr")
        except ImportError:
            raise PredictionException("Explanations of texts need the package captum on the server.", 501) from None
        from marserve_handlers.runtimes.attributions import attribute_tokens

        numbers, offsets = text_preprocess
        end = int(offsets[1]) if len(offsets) > 1 else len(numbers)
        words = [word for word in self._words(self.input_text) if self._numbers([word])]
        try:
            attributions, delta = attribute_tokens(
                self.model, getattr(self.model, "embedding", None), numbers[:end], offsets[:1], read_target(target)
            )
        except TypeError:
            raise PredictionException(
                "Explanations of texts need an eager model with a layer `embedding` of torch.nn.", 501
            ) from None
        importances = self.summarize_attributions(attributions)
        return [{"words": words, "importances": importances.tolist(), "delta": delta.tolist()}]

    def _words(self, text: str) -> list[str]:
        """The tokens and n-grams of a text as they are looked up."""
        text = self._remove_html_tags(text).lower()
        text = self._remove_punctuation(self._remove_accented_characters(self._expand_contractions(text)))
        return list(ngrams_iterator(self._tokenize(text), self.ngrams))

    def _numbers(self, words: list[str]) -> list[int]:
        unknown = self.source_vocab.get("<unk>")
        numbers = [self.source_vocab.get(word, unknown) for word in words]
        return [number for number in numbers if number is not None]


def _text_of(row: Any) -> str:
    value = value_of(row)
    if isinstance(value, (bytes, bytearray)):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise PredictionException("The request's text is not in UTF-8.", 400) from None
    if not isinstance(value, str):
        raise PredictionException("The request holds no text: send it as the body, or as the form field data.", 400)
    return value
