"""The built-in handler `trt_llm_handler`: a language model with NVIDIA's TensorRT-LLM.

One request a batch, many batches side by side: the model's configuration says `asyncCommunication: true`.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from typing import Any

from marserve_handlers.base import BaseHandler, value_of
from marserve_handlers.context import send_intermediate_predict_response
from marserve_handlers.errors import ModelNotLoadable, PredictionException
from marserve_handlers.support.devices.engines import end_if_dead, show_own_device


class TRTLLMHandler(BaseHandler):
    """Takes JSON with `prompt`, `streaming` and sampling parameters; answers the text, or pieces `{"text": …}`.

    `handler` of the model's configuration: `engine_dir` (an engine, or a model's folder or name on the hub),
    `tokenizer_dir`, `kv_cache_config` (TensorRT-LLM's KvCacheConfig).
    """

    def __init__(self) -> None:
        super().__init__()
        self.trt_llm_engine: Any = None

    def initialize(self, ctx: Any) -> None:
        """Start the engine. Raises ModelNotLoadable without TensorRT-LLM, or without `engine_dir`."""
        self.context = ctx
        self.manifest = ctx.manifest
        self.model_yaml_config = ctx.model_yaml_config or {}
        section = self.model_yaml_config.get("handler")
        if not isinstance(section, Mapping) or not section.get("engine_dir"):
            raise ModelNotLoadable("handler.engine_dir of the model's configuration is missing; it names the engine.")
        show_own_device(ctx, 1)
        try:
            trt = importlib.import_module("tensorrt_llm")
        except ModuleNotFoundError as error:
            if error.name != "tensorrt_llm":
                raise
            raise ModelNotLoadable("trt_llm_handler needs the package tensorrt_llm on the server.") from None
        options: dict[str, Any] = {}
        if section.get("tokenizer_dir"):
            options["tokenizer"] = self._path(section["tokenizer_dir"])
        if section.get("kv_cache_config"):
            options["kv_cache_config"] = importlib.import_module("tensorrt_llm.llmapi").KvCacheConfig(
                **section["kv_cache_config"]
            )
        self.trt_llm_engine = trt.LLM(model=self._path(section["engine_dir"]), **options)
        self.initialized = True

    async def handle(self, data: list[Any], context: Any) -> list[Any]:
        """Answer the one request of the batch."""
        self.context = context
        try:
            return await self.postprocess(await self.inference(await self.preprocess(data), context))
        except Exception as error:
            end_if_dead(self.trt_llm_engine, error)
            raise

    async def preprocess(self, requests: list[Any]) -> list[dict[str, Any]]:
        """The request's JSON. Raises PredictionException (400) for a body that is not JSON or has no prompt."""
        if len(requests) != 1:
            raise PredictionException("trt_llm_handler takes one request at a time: set batchSize to 1.", 500)
        value = value_of(requests[0])
        if isinstance(value, (bytes, bytearray, str)):
            try:
                value = json.loads(value)
            except ValueError:
                value = None
        if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
            raise PredictionException('The request must be a JSON object with a text "prompt".', 400)
        return [value]

    async def inference(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Ask the engine; with `streaming` all pieces but the last one go out at once."""
        request = dict(data[0])
        prompt, streaming = request.pop("prompt"), bool(request.pop("streaming", False))
        try:
            sampling = importlib.import_module("tensorrt_llm").SamplingParams(**request)
        except (TypeError, ValueError) as error:
            raise PredictionException(f"The request's sampling parameters cannot be used: {error}", 400) from None
        generated = self.trt_llm_engine.generate_async(prompt, sampling_params=sampling, streaming=streaming)
        if not streaming:
            output = await generated
            return [output.outputs[0].text]
        said, held = 0, None
        async for output in generated:
            text = output.outputs[0].text
            if held is not None:
                send_intermediate_predict_response([held], context.request_ids, "Prediction success", 200, context)
            held, said = {"text": text[said:]}, len(text)
        return [held if held is not None else {"text": ""}]

    async def postprocess(self, outputs: list[Any]) -> list[Any]:  # type: ignore[override]
        """The answers as they are."""
        return outputs

    def _path(self, name: Any) -> str:
        """A folder of the archive where there is one of that name, else the name itself."""
        inside = os.path.join(str(self.context.system_properties.get("model_dir")), str(name))
        return inside if os.path.exists(inside) else str(name)
