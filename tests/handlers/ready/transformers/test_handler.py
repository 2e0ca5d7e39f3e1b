"""The handler `transformers` beside the library's own pipelines, on tiny models with random weights."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

torch = pytest.importorskip("torch")

from marserve.pool.launchers.process import limit_threads  # noqa: E402
from marserve_handlers.batch_check import check_handler  # noqa: E402
from marserve_handlers.errors import BadInput, ModelNotLoadable  # noqa: E402
from marserve_handlers.ready.transformers.handler import TransformersHandler  # noqa: E402
from support import tiny_transformers as tiny  # noqa: E402
from support.model_context import FakeItem, make_context  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.ready, pytest.mark.filterwarnings("default")]

TEXTS = ["a good film", "it was very very bad and the film is not good", "Paris"]
ENCODERS = {
    "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "fill-mask": "ForMaskedLM",
}


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    """Here and not at the top: collecting these tests imports nothing heavy."""
    tiny.transformers()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each task, made once."""
    root = tmp_path_factory.mktemp("models")
    for task, head in ENCODERS.items():
        tiny.save_bert(root / task, head)
    tiny.save_bert(root / "embeddings", "Model")
    tiny.save_llama(root / "text-generation")
    tiny.save_bart(root / "summarization")
    tiny.save_vit(root / "image-classification")
    return {path.name: path for path in root.iterdir()}


def started(folder: Path, *, is_trusted: bool = False, **section: Any) -> TransformersHandler:
    """The handler with the model of this folder."""
    handler = TransformersHandler()
    context = make_context(folder, config={"handler": section} if section else {})
    context.is_trusted = is_trusted
    handler.initialize(context)
    return handler


def ask(handler: TransformersHandler, *values: Any) -> list[Any]:
    """The answers to a batch of these bodies."""
    context = handler.context
    context.begin_batch([FakeItem(id=str(number)) for number, _ in enumerate(values)])
    return handler.handle([{"body": value} for value in values], context)


def ask_row(handler: TransformersHandler, row: dict[str, Any]) -> Any:
    """The answer to a form."""
    handler.context.begin_batch([FakeItem()])
    return handler.handle([row], handler.context)[0]


def pipeline(task: str, folder: Path, **options: Any) -> Any:
    """The library's own pipeline."""
    return tiny.transformers().pipeline(task, model=str(folder), device="cpu", **options)


def assert_alike(found: Any, wanted: Any) -> None:
    """The same but for the last bits of numbers: a padded batch is summed in another order."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert_alike(found[name], wanted[name])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other)
    elif isinstance(wanted, str) or wanted is None:
        assert found == wanted
    else:
        assert found == pytest.approx(float(wanted), abs=1e-5)


def check_all_alike(handler: TransformersHandler, values: list[Any], wanted: list[Any]) -> None:
    """The answers of the values alone, in a batch, and as one list are those wanted, and JSON."""
    for value, answer in zip(values, wanted, strict=True):
        assert_alike(ask(handler, value)[0], answer)
    assert_alike(ask(handler, *values), wanted)
    (listed,) = ask(handler, list(values))
    assert_alike(listed, wanted)
    json.dumps(listed)


# ------------------------------------------------------------------------------------------- answers of the library


@pytest.mark.parametrize("top_k", [1, 2, "all"])
def test_texts_are_classified_as_the_pipeline_does(folders: dict[str, Path], top_k: int | str) -> None:
    """A list of labels with scores for each text, the likeliest first; of as many classes as are asked for."""
    folder = folders["text-classification"]
    own = pipeline("text-classification", folder)

    check_all_alike(started(folder, top_k=top_k), TEXTS, own(TEXTS, top_k=None if top_k == "all" else top_k))


def test_pairs_of_texts_are_classified(folders: dict[str, Path]) -> None:
    """With the field `text_pair`, beside texts without one."""
    folder = folders["text-classification"]
    pair = {"text": "a good film", "text_pair": "it was bad"}
    own = pipeline("text-classification", folder)

    assert_alike(ask(started(folder), pair, TEXTS[0]), [own(pair, top_k=1), own(TEXTS[0], top_k=1)])


@pytest.mark.parametrize("strategy", ["none", "simple"])
def test_tokens_are_classified_as_the_pipeline_does(folders: dict[str, Path], strategy: str) -> None:
    """Each token, or with `aggregation_strategy` each group of them, with its place in the text."""
    folder = folders["token-classification"]
    own = pipeline("token-classification", folder, aggregation_strategy=strategy)

    check_all_alike(started(folder, aggregation_strategy=strategy), TEXTS, [own(text) for text in TEXTS])


def test_masks_are_filled_as_the_pipeline_does(folders: dict[str, Path]) -> None:
    """The five likeliest words; of two masks a list for each."""
    folder = folders["fill-mask"]
    texts = ["a [MASK] film", "the film was [MASK] and [MASK] in Paris"]
    own = pipeline("fill-mask", folder)

    check_all_alike(started(folder), texts, [own(text) for text in texts])


@pytest.mark.parametrize("is_normalized", [False, True])
def test_embeddings_are_the_mean_of_the_last_hidden_states(folders: dict[str, Path], is_normalized: bool) -> None:
    """Of the text's tokens alone: padding counts nowhere."""
    folder = folders["embeddings"]
    own = pipeline("feature-extraction", folder)
    wanted = [torch.tensor(own(text)[0]).mean(0) for text in TEXTS]
    if is_normalized:
        wanted = [vector / vector.norm() for vector in wanted]

    check_all_alike(started(folder, normalize=is_normalized), TEXTS, [vector.tolist() for vector in wanted])


