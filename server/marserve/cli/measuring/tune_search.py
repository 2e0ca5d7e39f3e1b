"""What `marserve tune --goal` asks the search for, shows of it, and applies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from marserve.cli.measuring.load_target import described as describe
from marserve.cli.measuring.load_target import find_payloads, target_at, try_once
from marserve.cli.measuring.tuned_copy import GOVERNED, TunedCopy, setting_of
from marserve.cli.options import read_seconds
from marserve.cli.output import CommandFailed, Interrupted, Output, WrongArguments, table
from marserve.cli.remote import Management, is_loopback, model_path
from marserve.errors import without_stop
from marserve.files.atomic import replace_file
from marserve.tuning.patch import FILE, patch, patched, values_of
from marserve.tuning.search import Found, Row, search
from marserve.tuning.settings import BATCH_SIZES, DELAYS_S, Goal, Layout, Setting, read_goal, space

if TYPE_CHECKING:
    from rich.table import Table

# What is not better by more than this stays as it is.
GAIN: Final = 0.05
SHOWN: Final = 8
LEAST_S: Final = 10.0
OPTIMISED: Final = "-optimised"
_NEXT = "`marserve tune MODEL --goal p99=50ms --for 5m` is one."


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command was asked for, as it was typed."""

    model: str
    version: str | None
    goal: str
    within: str
    inputs: Path | None
    workers: str | None
    candidates: Sequence[str]
    is_live: bool
    applies: bool
    page: Path | None
    model_config: Path | None


def tune_for(wish: Wish, server: Management, inference: str, output: Output) -> None:
    """Search, show, and apply if that was asked for. Raises CommandFailed, WrongArguments and Interrupted."""
    goal, seconds = _goal(wish), _seconds(wish)
    before = _read_config(wish.model_config)
    described = _versions(wish, server)
    first, present = described[0], setting_of(described[0])
    version = str(first["modelVersion"])
    payloads = find_payloads(wish.inputs, first)
    workers = _workers(wish.workers, present.layout.workers, inference)
    if wish.applies or wish.is_live:
        _check_change(server, wish.model, present)
    try_once(inference, target_at(inference, wish.model, version), wish.model, version, payloads, timeout_s=120.0)
    layouts = [Layout(count, str(each["modelVersion"])) for each in described for count in workers]
    sizes = sorted({*BATCH_SIZES, present.batch_size})
    with output.progress() as bar:
        task = bar.add_task("", total=None)
        copy = TunedCopy(
            server,
            described,
            lambda name, version: target_at(inference, name, version),
            payloads,
            goal,
            seconds,
            lambda text: bar.update(task, description=text),
            wish.is_live,
        )
        try:
            with copy:
                found = search(space(layouts, sizes, DELAYS_S), goal, copy, present=present)
        except KeyboardInterrupt:
            is_back = (
                "The version has its options back." if wish.is_live else "The copy is removed, and nothing changed."
            )
            raise Interrupted(f"The search was given up. {copy.left or is_back}") from None
    if copy.left:
        found.notes.append(copy.left)
    found.notes += dict.fromkeys(copy.notes)
    _note_traffic(first, found)
    if not found.rows:
        why = "; ".join(found.notes) or "time was up"
        raise CommandFailed(
            f"No batch of {wish.model} {version} was answered: {without_stop(why)}.",
            "`marserve bench` shows what its answers are; --for gives more time.",
        )
    chosen = _chosen(found)
    if before is None:
        before = patched("", {**values_of(present), "minWorkers": first["minWorkers"]})
    text = patch(before, before if chosen is None else patched(before, values_of(chosen.setting)))
    result = _result(found, chosen, goal)
    if wish.page is not None:
        _write_page(wish.page, f"{wish.model} {version}", goal, result, found, text)
    applied = None
    if wish.applies and chosen is not None:
        applied = _apply(server, wish.model, version, chosen)
    lines = _lines(wish, goal, found, copy.asked, result)
    if text:
        lines += [f"As a patch of {FILE}:", text.rstrip("\n")]
    if applied:
        lines.append(applied)
    elif chosen is not None:
        lines.append("Nothing was changed: --apply sets it now, until the archive is registered again.")
    output.result(_document(wish, version, goal, found, copy.asked, chosen, text, applied), *lines)


