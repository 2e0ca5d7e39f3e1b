"""The envelope `kserve`: KServe's V1 protocol, `{"instances": […]}` in, predictions or explanations out."""

from __future__ import annotations

from typing import Any

from marserve_handlers.envelopes.base import BaseEnvelope, list_of, split
from marserve_handlers.envelopes.instances import decode_instance


class KServeEnvelope(BaseEnvelope):
    """The handler gets the instances, one list for the whole batch, and gives one answer for each of them.

    Batches of several requests work: their instances are joined, and the answers cut back. `{"b64": "…"}`, as an
    instance or one level below, becomes the bytes that it stands for.
    """

    answers_nothing_itself = True

    def __init__(self, handle_fn: Any) -> None:
        super().__init__(handle_fn)
        self._lengths = [0]

    def parse_input(self, data: Any) -> list[Any]:
        """All rows' instances, in order."""
        rows = [[decode_instance(instance) for instance in list_of(row, "instances")] for row in data]
        self._lengths = [len(row) for row in rows]
        return [instance for row in rows for instance in row]

    def format_output(self, data: Any) -> list[dict[str, Any]]:
        """`{"predictions": …}` for each row, `{"explanations": …}` where the request asked to explain."""
        rows = split(data, self._lengths)
        return [{"explanations" if self._is_explain(idx) else "predictions": row} for idx, row in enumerate(rows)]

    def _is_explain(self, idx: int = 0) -> bool:
        """Whether request `idx` asks to explain."""
        return self.context is not None and self.context.get_request_header(idx, "explain") == "True"
