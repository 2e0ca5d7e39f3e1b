"""`marserve optimise`: tries faster builds of an archive's model, and writes an archive with the best that is equal."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from marserve.cli import Tidied
from marserve.cli.local.compared_words import (
    check_archive,
    check_export_path,
    check_page,
    read_inputs,
    trust_line,
    wrong_scores,
)
from marserve.cli.options import Trust
from marserve.cli.output import AsJson, CommandFailed, Output, WrongArguments, table
from marserve.cli.progress.registering import send_and_register, send_made
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, model_path
from marserve.errors import MarserveError, without_stop
from marserve.files.atomic import replace_file

if TYPE_CHECKING:
    from marserve.optimise.optimise import Report, Row

# The parent stays: no build is better, or none is equal.
NOTHING_BETTER_STATUS = 3


class Goal(StrEnum):
    """What is to become better."""

    latency = "latency"
    throughput = "throughput"
    memory = "memory"


def optimise(
    archive: Annotated[Path, typer.Argument(help="The archive; it stays as it is.")],
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs",
            metavar="DIR",
            help="A folder of request bodies, one a file: a quarter calibrates; the archive's own if not given.",
        ),
    ] = None,
    goal: Annotated[
        Goal, typer.Option(help="One row at a time, full batches, or fewer bytes of weights.")
    ] = Goal.latency,
    max_error: Annotated[
        float, typer.Option(min=0.0, help="The mean error that is allowed, as a share of the mean output.")
    ] = 0.03,
    min_agreement: Annotated[
        float, typer.Option(min=0.0, max=0.9999, help="The share of inputs that must be shown to agree, by 95 %.")
    ] = 0.98,
    candidate: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A build to try, repeatable; else those of its `optimise` key, or all."),
    ] = None,
    export_path: Annotated[Path, typer.Option("--export-path", "-o", help="The folder for the archive.")] = Path("."),
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite the archive that is there.")] = False,
    batch_size: Annotated[
        int, typer.Option(min=0, max=1024, help="The largest batch; the archive's if not given.")
    ] = 0,
    scores: Annotated[
        list[str] | None, typer.Option(help="An output that holds class scores, where the archive does not say so.")
    ] = None,
    threads: Annotated[
        int, typer.Option(min=0, max=1024, help="Threads that a worker will have; its share of the cores if not given.")
    ] = 0,
    within: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="How long the search may take.")] = 1800.0,
    memory: Annotated[
        float, typer.Option(min=0.1, metavar="GIB", help="What each build's process may allocate.")
    ] = 8.0,
    trust: Trust = False,
    page: Annotated[
        list[Path] | None,
        typer.Option(
            "--page",
            metavar="FILE",
            help="Write the report as an HTML page, too; as its picture alone if it ends in .svg. Repeatable.",
        ),
    ] = None,
    register: Annotated[
        bool, typer.Option("--register", help="Send the archive to a running server, and register it there.")
    ] = False,
    rollout: Annotated[
        bool, typer.Option("--rollout", help="As --register, and let it take over step by step (see marserve rollout).")
    ] = False,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Its workers, with --register or --rollout.")] = 1,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Try faster builds of a model, show which are equal, and archive the best; exit status 3 if the parent stays."""
    # Here, for the time of other commands: numpy.
    from marserve.optimise.candidates import UnknownCandidate, refuse_unknown
    from marserve.optimise.compare import UnknownScores
    from marserve.optimise.comparison import Bounds
    from marserve.optimise.optimise import GIB, Wish, describe_report
    from marserve.optimise.optimise import optimise as search

    with Output(as_json) as output, Tidied():
        found = None if inputs is None else read_inputs(inputs)
        archive = check_archive(archive)
        check_export_path(export_path, archive)
        for each in page or ():
            check_page(each)
        try:
            refuse_unknown(candidate or ())
        except UnknownCandidate as error:
            raise WrongArguments(f"{without_stop(str(error))}.", "Name one of them with --candidate.") from error
        wish = Wish(
            goal.value,
            Bounds(max_error, min_agreement),
            tuple(candidate or ()),
            batch_size,
            threads,
            within,
            int(memory * GIB),
            tuple(scores or ()),
            is_trusted=trust,
        )
        with ExitStack() as held:
            server = None
            if register or rollout:
                server = held.enter_context(Management(find_address("management", management, config)))
                server.describe_all()  # first: a server that does not answer is an error before minutes are spent
            try:
                with output.steps() as show:
                    report = search(archive, found, wish, export_path, force=force, on_step=show)
            except UnknownScores as error:
                raise wrong_scores(error) from error
            except MarserveError as error:
                raise CommandFailed(error.message) from error
            document, lines = describe_report(report), _lines(report)
            for each in page or ():
                _write_page(each, document, max_error)
            if server is not None and report.archive is not None:
                document |= _hand_over(server, output, report, workers, is_rollout=rollout, replaces=force)
                lines.append(document["status"])
        output.result(document, *lines)
        if not report.winner:
            raise typer.Exit(NOTHING_BETTER_STATUS)


