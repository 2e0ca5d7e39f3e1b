"""`docker/monitoring`: rules and dashboards ask for what the server has, and each alert fires and has its page."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from marserve.telemetry.metrics.page.catalogue import CATALOGUE
from support.manifests import Refused, judge
from support.pages import ROOT

FOLDER = ROOT / "docker/monitoring"
RULES = FOLDER / "marserve.rules.yml"
DASHBOARDS = sorted((FOLDER / "dashboards").glob("*.json"))
PAGE = (ROOT / "docs/alerts.md").read_text(encoding="utf-8")
# Labels that Prometheus gives each series of a scrape, and that a histogram's buckets have.
OF_PROMETHEUS = {"job", "instance", "le"}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def rules() -> list[dict[str, Any]]:
    """All rules, of all groups."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def targets() -> Iterator[tuple[str, str, str]]:
    """The file, the panel and the query of each target of each dashboard."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield path.stem, panel["title"], target["expr"]


QUERIES = [*(("rules", rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()), *targets()]


def labels_of(name: str) -> set[str] | None:
    """The labels of a series, or None for one that is not there."""
    if name in RECORDED:
        found = re.search(r"by \(([^)]*)\)", RECORDED[name])
        return set() if found is None else set(re.split(r",\s*", found[1]))
    if name == "up":
        return set()
    for family in (name, re.sub(r"_(bucket|sum|count)$", "", name)):
        if family in CATALOGUE and (family == name) == (CATALOGUE[family].kind != "histogram"):
            return set(CATALOGUE[family].labels)
    return None


def unknown_parts(query: str) -> list[str]:
    """What of a query's names and labels no page of the server has."""
    wrong = []
    known: set[str] = set()
    for found in re.finditer(
        r"(?<![\w:\"])(up|(?:\w+:)?marserve_[\w:]+)\b(?:\{([^}]*)\})?", re.sub(r'job=~"[^"]*"', "", query)
    ):
        labels = labels_of(found[1])
        if labels is None:
            wrong.append(found[1])
            continue
        known |= labels
        chosen = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", found[2] or "")
        wrong += [f"{label} of {found[1]}" for label in chosen if label not in labels | OF_PROMETHEUS]
    for said in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
        wrong += [f"by {label}" for label in re.split(r",\s*", said) if label not in known | OF_PROMETHEUS]
    return wrong


@pytest.mark.parametrize(("place", "title", "query"), QUERIES, ids=[f"{a}-{b}" for a, b, _ in QUERIES])
def test_a_query_asks_for_names_and_labels_that_the_server_has(place: str, title: str, query: str) -> None:
    """So a family that is renamed takes its charts and alerts along."""
    assert re.search(r"marserve_|up\b", query), (place, title)
    assert not unknown_parts(query)


@pytest.mark.parametrize(
    "query",
    [
        "marserve_request_total",
        "rate(marserve_request_seconds[5m])",
        'marserve_workers{stat="ready"}',
        "sum by (modl) (marserve_workers)",
        "model_version:marserve_nothing:rate5m",
    ],
)
def test_a_planted_wrong_name_is_found(query: str) -> None:
    """So the test above can fail."""
    assert unknown_parts(query)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_is_wrong_and_where_it_is_told_what_to_do(name: str) -> None:
    """Its section has a command or a query; nothing is left for the reader to guess."""
    rule = ALERTS[name]

    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{name.lower()}"
    [section] = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert re.search(r"^- .*`", section, re.MULTILINE)


def test_the_page_has_no_section_of_an_alert_that_is_gone() -> None:
    """Headings with Marserve are alerts."""
    assert re.findall(r"^## (Marserve\w+)$", PAGE, re.MULTILINE) == list(ALERTS)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_rule_stands_in_the_page(name: str) -> None:
    """Else nobody knows of it."""
    assert f"`{name}`" in PAGE


# -------------------------------------------------------------------------------------------------------- dashboards


