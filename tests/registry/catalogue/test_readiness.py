"""Tests for whether the server should be sent requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from marserve.pool.pool import WorkerView
from marserve.registry.catalogue.readiness import Readiness, Rule, Standing, judge, why_not_ready
from support.fake_pool import a_death, a_worker


def ready(*standings: Standing, draining: bool = False, tried: bool = True, failures: Sequence[str] = ()) -> Readiness:
    """The judgement about these default versions."""
    return judge(standings, is_draining=draining, has_tried_startup=tried, startup_failures=failures)


def standing(*, least: int = 1, loaded: int = 1, at_startup: bool = False, settled: bool = True) -> Standing:
    """How version 1.0 of model m stands."""
    return Standing("m", "1.0", least, loaded, at_startup, settled)


def test_a_server_without_models_is_ready_once_its_start_was_tried() -> None:
    """Nothing is missing then."""
    assert ready() == Readiness(True, True)
    assert not ready(tried=False).is_ready
    assert not ready(tried=False).is_started


@pytest.mark.parametrize(("least", "loaded", "is_ready"), [(1, 0, False), (1, 1, True), (4, 1, True), (0, 0, True)])
def test_one_loaded_worker_is_enough_and_none_where_none_is_wanted(least: int, loaded: int, is_ready: bool) -> None:
    """A model of four workers answers with one."""
    judged = ready(standing(least=least, loaded=loaded))

    assert judged.is_ready is is_ready
    assert bool(judged.reasons) is not is_ready


def test_a_model_that_is_registered_while_the_server_runs_does_not_take_traffic_from_the_others() -> None:
    """It counts from the end of its first load on, also of a failed one."""
    assert ready(standing(loaded=0, settled=False)).is_ready
    assert not ready(standing(loaded=0, settled=True)).is_ready


def test_models_of_the_start_count_from_the_start() -> None:
    """Until they are loaded, the server is neither ready nor started."""
    judged = ready(standing(loaded=0, at_startup=True, settled=False))

    assert (judged.is_ready, judged.is_started) == (False, False)
    assert judged.reasons == ('no worker of model "m" version 1.0 has loaded it',)


def test_a_start_that_failed_is_over() -> None:
    """Orchestrators must not wait for ever for a model that cannot be loaded."""
    judged = ready(standing(loaded=0, at_startup=True), failures=["x.mar was not loaded: Model not found at: x.mar"])

    assert (judged.is_ready, judged.is_started) == (False, True)
    assert judged.startup_reasons == ("x.mar was not loaded: Model not found at: x.mar",)
    assert judged.remarks == ("x.mar was not loaded: Model not found at: x.mar",)


def test_a_draining_server_is_not_ready() -> None:
    """Whatever its models say."""
    judged = ready(standing(), draining=True)

    assert (judged.is_ready, judged.is_started) == (False, True)
    assert judged.reasons == ("the server is shutting down",)


@pytest.mark.parametrize(
    ("rule", "loaded", "wanted", "is_ready"),
    [
        ("any", 1, 4, True),
        ("any", 0, 4, False),
        ("min", 1, 4, False),
        ("min", 2, 4, True),
        ("all", 3, 4, False),
        ("all", 4, 4, True),
        ("all", 2, 0, True),
    ],
)
def test_the_models_rule_says_how_many_loaded_workers_are_enough(
    rule: Rule, loaded: int, wanted: int, is_ready: bool
) -> None:
    """One, the least number (two here), or all that there should be now."""
    judged = ready(Standing("m", "1.0", 2, loaded, False, True, rule, wanted))

    assert judged.is_ready is is_ready


def test_a_model_that_serves_with_fewer_workers_is_ready_and_says_so() -> None:
    """Whoever looks sees it, and traffic still comes; with another rule it does not."""
    some = ready(Standing("m", "1.0", 4, 2, False, True, "any", 4))
    few = ready(Standing("m", "1.0", 4, 2, False, True, "min", 4))

    assert (some.is_ready, some.reasons) == (True, ())
    assert some.remarks == ('model "m" version 1.0 serves with 2 of 4 workers',)
    assert few.reasons == ('model "m" version 1.0 has 2 of 4 workers, and its readinessRule is min',)
    assert few.remarks == ()


NOW = 1_700_000_100.0
SECRET = "no file /srv/models/secret.pt"


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([], "it is scaled to 0 workers"),
        ([a_worker("1", "LOADING")], "no worker has loaded it yet"),
        ([a_worker("1"), a_worker("2", "LOADING")], "1 of 2 workers have loaded it yet"),
        (
            [a_worker("1", "LOADING", waits_for=SECRET)],
            "no worker has loaded it: its workers wait for a device or a machine",
        ),
        (
            [a_worker("1", "LOADING", last_death=a_death("load_failed", SECRET))],
            "no worker has loaded it: the last one ended (load_failed), and the next one is being started",
        ),
        (
            [
                a_worker("1", "UNLOADING", last_death=a_death("load_failed", SECRET), next_start_at=NOW + 29.5),
                a_worker("2", "UNLOADING", last_death=a_death("load_failed", SECRET), next_start_at=NOW + 40),
            ],
            "no worker has loaded it: the last one ended (load_failed), and the next one is started in 30 s",
        ),
        (
            [a_worker("1"), a_worker("2", "UNLOADING", last_death=a_death(), next_start_at=math.inf)],
            "1 of 2 workers have loaded it: the last one ended (killed), and another one is started when it is scaled",
        ),
    ],
)
def test_a_client_is_told_why_a_version_cannot_answer(workers: Sequence[WorkerView], reason: str) -> None:
    """By a word for the cause; what the author's code or the file system said stays with the operator."""
    assert why_not_ready(workers, 2, NOW) == reason
