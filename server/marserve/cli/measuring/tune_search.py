"""What `marserve tune --goal` asks the search for, shows of it, and applies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from marserve.cli.measuring.load_target import described as describe
from marserve.cli.measuring.load_target import find_payloads, target_at, try_once
from marserve.cli.measuring.tune_space import Wish, find_space
from marserve.cli.measuring.tuned_copy import TunedCopy
from marserve.cli.options import read_seconds
from marserve.cli.output import CommandFailed, Interrupted, Output, WrongArguments, table
from marserve.cli.remote import Management, model_path
from marserve.errors import without_stop
from marserve.files.atomic import replace_file
from marserve.tuning.patch import FILE, declaration, patch, patched, values_of
from marserve.tuning.search import Found, Row, search
from marserve.tuning.settings import Goal, Setting, read_goal

if TYPE_CHECKING:
    from rich.table import Table

# What is not better by more than this stays as it is.
GAIN: Final = 0.05
SHOWN: Final = 8
# Requests of clients, a second, that take nothing of the machine: a command or two that asked once.
FEW: Final = 0.1
LEAST_S: Final = 10.0
OPTIMISED: Final = "-optimised"
_NEXT = "`marserve tune MODEL --goal p99=50ms --for 5m` is one."


def tune_for(wish: Wish, server: Management, inference: str, output: Output) -> None:
    """Search, show, and apply if that was asked for. Raises CommandFailed, WrongArguments and Interrupted."""
    goal, seconds = _goal(wish), _seconds(wish)
    before = _read_config(wish.model_config)
    described = _versions(wish, server)
    first = described[0]
    version = str(first["modelVersion"])
    payloads = find_payloads(wish.inputs, first)
    tried = find_space(wish, described, payloads, inference)
    present = tried.present
    document = _document_of_server(server)
    if wish.applies or wish.is_live:
        _check_change(server, wish.model, present)
    try_once(inference, target_at(inference, wish.model, version), wish.model, version, payloads, timeout_s=120.0)
    with output.progress() as bar:
        task = bar.add_task("", total=None)
        copy = TunedCopy(
            server,
            first,
            present.layout,
            lambda name, version: target_at(inference, name, version),
            payloads,
            goal,
            seconds,
            lambda text: bar.update(task, description=text),
            wish.is_live,
        )
        try:
            with copy:
                found = search(tried.settings, goal, copy, batching=tried.batching, present=present)
        except (KeyboardInterrupt, SystemExit) as signalled:
            is_back = (
                "The version has its options back." if wish.is_live else "The copy is removed, and nothing changed."
            )
            given_up = Interrupted(f"The search was given up. {copy.left or is_back}")
            if isinstance(signalled, SystemExit) and isinstance(signalled.code, int):
                given_up.status = signalled.code
            raise given_up from None
        except CommandFailed as failure:
            if copy.left != failure.message:
                failure.next_step = " ".join(filter(None, (copy.left, failure.next_step))) or None
            raise
    if copy.left:
        found.notes.append(copy.left)
    found.notes += dict.fromkeys(copy.notes)
    found.notes += tried.notes
    _note_traffic(first, found)
    if not found.rows:
        why = "; ".join(found.notes) or "time was up"
        raise CommandFailed(
            f"No batch of {wish.model} {version} was answered: {without_stop(why)}.",
            "`marserve bench` shows what its answers are; --for gives more time.",
        )
    chosen = _chosen(found)
    threads = first.get("threads")
    if before is None:
        now = {**values_of(present), "minWorkers": first["minWorkers"], "threads": threads}
        before = patched("", {key: value for key, value in now.items() if value is not None})
    values = {} if chosen is None else values_of(chosen.setting, threads)
    text = patch(before, before if chosen is None else patched(before, values))
    result = _result(found, chosen, goal)
    if wish.page is not None:
        _write_page(wish.page, f"{wish.model} {version}", goal, result, found, text)
    applied = None
    if wish.applies and chosen is not None:
        applied = _apply(server, wish.model, version, chosen)
    lines = _lines(wish, goal, found, copy.asked, result)
    declared = None
    if document is not None and chosen is not None:
        other = chosen.setting.layout.version
        declared = declaration(wish.model, other, values, other if other != version and first["isDefault"] else None)
        lines += [f"In {document}, in place of what it says of these keys (and of `workers`):", declared]
    elif text:
        lines += [f"As a patch of {FILE}:", text.removesuffix("\n")]
    if applied:
        lines.append(applied)
    elif declared is not None:
        lines.append(
            "Nothing was changed: `marserve plan FILE` shows what the changed document would do, and "
            "`marserve apply FILE` does it."
        )
    elif chosen is not None:
        lines.append(_how_to_set(wish.model, chosen, present))
    output.result(_document(wish, version, goal, found, copy.asked, chosen, text, declared, applied), *lines)


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
        return file.read_bytes().decode("utf-8")  # with the ends of its lines, which the patch has to fit
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
        return [first, *(_candidate(server, wish.model, each) for each in dict.fromkeys(wish.candidates))]
    optimised = f"{first['modelVersion']}{OPTIMISED}"
    return [first, *(each for each in server.describe(wish.model) if each["modelVersion"] == optimised)]


def _candidate(server: Management, model: str, version: str) -> dict[str, Any]:
    try:
        return describe(server, model, version)
    except CommandFailed as failure:
        if failure.detail.get("code") == 404:
            failure.next_step = "A candidate is a version; `marserve register ARCHIVE` makes an archive one."
        raise


def _document_of_server(server: Management) -> str | None:
    """The name of the document that says which models the server has; None if none does."""
    try:
        source = server.order("GET", "/desired-state").get("source")
    except (CommandFailed, AttributeError):
        return None
    return None if source is None else str(source)


def _check_change(server: Management, model: str, present: Setting) -> None:
    """Raise CommandFailed before minutes are spent, where the server would refuse the change."""
    parameters: dict[str, str | int] = {"batch_size": present.batch_size, "dry_run": "true"}
    try:
        server.order("PUT", model_path(model, present.layout.version), parameters)
    except CommandFailed as failure:
        if failure.detail.get("code") == 409:
            failure.next_step = (
                "Leave out --apply and --on-live: a copy is loaded then, and what is found is printed as a change of "
                "the document."
            )
        raise


def _how_to_set(model: str, chosen: Row, present: Setting) -> str:
    best = chosen.setting.layout.version
    if best != present.layout.version:
        return (
            f"Nothing was changed: the best is version {best}, with these options in its archive; "
            f"`marserve rollout {model} {best}` lets it take over."
        )
    if chosen.setting.layout.build[1:] != present.layout.build[1:]:
        return "Nothing was changed: threads and padding come with the archive; pack it anew and `marserve swap` it in."
    return "Nothing was changed: --apply sets it now, until the archive is registered again."


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
    if rate > FEW:
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
        f"{wish.model}, {goal}: {len(found.rows)} settings of {len(found.costs)} layouts simulated, "
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
    declared: str | None,
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
                "threads": layout.threads or None,
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
        "declaration": declared,
        "applied": applied,
        "notes": found.notes,
    }
