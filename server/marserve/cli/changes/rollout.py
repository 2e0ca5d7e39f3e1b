"""`marserve rollout`: let a version take over step by step, unless it is worse; and show, pause, resume, abort."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from msgspec import to_builtins

from marserve.cli.changes.shadow import read_compare
from marserve.cli.dry_run import HEAD, as_dry, query, show_dry_run, show_dry_run_of_sent
from marserve.cli.options import DryRun, Replace, SentAs, Upload, read_seconds
from marserve.cli.output import FAILED_STATUS, AsJson, Output, Step, WrongArguments, interrupted_as, table
from marserve.cli.progress.uploads import hinting_at_files, local_archive, send_named
from marserve.cli.progress.wait_progress import LOOK_EVERY_S, Lines
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, known_roots, model_path

_UNDER_WAY = ("preparing", "running", "paused")


def rollout(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    version: Annotated[
        str | None, typer.Argument(help="The version that is to take over; without it the roll-out is shown.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help="Register this archive first; with a slash (./m.mar) it is a file of this machine, which is sent to "
            "the server. Without it the version must be registered.",
        ),
    ] = None,
    upload: Upload = None,
    replace: Replace = False,
    sent_as: SentAs = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Its workers, with --url.")] = None,
    steps: Annotated[
        str | None,
        typer.Option("--steps", help="Its shares in percent, rising to 100; 5,25,50,100 if not given."),
    ] = None,
    hold: Annotated[
        str | None, typer.Option("--hold", metavar="TIME", help="How long each step lasts, such as 60s or 5m.")
    ] = None,
    max_hold: Annotated[
        str | None,
        typer.Option("--max-hold", metavar="TIME", help="How long a step waits at most for enough requests."),
    ] = None,
    max_error_increase: Annotated[
        str | None, typer.Option("--max-error-increase", help="More errors than that are too many; 1% if not given.")
    ] = None,
    max_p99_increase: Annotated[
        str | None,
        typer.Option("--max-p99-increase", help="A p99 longer by more than that is too slow; 25%, or off."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare", help='Mirror requests and compare answers: exact, handler, scores, or {"relative": 1e-3}.'
        ),
    ] = None,
    share: Annotated[
        str | None, typer.Option("--share", help="The share of requests that is mirrored, with --compare; 10%.")
    ] = None,
    max_difference: Annotated[
        str | None, typer.Option("--max-difference", help="More differing answers than that are too many; 0.1%.")
    ] = None,
    min_requests: Annotated[
        int | None, typer.Option("--min-requests", min=1, help="Fewer requests than that are too few to promote by.")
    ] = None,
    significance: Annotated[
        str | None, typer.Option("--significance", help="The chance that an equal version is rolled back; 1%.")
    ] = None,
    pause: Annotated[bool, typer.Option("--pause", help="Go no further until resumed.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="End it: the version before serves again.")] = False,
    promote: Annotated[bool, typer.Option("--promote", help="End it: the new version answers all.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Stay until it has ended; exit status 1 unless it was promoted.")
    ] = False,
    dry_run: DryRun = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Let a version take over step by step; it is taken back as soon as it is found to be worse."""
    with Output(as_json) as output, hinting_at_files(url or "", f"marserve rollout {model} {version} --url"):
        orders = [name for name, is_given in _given(pause, resume, abort, promote) if is_given]
        document = {
            "version": version,
            "url": url,
            "workers": workers,
            "steps": None if steps is None else [_percent_number("--steps", word) for word in steps.split(",")],
            "hold": read_seconds("--hold", hold),
            "max_hold": read_seconds("--max-hold", max_hold),
            "max_error_increase": _share("--max-error-increase", max_error_increase),
            "max_p99_increase": None if max_p99_increase == "off" else _share("--max-p99-increase", max_p99_increase),
            "compare": read_compare(compare),
            "share": _share("--share", share),
            "max_difference": _share("--max-difference", max_difference),
            "min_requests": min_requests,
            "significance": _share("--significance", significance),
        }
        document = {key: value for key, value in document.items() if value is not None}
        if max_p99_increase == "off":
            document["max_p99_increase"] = None
        if len(orders) > 1 or (orders and document):
            raise WrongArguments("One thing at a time: begin a roll-out, or give one order.", "See --help.")
        if version is None and document:
            raise WrongArguments("Options of a roll-out need its version.", f"marserve rollout {model} VERSION …")
        if dry_run and version is None and not orders:
            raise typer.BadParameter("it needs something to do: a version, or an order", param_hint="--dry-run")
        if dry_run and follow:
            raise typer.BadParameter("it goes with no --follow: there is nothing to follow", param_hint="--dry-run")
        if url is None and (replace or upload is not None or sent_as is not None):
            raise WrongArguments(
                "--upload, --no-upload, --replace and --as are for an archive: name it by --url.", "See --help."
            )
        roots = () if management is not None else known_roots(config)
        file = None if url is None else local_archive(url, upload, roots)
        path = f"{model_path(model)}/rollout"
        with Management(find_address("management", management, config)) as server:
            if orders and dry_run:
                show_dry_run(server, output, "PUT", f"{path}/{orders[0]}")
                return
            sent = None
            if url is not None:
                if file is not None:
                    server.describe(model)  # first, so that an unknown name is an error before anything is sent
                document["url"], sent = send_named(
                    server, output, url, file, replaces=replace, is_dry_run=dry_run, name=sent_as
                )
            if dry_run:
                show_dry_run_of_sent(
                    output,
                    sent,
                    lambda: _show_plan(output, server.order("POST", path, query(is_dry=True), json=document)),
                    "rolled out; what the steps would see",
                    replaces=replace,
                )
                return
            if orders:
                status = server.order("PUT", f"{path}/{orders[0]}")
            elif version is None:
                status = server.order("GET", path)
            else:
                status = server.order("POST", path, json=document)
            if follow:
                status = _follow(server, path, model, output)
            if sent is not None:
                status["upload"] = to_builtins(sent)
        output.result(status, *_shown(status, has_events=not follow))
        if follow and status["state"] != "promoted":
            raise typer.Exit(FAILED_STATUS)