def test_pooling_is_what_sentence_transformers_wrote_beside_the_model(folders: dict[str, Path], tmp_path: Path) -> None:
    """The first token's vector with `pooling_mode_cls_token`, of length 1 with a module Normalize."""
    tiny.save_bert(tmp_path, "Model")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Normalize"}]))
    first = torch.tensor(pipeline("feature-extraction", tmp_path)(TEXTS[0])[0][0])

    assert_alike(ask(started(tmp_path), TEXTS[0])[0], (first / first.norm()).tolist())


def test_pictures_are_classified_as_the_pipeline_does(folders: dict[str, Path]) -> None:
    """Image files, base64 text of them, alone or in the field `image`; of any size."""
    folder = folders["image-classification"]
    images = [Image.new("RGB", (20, 10), "red"), Image.new("L", (8, 8), 200)]
    files = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        files.append(bytearray(file.getvalue()))
    wanted = pipeline("image-classification", folder)(images)
    handler = started(folder)

    assert_alike(ask(handler, *files), wanted)
    coded = base64.b64encode(files[0]).decode()
    assert_alike(ask(handler, {"image": coded}, [coded, coded]), [wanted[0], [wanted[0], wanted[0]]])
    assert_alike(ask_row(handler, {"image": files[1]}), wanted[1])


def test_texts_are_generated_as_the_pipeline_does(folders: dict[str, Path]) -> None:
    """Without the prompt; a batch of prompts of several lengths is padded on the left."""
    folder = folders["text-generation"]
    own = pipeline("text-generation", folder)
    wanted = [own(text, max_new_tokens=6, do_sample=False, return_full_text=False)[0] for text in TEXTS]

    check_all_alike(started(folder, max_new_tokens=6), TEXTS, wanted)
    assert len({answer["generated_text"] for answer in wanted}) > 1


def test_each_request_has_parameters_of_its_own(folders: dict[str, Path]) -> None:
    """Those of its mates in the batch make no difference."""
    handler = started(folders["text-generation"], max_new_tokens=6)
    asked = [{"text": TEXTS[0], "parameters": {"max_new_tokens": count}} for count in (1, 6, 1)]
    asked.append({"text": TEXTS[0], "parameters": {"num_beams": 2, "max_new_tokens": 3}})

    answers = ask(handler, *asked)

    assert answers == [ask(handler, each)[0] for each in asked]
    assert len(answers[0]["generated_text"]) < len(answers[1]["generated_text"])


def test_messages_go_through_the_chat_template(folders: dict[str, Path]) -> None:
    """As the text that the template makes of them."""
    handler = started(folders["text-generation"], max_new_tokens=3)
    messages = [{"role": "user", "content": "a good film"}]

    assert ask(handler, {"messages": messages}) == ask(handler, "a good film ")


