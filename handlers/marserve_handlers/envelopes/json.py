"""The envelope `json`: `{"instances": […]}` in, `{"predictions": […]}` out."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from marserve_handlers.envelopes.base import BaseEnvelope, list_of, raise_failure
from marserve_handlers.envelopes.instances import decode_instance


class JSONEnvelope(BaseEnvelope):
    """The instances of all rows are one list for the handler; its answers are cut back to the rows.

    `{"b64": "…"}`, as an instance or one level below, becomes the bytes that it stands for.
    """

    answers_nothing_itself = True

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
        return [decode_instance(instance) for instance in list_of(data, "instances")]

    def _batch_to_json(self, batch: Any, lengths: list[int]) -> list[str]:
        """The answers of each row as JSON text.

        Raises ValueError when there is not one for each instance, and an exception that stands in an answer's place.
        """
        raise_failure(batch)
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
