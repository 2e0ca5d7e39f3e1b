"""What a start shows on a terminal: one block with what listens where, the models and a command to try the first.

`block` and what it calls are pure. `StartScreen` is the companion of a server in front: it shows the block when the
models are loaded or a few seconds have passed, and a line for each model that is later.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from marserve import __version__
from marserve.cli.server.foreground import finishing_line
from marserve.cli.server.sample_request import curl_line
from marserve.cli.versions import Description, has_failed, is_ready, last_death, ready_workers
from marserve.names import escaped

if TYPE_CHECKING:
    from marserve.app.building.parts import Parts
    from marserve.app.draining import Stop
    from marserve.app.listeners import Listener

# The block comes after so long, though models are still loading.
LATEST_S = 3.0
LOOK_EVERY_S = 0.1
# In the block: ready models beyond these are counted; models that failed are all named.
MOST_READY = 12
MOST_REASON = 160

Style = Literal["bold", "green", "red", "yellow", "dim"]
Paint = Callable[[str, Style], str]
_CODES: dict[Style, str] = {"bold": "1", "green": "32", "red": "31", "yellow": "33", "dim": "2"}


def plain(text: str, style: Style) -> str:
    """The text without colours."""
    return text


def coloured(text: str, style: Style) -> str:
    """The text in the colours of a terminal."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


@dataclass(frozen=True, slots=True)
class Started:
    """A start as it stands. `listening` are (what, where); `seconds` says how long a model took, by `name version`."""

    listening: Sequence[tuple[str, str]]
    models: Sequence[Description]
    inference: str
    device: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    failures: Sequence[str] = ()
    ending: str = ""


def block(started: Started, paint: Paint = plain) -> list[str]:
    """The lines of the block."""
    head = f"  {paint(f'marserve {__version__}', 'bold')}"
    lines = ["", f"{head}   {started.device}" if started.device else head, ""]
    width = max((len(what) for what, _ in started.listening), default=0)
    lines += [f"  {what:<{width}}   {where}" for what, where in started.listening]
    lines += ["", *_models(started, paint)]
    lines += [f"  {paint('failed', 'red')}  {_short(sentence)}" for sentence in started.failures]
    first = next((version for version in started.models if ready_workers(version)), None)
    if first is not None:
        lines += ["", f"  {try_it(first, started.inference)}"]
    return [*lines, *(["", f"  {paint(started.ending, 'dim')}"] if started.ending else []), ""]


def _models(started: Started, paint: Paint) -> list[str]:
    models = list(started.models)
    if not models:
        return [] if started.failures else ["  no model is loaded; `marserve register ARCHIVE` adds one"]
    width = max(len(name_of(version)) for version in models)
    lines, ready = [], 0
    for version in models:
        if is_ready(version):
            ready += 1
            if ready > MOST_READY:
                continue
        lines.append(model_line(version, started.seconds.get(name_of(version)), paint, width))
    if ready > MOST_READY:
        lines.append(f"  … and {ready - MOST_READY} more that are ready; `marserve models` lists all")
    return lines


def model_line(version: Description, seconds: float | None, paint: Paint = plain, width: int = 0) -> str:
    """A model with its state, and how long it took or why it failed."""
    name = f"  {name_of(version):<{width}}   "
    if is_ready(version):
        workers = ready_workers(version)
        took = "" if seconds is None else f" in {seconds:.1f} s"
        if not workers:
            return f"{name}{paint('asleep', 'dim')}   no worker until a request comes"
        return f"{name}{paint('ready', 'green')}{took}   {workers} worker{'' if workers == 1 else 's'}"
    if has_failed(version):
        reason = _short(last_death(version) or "no worker is left")
        return f"{name}{paint('failed', 'red')}   {reason}; `marserve models {version['modelName']}` shows all of it"
    return f"{name}{paint('loading', 'yellow')}"


def name_of(version: Description) -> str:
    """`digits 1.0`."""
    return f"{version['modelName']} {version['modelVersion']}"


def _short(text: str) -> str:
    text = escaped(text)
    return text if len(text) <= MOST_REASON else f"{text[: MOST_REASON - 1]}…"


def try_it(version: Description, inference: str) -> str:
    """A command that asks the model: with its declared input where it is known, else with a file."""
    return curl_line(inference, f"/predictions/{version['modelName']}", version.get("declaration"))


# ------------------------------------------------------------------------------------------- in front


_WORKER = re.compile(r"^W-\d+-(\S+) ")
# What the block says of a load that failed.
_OF_LOADS = re.compile(r"^(W-\d+-\S+ ended \(|Model \S+ version \S+ failed to load)")


