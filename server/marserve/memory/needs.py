"""How much memory a version takes, before it is loaded: declared, learned, or estimated. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1024 * 1024

# What a worker's interpreter with its handler takes without weights, and what the import of torch adds.
INTERPRETER_BYTES = 40 * MIB
RUNTIME_BYTES = 220 * MIB
# What a worker forked from a loaded template takes: its own pages while it answers.
FORKED_BYTES = 48 * MIB
# What a process takes on a device before its weights: the context, and the kernels of the runtime's libraries.
CONTEXT_BYTES = 512 * MIB
# The part of the machine's (or container's) memory that `auto` leaves to the server, the page cache and others.
RESERVE_SHARE = 0.1
LEAST_RESERVE_BYTES = 256 * MIB

Source = Literal["declared", "learned", "estimated"]


def budget_of(total_bytes: int) -> int:
    """The budget for models under `auto`, on a machine or in a container with so much memory."""
    return max(0, total_bytes - max(LEAST_RESERVE_BYTES, int(RESERVE_SHARE * total_bytes)))


@dataclass(frozen=True, slots=True)
class Need:
    """How much a version takes, in bytes.

    `first_bytes` with one worker (and its template), `more_bytes` for each further worker, `peak_bytes` for a moment
    during the first load. `source` says how that is known.
    """

    first_bytes: int
    more_bytes: int
    peak_bytes: int
    source: Source

    def resident(self, workers: int) -> int:
        """What so many workers take that have loaded the model."""
        return self.first_bytes + (workers - 1) * self.more_bytes if workers > 0 else 0

    def loading(self, workers: int) -> int:
        """What so many workers take while the model is loaded."""
        return max(self.peak_bytes, self.first_bytes) - self.first_bytes + self.resident(workers) if workers > 0 else 0


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """How much a worker takes on each of its devices, in bytes, and how that is known."""

    size: int
    source: Source


@dataclass(frozen=True, slots=True)
class Learned:
    """What a version was measured to take. As `Need`; `load_s` is how long loading took, in seconds."""

    first_bytes: int
    more_bytes: int
    peak_bytes: int
    load_s: float


def need_of(
    *,
    declared_bytes: int | None,
    learned: Learned | None,
    weight_bytes: int,
    shares_weights: bool,
    uses_devices: bool,
) -> Need:
    """How much a version takes of the host's memory.

    For the first worker its configuration's declaration counts, then what was learned before, else an estimate: the
    weights, an interpreter, and a runtime if there are weights. Weights for a device count only for the peak: they pass
    through the host. `shares_weights`: its workers are forked from a template that has loaded them.
    """
    runtime = RUNTIME_BYTES if weight_bytes else 0
    held = 0 if uses_devices else weight_bytes
    estimated = INTERPRETER_BYTES + runtime + held
    more = FORKED_BYTES if shares_weights else estimated
    if declared_bytes is not None:
        if learned is not None:
            more = learned.more_bytes
        elif not shares_weights:
            more = declared_bytes
        return Need(declared_bytes, more, declared_bytes, "declared")
    if learned is not None:
        return Need(learned.first_bytes, learned.more_bytes, learned.peak_bytes, "learned")
    return Need(estimated, more, estimated - held + weight_bytes, "estimated")


def device_need(
    *, declared_bytes: int | None, learned_bytes: int | None, weight_bytes: int, devices_per_worker: int
) -> DeviceNeed:
    """How much a worker takes on each of its devices."""
    if declared_bytes is not None:
        return DeviceNeed(declared_bytes, "declared")
    if learned_bytes is not None:
        return DeviceNeed(learned_bytes, "learned")
    return DeviceNeed(weight_bytes // max(1, devices_per_worker) + CONTEXT_BYTES, "estimated")
