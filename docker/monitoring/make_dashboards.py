"""Writes the Grafana dashboards beside this file: `python docker/monitoring/make_dashboards.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# What the variables choose; `.*` where all is chosen.
V = 'job=~"marserve.*",instance=~"$instance",model=~"$model",version=~"$version"'
S = 'job=~"marserve.*",instance=~"$instance"'


class Panel(NamedTuple):
    """A chart: its title, its unit in Grafana's words, and pairs of a query and the legend of its series."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


def rate(name: str, by: str, chosen: str = V) -> str:
    """A counter's growth in a second."""
    return f"sum by ({by}) (rate({name}{{{chosen}}}[$__rate_interval]))"


def quantile(share: float, name: str, by: str, chosen: str = V) -> str:
    """A quantile of a histogram."""
    buckets = f"rate({name}_bucket{{{chosen}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by ({by}, le) ({buckets}))"


def gauge(name: str, by: str, chosen: str = V, how: str = "sum") -> str:
    """A gauge over the servers."""
    return f"{how} by ({by}) ({name}{{{chosen}}})"


def stage(share: float, name: str) -> str:
    """A quantile of the time in a stage."""
    return quantile(share, "marserve_request_seconds", "model, version", f'{V},stage="{name}"')


MV = "{{model}} {{version}}"
DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "fleet": (
        "Fleet",
        (
            Panel("Servers that answer", "short", ((f"sum(up{{{S}}})", "up"), (f"count(up{{{S}}})", "known"))),
            Panel("Requests by model", "reqps", ((rate("marserve_requests_total", "model"), "{{model}}"),)),
            Panel("Answers by class", "reqps", ((rate("marserve_http_responses_total", "class", S), "{{class}}"),)),
            Panel("Errors by cause", "reqps", ((rate("marserve_errors_total", "cause"), "{{cause}}"),)),
            Panel(
                "Refused by cause",
                "reqps",
                (
                    (rate("marserve_model_refused_total", "cause"), "{{cause}} (model)"),
                    (rate("marserve_refused_total", "cause", S), "{{cause}} (before a model)"),
                ),
            ),
            Panel("Workers by state", "short", ((gauge("marserve_workers", "state"), "{{state}}"),)),
            Panel(
                "Memory for models",
                "bytes",
                (
                    (gauge("marserve_memory_charged_bytes", "instance", S), "{{instance}} charged"),
                    (gauge("marserve_memory_budget_bytes", "instance", S), "{{instance}} budget"),
                ),
            ),
            Panel(
                "Bodies and answers in memory",
                "bytes",
                (
                    (gauge("marserve_bytes_in_flight", "of", S), "{{of}}"),
                    (gauge("marserve_bytes_in_flight_limit", "instance", S), "{{instance}} limit"),
                ),
            ),
            Panel(
                "Lag of the event loop, p99",
                "s",
                ((quantile(0.99, "marserve_loop_lag_seconds", "instance", S), "{{instance}}"),),
            ),
            Panel(
                "Compute by model (cores)",
                "short",
                (
                    (
                        rate("marserve_usage_compute_seconds_total", "model", f'{S},model=~"$model"'),
                        "{{model}}",
                    ),
                ),
            ),
            Panel(
                "Usage of the last day",
                "short",
                (
                    (
                        f'sum by (model) (increase(marserve_usage_requests_total{{{S},model=~"$model"}}[1d]))',
                        "{{model}}",
                    ),
                ),
                "table",
            ),
        ),
    ),
    "model": (
        "Model",
        (
            Panel("Requests", "reqps", ((rate("marserve_requests_total", "model, version"), MV),)),
            Panel("Time to the answer, p50", "s", ((stage(0.5, "total"), MV),)),
            Panel("Time to the answer, p99", "s", ((stage(0.99, "total"), MV),)),
            Panel("Answers by status", "reqps", ((rate("marserve_answers_total", "status"), "{{status}}"),)),
            Panel("Errors by cause", "reqps", ((rate("marserve_errors_total", "cause"), "{{cause}}"),)),
            Panel("Refused by cause", "reqps", ((rate("marserve_model_refused_total", "cause"), "{{cause}}"),)),
            Panel("In the queue", "short", ((gauge("marserve_queue_length", "model, version"), MV),)),
            Panel(
                "Oldest in the queue", "s", ((gauge("marserve_queue_oldest_seconds", "model, version", how="max"), MV),)
            ),
            Panel(
                "Workers",
                "short",
                (
                    (gauge("marserve_workers", "state"), "{{state}}"),
                    (gauge("marserve_workers_target", "model, version"), f"{MV} target"),
                ),
            ),
            Panel("Workers that died", "short", ((rate("marserve_worker_deaths_total", "cause"), "{{cause}}"),)),
            Panel(
                "Busy share", "percentunit", ((gauge("marserve_worker_busy_ratio", "model, version", how="avg"), MV),)
            ),
            Panel("Processor time", "short", ((rate("marserve_worker_cpu_seconds_total", "model, version"), MV),)),
            Panel("Memory (PSS)", "bytes", ((gauge("marserve_worker_proportional_bytes", "model, version"), MV),)),
            Panel(
                "Bytes in and out",
                "Bps",
                (
                    (rate("marserve_input_bytes_total", "model, version"), f"{MV} in"),
                    (rate("marserve_answer_bytes_total", "model, version"), f"{MV} out"),
                ),
            ),
        ),
    ),
    "stages": (
        "Request stages",
        (
            Panel(
                "Mean by stage",
                "s",
                (
                    (
                        f"{rate('marserve_request_seconds_sum', 'stage')}"
                        f" / {rate('marserve_request_seconds_count', 'stage')}",
                        "{{stage}}",
                    ),
                ),
            ),
            Panel("p99 by stage", "s", ((quantile(0.99, "marserve_request_seconds", "stage"), "{{stage}}"),)),
            Panel("Queue, p99", "s", ((stage(0.99, "queue"), MV),)),
            Panel("Handler, p99", "s", ((stage(0.99, "handler"), MV),)),
            Panel(
                "Mean batch",
                "short",
                (
                    (
                        f"{rate('marserve_batch_size_sum', 'model, version')}"
                        f" / {rate('marserve_batch_size_count', 'model, version')}",
                        MV,
                    ),
                ),
            ),
            Panel("Deadlines passed", "reqps", ((rate("marserve_expired_total", "model, version"), MV),)),
        ),
    ),
    "rollouts": (
        "Roll-outs",
        (
            Panel(
                "Share of the traffic",
                "percentunit",
                ((gauge("marserve_traffic_share", "model, version", how="avg"), MV),),
            ),
            Panel(
                "Why a version was chosen",
                "reqps",
                ((rate("marserve_traffic_requests_total", "version, reason"), "{{version}} {{reason}}"),),
            ),
            Panel(
                "Arms in the present window",
                "short",
                ((gauge("marserve_rollout_arm_requests", "arm, version, result"), "{{arm}} {{version}} {{result}}"),),
            ),
            Panel("Time to the answer, p99", "s", ((stage(0.99, "total"), MV),)),
            Panel("Errors", "reqps", ((rate("marserve_errors_total", "version, cause"), "{{version}} {{cause}}"),)),
            Panel(
                "Roll-outs that ended",
                "short",
                ((gauge("marserve_rollouts_ended_total", "outcome, reason", S), "{{outcome}} {{reason}}"),),
            ),
            Panel(
                "Shadow: compared and differing",
                "reqps",
                (
                    (rate("marserve_shadow_compared_total", "version"), "{{version}} compared"),
                    (rate("marserve_shadow_differing_total", "version"), "{{version}} differing"),
                ),
            ),
            Panel(
                "Changes of the desired state",
                "short",
                ((rate("marserve_desired_state_changes_total", "result", S), "{{result}}"),),
            ),
        ),
    ),
    "devices": (
        "Devices",
        (
            Panel(
                "Healthy",
                "short",
                ((gauge("marserve_device_healthy", "instance, gpu_id", S), "{{instance}} {{gpu_id}}"),),
            ),
            Panel(
                "Busy",
                "percentunit",
                ((gauge("marserve_device_busy_ratio", "instance, gpu_id", S), "{{instance}} {{gpu_id}}"),),
            ),
            Panel(
                "Memory",
                "bytes",
                (
                    (gauge("marserve_device_memory_used_bytes", "instance, gpu_id", S), "{{instance}} {{gpu_id}} used"),
                    (gauge("marserve_device_memory_bytes", "instance, gpu_id", S), "{{instance}} {{gpu_id}} there is"),
                ),
            ),
            Panel(
                "Temperature",
                "celsius",
                ((gauge("marserve_device_temperature_celsius", "instance, gpu_id", S), "{{instance}} {{gpu_id}}"),),
            ),
            Panel(
                "Loads without a device",
                "short",
                ((rate("marserve_device_loads_refused_total", "instance", S), "{{instance}}"),),
            ),
        ),
    ),
}


