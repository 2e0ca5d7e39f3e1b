"""The levels of logging that can be changed while the server runs: the server log's, and those of workers."""

from __future__ import annotations

from collections.abc import Mapping

from marserve.pool.worker_end.worker_levels import WorkerLevels
from marserve.telemetry.logs.logs import Logs


class LogLevels:
    """As `api/rest/logs.py` changes them; a start begins with those of the settings again."""

    def __init__(self, logs: Logs, workers: WorkerLevels) -> None:
        self._logs = logs
        self._workers = workers

    @property
    def server(self) -> str:
        """The server log's."""
        return self._logs.level

    @property
    def workers(self) -> str:
        """That of workers of models without a level of their own."""
        return self._workers.default

    @property
    def of_models(self) -> Mapping[str, str]:
        """Those of single models' workers."""
        return self._workers.of_models

    def set(self, level: str, model: str | None) -> None:
        """Change all levels, or that of one model's workers; running workers included."""
        if model is None:
            self._logs.set_level(level)
        self._workers.set(level, model)
