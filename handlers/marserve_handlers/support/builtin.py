"""Which handlers come with marserve, by the names that manifests use. Importing this imports none of them."""

from __future__ import annotations

import importlib

BUILT_IN = {
    "base_handler": ("marserve_handlers.base", "BaseHandler"),
    "image_classifier": ("marserve_handlers.image_classifier", "ImageClassifier"),
    "image_segmenter": ("marserve_handlers.image_segmenter", "ImageSegmenter"),
    "object_detector": ("marserve_handlers.object_detector", "ObjectDetector"),
    "text_classifier": ("marserve_handlers.text_classifier", "TextClassifier"),
    "densenet_handler": ("marserve_handlers.densenet", "DenseNetHandler"),
    "dali_image_classifier": ("marserve_handlers.dali", "DALIImageClassifier"),
    "vllm_handler": ("marserve_handlers.vllm", "VLLMHandler"),
    "trt_llm_handler": ("marserve_handlers.trt_llm", "TRTLLMHandler"),
    "sagemaker_script": ("marserve_handlers.sagemaker_script", "SageMakerScript"),
    "transformers": ("marserve_handlers.ready.transformers.handler", "TransformersHandler"),
    "sklearn": ("marserve_handlers.ready.sklearn", "SklearnHandler"),
    "xgboost": ("marserve_handlers.ready.xgboost", "XGBoostHandler"),
    "lightgbm": ("marserve_handlers.ready.lightgbm", "LightGBMHandler"),
    "vision_handler": ("marserve_handlers.vision", "VisionHandler"),
    "text_handler": ("marserve_handlers.text", "TextHandler"),
    "dali_handler": ("marserve_handlers.dali", "DALIHandler"),
    "distributed.base_pippy_handler": ("marserve_handlers.distributed.pippy", "BasePippyHandler"),
    "distributed.base_deepspeed_handler": ("marserve_handlers.distributed.deepspeed", "BaseDeepSpeedHandler"),
}
"""Name in the manifest to module and class."""

NAMED_AS_LIBRARIES = frozenset(("transformers", "sklearn", "xgboost", "lightgbm"))
"""Handlers with the name of the library that they are for: an installed module of that name is not the handler."""


def find_built_in(name: str) -> type | None:
    """The class of the built-in handler of that name, imported now, or None for an unknown name."""
    place = BUILT_IN.get(name)
    if place is None:
        return None
    found: type = getattr(importlib.import_module(place[0]), place[1])
    return found
