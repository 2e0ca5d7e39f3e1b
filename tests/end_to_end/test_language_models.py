"""`vllm_handler` as its users run it: an archive with a configuration alone, many requests at once, streams.

The archive brings a stand-in for vLLM's engine, which says a prompt's words back.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.server import Server

ENGINE = """
import asyncio
from types import SimpleNamespace


class AsyncEngineArgs:
    def __init__(self, model):
        self.model = model


class SamplingParams(SimpleNamespace):
    pass


class AsyncLLMEngine:
    waiting = 0

    @classmethod
    def from_engine_args(cls, arguments):
        return cls()

    async def generate(self, prompt, sampling, request_id):
        words = prompt.split()
        self.waiting += words[0] == "together"
        while words[0] == "together" and self.waiting < 2:
            await asyncio.sleep(0.01)
        for count in range(1, len(words) + 1):
            await asyncio.sleep(0)
            reason = "stop" if count == len(words) else None
            choice = SimpleNamespace(
                index=0, text=" ".join(words[:count]), token_ids=list(range(count)), finish_reason=reason
            )
            yield SimpleNamespace(outputs=[choice], prompt_token_ids=[1])
"""
CONFIG = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 1\nasyncCommunication: true\nhandler: {model_path: a/b}\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the model."""
    folder = tmp_path_factory.mktemp("language")
    store: Path = folder / "store"
    store.mkdir()
    model = {"modelName": "llm", "modelVersion": "1.0", "handler": "vllm_handler", "configFile": "model-config.yaml"}
    with zipfile.ZipFile(store / "llm.mar", "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
        archive.writestr("model-config.yaml", CONFIG)
        archive.writestr("vllm.py", ENGINE)
    with Server(folder, store=store) as server:
        server.register("llm.mar").raise_for_status()
        yield server


def test_completions_are_openais(server: Server) -> None:
    """Route, body and answer as OpenAI's clients have them."""
    url = f"{server.inference}/predictions/llm/1.0/v1"

    answer = server.client.post(f"{url}/completions", json={"prompt": "hello world"})
    models = server.client.get(f"{url}/models")
    unknown = server.client.post(f"{url}/embeddings", json={})

    assert answer.json()["choices"][0]["text"] == "hello world"
    assert answer.headers["content-type"] == "application/json"
    assert [model["id"] for model in models.json()["data"]] == ["llm"]
    assert (unknown.status_code, unknown.json()["message"]) == (404, "Unknown API endpoint: v1/embeddings")


def test_streams_come_event_by_event(server: Server) -> None:
    """Server-sent events, `[DONE]` at the end."""
    url = f"{server.inference}/predictions/llm/1.0/v1/completions"

    with server.client.stream("POST", url, json={"prompt": "a b c", "stream": True}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]

    assert answer.headers["content-type"] == "text/event-stream"
    assert [json.loads(event)["choices"][0]["text"] for event in events[:-1]] == ["a", " b", " c"]
    assert events[-1] == "[DONE]"


def test_requests_run_side_by_side(server: Server) -> None:
    """One worker, and two requests that wait for each other."""
    url = f"{server.inference}/predictions/llm/1.0/v1/completions"

    def ask(word: str) -> str:
        text: str = server.client.post(url, json={"prompt": f"together {word}"}).json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(ask, ["one", "two"])) == ["together one", "together two"]
