"""The level of workers' logging, changed while they run: of all workers, or of one model's.

Workers log at INFO until another level is set. One that starts gets its model's level before it loads. The ranks of a
group behind the first get theirs with their order to load (`pool/launchers/group.py`), later ones from the first rank.
"""

from __future__ import annotations

from collections.abc import Callable

DEFAULT_LEVEL = "info"

# Sends a level to one worker.
SetLevel = Callable[[str], None]


class WorkerLevels:
    """`default` is the level of models without one of their own, which are in `of_models`; as `info`, `debug`."""

    def __init__(self) -> None:
        self.default = DEFAULT_LEVEL
        self.of_models: dict[str, str] = {}
        self._workers: dict[SetLevel, str] = {}

    def join(self, model: str, set_level: SetLevel) -> None:
        """A worker of `model` has a connection; it gets its level, since its template may have had another one."""
        self._workers[set_level] = model
        set_level(self.of(model))

    def leave(self, set_level: SetLevel) -> None:
        """A worker has ended. May be called again, and for one that never joined."""
        self._workers.pop(set_level, None)

    def set(self, level: str, model: str | None = None) -> None:
        """Set the level of one model's workers; without a model that of all, and no model has its own any more."""
        if model is not None:
            self.of_models[model] = level
        else:
            self.default = level
            self.of_models.clear()
        for set_level, its_model in list(self._workers.items()):
            if model in (None, its_model):
                set_level(level)

    def of(self, model: str) -> str:
        """The level that a model's workers have now."""
        return self.of_models.get(model, self.default)
