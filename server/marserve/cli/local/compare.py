"""`marserve compare`: whether two archives answer alike, and how fast each is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from marserve.cli import Tidied
from marserve.cli.local.compared_words import check_archive, read_inputs
from marserve.cli.options import ModelThreads, Trust
from marserve.cli.output import FAILED_STATUS, AsJson, CommandFailed, Output, table
from marserve.errors import MarserveError

if TYPE_CHECKING:
    from marserve.optimise.compare import Report
    from marserve.optimise.subject import Subject


def compare(
    reference: Annotated[Path, typer.Argument(metavar="A", help="The archive that is right by definition.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="The archive that is compared with it.")],
    inputs: Annotated[
        Path,
        typer.Option(
            "--inputs", metavar="DIR", help="A folder of request bodies, one a file; the ending says its type."
        ),
    ],
    max_error: Annotated[
        float, typer.Option(min=0.0, help="The mean error that is allowed, as a share of the mean output.")
    ] = 0.03,
    min_agreement: Annotated[
        float | None,
        typer.Option(min=0.0, max=0.9999, help="The share of inputs that must be shown to agree, with 95 % certainty."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=0, max=1024, help="The largest batch; that of A if not given.")] = 0,
    scores: Annotated[
        list[str] | None, typer.Option(help="An output that holds class scores, where the archive does not say so.")
    ] = None,
    threads: ModelThreads = 1,
    within: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="How long the runs of each may take.")
    ] = 600.0,
    pairs: Annotated[int, typer.Option(min=0, max=99, help="Pairs of measurements; 0 for none.")] = 9,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Compare what two archives answer, and what their models give, input by input; exit status 1 beyond a bound."""
    # Here, for the time of other commands: numpy.
    from marserve.optimise.compare import Wish
    from marserve.optimise.compare import compare as compare_both
    from marserve.optimise.comparison import Bounds

    with Output(as_json) as output, Tidied():
        found = read_inputs(inputs)
        wish = Wish(Bounds(max_error, min_agreement), batch_size, tuple(scores or ()), within, pairs)
        try:
            with (
                _open(reference, threads, trust) as ours,
                _open(other, threads, trust) as theirs,
                output.progress() as bar,
            ):
                task = bar.add_task("")
                report = compare_both(ours, theirs, found, wish, lambda step: bar.update(task, description=step))
                names = ours.name, theirs.name
        except MarserveError as error:
            raise CommandFailed(error.message) from error
        output.result(_document(report, names, (reference, other)), *_lines(report, names))
        if not report.verdict.has_passed:
            raise typer.Exit(FAILED_STATUS)


def _open(archive: Path, threads: int, is_trusted: bool) -> Subject:
    from marserve.optimise.subject import Subject  # here, for the time of other commands

    archive = check_archive(archive)
    return Subject(archive, threads=threads, trusted=[archive.name] if is_trusted else [])


def _lines(report: Report, names: tuple[str, str]) -> list[str | Table]:
    from marserve.optimise.comparison import percent, shown  # here, for the time of other commands

    lines: list[str | Table] = []
    answers = report.answers
    found = "none answered by both"
    if answers.compared:
        found = f"{answers.compared} answers compared, {len(answers.differing)} differ {answers.by}"
    lines.append(f"{names[1]} beside {names[0]}: {report.inputs} inputs, {found}.")
    rows = []
    for run, errors in report.runs.items():
        for name, each in errors.outputs.items():
            mates = report.mates.get(run)
            rows.append(
                [
                    run,
                    name,
                    shown(each.mean_error),
                    shown(each.largest),
                    f"{each.cosine:.6f}",
                    f"{each.top1} of {each.ranked}" if each.ranked else "-",
                    f"{each.top5 / each.ranked:.3f}" if each.ranked else "-",
                    shown(mates.outputs[name].largest) if mates is not None and name in mates.outputs else "-",
                ]
            )
    if rows:
        head = ["run", "output", "mean error", "largest", "cosine", "top-1", "top-5", "by mates"]
        lines.append(table(head, rows))
    if report.agreement is not None:
        lines.append(
            f"{report.agreement.agreeing} of {report.agreement.inputs} agree by {report.agreement.by}: "
            f"{percent(report.agreement.shown)} is shown with 95 % certainty."
        )
    for rows_of_batch, ratio in report.ratios.items():
        what = "one row" if rows_of_batch == 1 else f"{rows_of_batch} rows"
        lines.append(f"{what} at a time: {ratio.in_words}.")
    lines += [f"note: {note}" for note in report.verdict.notes]
    lines += [f"beyond its bound: {fault}" for fault in report.verdict.faults]
    lines.append("Within all bounds." if report.verdict.has_passed else "Not within its bounds.")
    return lines


def _document(report: Report, names: tuple[str, str], archives: tuple[Path, Path]) -> dict[str, Any]:
    # here, for the time of other commands
    from marserve.optimise.compare import describe_agreement, describe_outputs, describe_ratios

    return {
        "reference": {"name": names[0], "archive": str(archives[0]), "loadSeconds": report.load_s[0]},
        "other": {"name": names[1], "archive": str(archives[1]), "loadSeconds": report.load_s[1]},
        "inputs": report.inputs,
        "batchSize": report.batch_size,
        "passed": report.verdict.has_passed,
        "faults": list(report.verdict.faults),
        "notes": list(report.verdict.notes),
        "outputs": describe_outputs(report.runs, report.mates),
        "agreement": describe_agreement(report.agreement),
        "answers": {
            "compared": report.answers.compared,
            "by": report.answers.by,
            "differing": [
                {"input": at, "path": path, "seen": seen, "wanted": wanted}
                for at, path, seen, wanted in report.answers.differing
            ],
        },
        "ratios": describe_ratios(report.ratios),
    }