def test_summaries_are_what_the_model_generates(folders: dict[str, Path]) -> None:
    """As the library's `generate` does, alone and padded."""
    folder = folders["summarization"]
    library = tiny.transformers()
    model = library.AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    wanted = []
    for text in TEXTS:
        (tokens,) = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=5)
        wanted.append({"summary_text": tokenizer.decode(tokens, skip_special_tokens=True)})

    check_all_alike(started(folder, max_new_tokens=5), TEXTS, wanted)


@pytest.mark.parametrize("task", [*ENCODERS, "embeddings", "text-generation", "summarization"])
def test_batches_are_certified(folders: dict[str, Path], task: str) -> None:
    """An answer depends on its own request alone."""
    options = {"max_new_tokens": 4} if task in ("text-generation", "summarization") else {}
    handler = started(folders[task], **options)
    texts = [f"{text} [MASK]" for text in TEXTS] if task == "fill-mask" else TEXTS
    rows = [{"body": text} for text in (*texts, list(texts))]

    verdict = check_handler(handler.handle, handler.context, rows, batch_size=4)

    assert verdict.has_passed, verdict.differences


# ------------------------------------------------------------------------------------------------- pieces


def streamed(handler: TransformersHandler, *values: Any) -> tuple[list[list[Any]], list[Any]]:
    """The pieces of a batch as they are sent, and what `handle` returns."""
    pieces: list[list[Any]] = []
    handler.context.send_pieces = pieces.append
    return pieces, ask(handler, *values)


@pytest.mark.parametrize("task", ["text-generation", "summarization"])
def test_pieces_put_together_are_the_answer(folders: dict[str, Path], task: str) -> None:
    """Each token's text leaves when it is there."""
    handler = started(folders[task], max_new_tokens=6)
    (whole,) = ask(handler, TEXTS[0])

    pieces, (last,) = streamed(handler, {"text": TEXTS[0], "stream": True})

    assert len(pieces) > 2
    assert "".join(piece for (piece,) in pieces) + last == next(iter(whole.values()))
    assert handler.context.get_response_content_type(0) == "text/plain; charset=utf-8"


def test_mates_of_a_stream_are_answered_whole(folders: dict[str, Path]) -> None:
    """A request that wants no pieces gets empty ones; one that does not fit gets its error at once."""
    handler = started(folders["text-generation"], max_new_tokens=5)
    alone = ask(handler, TEXTS[1])

    pieces, answers = streamed(handler, {"text": TEXTS[0], "stream": True}, TEXTS[1], 7)

    assert answers[1] == alone[0]
    assert handler.context.get_response_content_type(1) == "application/json"
    assert {piece[1] for piece in pieces} == {""}
    assert all(isinstance(piece[2], BadInput) for piece in pieces)
    assert isinstance(answers[2], BadInput)


def test_generation_ends_between_two_tokens_when_the_client_goes(folders: dict[str, Path]) -> None:
    """And goes on for the others of its batch."""
    handler = started(folders["text-generation"], max_new_tokens=20)
    (whole,) = ask(handler, TEXTS[1])
    sent: list[Any] = []
    handler.context.ask_cancelled = lambda index: index == 0 and len(sent) >= 3
    handler.context.send_pieces = sent.append

    answers = ask(handler, {"text": TEXTS[0], "stream": True}, TEXTS[1])

    assert answers[1] == whole
    assert [piece[0] for piece in sent if piece[0]] == [piece[0] for piece in sent[:4] if piece[0]]


def test_generation_ends_at_the_clients_deadline(folders: dict[str, Path]) -> None:
    """After one token, where it is over already."""
    handler = started(folders["text-generation"], max_new_tokens=20)
    handler.context.begin_batch([FakeItem(deadline=time.monotonic())])

    (answer,) = handler.handle([{"body": TEXTS[0]}], handler.context)

    assert len(answer["generated_text"].split()) == 1


# ------------------------------------------------------------------------------------ input that does not fit


