"""The handler of language models with vLLM, with a stand-in for its engine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marserve_handlers.errors import ModelNotLoadable, PredictionException
from marserve_handlers.vllm import VLLMHandler
from support.model_context import FakeItem, make_context


class FakeEngine:
    """Says a prompt's words back, one more each time."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.calls: list[tuple[Any, Any, str, dict[str, Any]]] = []
        self.aborted: list[str] = []

    @classmethod
    def from_engine_args(cls, arguments: Any) -> FakeEngine:
        """Start."""
        return cls(arguments)

    async def generate(self, prompt: Any, sampling: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
        """What there is so far, again and again."""
        self.calls.append((prompt, sampling, request_id, options))
        words = prompt.split() if isinstance(prompt, str) else [str(token) for token in prompt["prompt_token_ids"]]
        for count in range(1, len(words) + 1):
            reason = "stop" if count == len(words) else None
            choice = SimpleNamespace(
                index=0, text=" ".join(words[:count]), token_ids=list(range(count)), finish_reason=reason
            )
            yield SimpleNamespace(outputs=[choice], prompt_token_ids=[1, 2, 3])

    async def abort(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        self.aborted.append(request_id)

    async def get_tokenizer(self) -> Any:
        """Whose template joins the messages."""

        def apply(messages: Any, chat_template: Any, tokenize: bool, add_generation_prompt: bool) -> str:
            return "".join(message["content"] for message in messages)

        return SimpleNamespace(
            apply_chat_template=apply, encode=lambda text, add_special_tokens: [ord(letter) for letter in text]
        )


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's names."""

    class EngineArguments:
        def __init__(self, model: str) -> None:
            self.model = model
            self.max_model_len = None

    class Sampling(SimpleNamespace):
        pass

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    vllm = SimpleNamespace(AsyncLLMEngine=FakeEngine, AsyncEngineArgs=EngineArguments, SamplingParams=Sampling)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(
        sys.modules,
        "vllm.lora.request",
        SimpleNamespace(LoRARequest=lambda name, number, path: (name, number, path)),
    )


def load(tmp_path: Path, **handler: Any) -> VLLMHandler:
    """A handler with this configuration."""
    found = VLLMHandler()
    found.initialize(make_context(tmp_path, config={"handler": {"model_path": "model", **handler}}))
    return found


def ask(handler: VLLMHandler, path: str, body: Any) -> tuple[Any, list[str]]:
    """The answer on that path, and the pieces before it."""
    pieces: list[str] = []
    context = handler.context
    context.send_pieces = lambda ret: pieces.extend(ret)
    context.begin_batch([FakeItem("id", server_headers=[("url_path", path)])])
    (answer,) = asyncio.run(handler.handle([{"body": body}], context))
    return answer, pieces


def test_a_completion_is_openais(tmp_path: Path) -> None:
    """Sampling parameters go to vLLM; the answer says what was used."""
    handler = load(tmp_path)

    answer, _ = ask(handler, "v1/completions", b'{"prompt": "a b", "max_tokens": 5, "temperature": 0, "user": "x"}')

    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "a b", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert (answer["id"], answer["model"]) == ("cmpl-id", "m")
    ((prompt, sampling, request_id, options),) = handler.vllm_engine.calls
    assert (prompt, vars(sampling), request_id, options) == ("a b", {"max_tokens": 5, "temperature": 0}, "id-1", {})
    assert handler.context.get_response_content_type(0) == "application/json"


def test_a_chat_goes_through_the_models_template(tmp_path: Path) -> None:
    """Its text is not given a beginning twice."""
    handler = load(tmp_path)

    answer, _ = ask(
        handler, "v1/chat/completions", {"messages": [{"role": "user", "content": "AB"}], "max_completion_tokens": 1}
    )

    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "65 66"}
    prompt, sampling, _, _ = handler.vllm_engine.calls[0]
    assert (prompt, sampling.max_tokens) == ({"prompt_token_ids": [65, 66]}, 1)


def test_streams_are_server_sent_events(tmp_path: Path) -> None:
    """Each holds what is new; `[DONE]` is the last piece."""
    handler = load(tmp_path)

    last, pieces = ask(
        handler, "v1/chat/completions", {"messages": [{"role": "user", "content": "AB"}], "stream": True}
    )

    assert last == "data: [DONE]\n\n"
    events = [json.loads(piece.removeprefix("data: ")) for piece in pieces]
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": "65"},
        {"content": " 66"},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "stop"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert handler.context.get_response_content_type(0) == "text/event-stream"


def test_adapters_are_models_of_their_own(tmp_path: Path) -> None:
    """They are listed, and asked for by name."""
    handler = load(tmp_path, adapters={"polite": "adapters/polite"})

    listed, _ = ask(handler, "v1/models", b"")
    answer, _ = ask(handler, "v1/completions", {"prompt": "a", "model": "polite"})

    assert [entry["id"] for entry in listed["data"]] == ["m", "polite"]
    assert answer["model"] == "polite"
    assert handler.vllm_engine.calls[0][3] == {"lora_request": ("polite", 1, str(tmp_path / "adapters" / "polite"))}


def test_a_client_that_has_gone_ends_the_generation(tmp_path: Path) -> None:
    """The engine is told."""
    handler = load(tmp_path)
    handler.context.ask_cancelled = lambda index: True

    ask(handler, "v1/completions", {"prompt": "a b c"})

    assert handler.vllm_engine.aborted == ["id-1"]


@pytest.mark.parametrize(
    ("path", "body", "code", "words"),
    [
        ("v1/embeddings", {}, 404, "Unknown API endpoint: v1/embeddings"),
        ("", {}, 404, "Unknown API endpoint: "),
        ("v1/completions", b"{", 400, "must be a JSON object"),
        ("v1/completions", {"prompt": 5}, 400, 'no "prompt"'),
        ("v1/chat/completions", {"prompt": "a"}, 400, 'no list "messages"'),
        ("v1/chat/completions", {"messages": [{}]}, 400, "does not take these messages"),
    ],
)
def test_other_requests_are_refused(tmp_path: Path, path: str, body: Any, code: int, words: str) -> None:
    """With a sentence and a status."""
    with pytest.raises(PredictionException, match=words) as caught:
        ask(load(tmp_path), path, body)

    assert caught.value.error_code == code


def test_the_model_lies_in_the_archive_or_on_the_hub(tmp_path: Path) -> None:
    """A folder of that name wins; engine arguments are set, unknown ones refused."""
    assert load(tmp_path).vllm_engine.arguments.model == "model"
    (tmp_path / "model").mkdir()
    arguments = load(tmp_path, vllm_engine_config={"max_model_len": 9}).vllm_engine.arguments
    assert (arguments.model, arguments.max_model_len) == (str(tmp_path / "model"), 9)
    with pytest.raises(ModelNotLoadable, match="names max_len, which this vLLM does not know"):
        load(tmp_path, vllm_engine_config={"max_len": 9})
    with pytest.raises(ModelNotLoadable, match=r"handler\.model_path .* is missing"):
        load(tmp_path, model_path=None)


def test_without_vllm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which package is missing."""
    monkeypatch.setitem(sys.modules, "vllm", None)

    with pytest.raises(ModelNotLoadable, match="needs the package vllm"):
        load(tmp_path)


def test_a_dead_engine_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later request would fail as well."""
    handler = load(tmp_path)

    class EngineDeadError(Exception):
        pass

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        raise EngineDeadError
        yield

    monkeypatch.setattr(handler.vllm_engine, "generate", generate)

    with pytest.raises(SystemExit):
        ask(handler, "v1/completions", b'{"prompt": "a"}')


@pytest.mark.parametrize(("size", "shown"), [(1, "1"), (2, "0,1")])
def test_the_engine_sees_its_workers_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, shown: str
) -> None:
    """All that there are where it is to compute on several."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(VLLMHandler, "_set_attr_value", lambda *_: None)
    config = {"handler": {"model_path": "m", "vllm_engine_config": {"tensor_parallel_size": size}}}

    VLLMHandler().initialize(make_context(tmp_path, config=config, gpu_id=1))

    assert os.environ["CUDA_VISIBLE_DEVICES"] == shown