def _write_page(page: Path, document: dict[str, Any], max_error: float) -> None:
    from marserve.optimise.page import write_page, write_picture  # here, for the time of other commands

    write = write_picture if page.suffix == ".svg" else write_page
    try:
        replace_file(page, write(document, max_error).encode(), mode=0o644)
    except OSError as error:
        raise CommandFailed(f"The page {page} cannot be written: {error.strerror}.") from error


def _hand_over(
    server: Management, output: Output, report: Report, workers: int, *, is_rollout: bool, replaces: bool
) -> dict[str, Any]:
    """Register the archive, or let it take over step by step; what is said of that. The archive stays in any case."""
    assert report.archive is not None
    if not is_rollout:
        return send_and_register(server, output, report.archive, workers, replaces=replaces)
    sent = send_made(server, output, report.archive, replaces=replaces)
    from marserve.optimise.proof import optimised_version  # here, for the time of other commands

    version = optimised_version(report.version)
    told = server.order(
        "POST",
        f"{model_path(report.model)}/rollout",
        json={"version": version, "url": sent.archive, "workers": workers},
        timeout_s=None,
    )
    status = f"The roll-out of version {version} has begun; `marserve rollout {report.model}` shows how far it is."
    return {"status": status, "rollout": told}


def _lines(report: Report) -> list[str | Table]:
    lines: list[str | Table] = [
        f"{report.model} {report.version}: {report.calibrated} inputs calibrated, {report.compared} were compared, "
        f"{report.seconds:.0f} s."
    ]
    sizes = sorted({1, report.batch_size})
    # One thread first, and a worker's share where that is another number.
    shares = sorted({1, report.threads})
    with_threads = {count: f", {count} thread{'s' if count > 1 else ''}" if len(shares) > 1 else "" for count in shares}
    columns = [(count, size) for count in shares for size in sizes]
    # The first says of what the others are, too: so they stay as narrow as their cells.
    measured = [f"at {size} row{'s' if size > 1 else ''}{with_threads[count]}" for count, size in columns]
    head = [
        "build",
        f"times as fast {measured[0]}",
        *measured[1:],
        "mean error",
        "agreement",
        "MB",
        "built in",
        "result",
    ]
    lines.append(table(head, [_row(row, columns, report) for row in report.rows]))
    lines += [f"note: {note}" for note in report.notes]
    winners = [row.verdict for row in report.rows if row.name == report.winner and row.verdict is not None]
    lines += [f"note: {report.winner}: {note}" for verdict in winners for note in verdict.notes]
    if report.archive is None:
        lines.append("The parent stays: no build is equal and surely better.")
    else:
        lines.append(f"{report.winner} is in {report.archive}; it is served as version {report.version}-optimised.")
        if report.trust:
            lines.append(trust_line(report.winner, report.trust, "without, the parent serves."))
    return lines


def _row(row: Row, columns: list[tuple[int, int]], report: Report) -> list[str]:
    from marserve.optimise.comparison import percent, shown  # here, for the time of other commands

    errors = [each.mean_error for each in row.worst.values()]
    result = row.why_not
    if row.verdict is not None and not result:
        result = "the best" if row.name == report.winner else "equal" if row.has_passed else row.verdict.faults[0]
    measured = {threads: row.ratios if threads == report.threads else row.ratios_of_one for threads, _ in columns}
    return [
        row.name,
        *(str(measured[threads][size]) if size in measured[threads] else "-" for threads, size in columns),
        shown(max(errors)) if errors else "-",
        percent(row.agreement.shown) if row.agreement is not None else "-",
        f"{row.size / 1e6:.1f}" if row.size else "-",
        f"{row.seconds:.1f} s" if row.seconds else "-",
        result,
    ]