def test_the_dashboards_are_those_that_the_description_makes() -> None:
    """After a change: `python docker/monitoring/make_dashboards.py`."""
    spec = importlib.util.spec_from_file_location("make_dashboards", FOLDER / "make_dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)

    assert {path.stem: path.read_text() for path in DASHBOARDS} == {
        name: maker.written(name) for name in maker.DASHBOARDS
    }


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_right_by_the_schema_and_uses_only_its_own_variables(path: Path) -> None:
    """No panel covers another, and each number stands once."""
    document = json.loads(path.read_text())

    judge(document, "grafana-dashboard")

    variables = {each["name"] for each in document["templating"]["list"]} | {"__rate_interval", "__all"}
    assert set(re.findall(r"\$\{?(\w+)", path.read_text())) <= variables
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in document["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in document["panels"]})


@pytest.mark.parametrize(
    "change",
    [
        lambda board: board.pop("schemaVersion"),
        lambda board: board.update(uid="has spaces"),
        lambda board: board["panels"][0].update(targts=[]),
        lambda board: board["panels"][0]["gridPos"].update(x=24),
        lambda board: board["panels"][0]["targets"][0].pop("expr"),
        lambda board: board["panels"][0]["datasource"].update(uid="prometheus"),
    ],
)
def test_a_planted_mistake_in_a_dashboard_is_found(change: Any) -> None:
    """So the test above can fail."""
    document = copy.deepcopy(json.loads(DASHBOARDS[0].read_text()))
    change(document)

    with pytest.raises(Refused):
        judge(document, "grafana-dashboard")


# ----------------------------------------------------------------------------------------------------- alerts that fire

OF_A_VERSION = 'job="marserve",instance="a:8082",model="m",version="1.0"'
OF_A_SERVER = 'job="marserve",instance="a:8082"'
# For each alert: series, one value a minute, with which it fires, and with which it does not.
FIRES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "MarserveNotScraped": ({f"up{{{OF_A_SERVER}}}": "0x30"}, {f"up{{{OF_A_SERVER}}}": "1x30"}),
    "MarserveNoWorkerReady": (
        {
            f'marserve_workers{{{OF_A_VERSION},state="ready"}}': "0x30",
            f"marserve_workers_target{{{OF_A_VERSION}}}": "1x30",
        },
        {
            f'marserve_workers{{{OF_A_VERSION},state="ready"}}': "0x30",
            f"marserve_workers_target{{{OF_A_VERSION}}}": "0x30",
        },
    ),
    "MarserveWorkersDie": (
        {f'marserve_worker_deaths_total{{{OF_A_VERSION},cause="exit"}}': "0+1x30"},
        {f'marserve_worker_deaths_total{{{OF_A_VERSION},cause="exit"}}': "0x28 1 2"},
    ),
    "MarserveQueueStands": (
        {f"marserve_queue_oldest_seconds{{{OF_A_VERSION}}}": "11x30"},
        {f"marserve_queue_oldest_seconds{{{OF_A_VERSION}}}": "9x30"},
    ),
    "MarserveRequestsWait": (
        {
            f'marserve_request_seconds_bucket{{{OF_A_VERSION},stage="queue",le="1"}}': "0+10x30",
            f'marserve_request_seconds_bucket{{{OF_A_VERSION},stage="queue",le="5"}}': "0+100x30",
            f'marserve_request_seconds_bucket{{{OF_A_VERSION},stage="queue",le="+Inf"}}': "0+100x30",
        },
        {
            f'marserve_request_seconds_bucket{{{OF_A_VERSION},stage="queue",le="1"}}': "0+100x30",
            f'marserve_request_seconds_bucket{{{OF_A_VERSION},stage="queue",le="5"}}': "0+100x30",
            f'marserve_request_seconds_bucket{{{OF_A_VERSION},stage="queue",le="+Inf"}}': "0+100x30",
        },
    ),
    "MarserveRequestsFail": (
        {
            f'marserve_errors_total{{{OF_A_VERSION},cause="handler"}}': "0+10x30",
            f"marserve_requests_total{{{OF_A_VERSION}}}": "0+100x30",
        },
        {
            f'marserve_errors_total{{{OF_A_VERSION},cause="bad_input"}}': "0+10x30",
            f"marserve_requests_total{{{OF_A_VERSION}}}": "0+100x30",
        },
    ),
    "MarserveRefuses": (
        {
            f'marserve_model_refused_total{{{OF_A_VERSION},cause="queue_full"}}': "0+10x30",
            f"marserve_requests_total{{{OF_A_VERSION}}}": "0+100x30",
        },
        {
            f'marserve_model_refused_total{{{OF_A_VERSION},cause="draining"}}': "0+10x30",
            f"marserve_requests_total{{{OF_A_VERSION}}}": "0+100x30",
        },
    ),
    "MarserveRequestsExpire": (
        {
            f"marserve_expired_total{{{OF_A_VERSION}}}": "0+2x30",
            f"marserve_requests_total{{{OF_A_VERSION}}}": "0+100x30",
        },
        {f"marserve_expired_total{{{OF_A_VERSION}}}": "0x30", f"marserve_requests_total{{{OF_A_VERSION}}}": "0+100x30"},
    ),
    "MarserveLoopStalls": (
        {f'marserve_loop_stalls_total{{{OF_A_SERVER},reason="held"}}': "0+1x30"},
        {f'marserve_loop_stalls_total{{{OF_A_SERVER},reason="paused"}}': "0+1x30"},
    ),
    "MarserveMemoryShort": (
        {
            f"marserve_memory_charged_bytes{{{OF_A_SERVER}}}": "96x30",
            f"marserve_memory_budget_bytes{{{OF_A_SERVER}}}": "100x30",
        },
        {
            f"marserve_memory_charged_bytes{{{OF_A_SERVER}}}": "94x30",
            f"marserve_memory_budget_bytes{{{OF_A_SERVER}}}": "100x30",
        },
    ),
    "MarserveDeviceLost": (
        {f'marserve_device_healthy{{{OF_A_SERVER},gpu_id="0"}}': "0x30"},
        {f'marserve_device_healthy{{{OF_A_SERVER},gpu_id="0"}}': "1x30"},
    ),
    "MarserveDesiredStateFailed": (
        {f'marserve_desired_state_in_force{{{OF_A_SERVER},digest="d"}}': "0x30"},
        {f'marserve_desired_state_in_force{{{OF_A_SERVER},digest="d"}}': "1x30"},
    ),
    "MarserveWatchFails": (
        {
            f'marserve_watch_last_success_age_seconds{{{OF_A_SERVER},watch="w"}}': "901x30",
            f'marserve_watch_failures_total{{{OF_A_SERVER},watch="w"}}': "0+1x30",
        },
        {
            f'marserve_watch_last_success_age_seconds{{{OF_A_SERVER},watch="w"}}': "60x30",
            f'marserve_watch_failures_total{{{OF_A_SERVER},watch="w"}}': "0+1x30",
        },
    ),
    "MarserveShadowDiffers": (
        {
            f"marserve_shadow_differing_total{{{OF_A_VERSION}}}": "0+2x30",
            f"marserve_shadow_compared_total{{{OF_A_VERSION}}}": "0+100x30",
        },
        {
            f"marserve_shadow_differing_total{{{OF_A_VERSION}}}": "0x30",
            f"marserve_shadow_compared_total{{{OF_A_VERSION}}}": "0+100x30",
        },
    ),
    "MarserveRolloutTurnedBack": (
        {f'marserve_rollouts_ended_total{{{OF_A_SERVER},outcome="rolled_back",reason="p99"}}': "0x20 1x10"},
        {f'marserve_rollouts_ended_total{{{OF_A_SERVER},outcome="promoted",reason="judge"}}': "0x20 1x10"},
    ),
    "MarserveLogLinesLost": (
        {f'marserve_dropped_log_lines_total{{{OF_A_SERVER},log="access"}}': "0+5x30"},
        {f'marserve_dropped_log_lines_total{{{OF_A_SERVER},log="access"}}': "5x30"},
    ),
}


def loading(deaths: str) -> dict[str, str]:
    """A version whose only worker loads for half an hour, after so many deaths."""
    return {
        f'marserve_workers{{{OF_A_VERSION},state="ready"}}': "0x30",
        f'marserve_workers{{{OF_A_VERSION},state="loading"}}': "1x30",
        f"marserve_workers_target{{{OF_A_VERSION}}}": "1x30",
        f'marserve_worker_deaths_total{{{OF_A_VERSION},cause="exit"}}': deaths,
    }


def promtool(*arguments: str | Path) -> str:
    """What promtool prints; it is to be content."""
    run = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def firing(series: dict[str, str], name: str, folder: Path) -> bool:
    """Whether the alert fires half an hour after these series began."""
    case = {
        "interval": "1m",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "alert_rule_test": [{"eval_time": "29m", "alertname": name, "exp_alerts": []}],
    }
    file = folder / "case.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": [case]}))
    run = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0 or "got:[" in re.sub(r"\s", "", run.stdout + run.stderr), run.stdout + run.stderr
    return run.returncode != 0


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    """By Prometheus' own judgement."""
    assert f"{len(rules())} rules found" in promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)