@pytest.mark.parametrize(
    ("task", "value", "message"),
    [
        ("text-classification", 7, "text: expected text, got 7"),
        ("text-classification", b"\xff", "text: expected text in UTF-8, got other bytes"),
        ("text-classification", " ", "text: expected text, got an empty one"),
        ("text-classification", {"txt": "a"}, "txt: is not known; an item may have text, text_pair"),
        ("text-classification", {"text_pair": "a"}, "text: is missing"),
        ("text-classification", {"text": "a", "text_pair": 1}, "text_pair: expected text, got 1"),
        ("text-classification", ["a", {"text": None}], "[1].text: expected text, got None"),
        ("text-classification", [], "The list has 0 items; a request may have 1 to 64."),
        ("text-classification", ["a"] * 65, "The list has 65 items; a request may have 1 to 64."),
        ("fill-mask", "a film", "text: expected a text with [MASK] within its first 32 tokens"),
        ("fill-mask", f"{'a ' * 40}[MASK]", "text: expected a text with [MASK] within its first 32 tokens"),
        ("image-classification", b"no picture", "image: The request's body is no picture that can be read"),
        ("image-classification", 3, "image: expected an image file, or base64 text of one"),
        ("text-generation", "a " * 30, "text: expected at most 26 tokens with max_new_tokens 6, got 30"),
        ("text-generation", {"text": "a", "parameters": 3}, "parameters: expected an object, got 3"),
        (
            "text-generation",
            {"text": "a", "parameters": {"max_new_tokens": 7}},
            "parameters.max_new_tokens: expected a whole number from 1 to 6, got 7",
        ),
        (
            "text-generation",
            {"text": "a", "parameters": {"temperature": 0}},
            "parameters.temperature: expected a number above 0 up to 100, got 0",
        ),
        (
            "text-generation",
            {"text": "a", "parameters": {"best": 1}},
            "parameters.best: is not known; the parameters are",
        ),
        ("text-generation", {"text": "a", "stream": "yes"}, "stream: expected true or false, got 'yes'"),
        ("text-generation", [{"text": "a", "stream": True}], "[0].stream: expected false"),
        ("text-generation", {"text": "a", "messages": []}, "messages: expected either text or messages, got both"),
        ("text-generation", {"messages": ["a"]}, "messages: expected a list of"),
        (
            "text-generation",
            {"text": "a", "stream": True, "parameters": {"num_beams": 2}},
            "parameters.num_beams: expected 1 for an answer in pieces",
        ),
    ],
)
def test_input_that_does_not_fit_is_400_with_its_field(
    folders: dict[str, Path], task: str, value: Any, message: str
) -> None:
    """Its mates in the batch are answered."""
    options = {"max_new_tokens": 6} if task == "text-generation" else {}
    handler = started(folders[task], **options)

    (found,) = ask(handler, value)

    assert isinstance(found, BadInput)
    assert found.message.startswith(message)
    assert found.error_code == 400
    if task == "text-classification":
        assert_alike(ask(handler, TEXTS[0], value)[0], ask(handler, TEXTS[0])[0])


def test_texts_that_are_too_long_are_cut(folders: dict[str, Path]) -> None:
    """At the places of the model, or at `max_length`, special tokens counted."""
    folder = folders["text-classification"]

    assert_alike(ask(started(folder), "good " * 99), ask(started(folder), "good " * 30))
    assert_alike(ask(started(folder, max_length=5), "good bad film very"), ask(started(folder), "good bad film"))


def test_a_form_is_an_item_of_its_fields(folders: dict[str, Path]) -> None:
    """As `curl -F` sends it."""
    handler = started(folders["text-classification"])

    assert_alike(ask_row(handler, {"text": bytearray(b"a good film")}), ask(handler, TEXTS[0])[0])
    assert_alike(ask_row(handler, {"data": bytearray(b"a good film")}), ask(handler, TEXTS[0])[0])


