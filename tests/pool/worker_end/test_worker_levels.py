"""The level of workers' logging: of all, of one model, of workers that come."""

from __future__ import annotations

from marserve.pool.worker_end.worker_levels import WorkerLevels


class Worker:
    """A worker that keeps the levels that it was sent."""

    def __init__(self) -> None:
        self.levels: list[str] = []

    def set_level(self, level: str) -> None:
        """Keep it."""
        self.levels.append(level)


def test_running_workers_get_a_new_level_at_once() -> None:
    """Those of one model, or all."""
    levels, a, b = WorkerLevels(), Worker(), Worker()
    levels.join("a", a.set_level)
    levels.join("b", b.set_level)

    levels.set("debug", "a")
    levels.set("warning")

    assert (a.levels, b.levels) == (["info", "debug", "warning"], ["info", "warning"])
    assert (levels.default, levels.of_models) == ("warning", {})


def test_a_worker_that_comes_begins_with_its_models_level() -> None:
    """Whatever the template that it was forked from had."""
    levels, plain, early, late = WorkerLevels(), Worker(), Worker(), Worker()
    levels.join("a", plain.set_level)
    levels.set("debug", "a")
    levels.join("a", early.set_level)
    levels.join("b", late.set_level)

    assert (plain.levels, early.levels, late.levels) == (["info", "debug"], ["debug"], ["info"])
    assert (levels.of("a"), levels.of("b")) == ("debug", "info")


def test_a_worker_that_has_ended_is_sent_nothing() -> None:
    """Its connection is closed."""
    levels, worker = WorkerLevels(), Worker()
    levels.join("a", worker.set_level)
    levels.leave(worker.set_level)
    levels.leave(worker.set_level)

    levels.set("debug")

    assert worker.levels == ["info"]