def chart(number: int, panel: Panel) -> dict[str, Any]:
    """A panel in Grafana's words; two stand beside each other."""
    shows_once = {"instant": True, "format": "table"} if panel.kind == "table" else {"range": True}
    return {
        "id": number + 1,
        "title": panel.title,
        "type": panel.kind,
        "datasource": SOURCE,
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {},
        "targets": [
            {"refId": chr(65 + place), "datasource": SOURCE, "expr": query, "legendFormat": legend, **shows_once}
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }


def choice(name: str, family: str, chosen: str) -> dict[str, Any]:
    """A variable with the values of a label."""
    query = f"label_values({family}{{{chosen}}}, {name})"
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "sort": 1,
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard(name: str) -> dict[str, Any]:
    """One dashboard."""
    title, panels = DASHBOARDS[name]
    job = 'job=~"marserve.*"'
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        choice("instance", "up", job),
    ]
    if name != "devices":
        variables.append(choice("model", "marserve_workers_target", job))
        variables.append(choice("version", "marserve_workers_target", f'{job},model=~"$model"'))
    return {
        "uid": f"marserve-{name}",
        "title": f"marserve: {title}",
        "tags": ["marserve"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "annotations": {"list": []},
        "links": [{"title": "marserve", "type": "dashboards", "tags": ["marserve"], "asDropdown": True}],
        "panels": [chart(number, panel) for number, panel in enumerate(panels)],
    }


def written(name: str) -> str:
    """The text of a dashboard's file."""
    return json.dumps(dashboard(name), indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(written(each), encoding="utf-8")
