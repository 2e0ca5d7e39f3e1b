"""The built-in text classifier, with its vocabulary, on an eager model and on TorchScript."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from support.model_context import FakeItem, make_context

torch = pytest.importorskip("torch")

from marserve_handlers.errors import ModelNotLoadable, PredictionException  # noqa: E402
from marserve_handlers.text import TextHandler  # noqa: E402
from marserve_handlers.text_classifier import TextClassifier  # noqa: E402

pytestmark = pytest.mark.torch

MODEL = """
import torch


class Topics(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(6, 2, mode="mean")
        with torch.no_grad():
            self.embedding.weight.copy_(torch.tensor([[0.0, 0], [4, 0], [0, 4], [2, 2], [9, 9], [1, 0]]))

    def forward(self, numbers, offsets):
        return self.embedding(numbers, offsets)
"""
WORDS = {"<unk>": 0, "ball": 1, "bank": 2, "do not": 3, "ball bank": 4, "cafe": 5}


def load(tmp_path: Path, vocabulary: Any = WORDS, config: dict[str, Any] | None = None) -> TextClassifier:
    """A classifier of the model above: first score sport, second money."""
    (tmp_path / "topics.py").write_text(MODEL)
    torch.save({}, tmp_path / "none.pt")
    if vocabulary is not None:
        torch.save(vocabulary, tmp_path / "source_vocab.pt")
    (tmp_path / "index_to_name.json").write_text('{"0": "sport", "1": "money"}')
    classifier = TextClassifier()
    context = make_context(tmp_path, None, "topics.py", config)
    try:
        classifier.initialize(context)
    finally:
        sys.modules.pop("topics", None)
    context.begin_batch([FakeItem()])
    return classifier


def ask(classifier: TextClassifier, *rows: Any) -> list[Any]:
    """The answers to these rows."""
    classifier.context.begin_batch([FakeItem() for _ in rows])
    return list(classifier.handle(list(rows), classifier.context))


def test_a_text_gets_a_probability_for_each_label(tmp_path: Path) -> None:
    """All classes, in their order."""
    (answer,) = ask(load(tmp_path), {"body": "BALL!"})

    assert list(answer) == ["sport", "money"]
    assert answer["sport"] == pytest.approx(0.982, abs=1e-3)


def test_texts_share_a_batch(tmp_path: Path) -> None:
    """Each row has its own tokens; bytes, text and form fields are all texts."""
    classifier = load(tmp_path)

    together = ask(classifier, {"body": bytearray(b"ball")}, {"data": "bank bank bank"}, {"data": b"ball ball"})
    alone = [ask(classifier, row)[0] for row in ({"body": "ball"}, {"body": "bank bank bank"}, {"body": "ball ball"})]

    assert [list(answer.values()) for answer in together] == [pytest.approx(list(answer.values())) for answer in alone]


def test_the_text_is_cleaned(tmp_path: Path) -> None:
    """Markup, capitals, contractions, accents and punctuation; bigrams count."""
    classifier = load(tmp_path)

    words = classifier._words("<b>Don't</b> go to the Café, Ball-Bank\N{RIGHT SINGLE QUOTATION MARK}s")

    assert words[:6] == ["do", "not", "go", "to", "the", "cafe"]
    assert "do not" in words
    assert "the cafe" in words


def test_unknown_words_count_as_unknown_or_not_at_all(tmp_path: Path) -> None:
    """`<unk>` of the vocabulary where it has one."""
    classifier = load(tmp_path)
    assert classifier._numbers(["ball", "nothing"]) == [1, 0]

    del classifier.source_vocab["<unk>"]
    assert classifier._numbers(["ball", "nothing"]) == [1]
    with pytest.raises(PredictionException, match="knows a word of") as caught:
        ask(classifier, {"body": "nothing"})
    assert caught.value.error_code == 400


@pytest.mark.parametrize("row", [{"body": {"a": 1}}, {"body": b"\xff"}, {"body": None}, {"other": b"x"}])
def test_what_is_no_text_fails_with_400(tmp_path: Path, row: Any) -> None:
    """The client's fault."""
    with pytest.raises(PredictionException) as caught:
        ask(load(tmp_path), row)

    assert caught.value.error_code == 400


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [(None, "Missing the source_vocab file"), ([1, 2], "holds a list"), (Path("x"), "holds more than plain data")],
)
def test_a_vocabulary_that_cannot_be_used_fails_the_load(tmp_path: Path, vocabulary: Any, words: str) -> None:
    """With a sentence; nothing but plain data is unpickled."""
    with pytest.raises(ModelNotLoadable, match=words):
        load(tmp_path, vocabulary)


def test_ngrams_come_from_the_configuration(tmp_path: Path) -> None:
    """A whole number above 0."""
    assert load(tmp_path, config={"handler": {"ngrams": 1}})._words("a b") == ["a", "b"]
    with pytest.raises(ModelNotLoadable, match=r"handler\.ngrams .* is 0"):
        load(tmp_path, config={"handler": {"ngrams": 0}})


def test_the_manifest_may_name_the_vocabulary(tmp_path: Path) -> None:
    """`sourceVocab`."""
    context = make_context(tmp_path)
    context.manifest["model"]["sourceVocab"] = "words.pt"  # type: ignore[index]

    assert TextClassifier().get_source_vocab_path(context) == str(tmp_path / "words.pt")


def test_words_that_spoke_for_a_class_are_named(tmp_path: Path) -> None:
    """One importance a word; the baseline is the embedding of nothing."""
    pytest.importorskip("captum.attr", reason="explanations need captum")
    classifier = load(tmp_path, config={"handler": {"ngrams": 1}})
    classifier.context.begin_batch([FakeItem(server_headers=[("explain", "True")])])

    (answer,) = classifier.handle([{"data": "ball bank", "target": 1}], classifier.context)

    assert answer["words"] == ["ball", "bank"]
    assert answer["importances"] == pytest.approx([0.0, 1.0])
    assert answer["delta"] == pytest.approx([0.0], abs=1e-5)


def test_a_model_without_an_embedding_gives_no_explanations(tmp_path: Path) -> None:
    """501, with a sentence."""
    pytest.importorskip("captum.attr", reason="explanations need captum")
    classifier = load(tmp_path)
    prepared = classifier.preprocess([{"body": "ball"}])
    classifier.model = torch.nn.Linear(1, 1)

    with pytest.raises(PredictionException, match="layer `embedding`") as caught:
        classifier.get_insights(prepared, "ball")
    assert caught.value.error_code == 501


def test_other_text_handlers_need_no_vocabulary(tmp_path: Path) -> None:
    """Those of transformers' models bring a tokenizer of their own."""

    class Own(TextHandler):
        """A handler with a model of its own."""

        def _load_model(self, model_dir: str, model_file: str | None, serialized_file: str | None) -> Any:
            return object()

    handler = Own()
    handler.initialize(make_context(tmp_path))

    assert handler.source_vocab is None
    assert handler.get_word_token(["Ġhello", "##s", "▁x"]) == ["hello", "s", "x"]
    assert handler._remove_puncutation("a,b") == "ab"
    summed = handler.summarize_attributions(torch.tensor([[[3.0, 0.0], [0.0, 4.0]]]))
    assert summed.tolist() == pytest.approx([0.6, 0.8])