class StartScreen:
    """The companion of `marserve start --foreground` on a terminal."""

    binds_grpc = True
    shows_tracebacks = False

    def __init__(self, show: Callable[[str], None], began: float, logs: str, paint: Paint = plain) -> None:
        """`show` prints a line; `began` is when the command began, by `time.monotonic`; `logs` is the logs' folder."""
        self._show, self._began, self._logs, self._paint = show, began, logs, paint
        self._seconds: dict[str, float] = {}
        self._is_shown = False

    def shorten(self, text: str) -> str:
        """A line of the logs without the name of a worker's process.

        Empty for what the block says, and for the traceback of a worker that ended, which describe has.
        """
        if (not self._is_shown and _OF_LOADS.match(text)) or text.startswith("Traceback "):
            return ""
        return _WORKER.sub(r"\1 ", text)

    def with_own_paths(self, text: str) -> str:
        """The text: archives are the only copies."""
        return text

    async def live(self, parts: Parts, listeners: Sequence[Listener], reading: asyncio.Task[Any], stop: Stop) -> None:
        """Show the block, then a line for each model that was still loading."""
        until = time.monotonic() + LATEST_S
        models = self._look(parts)
        while time.monotonic() < until and not (reading.done() and all(map(_is_settled, models))):
            await asyncio.sleep(LOOK_EVERY_S)
            models = self._look(parts)
        started = Started(
            listening_at([(each.names, str(each.address)) for each in listeners], _grpc_of(parts)),
            models,
            next(str(each.address) for each in listeners if "Inference" in each.names),
            _device_of(parts, models),
            self._seconds,
            parts.registry.startup_failures,
            f"Logs are in {self._logs}; --verbose shows them here. Ctrl-C stops the server.",
        )
        await self._say(*block(started, self._paint))
        self._is_shown = True
        await self._tell_late(parts, reading, started)

    async def _tell_late(self, parts: Parts, reading: asyncio.Task[Any], started: Started) -> None:
        shown = {name_of(version) for version in started.models if _is_settled(version)}
        has_command = any(map(ready_workers, started.models))
        failures = len(started.failures)
        while not (reading.done() and all(name_of(version) in shown for version in self._look(parts))):
            await asyncio.sleep(LOOK_EVERY_S)
            for version in self._look(parts):
                if name_of(version) in shown or not _is_settled(version):
                    continue
                shown.add(name_of(version))
                await self._say(model_line(version, self._seconds.get(name_of(version)), self._paint))
                if not has_command and ready_workers(version):
                    has_command = True
                    await self._say(f"  {try_it(version, started.inference)}")
        for sentence in parts.registry.startup_failures[failures:]:
            await self._say(f"  {self._paint('failed', 'red')}  {_short(sentence)}")

    def finishing(self, requests: int, limit_s: float) -> None:
        """Say what a stop waits for."""
        self._show(f"  {finishing_line(requests, limit_s)}")

    async def _say(self, *lines: str) -> None:
        await asyncio.to_thread(self._show, "\n".join(lines))  # a terminal may be stopped

    def _look(self, parts: Parts) -> list[Description]:
        models = [
            version
            for model, _ in parts.registry.list_models().models
            for version in parts.registry.describe_all(model)
        ]
        for version in models:
            if is_ready(version):
                self._seconds.setdefault(name_of(version), time.monotonic() - self._began)
        return models


def _is_settled(version: Description) -> bool:
    return is_ready(version) or has_failed(version)


def listening_at(http: Sequence[tuple[Sequence[str], str]], grpc: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """What listens where, as the block has it."""
    return [(" and ".join(names).capitalize(), escaped(address)) for names, address in http] + list(grpc)


def _grpc_of(parts: Parts) -> list[tuple[str, str]]:
    settings = parts.settings
    if sys.modules.get("grpc") is None:
        return []
    inference = f"{settings.grpc_inference_address}:{settings.grpc_inference_port}"
    management = f"{settings.grpc_management_address}:{settings.grpc_management_port}"
    return [("gRPC", f"{inference}   management {management}")]


def _device_of(parts: Parts, models: Sequence[Description]) -> str:
    machine = parts.machine
    names = sorted({each.name or "accelerator" for each in machine.devices})
    device = f"{len(machine.devices)} × {', '.join(names)}" if machine.devices else "CPU"
    return device_line(device, machine.cores, models)


def device_line(device: str, cores: int, models: Sequence[Description]) -> str:
    """The device and the threads: `CPU, 2 cores, 1 thread a worker`."""
    workers = max((int(version["maxWorkers"]) for version in models), default=0) or cores
    threads = max(1, cores // workers)
    return f"{device}, {cores} core{'' if cores == 1 else 's'}, {threads} thread{'' if threads == 1 else 's'} a worker"


def device_of_workers(models: Sequence[Description]) -> str:
    """What the workers of these versions compute on: `CPU`, or how many accelerators."""
    workers = [worker for version in models for worker in version.get("workers", ())]
    devices = {number for worker in workers for number in (worker.get("gpuIds") or [worker.get("gpuId")])} - {None}
    return f"{len(devices)} accelerator{'' if len(devices) == 1 else 's'}" if devices else "CPU"
