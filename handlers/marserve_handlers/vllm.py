"""The built-in handler `vllm_handler`: a language model behind OpenAI's completions, with the engine of vLLM.

Only vLLM's engine is used, not its server: what OpenAI's clients send and get is written here. One request a batch,
many batches side by side: the model's configuration says `asyncCommunication: true`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

from marserve_handlers.base import BaseHandler, value_of
from marserve_handlers.context import send_intermediate_predict_response
from marserve_handlers.errors import ModelNotLoadable, PredictionException
from marserve_handlers.support.devices.engines import end_if_dead, show_own_device

# What of a request goes to vLLM's SamplingParams as it is.
_SAMPLING = [
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
]


class VLLMHandler(BaseHandler):
    """Answers `/predictions/{model}/{version}/v1/completions`, `…/v1/chat/completions` and `…/v1/models`.

    `handler` of the model's configuration: `model_path` (of the archive, else a name on the hub), `vllm_engine_config`
    (vLLM's engine arguments), `adapters` (name of a LoRA adapter to its path), `chat_template`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vllm_engine: Any = None
        self._asked = count(1)
        self.model_name = ""
        self.adapters: dict[str, Any] = {}
        self.chat_template: str | None = None

    def initialize(self, ctx: Any) -> None:
        """Start the engine. Raises ModelNotLoadable without vLLM, and for a configuration that cannot be used."""
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        self.context = ctx
        self.manifest = ctx.manifest
        self.model_yaml_config = ctx.model_yaml_config or {}
        self.model_name = ctx.model_name
        section = self.model_yaml_config.get("handler") or {}
        if not isinstance(section, Mapping):
            raise ModelNotLoadable(f"handler of the model's configuration is {section!r}; it must be a map.")
        show_own_device(ctx, _devices_of(section))
        try:
            vllm = importlib.import_module("vllm")
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            raise ModelNotLoadable("vllm_handler needs the package vllm on the server.") from None
        arguments = self._get_vllm_engine_config(section)
        self.vllm_engine = vllm.AsyncLLMEngine.from_engine_args(arguments)
        self.chat_template = section.get("chat_template")
        self.adapters = self._read_adapters(section.get("adapters") or {})
        self.initialized = True

    async def handle(self, data: list[Any], context: Any) -> list[Any]:
        """Answer the one request of the batch."""
        self.context = context
        try:
            return await self.postprocess(await self.inference(await self.preprocess(data, context), context))
        except Exception as error:
            end_if_dead(self.vllm_engine, error)
            raise

    async def preprocess(self, requests: list[Any], context: Any) -> list[Any]:  # type: ignore[override]
        """The request's JSON, without anything for `v1/models`. Raises PredictionException."""
        if len(requests) != 1:
            raise PredictionException("vllm_handler takes one request at a time: set batchSize to 1.", 500)
        value = value_of(requests[0])
        if context.get_request_header(0, "url_path") == "v1/models":
            return [{}]
        if isinstance(value, (bytes, bytearray, str)):
            try:
                value = json.loads(value)
            except ValueError:
                value = None
        if not isinstance(value, dict):
            raise PredictionException("The request must be a JSON object, as OpenAI's API has it.", 400)
        return [value]

    async def inference(self, input_batch: list[Any], context: Any) -> list[Any]:
        """Ask the engine, by the route's last words. Raises PredictionException (404) for others."""
        path = context.get_request_header(0, "url_path") or ""
        request = input_batch[0]
        if path == "v1/models":
            names = [self.model_name, *self.adapters]
            return [
                {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "marserve"} for name in names]}
            ]
        if path not in ("v1/completions", "v1/chat/completions"):
            raise PredictionException(f"Unknown API endpoint: {path}", 404)
        is_chat = path == "v1/chat/completions"
        prompt = await (self._chat_prompt(request) if is_chat else _completion_prompt(request))
        request_id = str(context.get_request_id(0))
        options = {"lora_request": self.adapters[request["model"]]} if request.get("model") in self.adapters else {}
        # The engine's own name: a client may send its id again while the engine still ends the first request.
        engine_id = f"{request_id}-{next(self._asked)}"
        outputs = self.vllm_engine.generate(prompt, self._sampling(request), engine_id, **options)
        writer = _Writer(request_id, str(request.get("model") or self.model_name), is_chat)
        if not request.get("stream"):
            last = None
            async for output in outputs:
                last = output
                if context.is_cancelled(0):
                    await self.vllm_engine.abort(engine_id)
                    break
            context.set_response_content_type(0, "application/json")
            return [writer.whole(last)]
        context.set_response_content_type(0, "text/event-stream")
        async for output in outputs:
            for event in writer.pieces(output):
                send_intermediate_predict_response([event], context.request_ids, "Prediction success", 200, context)
        return ["data: [DONE]\n\n"]

    async def postprocess(self, inference_outputs: list[Any]) -> list[Any]:  # type: ignore[override]
        """The answers as they are."""
        return inference_outputs

    def _get_vllm_engine_config(self, handler_config: Mapping[str, Any]) -> Any:
        """vLLM's engine arguments: `vllm_engine_config`, and `model_path` as its model."""
        config = dict(handler_config.get("vllm_engine_config") or {})
        path = str(handler_config.get("model_path") or config.pop("model", None) or "")
        if not path:
            raise ModelNotLoadable("handler.model_path of the model's configuration is missing; it names the model.")
        inside = os.path.join(str(self.context.system_properties.get("model_dir")), path)
        arguments = importlib.import_module("vllm").AsyncEngineArgs(model=inside if os.path.exists(inside) else path)
        self._set_attr_value(arguments, config)
        return arguments

    def _set_attr_value(self, obj: Any, config: Mapping[str, Any]) -> None:
        """Set what `config` says on the engine's arguments. Raises ModelNotLoadable for one that vLLM does not know."""
        for key, value in config.items():
            if not hasattr(obj, key):
                raise ModelNotLoadable(f"handler.vllm_engine_config names {key}, which this vLLM does not know.")
            setattr(obj, key, value)

    def _read_adapters(self, adapters: Mapping[str, Any]) -> dict[str, Any]:
        if not adapters:
            return {}
        request = importlib.import_module("vllm.lora.request").LoRARequest
        folder = str(self.context.system_properties.get("model_dir"))
        return {
            name: request(name, number, os.path.join(folder, str(path)))
            for number, (name, path) in enumerate(adapters.items(), 1)
        }

    def _sampling(self, request: Mapping[str, Any]) -> Any:
        options = {key: request[key] for key in _SAMPLING if request.get(key) is not None}
        if request.get("max_completion_tokens") is not None:
            options["max_tokens"] = request["max_completion_tokens"]
        try:
            return importlib.import_module("vllm").SamplingParams(**options)
        except (TypeError, ValueError) as error:
            raise PredictionException(f"The request's sampling parameters cannot be used: {error}", 400) from None

    async def _chat_prompt(self, request: Mapping[str, Any]) -> Any:
        messages = request.get("messages")
        if not isinstance(messages, list) or not messages:
            raise PredictionException('The request has no list "messages".', 400)
        tokenizer = self.vllm_engine.get_tokenizer()
        if inspect.isawaitable(tokenizer):
            tokenizer = await tokenizer
        try:
            text = tokenizer.apply_chat_template(
                messages, chat_template=self.chat_template, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs: they raise what they like at messages they do not expect
            raise PredictionException(f"The model's chat template does not take these messages: {error}", 400) from None
        return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def _devices_of(section: Mapping[str, Any]) -> int:
    """On how many devices the engine is to compute."""
    config = section.get("vllm_engine_config") or {}
    sizes = [config.get(key) or 1 for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")]
    return max((size for size in sizes if isinstance(size, int)), default=1)


async def _completion_prompt(request: Mapping[str, Any]) -> Any:
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return {"prompt_token_ids": prompt}
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise PredictionException('The request has no "prompt": a text, or a list of token numbers.', 400)
    return prompt


class _Writer:
    """Writes what the engine gives as OpenAI's API has it, whole or piece by piece."""

    def __init__(self, request_id: str, model: str, is_chat: bool) -> None:
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }
        self._is_chat = is_chat
        self._said: dict[int, int] = {}

    def whole(self, output: Any) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for choice in output.outputs:
            said = (
                {"message": {"role": "assistant", "content": choice.text}} if self._is_chat else {"text": choice.text}
            )
            choices.append({"index": choice.index, **said, "logprobs": None, "finish_reason": choice.finish_reason})
        prompt = len(output.prompt_token_ids or ())
        answer = sum(len(choice.token_ids) for choice in output.outputs)
        usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def pieces(self, output: Any) -> list[str]:
        """What is new since the last output, one server-sent event a choice. The engine's texts grow."""
        events = []
        for choice in output.outputs:
            is_first = choice.index not in self._said
            new = choice.text[self._said.get(choice.index, 0) :]
            self._said[choice.index] = len(choice.text)
            if not new and not choice.finish_reason and not is_first:
                continue
            delta: dict[str, Any] = {"content": new}
            if is_first:
                delta = {"role": "assistant", **delta}
            said = {"delta": delta} if self._is_chat else {"text": new}
            kind = "chat.completion.chunk" if self._is_chat else "text_completion"
            document = {
                **self._head,
                "object": kind,
                "choices": [{"index": choice.index, **said, "logprobs": None, "finish_reason": choice.finish_reason}],
            }
            events.append(f"data: {json.dumps(document)}\n\n")
        return events
