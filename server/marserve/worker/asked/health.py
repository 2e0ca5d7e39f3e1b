"""Whether the worker is well: calls the author's `health`, between two batches.

The worker is well if the call returns None or something true. It is not if that is false, or the call raises.
"""

from __future__ import annotations

import inspect
import logging
import time
from typing import Any

from marserve.messages import AskHealth, Health
from marserve.worker.load import LoadedModel
from marserve.worker.outgoing import MAX_SENTENCE, cut, loss_told_by, say, shown
from marserve_handlers.declared.running import Runner


class HealthCall:
    """The calls of one worker. The first failure after a success is logged with its traceback, the others without."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._has_failed = False
        self._runner = Runner()
        self.loss_words: str | None = None
        """After a call that raised: the runtime's words on a lost device, or empty; None after any other."""

    def ask(self, ask: AskHealth) -> Health:
        """Call it. A coroutine runs to its end in an event loop of its own."""
        began = time.monotonic()
        try:
            said = self._call()
            if inspect.iscoroutine(said):
                said = self._runner.run(said)
            failure = self._judge(said)
        except SystemExit:
            raise
        except BaseException as error:  # the author's code
            failure = self._raised(error)
        return Health(ask.number, time.monotonic() - began, failure)

    async def ask_beside(self, ask: AskHealth) -> Health:
        """The same in a running event loop, where a coroutine runs beside batches."""
        began = time.monotonic()
        try:
            said = self._call()
            failure = self._judge(await said if inspect.isawaitable(said) else said)
        except SystemExit:
            raise
        except BaseException as error:  # the author's code
            failure = self._raised(error)
        return Health(ask.number, time.monotonic() - began, failure)

    def _call(self) -> Any:
        self.loss_words = None
        return None if self._model.health is None else self._model.health()

    def _judge(self, said: object) -> str:
        if said is None or bool(said):
            self._has_failed = False
            return ""
        self._tell("health() says that the worker is not well")
        return cut(f"health() returned {said!r}", MAX_SENTENCE)

    def _raised(self, error: BaseException) -> str:
        self.loss_words = loss_told_by(error)
        self._tell("health() raised", error)
        return cut(f"health() raised {shown(error)}", MAX_SENTENCE)

    def _tell(self, sentence: str, error: BaseException | None = None) -> None:
        if not self._has_failed:
            say(logging.ERROR, "%s", sentence, error=error)
        self._has_failed = True
