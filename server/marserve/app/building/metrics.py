"""Builds the server's metrics, and reads the machine's own figures."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn, TypeVar

from marserve import __version__
from marserve.machine.describe import Machine, Meter
from marserve.machine.device_watch import DeviceWatch
from marserve.machine.measuring_program import ProgramFailed, run_program
from marserve.settings import Settings
from marserve.telemetry.logs.logs import Logs
from marserve.telemetry.metrics.counts import LEGACY_PAGE, Metrics
from marserve.telemetry.metrics.handler_metrics import ModelMetrics
from marserve.telemetry.metrics.metric_definitions import BUILT_IN, read_metrics_file
from marserve.telemetry.metrics.metric_line import parse_line
from marserve.telemetry.metrics.metrics_log import MetricsLog
from marserve.telemetry.recorder import Recorder
from marserve.telemetry.traces.exporter import FAMILIES as TRACE_FAMILIES
from marserve.telemetry.traces.tracing import Tracing, open_tracing

log = logging.getLogger("marserve.app")

# How long the operator's own program may take to measure the machine.
PROGRAM_S = 60.0

Counted = TypeVar("Counted")


def build_metrics(settings: Settings, logs: Logs, machine: Machine, stack: contextlib.AsyncExitStack) -> Metrics:
    """The metrics that the metrics file lists, on a page or as log lines. Raises BadSettings for a bad file.

    A page is read when it is asked for. Log lines need a thread, which ends after all parts that measure.
    """
    path = settings.metrics_config
    definitions = BUILT_IN if path is None else read_metrics_file(path)
    models = ModelMetrics(definitions, detects=settings.model_metrics_auto_detect)
    mode, lines = settings.metrics_mode, None
    if mode != "prometheus":
        skips = LEGACY_PAGE if mode == "legacy" else ()
        lines = MetricsLog(definitions.front, models.known, machine.hostname, logs.write_metrics, skips)
    metrics = Metrics(
        machine.hostname, logs.dropped, definitions=definitions, model_metrics=models, mode=mode, lines=lines
    )
    if lines is not None:
        lines.start(metrics.responses)
        stack.callback(lines.close)
    return metrics


async def build_tracing(
    settings: Settings, metrics: Metrics, recorder: Recorder | None, stack: contextlib.AsyncExitStack
) -> Tracing | None:
    """The traces of requests, with `tracing=otlp`; None without, and where the libraries cannot be used.

    They are sent by a thread, which ends after all parts that take requests.
    """
    if settings.tracing == "off":
        return None
    share = None if settings.trace_sample == "auto" else settings.trace_sample
    # On a thread: importing the libraries takes half a second.
    opened = await asyncio.to_thread(open_tracing, share, settings.trace_slower_than, __version__, os.environ)
    if opened is None:
        return None
    exporter, sampling = opened
    exporter.start()
    stack.push_async_callback(asyncio.to_thread, exporter.stop)
    declare_families(metrics, TRACE_FAMILIES, exporter)
    tracing = Tracing(exporter, sampling, recorder)
    metrics.happenings.heard = tracing.note
    return tracing


def declare_families(
    metrics: Metrics,
    families: Iterable[tuple[str, str, str, str, Callable[[Counted], Mapping[str, float]]]],
    counted: Counted,
) -> None:
    """Show families that a part counts itself: name, kind, text, label, and the function that reads `counted`."""
    for name, kind, text, label, read in families:
        metrics.declare(name, kind, text, label, functools.partial(read, counted))


async def watch_machine(settings: Settings, devices: DeviceWatch | None, metrics: Metrics) -> None:
    """Read the machine's figures from time to time; `devices` watches its accelerators, if there are any."""
    if settings.system_metrics_cmd:
        await _watch_with_program(settings.system_metrics_cmd.split(), settings, metrics)
    meter = Meter(lambda: () if devices is None else devices.readings)
    while True:
        metrics.set_system(await asyncio.to_thread(meter.read))
        await asyncio.sleep(settings.metric_time_interval)


async def _watch_with_program(words: list[str], settings: Settings, metrics: Metrics) -> NoReturn:
    """Have the operator's own program read the machine's figures. Each new error of it is logged once."""
    last_trouble = ""
    while True:
        trouble = ""
        try:
            printed = await run_program(words, settings.working_directory, PROGRAM_S)
        except ProgramFailed as error:
            trouble = str(error)
        else:
            for line in printed:
                metric = parse_line(line)
                if metric is None:
                    trouble = f"printed a line that says no metric: {line[:200]!r}"
                elif not metrics.update_front(metric):
                    trouble = f"measured {metric.name}, which ts_metrics does not list with those dimensions"
        if trouble and trouble != last_trouble:
            log.error("system_metrics_cmd=%s %s", " ".join(words), trouble)
        last_trouble = trouble
        await asyncio.sleep(settings.metric_time_interval)
