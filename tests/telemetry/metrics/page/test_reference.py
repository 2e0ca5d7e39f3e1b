"""The page of all metrics is current and complete: every family of a server stands in it, and no other."""

from __future__ import annotations

from pathlib import Path

from marserve.api import byte_ledger
from marserve.app.building import desired_state, devices
from marserve.arrivals import watches
from marserve.memory import host_memory
from marserve.store.fetching import download_list
from marserve.telemetry import loop_lag
from marserve.telemetry.metrics.metric_definitions import BUILT_IN
from marserve.telemetry.metrics.page.catalogue import CATALOGUE
from marserve.telemetry.metrics.page.reference import _MOVES, COMMAND, LABELS, write_reference
from marserve.telemetry.metrics.page.torchserve import SYSTEM_METRICS
from marserve.telemetry.metrics.server_metrics import Metrics
from marserve.telemetry.traces import exporter

PAGE = Path(__file__).resolve().parents[4] / "docs" / "metrics-reference.md"

DECLARED = (
    byte_ledger.FAMILIES,
    desired_state.FAMILIES,
    devices.FAMILIES,
    devices.REFUSAL_FAMILIES,
    watches.FAMILIES,
    host_memory.FAMILIES,
    download_list.FAMILIES,
    loop_lag.FAMILIES,
    exporter.FAMILIES,
)
# By `app/building/` and `scrapes.py`.
DECLARED_BY_ROWS = {
    "marserve_rollout_arm_requests",
    "marserve_rollouts_ended_total",
    "marserve_collector_failures_total",
    "marserve_loop_lag_seconds",
}


def test_the_page_is_current() -> None:
    """It is written by the command that it names."""
    assert PAGE.read_text() == write_reference(), f"run: {COMMAND}"


def test_every_family_of_a_server_is_in_the_catalogue_and_no_other() -> None:
    """A metric that nothing shows any more is not promised."""
    of_metrics = {family.name for family in Metrics("box").families if family.name.startswith("marserve_")}
    by_parts = {name for families in DECLARED for name, _ in families}

    assert of_metrics | by_parts | DECLARED_BY_ROWS == CATALOGUE.keys()


def test_each_meaning_is_whole() -> None:
    """A sentence, a unit, when it moves; counters end as OpenMetrics wants; each label's values are explained."""
    for meaning in CATALOGUE.values():
        assert meaning.text.endswith("."), meaning.name
        assert meaning.unit, meaning.name
        assert meaning.moves, meaning.name
        assert (meaning.kind == "counter") == meaning.name.endswith("_total"), meaning.name
        assert set(meaning.labels) <= LABELS.keys(), meaning.name
        assert "|" not in meaning.text + meaning.moves, meaning.name
    assert {label for meaning in CATALOGUE.values() for label in meaning.labels} == LABELS.keys()


def test_each_of_torchserves_metrics_says_when_it_moves() -> None:
    """Those of the machine move together."""
    assert {*BUILT_IN.front, *BUILT_IN.model} == _MOVES.keys() | SYSTEM_METRICS.keys()
