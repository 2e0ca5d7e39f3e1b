"""The envelope `json`: `{"instances": […]}` in, `{"predictions": […]}` out."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, ClassVar

from marserve_handlers.envelopes.base import BaseEnvelope, list_of
from marserve_handlers.errors import PredictionException


class JSONEnvelope(BaseEnvelope):
    """The instances of all rows are one list for the handler; its answers are cut back to the rows.

    `{"b64": "…"}`, as an instance or one level below, becomes the bytes that it stands for.
    """

    _lengths: ClassVar[list[int]] = []

    def parse_input(self, data: Any) -> list[Any]:
        """All rows' instances, in order."""
        instances, self._lengths = self._batch_from_json(data)  # type: ignore[misc] # each batch's own, over the class's
        return instances

    def format_output(self, data: Any) -> list[str]:
        """One JSON text a row."""
        return self._batch_to_json(data, self._lengths)

    def _batch_from_json(self, data_rows: Any) -> tuple[list[Any], list[int]]:
        """The instances of all rows, and how many each row has."""
        rows = [self._from_json(row) for row in data_rows]
        return [instance for row in rows for instance in row], [len(row) for row in rows]

    def _from_json(self, data: Any) -> list[Any]:
        """The instances of one row."""
        return [_decode(instance) for instance in list_of(data, "instances")]

    def _batch_to_json(self, batch: Any, lengths: list[int]) -> list[str]:
        """The answers of each row as JSON text. Raises ValueError when there is not one for each instance."""
        if len(batch) != sum(lengths):
            raise ValueError(f"The handler gave {len(batch)} answers for {sum(lengths)} instances.")
        texts, at = [], 0
        for length in lengths:
            texts.append(self._to_json(batch[at : at + length]))
            at += length
        return texts

    def _to_json(self, output: Any) -> str:
        """One row's answers as JSON text."""
        return json.dumps({"predictions": list(output)})


def _decode(instance: Any) -> Any:
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
