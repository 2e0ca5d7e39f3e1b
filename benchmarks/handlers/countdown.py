"""As many pieces as the request's body says: a step of continuous batching each, or sent within one call."""

from __future__ import annotations

from typing import Any

from marserve_handlers.context import send_intermediate_predict_response

PIECE = b"." * 16


class Countdown:
    """One piece a step where the model's configuration says `continuousBatching`, else all of them in one call."""

    def initialize(self, context: Any) -> None:
        """Nothing to load."""
        self.left: dict[str | None, int] = {}
        self.is_continuous = bool(context.model_yaml_config.get("continuousBatching"))

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[bytes]:
        """B rows in, the next piece of each out; rows that run already are empty."""
        if not self.is_continuous:
            for _ in range(int(rows[0]["body"]) - 1):
                send_intermediate_predict_response([PIECE], context.request_ids, "", 200, context)
            return [PIECE]
        ids = [context.get_request_id(index) for index in range(len(rows))]
        for name, row in zip(ids, rows, strict=True):
            self.left[name] = (int(row["body"]) if row else self.left[name]) - 1
        context.stopping_criteria = [lambda _, name=name: self.left[name] <= 0 for name in ids]
        return [PIECE] * len(rows)