def _given(pause: bool, resume: bool, abort: bool, promote: bool) -> list[tuple[str, bool]]:
    return [("pause", pause), ("resume", resume), ("abort", abort), ("promote", promote)]


def _follow(server: Management, path: str, model: str, output: Output) -> dict[str, Any]:
    """Show the progress until the roll-out has ended. New events are notes, so that a log file has them too."""
    status: dict[str, Any] = server.order("GET", path)
    seen = 0
    with (
        interrupted_as(
            f"The roll-out goes on in the server; `marserve rollout {model}` shows how far it is, --abort ends it."
        ),
        output.progress() as progress,
    ):
        lines = Lines(progress)
        while True:
            for event in status["events"][seen:]:
                output.note(_event(event))
            seen = len(status["events"])
            if status["state"] not in _UNDER_WAY:
                return status
            hold_s = status.get("holdSeconds") or 0
            elapsed_s = min(status.get("elapsedSeconds") or 0, hold_s)
            text = f"{status['state']}, {status['share']:g}% to {status['modelName']} {status['modelVersion']}"
            lines.show([Step(text, int(1000 * elapsed_s), int(1000 * hold_s) or None)])
            time.sleep(LOOK_EVERY_S)
            status = server.order("GET", path)


def _shown(status: dict[str, Any], *, has_events: bool) -> list[Any]:
    """What is shown of a roll-out; without the events where these were shown as they came."""
    head = (
        f"{status['modelName']} {status['modelVersion']}, in the place of {status['baseline']}: {status['state']}"
        + (f", {status['share']:g}% of the requests" if status["state"] in ("running", "paused") else "")
        + (f" ({status['reason']})" if status["reason"] else "")
    )
    lines: list[Any] = [head]
    findings = status.get("verdict", {}).get("findings", [])
    if findings:
        rows = [[each["measure"], each["standing"], each["reason"]] for each in findings]
        lines.append(table(["measure", "the candidate is", "evidence"], rows))
    if has_events:
        lines.append(table(["at", "what happened"], [_event_row(event) for event in status["events"]]))
    return lines


def _event_row(event: dict[str, Any]) -> list[str]:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
    return [at, event["event"] + (f": {event['reason']}" if event.get("reason") else "")]


def _event(event: dict[str, Any]) -> str:
    """As in the table, without the day."""
    at, what = _event_row(event)
    return f"{at.rpartition(' ')[2]}  {what}"


def _show_plan(output: Output, plan: dict[str, Any]) -> None:
    output.result(as_dry(plan), HEAD, *_plan(plan))


def _plan(plan: dict[str, Any]) -> list[Any]:
    rows = []
    for step in plan["steps"]:
        found = step["findsErrors"]
        rows.append(
            [
                f"{step['share']:g}%",
                f"{step['holdSeconds']:g} s",
                str(step["requests"]),
                "nothing" if found is None else f"{100 * found:.2g}%",
                "nothing" if step.get("findsDiffering") is None else f"{100 * step['findsDiffering']:.2g}%",
            ]
        )
    title = f"{plan['modelName']} {plan['modelVersion']} would take over from {plan['baseline']}, at today's traffic:"
    columns = ["step", "lasts", "requests to it", "finds errors from", "finds differing answers from"]
    return [title, table(columns, rows)]


def _share(flag: str, word: str | None) -> float | None:
    """A share: `0.01` or `1%`."""
    if word is None:
        return None
    is_percent = word.endswith("%")
    number = _percent_number(flag, word)
    return number / 100 if is_percent else number


def _percent_number(flag: str, word: str) -> float:
    try:
        return float(word.strip().removesuffix("%"))
    except ValueError:
        raise WrongArguments(f"{flag} is {word!r}, which is no number.", "0.01 and 1% are.") from None