def test_each_alert_has_series_that_make_it_fire() -> None:
    """A new alert needs them, too."""
    assert list(FIRES) == list(ALERTS)


@pytest.mark.system
@needs_promtool
@pytest.mark.parametrize(
    ("name", "series", "fires"),
    [
        # A place that never answered has no age.
        ("MarserveWatchFails", {f'marserve_watch_failures_total{{{OF_A_SERVER},watch="w"}}': "0+1x30"}, True),
        # One that is looked at once an hour.
        (
            "MarserveWatchFails",
            {
                f'marserve_watch_last_success_age_seconds{{{OF_A_SERVER},watch="w"}}': "0+60x30",
                f'marserve_watch_failures_total{{{OF_A_SERVER},watch="w"}}': "0x30",
            },
            False,
        ),
        ("MarserveNoWorkerReady", loading("0x30"), False),
        ("MarserveNoWorkerReady", loading("0x20 1x10"), True),
    ],
    ids=["never answered", "looked at hourly", "first load", "load after a death"],
)
def test_an_alert_knows_what_only_looks_like_its_trouble(
    name: str, series: dict[str, str], fires: bool, tmp_path: Path
) -> None:
    """False alarms teach people to look away, and a place that was wrong from the beginning is one that fails."""
    assert firing(series, name, tmp_path) is fires


@pytest.mark.system
@needs_promtool
@pytest.mark.parametrize("name", FIRES)
def test_an_alert_fires_for_what_it_is_about_and_for_nothing_near_it(name: str, tmp_path: Path) -> None:
    """Prometheus itself runs the rules over series of half an hour."""
    series, near = FIRES[name]

    assert firing(series, name, tmp_path)
    assert not firing(near, name, tmp_path)
