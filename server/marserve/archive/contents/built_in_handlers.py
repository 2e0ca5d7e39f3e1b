"""The handlers that come with the server and need no file in an archive."""

from __future__ import annotations

BUILT_IN_HANDLERS = (
    "base_handler",
    "image_classifier",
    "image_segmenter",
    "object_detector",
    "text_classifier",
    "densenet_handler",
    "dali_image_classifier",
    "vllm_handler",
    "trt_llm_handler",
    "sagemaker_script",
    "transformers",
    "sklearn",
    "xgboost",
    "lightgbm",
)