def _goal(wish: Wish) -> Goal:
    try:
        return read_goal(wish.goal)
    except ValueError as error:
        raise WrongArguments(f"{without_stop(error)}.", _NEXT) from error


def _seconds(wish: Wish) -> float:
    seconds = read_seconds("--for", wish.within) or 0.0
    if seconds < LEAST_S:
        raise WrongArguments(f"--for is {wish.within!r}, which is too short: {LEAST_S:g} s are the least.", _NEXT)
    return seconds


def _read_config(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is no text"
        raise WrongArguments(f"{file} cannot be read: {without_stop(what)}.", f"Name the archive's {FILE}.") from error


def _versions(wish: Wish, server: Management) -> list[dict[str, Any]]:
    """The version that is tuned, then its candidates: those that were named, else its optimised one if it is there."""
    first = describe(server, wish.model, wish.version)
    if wish.is_live:
        if wish.candidates:
            raise WrongArguments("--candidate and --on-live exclude each other.", "Candidates are loaded as copies.")
        return [first]
    if wish.candidates:
        return [first, *(describe(server, wish.model, each) for each in dict.fromkeys(wish.candidates))]
    optimised = f"{first['modelVersion']}{OPTIMISED}"
    return [first, *(each for each in server.describe(wish.model) if each["modelVersion"] == optimised)]


def _workers(word: str | None, present: int, inference: str) -> list[int]:
    """How many workers are tried: those named, else powers of two up to this machine's processors, if it serves."""
    if word is None:
        host = urlsplit(inference).hostname
        is_here = host is None or is_loopback(host) or host in ("0.0.0.0", "::")
        most = max(present, len(os.sched_getaffinity(0))) if is_here else 2 * present
        return sorted({present, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})
    numbers = [each.strip() for each in word.split(",")]
    if not all(each.isdecimal() and 1 <= int(each) <= 1024 for each in numbers):
        raise WrongArguments(f"--workers is {word!r}; it is numbers from 1 to 1024 with commas.", "1,2,4 are some.")
    return sorted({present, *map(int, numbers)})


def _check_change(server: Management, model: str, present: Setting) -> None:
    """Raise CommandFailed before minutes are spent, where the server would refuse the change."""
    parameters: dict[str, str | int] = {"batch_size": present.batch_size, "dry_run": "true"}
    try:
        server.order("PUT", model_path(model, present.layout.version), parameters)
    except CommandFailed as failure:
        if failure.detail.get("code") == 409:
            failure.next_step = GOVERNED
        raise


def _apply(server: Management, model: str, version: str, row: Row) -> str:
    setting = row.setting
    if setting.layout.version != version:
        return (
            f"Not applied: it is version {setting.layout.version}; let it take over with "
            f"`marserve rollout {model} {setting.layout.version}` first."
        )
    workers = setting.layout.workers
    server.order(
        "PUT",
        model_path(model, version),
        {
            "batch_size": setting.batch_size,
            "max_batch_delay": round(1000 * setting.delay_s),
            "min_worker": workers,
            "max_worker": workers,
            "synchronous": "true",
        },
        timeout_s=None,
    )
    return f"Applied to {model} {version}; registering its archive again brings the old values back."


def _note_traffic(described: dict[str, Any], found: Found) -> None:
    rate = (described.get("lastMinute") or {}).get("requestsPerSecond", 0.0)
    if rate > 0:
        found.notes.append(
            f"Clients sent {rate:g} requests a second before: what those take of the machine is missing in the figures."
        )


def _chosen(found: Found) -> Row | None:
    """The best setting, if it is surely better than the present one."""
    best, present = found.best, found.present
    if best is None or best is present:
        return None
    if present is not None and (best.measured or 0.0) <= (1 + GAIN) * (present.measured or 0.0):
        return None
    return best


def _result(found: Found, chosen: Row | None, goal: Goal) -> str:
    if chosen is None:
        if not any(row.foreseen for row in found.rows):
            return f"No setting keeps {goal} by the simulation: a longer time may be kept, or a faster build is needed."
        if all(row.measured is None for row in found.rows if row is not found.present):
            return "It stays as it is: there was time to measure nothing else. --for gives more."
        if found.best is None:
            return f"No setting that was measured keeps {goal}: a longer time may be kept, or a faster build is needed."
        return f"It stays as it is: nothing is better by more than {GAIN:.0%}."
    measured = f"{chosen.measured:.0f} a second"
    if found.present is None or not found.present.measured:
        return f"The best: {chosen.setting}, with {measured}; as it is now it keeps {goal} at no rate that was tried."
    times = (chosen.measured or 0.0) / found.present.measured
    return f"The best: {chosen.setting}, with {measured}, {times:.2f} times as much as now."


def _write_page(page: Path, name: str, goal: Goal, result: str, found: Found, text: str) -> None:
    from marserve.tuning.page import write_page  # here, for the time of searches without

    try:
        replace_file(page, write_page(name, str(goal), result, found, text).encode(), mode=0o644)
    except OSError as error:
        raise CommandFailed(f"The page {page} cannot be written: {error.strerror}.") from error


def _shown(found: Found) -> list[Row]:
    """The present one, those that were measured, and some more of the best foreseen."""
    first = [found.present] if found.present is not None else []
    rows = [row for row in found.rows if row.measured is not None and row is not found.present]
    return [*first, *sorted(rows, key=lambda row: -(row.measured or 0.0))][:SHOWN]


def _lines(wish: Wish, goal: Goal, found: Found, asked: int, result: str) -> list[str | Table]:
    rows = []
    for row in _shown(found):
        kept = [sample for rate, sample in row.samples if rate is None or rate == row.measured]
        seen = kept[-1:] or [sample for _, sample in row.samples[-1:]]  # of none that kept the goal, the slowest rate
        time_s = seen[0].percentile_s if seen else None
        rows.append(
            [
                f"{row.setting}{' (now)' if row is found.present else ''}",
                f"{row.foreseen:.0f} /s",
                _measured(row),
                "-" if time_s is None else f"{1000 * time_s:.3g} ms",
                str(row.failed),
            ]
        )
    share = f"p{100 * goal.share:g}"
    return [
        f"{wish.model}, {goal}: {len(found.rows)} settings of {len(found.costs)} numbers of workers simulated, "
        f"{len(rows)} measured, {asked:,} requests.",
        table(["setting", "foreseen", "measured", share, "failed"], rows),
        *(f"note: {note}" for note in found.notes),
        result,
    ]


def _measured(row: Row) -> str:
    """The highest rate that kept the goal; of none, how far down it was tried."""
    if not row.measured:
        rate = row.samples[-1][0] if row.samples else None
        return "-" if row.measured is None else "none" if rate is None else f"none, down to {rate:.0f} /s"
    return f"{row.measured:.0f} /s"


def _document(
    wish: Wish,
    version: str,
    goal: Goal,
    found: Found,
    asked: int,
    chosen: Row | None,
    text: str,
    applied: str | None,
) -> dict[str, Any]:
    return {
        "modelName": wish.model,
        "modelVersion": version,
        "goal": str(goal),
        "requests": asked,
        "simulated": len(found.rows),
        "costs": [
            {
                "version": layout.version,
                "workers": layout.workers,
                "msBySize": {str(size): 1000 * cost for size, cost in costs.known().items()},
            }
            for layout, costs in found.costs.items()
        ],
        "settings": [
            {
                "version": row.setting.layout.version,
                **values_of(row.setting),
                "isPresent": row is found.present,
                "foreseenPerSecond": row.foreseen,
                "measuredPerSecond": row.measured,
                "failed": row.failed,
            }
            for row in _shown(found)
        ],
        "chosen": None if chosen is None else {"version": chosen.setting.layout.version, **values_of(chosen.setting)},
        "patch": text,
        "applied": applied,
        "notes": found.notes,
    }
