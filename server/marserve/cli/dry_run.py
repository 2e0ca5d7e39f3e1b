"""Dry runs: a command that changes something asks the server what would change, and shows it.

A server without dry runs would carry out the call. So it is first asked whether it has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from rich.filesize import decimal
from rich.table import Table

from marserve.answers.management import UploadedArchive
from marserve.cli.output import CommandFailed, Output, Step, table
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.remote import QUICK_S, Management
from marserve.errors import without_stop

DRY: Mapping[str, str] = {"dry_run": "true"}
"""The parameter of a dry run."""
HEAD = "This would be, and nothing was changed:"
MIB = 1 << 20
# The type of the error for an archive that the store has not.
_NOT_THERE = "ModelNotFoundException"


def as_dry(document: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document of a dry run."""
    return {**document, "isDryRun": True}


def query(is_dry: bool) -> dict[str, str]:
    """The parameters of a call that every server which has the call can dry-run."""
    return dict(DRY) if is_dry else {}


def show_dry_run(
    server: Management,
    output: Output,
    method: str,
    path: str,
    parameters: Mapping[str, str | int] | None = None,
    *,
    look: Callable[[], Sequence[Step]] = list,
    title: str = "Looking what would be",
    timeout_s: float | None = QUICK_S,
) -> None:
    """Send a call as a dry run and show the answer. Raises CommandFailed if the call would fail."""
    _insist_on_dry_runs(server)
    asked = {**(parameters or {}), **DRY}
    outcome = while_showing(lambda: server.order(method, path, asked, timeout_s=timeout_s), look, output, title)
    if not outcome.get("isDryRun"):
        raise CommandFailed(f"The server at {server.address} did not take {method} {path} for a dry run.")
    output.result(outcome, HEAD, *lines_of(outcome))


def show_dry_run_of_sent(
    output: Output, sent: UploadedArchive | None, show: Callable[[], None], what: str, *, replaces: bool
) -> None:
    """Show a dry run by `show`; of an archive that the server has only checked, what can be said.

    `what` is in words what the command does with it. With `replaces` the store may have another file of the name, whose
    dry run would say nothing of the one sent.
    """
    if sent is not None:
        output.note(
            f"{sent.archive} ({decimal(sent.bytes)}) would be sent; the server has checked it and kept nothing."
        )
    if sent is None or not replaces:
        try:
            show()
            return
        except CommandFailed as failure:
            if sent is None or failure.detail.get("type") != _NOT_THERE:
                raise
    output.result(
        as_dry({"upload": msgspec.to_builtins(sent)}),
        HEAD,
        f"{sent.archive}: sent to the server and {what} can be said when it is there",
    )


def lines_of(outcome: Mapping[str, Any]) -> list[str | Table]:
    """A dry run's answer for a person: a sentence, a table of values now and then, memory, notes."""
    before, after = outcome.get("before") or {}, outcome.get("after") or {}
    rows = [
        [_words(name), _shown(before.get(name)), _shown(value)]
        for name, value in after.items()
        if value not in ([], None) or before.get(name) not in ([], None)
    ]
    lines: list[str | Table] = [f"{without_stop(outcome['status'])}."]
    if rows:
        lines.append(table(["", "now", "then"], rows))
    return [*lines, *_memory(outcome), *(f"Note: {without_stop(note)}." for note in outcome.get("notes", []))]


def _insist_on_dry_runs(server: Management) -> None:
    """Raise CommandFailed for a server without dry runs: TorchServe, or an earlier marserve."""
    answer = server.ask("OPTIONS", "/")
    try:
        call = answer.json()["paths"]["/models/{model_name}/{model_version}/set-default"]["put"]
        knows = any(parameter["name"] == "dry_run" for parameter in call["parameters"])
    except (ValueError, KeyError, TypeError):
        knows = False
    if not knows and answer.status_code < 400:
        raise CommandFailed(
            f"The server at {server.address} knows no dry run of this: it would do it.",
            "Leave --dry-run out, or update the server.",
        )
    if not knows:
        server.order("GET", "/models", {"limit": 1})  # to fail in the server's words: a missing key, say
        raise CommandFailed(f"The server at {server.address} does not say whether it knows dry runs; nothing was sent.")


def _memory(outcome: Mapping[str, Any]) -> list[str]:
    lines = []
    if memory := outcome.get("memory"):
        more = int(memory["moreBytes"])
        text = f"Memory: {abs(more) / MIB:,.0f} MiB {'less' if more < 0 else 'more'} ({memory['source']})"
        if "freeBytes" in memory:
            free, had, budget = (memory[name] / MIB for name in ("freeBytes", "couldBeHadBytes", "budgetBytes"))
            text += f"; of {budget:,.0f} MiB for models {free:,.0f} MiB are free, and {had:,.0f} MiB can be had"
        lines.append(f"{text}.")
    if devices := outcome.get("deviceMemory"):
        size = f"{devices['bytesPerWorker'] / MIB:,.0f} MiB a worker ({devices['source']})"
        lines.append(f"On its devices: {size}; there are places for {devices['places']} more.")
    return lines


def _words(name: str) -> str:
    """`max batch delay` of `maxBatchDelay`."""
    return re.sub("([A-Z])", lambda found: f" {found[1].lower()}", name)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
