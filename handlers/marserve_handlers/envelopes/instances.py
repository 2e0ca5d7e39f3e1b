"""Bytes inside of JSON, as TensorFlow Serving and KServe write them: `{"b64": "…"}`, an instance or one level below."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from marserve_handlers.errors import PredictionException


def decode_instance(instance: Any) -> Any:
    """An instance with the bytes that it stands for. Raises PredictionException (400) for what is no base64."""
    if isinstance(instance, dict):
        if _is_encoded(instance):
            return _bytes_of(instance)
        return {key: _bytes_of(value) if _is_encoded(value) else value for key, value in instance.items()}
    if isinstance(instance, list):
        return [_bytes_of(value) if _is_encoded(value) else value for value in instance]
    return instance


def _is_encoded(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("b64"), str)


def _bytes_of(encoded: dict[str, str]) -> bytes:
    try:
        return base64.b64decode(encoded["b64"])
    except (binascii.Error, ValueError):
        raise PredictionException('The text of "b64" is no base64.', 400) from None
