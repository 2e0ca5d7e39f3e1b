"""What a version takes before it is loaded, as far as that is known: declared, learned, or estimated. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1024 * 1024

# What a worker's interpreter with its handler takes before there are any weights, and what importing torch adds.
INTERPRETER_BYTES = 40 * MIB
RUNTIME_BYTES = 220 * MIB
# What a worker takes that is forked from a loaded template: its own pages, while it answers.
FORKED_BYTES = 48 * MIB
# What a process takes on a device before its weights: the context, and the kernels of the runtime's libraries.
CONTEXT_BYTES = 512 * MIB
# With `auto` so much of the machine's (or the container's) memory is not for models: the server, files' pages, others.
RESERVE_SHARE = 0.1
LEAST_RESERVE_BYTES = 256 * MIB

Source = Literal["declared", "learned", "estimated"]


def budget_of(total_bytes: int) -> int:
    """The budget for models that `auto` means on a machine, or in a container, of so much memory."""
    return max(0, total_bytes - max(LEAST_RESERVE_BYTES, int(RESERVE_SHARE * total_bytes)))


@dataclass(frozen=True, slots=True)
class Need:
    """What a version takes, in bytes: `first_bytes` with one worker (its template counted), `more_bytes` each further
    one, `peak_bytes` for a moment while the first is loaded. `source` says how that is known.
    """

    first_bytes: int
    more_bytes: int
    peak_bytes: int
    source: Source

    def resident(self, workers: int) -> int:
        """With so many workers that have loaded the model."""
        return self.first_bytes + (workers - 1) * self.more_bytes if workers > 0 else 0

    def loading(self, workers: int) -> int:
        """While it is loaded, to have so many workers then."""
        return max(self.peak_bytes, self.first_bytes) - self.first_bytes + self.resident(workers) if workers > 0 else 0


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """What a worker takes on each of its devices, in bytes, and how that is known."""

    size: int
    source: Source


@dataclass(frozen=True, slots=True)
class Learned:
    """What a version was seen to take. As `Need`; `load_s` is how long loading took, in seconds."""

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
    """What a version takes of the host's memory.

    What its configuration declares is believed, for the first worker; then what was seen of it before; else it is
    estimated: the weights, an interpreter, a runtime where there are weights. Weights that go to a device are not held
    here for long, but they pass through. `shares_weights`: its workers are forked from a template that has loaded them.
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
    """What a worker takes on each of its devices."""
    if declared_bytes is not None:
        return DeviceNeed(declared_bytes, "declared")
    if learned_bytes is not None:
        return DeviceNeed(learned_bytes, "learned")
    return DeviceNeed(weight_bytes // max(1, devices_per_worker) + CONTEXT_BYTES, "estimated")
