"""The ready handlers as their users run them: an archive of files alone, a server, requests, a stream."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support import tiny_transformers as tiny
from support.command_line import marserve
from support.hub_server import hub_server
from support.local_run import Run
from support.server import Server, poll

pytestmark = [pytest.mark.ready, pytest.mark.torch]

TEXTS = ["a good film", "it was very bad and the film was not good", "Paris"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a classifier of texts and a model that writes text, packed by `marserve archive`."""
    tiny.transformers()
    folder = tmp_path_factory.mktemp("ready")
    store = folder / "store"
    store.mkdir()
    tiny.save_bert(folder / "sentiment", "ForSequenceClassification")
    tiny.save_llama(folder / "writer")
    usual = "workerStart: fork\nstartupTimeout: 900\n"
    configs = {
        "sentiment": f"{usual}batchSize: 4\nmaxBatchDelay: 50\nminWorkers: 2\nmaxWorkers: 2\nhandler: {{top_k: all}}\n",
        "writer": f"{usual}minWorkers: 1\nmaxWorkers: 1\nhandler: {{max_new_tokens: 8}}\n",
    }
    for name, config in configs.items():
        (folder / f"{name}.yaml").write_text(config)
        ran = marserve(
            *("archive", name, "--handler", "transformers", "--extra-file", folder / name),
            *("--config-file", folder / f"{name}.yaml", "--export-path", store),
        )
        assert ran.status == 0, ran.err
    with Server(folder, store=store) as server:
        server.client.timeout = 900
        for name in configs:
            answer = server.register(f"{name}.mar")
            assert answer.status_code == 200, answer.text
        yield server


def ask(server: Server, name: str, **what: Any) -> Any:
    """The answer of a model."""
    return server.client.post(f"{server.inference}/predictions/{name}", **what)


def test_a_folder_is_served_as_the_pipeline_answers(server: Server) -> None:
    """Raw text, JSON and a list of texts, in batches of several clients."""
    own = tiny.transformers().pipeline("text-classification", model=str(server.folder / "sentiment"))(TEXTS, top_k=None)
    found: dict[int, Any] = {}

    def call(number: int) -> None:
        found[number] = ask(server, "sentiment", json={"text": TEXTS[number]}).json()

    callers = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    raw = ask(server, "sentiment", content=TEXTS[0], headers={"content-type": "text/plain"})
    listed = ask(server, "sentiment", json=TEXTS).json()

    for answers in ([found[number] for number in range(3)], [raw.json(), *own[1:]], listed):
        for answer, wanted in zip(answers, own, strict=True):
            assert [each["label"] for each in answer] == [each["label"] for each in wanted]
            assert [each["score"] for each in answer] == pytest.approx([each["score"] for each in wanted], abs=1e-5)


def test_a_text_that_does_not_fit_is_400_with_its_field(server: Server) -> None:
    """The message says what was expected."""
    answer = ask(server, "sentiment", json={"text": 3})

    assert answer.status_code == 400
    assert answer.json()["message"] == "text: expected text, got 3"


def test_the_model_is_loaded_once_for_all_workers(server: Server) -> None:
    """`workerStart: fork` fails a load that leaves threads: none of a tokenizer or a progress bar is there."""
    (described,) = server.client.get(f"{server.management}/models/sentiment").json()

    assert [worker["status"] for worker in described["workers"]] == ["READY", "READY"]
    assert not described.get("warnings")


def test_generated_text_comes_in_pieces(server: Server) -> None:
    """Put together they are the whole answer."""
    whole = ask(server, "writer", json={"text": TEXTS[0]}).json()["generated_text"]

    with server.client.stream(
        "POST", f"{server.inference}/predictions/writer", json={"text": TEXTS[0], "stream": True}
    ) as answer:
        pieces = list(answer.iter_text())

    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert "".join(pieces) == whole


def test_pickled_weights_are_refused_at_registration_and_by_the_handler(server: Server) -> None:
    """What can run code by the check of all archives; a plain state dict by the handler, which wants safetensors."""
    torch = importlib.import_module("torch")
    for name, content in (("module", torch.nn.Linear(1, 1)), ("weights", {"weight": torch.zeros(1)})):
        folder = server.folder / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": ["BertForSequenceClassification"]}))
        torch.save(content, folder / "pytorch_model.bin")
        archive = ("archive", name, "--handler", "transformers", "--extra-file", folder, "--export-path", server.store)
        assert marserve(*archive).status == 0

    refused, failed = server.register("module.mar"), server.register("weights.mar")

    assert refused.status_code == 400
    assert "pytorch_model.bin" in refused.json()["message"]
    assert failed.status_code >= 400
    for _ in poll(30, "the handler's sentence in the log"):
        if "The weights of pytorch_model.bin are not loaded" in server.output():
            break


def test_a_model_of_a_hub_answers_in_one_command_and_as_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a branch, whose commit is shown, and beside code that is not fetched; nothing is left in the folder.

    Its archive answers the same, byte for byte, when the hub is gone.
    """
    pytest.importorskip("huggingface_hub")
    saved, here = tmp_path / "saved", tmp_path / "here"
    here.mkdir()
    tiny.save_bert(saved, "ForSequenceClassification")
    with hub_server() as hub:
        files = {path.name: path.read_bytes() for path in saved.iterdir()}
        commit = hub.commit("org/film", {**files, "handler.py": b"raise SystemExit(9)"})
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        with Run(here, "hf://org/film@main", "--task", "text-classification", **variables) as run:
            run.wait_for(f"film 1.0 of hf://org/film@{commit}, ready in ")
            answer = httpx.post(run.url, json={"text": TEXTS[0]}, timeout=900)
            run.interrupt()
        left = [*here.iterdir(), *run.temporary.iterdir()]
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        words = ("--task", "text-classification", "--export-path", here)
        packed = marserve("archive", "hf://org/film@main", *words)
    with Run(here, "film.mar") as again:
        again.wait_for("film 1.0 of film.mar, ready in ")
        answer_of_archive = httpx.post(again.url, json={"text": TEXTS[0]}, timeout=900)
        again.interrupt()

    own = tiny.transformers().pipeline("text-classification", model=str(saved))(TEXTS[0])
    assert [each["label"] for each in answer.json()] == [each["label"] for each in own]
    assert not left
    assert packed.status == 0, packed.err
    assert answer_of_archive.content == answer.content
