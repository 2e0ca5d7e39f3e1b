"""Which settings `marserve tune --goal` tries of a version, and what it cannot try of this one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from marserve.cli.measuring.tuned_copy import setting_of
from marserve.cli.output import WrongArguments
from marserve.cli.remote import is_loopback
from marserve.messages import Part, Request
from marserve.pool.dispatch.lengths.lengths import FROM_HANDLER, read_rule
from marserve.tuning.payloads import Payload
from marserve.tuning.settings import (
    BATCH_SIZES,
    BOUNDS,
    DELAYS_S,
    FOUND,
    PADDINGS,
    Layout,
    Setting,
    layouts,
    space,
)
from marserve.tuning.simulated import IDLE, Batching

# Inputs whose longest is less than so many times the shortest need no batches of about one length.
ALIKE = 1.2


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command was asked for, as it was typed."""

    model: str
    version: str | None
    goal: str
    within: str
    inputs: Path | None
    workers: str | None
    threads: str | None
    candidates: Sequence[str]
    is_live: bool
    applies: bool
    page: Path | None
    model_config: Path | None


@dataclass(frozen=True, slots=True)
class Space:
    """What is tried: the settings, the present one, how batches are formed, and sentences about what is left out."""

    settings: list[Setting]
    present: Setting
    batching: Batching
    notes: list[str] = field(default_factory=list)


def find_space(wish: Wish, described: Sequence[dict[str, Any]], payloads: Sequence[Payload], inference: str) -> Space:
    """The settings of these versions, the first of which is tuned. Raises WrongArguments."""
    first = described[0]
    no_threads = _why_no_threads(wish, first)
    goal = first.get("goal") or {}
    requests = tuple(Request("r", [Part("body", each.body, each.content_type or None)], []) for each in payloads)
    no_padding = _why_no_padding(wish, goal, requests)
    has_padding = bool(goal) and no_padding is None
    present = setting_of(first, with_threads=no_threads is None or wish.applies, with_padding=has_padding)
    found = _layouts(wish, described, present.layout, inference, has_threads=no_threads is None)
    notes = [] if no_threads is None else [f"Threads are not searched: {no_threads}"]
    if not goal:
        return Space(space(found, sorted({*BATCH_SIZES, present.batch_size}), DELAYS_S), present, IDLE, notes)
    if no_padding is not None:
        notes.append(f"The padding of batches is not searched: {no_padding}")
    else:
        budgets = sorted({*PADDINGS, present.layout.padding})
        found = [Layout(each.workers, each.version, each.threads, budget) for each in found for budget in budgets]
    batching = Batching(
        goal_s=goal["latencyGoalMs"] / 1000, length_from=goal["lengthFrom"] if has_padding else None, requests=requests
    )
    return Space(space(found, sorted({*BOUNDS, present.batch_size}), (FOUND,)), present, batching, notes)


def _why_no_padding(wish: Wish, goal: dict[str, Any], requests: Sequence[Request]) -> str | None:
    """Why the padding of batches cannot be tried, as a sentence; None if it can, or there is no such policy."""
    rule = goal.get("lengthFrom")
    if not goal:
        return None
    if rule is None or rule == FROM_HANDLER:
        return "no lengthFrom of its configuration says how long inputs are, or only its handler knows."
    if rule.startswith("header:"):
        return f"lengths are in the header {rule.removeprefix('header:')}, which these requests do not have."
    if wish.is_live or wish.applies:
        return "it comes with the archive, which --apply and --on-live leave as it is."
    lengths = [read_rule(rule)(request) for request in requests]
    if max(lengths) < ALIKE * max(1, min(lengths)):
        return f"all inputs are of about one length ({min(lengths):,} to {max(lengths):,}); --inputs names others."
    return None


def _why_no_threads(wish: Wish, described: dict[str, Any]) -> str | None:
    """Why the threads of workers cannot be tried, as a sentence; None if they can."""
    if wish.is_live or wish.applies:
        flag = "--on-live" if wish.is_live else "--apply"
        if wish.threads:
            raise WrongArguments(
                f"--threads and {flag} exclude each other.",
                "Workers get other threads when they are loaded, and not before.",
            )
        return f"{flag} changes what serves, whose workers get other threads only when they are loaded."
    if not described.get("threadsPerWorker"):
        return "the server does not say how many a worker has."
    if described.get("workerProgram"):
        return "its workers are programs in another language."
    if described.get("parallelLevel", 1) > 1 or described.get("parallelType"):
        return "its workers are groups of processes, which share them out."
    if any(worker.get("node") for worker in described.get("workers", ())):
        return "its workers are on other machines."
    if described.get("deviceType") == "gpu" and not wish.threads:
        return "it computes on an accelerator; --threads names numbers to try all the same."
    return None


def _layouts(
    wish: Wish, described: Sequence[dict[str, Any]], present: Layout, inference: str, *, has_threads: bool
) -> list[Layout]:
    """What is tried of each version: numbers of workers and of threads, those named or powers of two.

    Not named, they go up to this machine's processors where it serves, else to twice what there is.
    """
    host = urlsplit(inference).hostname
    is_here = host is None or is_loopback(host) or host in ("0.0.0.0", "::")
    each = max(1, present.threads)
    cores = max(present.workers * each, len(os.sched_getaffinity(0)) if is_here else 2 * present.workers * each)
    workers = _numbers("--workers", wish.workers, cores, present.workers)
    threads = _numbers("--threads", wish.threads, cores, present.threads) if has_threads else [present.threads]
    versions = [str(each["modelVersion"]) for each in described]
    return [
        layout
        for version in versions
        for layout in layouts(
            version, workers, threads, cores=cores, always=[present] if version == present.version else ()
        )
    ]


def _numbers(flag: str, word: str | None, most: int, present: int) -> list[int]:
    if word is None:
        return sorted({present, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})
    numbers = [each.strip() for each in word.split(",")]
    if not all(each.isdecimal() and 1 <= int(each) <= 1024 for each in numbers):
        raise WrongArguments(f"{flag} is {word!r}; it is numbers from 1 to 1024 with commas.", "1,2,4 are some.")
    return sorted({present, *map(int, numbers)})