# ------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tsk": 1}, r"handler\.tsk .* is not known: .* Did you mean task\?"),
        ({"task": "sentiment"}, r"handler\.task .* is 'sentiment'; it must be one of text-classification, "),
        ({"top_k": 0}, r"handler\.top_k .* is 0; it must be a whole number, 1 or more, or all"),
        ({"max_length": 33}, r"handler\.max_length .* is 33; it must be a whole number from 1 to 32"),
        ({"labels": ["x"]}, r"handler\.labels .* is \['x'\]; it must be a list of 3 texts"),
        ({"pooling": "cls"}, r"handler\.pooling .* is not for the task text-classification; it is for embeddings"),
        ({"model": "elsewhere"}, r"handler\.model .* is 'elsewhere'; it must be a folder of the archive"),
        ({"task": "fill-mask"}, r"do not fit the task fill-mask: .* is missing"),
        ({"task": "image-classification"}, r"cannot|has no model"),
    ],
)
def test_a_bad_configuration_is_an_error_of_the_load(
    folders: dict[str, Path], section: dict[str, Any], message: str
) -> None:
    """It names the key and what is allowed."""
    with pytest.raises(ModelNotLoadable, match=message):
        started(folders["text-classification"], **section)


def test_labels_are_the_options_else_those_of_index_to_name(folders: dict[str, Path], tmp_path: Path) -> None:
    """Else those of config.json."""
    tiny.save_bert(tmp_path, "ForSequenceClassification")
    plain = [each["label"] for each in ask(started(tmp_path, top_k="all"), TEXTS[0])[0]]
    (tmp_path / "index_to_name.json").write_text(json.dumps({"0": "mau", "1": "medio", "2": "bom"}))

    mapped = [each["label"] for each in ask(started(tmp_path, top_k="all"), TEXTS[0])[0]]
    named = [each["label"] for each in ask(started(tmp_path, top_k="all", labels=["x", "y", "z"]), TEXTS[0])[0]]

    assert mapped == [{"bad": "mau", "fair": "medio", "good": "bom"}[name] for name in plain]
    assert named == [{"bad": "x", "fair": "y", "good": "z"}[name] for name in plain]


def test_a_model_may_lie_in_a_folder_of_the_archive(folders: dict[str, Path], tmp_path: Path) -> None:
    """In the only one; of several, in the one that the configuration names."""
    tiny.save_bert(tmp_path / "one", "ForSequenceClassification")
    assert ask(started(tmp_path), TEXTS[0]) == ask(started(tmp_path / "one"), TEXTS[0])

    tiny.save_bert(tmp_path / "two", "ForMaskedLM")

    with pytest.raises(ModelNotLoadable, match=r"Several folders .*: one, two\. Name one with handler\.model"):
        started(tmp_path)
    assert ask(started(tmp_path, model="two"), "a [MASK]")


def test_pickled_weights_are_loaded_by_the_operators_trust_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    """Though transformers would open them."""
    tiny.save_bert(tmp_path, "ForSequenceClassification")
    wanted = ask(started(tmp_path), TEXTS[0])
    weights = __import__("safetensors.torch").torch.load_file(tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()

    with pytest.raises(ModelNotLoadable, match=r"pytorch_model\.bin are not loaded.*save_pretrained.*trusted_models"):
        started(tmp_path)
    assert_alike(ask(started(tmp_path, is_trusted=True), TEXTS[0]), wanted)


def test_code_of_the_folder_is_run_by_the_operators_trust_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    """A type that the library does not have needs it."""
    tiny.save_bert(tmp_path, "ForSequenceClassification")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelNotLoadable, match=r"type mine needs code of its own.*trusted_models"):
        started(tmp_path)


def test_a_load_leaves_no_thread_that_forbids_a_fork(folders: dict[str, Path]) -> None:
    """In a fresh process, as a template looks at itself."""
    script = f"""
import json, sys
sys.path[:0] = {[str(Path(__file__).parents[4] / name) for name in ("server", "handlers", "tests")]!r}
from marserve.worker.process.idle_threads import end_idle_threads
from marserve.worker.template import open_descriptors, refusals
from support.model_context import make_context
from marserve_handlers.ready.transformers.handler import TransformersHandler
known = open_descriptors()
kept = []
for folder in {[str(folders[name]) for name in ("text-classification", "text-generation", "image-classification")]!r}:
    kept.append(TransformersHandler())
    kept[-1].initialize(make_context(folder))
end_idle_threads()
print(json.dumps(refusals(known)))
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **limit_threads(1)},
    )

    assert json.loads(run.stdout.splitlines()[-1]) == []
