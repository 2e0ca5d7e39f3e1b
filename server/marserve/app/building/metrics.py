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
from marserve.app.building.cannot_start import CannotStart
from marserve.machine.describe import Machine, Meter
from marserve.machine.device_watch import DeviceWatch
from marserve.machine.measuring_program import ProgramFailed, run_program
from marserve.machine.own_thread import in_own_thread
from marserve.plugins import find_collectors
from marserve.registry.models import Registry
from marserve.registry.observing.processes import ProcessLooks
from marserve.settings import Settings
from marserve.telemetry.logs.logs import Logs
from marserve.telemetry.metrics.handler_metrics import ModelMetrics
from marserve.telemetry.metrics.metric_definitions import BUILT_IN, read_metrics_file
from marserve.telemetry.metrics.metric_line import parse_line
from marserve.telemetry.metrics.metrics_log import MetricsLog
from marserve.telemetry.metrics.page.foreign import ForeignCollectors, Source
from marserve.telemetry.metrics.page.torchserve import LEGACY_PAGE
from marserve.telemetry.metrics.scrapes import Scrapes
from marserve.telemetry.metrics.server_metrics import Metrics
from marserve.telemetry.recorder import RECORD_BYTES, TRACE_BYTES, FiledRecorder, Recorder
from marserve.telemetry.recorder_file import FileUnusable
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


def build_scrapes(settings: Settings, metrics: Metrics, registry: Registry) -> Scrapes:
    """Writes the metrics page, with the collectors of plug-ins and of prometheus_client's own registry.

    `torchserve` has one format, as TorchServe had. Raises BadSettings for a plug-in that is no collector.
    """
    sources: list[Source] = []
    looks = []
    if settings.metrics_mode == "prometheus":
        metrics.declare_rows("marserve_rollout_arm_requests", registry.mirrors.arm_rows)
        looks.append(ProcessLooks(registry.processes, in_own_thread).look)
        sources.append(Source("prometheus_client", "prometheus_client's own registry", _LibraryRegistry()))
        for each in find_collectors():
            sources.append(Source(each.name, each.origin, each.collector))
            log.info("The metrics page has what %s collects", each.origin)
    foreign = ForeignCollectors(sources, in_own_thread)
    return Scrapes(metrics, foreign, negotiates=settings.entry == "marserve", looks=looks)


class _LibraryRegistry:
    """The registry that prometheus_client has for a process: its collectors of the process, the platform and garbage
    collection, and whatever code in this process measures by the library.
    """

    def collect(self) -> Iterable[object]:
        # Importing the library takes 14 ms, which a start does without.
        from prometheus_client import REGISTRY

        return REGISTRY.collect()


def build_recorder(settings: Settings, stack: contextlib.ExitStack | contextlib.AsyncExitStack) -> Recorder | None:
    """What keeps the timelines of requests; None if none are kept. Raises CannotStart for a file it cannot have."""
    if not settings.flight_recorder_size:
        return None
    record_bytes = RECORD_BYTES if settings.tracing == "off" else RECORD_BYTES + TRACE_BYTES
    if settings.flight_recorder_file is None:
        return Recorder(settings.flight_recorder_size, record_bytes)
    try:
        recorder = FiledRecorder(settings.flight_recorder_size, settings.flight_recorder_file, record_bytes)
    except FileUnusable as error:
        raise CannotStart(f"flight_recorder_file cannot be used: {error}; name another one") from error
    stack.callback(recorder.close)
    return recorder


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
    families: Iterable[tuple[str, Callable[[Counted], Mapping[str, float]]]],
    counted: Counted,
) -> None:
    """Show families of the catalogue that a part counts itself: their names, and what reads `counted`."""
    for name, read in families:
        metrics.declare(name, functools.partial(read, counted))


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
