"""A handler whose `preprocess` and `inference` take 10 ms each, and let go of the interpreter meanwhile."""

from __future__ import annotations

import time
from typing import Any

from marserve_handlers.base import BaseHandler

STEP_S = 0.01


class TwoSteps(BaseHandler):
    """Answers `ok` to each row."""

    def initialize(self, context: Any) -> None:
        """Nothing to load."""
        self.context = context

    def preprocess(self, data: list[Any]) -> Any:
        """As reading pictures does."""
        time.sleep(STEP_S)
        return data

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """As a model does."""
        time.sleep(STEP_S)
        return data

    def postprocess(self, data: Any) -> list[Any]:
        """One answer a row."""
        return [b"ok"] * len(data)
