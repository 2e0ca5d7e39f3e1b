"""The handler of language models with TensorRT-LLM, with a stand-in for its engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marserve_handlers.errors import ModelNotLoadable, PredictionException
from marserve_handlers.trt_llm import TRTLLMHandler
from support.model_context import FakeItem, make_context


class Generating:
    """What the engine gives: to be waited for, or iterated over."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def __await__(self) -> Any:
        return self._whole().__await__()

    async def _whole(self) -> Any:
        return self._output(len(self._words))

    async def __aiter__(self) -> AsyncIterator[Any]:
        for count in range(1, len(self._words) + 1):
            yield self._output(count)

    def _output(self, count: int) -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(text=" ".join(self._words[:count]))])


class FakeEngine:
    """Says a prompt's words back."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def generate_async(self, prompt: str, sampling_params: Any, streaming: bool) -> Generating:
        """Begin."""
        self.sampling = sampling_params
        return Generating(prompt.split())


class Sampling:
    """Knows one parameter."""

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature


@pytest.fixture(autouse=True)
def _trt_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM's names."""
    monkeypatch.setitem(sys.modules, "tensorrt_llm", SimpleNamespace(LLM=FakeEngine, SamplingParams=Sampling))
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", SimpleNamespace(KvCacheConfig=dict))


def load(tmp_path: Path, **handler: Any) -> TRTLLMHandler:
    """A handler with this configuration."""
    found = TRTLLMHandler()
    found.initialize(make_context(tmp_path, config={"handler": {"engine_dir": "engine", **handler}}))
    return found


def ask(handler: TRTLLMHandler, body: Any) -> tuple[Any, list[Any]]:
    """The answer, and the pieces before it."""
    pieces: list[Any] = []
    handler.context.send_pieces = lambda ret: pieces.extend(ret)
    handler.context.begin_batch([FakeItem("id")])
    (answer,) = asyncio.run(handler.handle([{"body": body}], handler.context))
    return answer, pieces


def test_a_prompt_is_answered_with_text(tmp_path: Path) -> None:
    """Further members are sampling parameters."""
    handler = load(tmp_path)

    assert ask(handler, b'{"prompt": "a b", "temperature": 0.5}') == ("a b", [])
    assert handler.trt_llm_engine.sampling.temperature == 0.5


def test_a_stream_comes_in_pieces(tmp_path: Path) -> None:
    """What is new each time; the last one is the answer."""
    assert ask(load(tmp_path), {"prompt": "a b c", "streaming": True}) == (
        {"text": " c"},
        [{"text": "a"}, {"text": " b"}],
    )
    assert ask(load(tmp_path), {"prompt": "", "streaming": True}) == ({"text": ""}, [])


@pytest.mark.parametrize("body", [b"{", {}, {"prompt": 5}, {"prompt": "a", "heat": 1}])
def test_other_requests_are_refused(tmp_path: Path, body: Any) -> None:
    """400, with a sentence."""
    with pytest.raises(PredictionException) as caught:
        ask(load(tmp_path), body)

    assert caught.value.error_code == 400


def test_the_engine_is_set_up_as_the_configuration_says(tmp_path: Path) -> None:
    """Folders of the archive win over names on the hub."""
    (tmp_path / "engine").mkdir()

    engine = load(tmp_path, tokenizer_dir="a/b", kv_cache_config={"free_gpu_memory_fraction": 0.1}).trt_llm_engine

    assert engine.options == {
        "model": str(tmp_path / "engine"),
        "tokenizer": "a/b",
        "kv_cache_config": {"free_gpu_memory_fraction": 0.1},
    }


def test_without_what_it_needs_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key or package."""
    with pytest.raises(ModelNotLoadable, match=r"handler\.engine_dir .* is missing"):
        load(tmp_path, engine_dir=None)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(ModelNotLoadable, match="needs the package tensorrt_llm"):
        load(tmp_path)


def test_a_dead_engine_ends_the_worker(tmp_path: Path) -> None:
    """Every later request would fail as well."""
    handler = load(tmp_path)

    def generate(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no worker answers")

    handler.trt_llm_engine.generate_async = generate
    handler.trt_llm_engine._executor = SimpleNamespace(is_shutdown=lambda: True)

    with pytest.raises(SystemExit):
        ask(handler, {"prompt": "a"})
