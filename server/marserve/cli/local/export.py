"""`marserve export`: an archive's model in another format, in an archive of its own, shown to answer alike."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from marserve.cli import Tidied
from marserve.cli.local.compared_words import check_archive, check_export_path, read_inputs, trust_line
from marserve.cli.options import ModelThreads, Trust
from marserve.cli.output import AsJson, CommandFailed, Output
from marserve.errors import MarserveError


class To(StrEnum):
    """The formats."""

    onnx = "onnx"
    pt2 = "pt2"
    aoti = "aoti"


def export(
    archive: Annotated[Path, typer.Argument(help="The archive; it stays as it is.")],
    to: Annotated[To, typer.Option("--to", help="ONNX, torch's exported program, or a package of native code.")],
    inputs: Annotated[
        Path, typer.Option("--inputs", metavar="DIR", help="A folder of request bodies, one a file, to compare by.")
    ],
    export_path: Annotated[Path, typer.Option("--export-path", "-o", help="The folder for the archive.")] = Path("."),
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite the archive that is there.")] = False,
    batch_size: Annotated[
        int, typer.Option(min=0, max=1024, help="The largest batch; the archive's if not given.")
    ] = 0,
    threads: ModelThreads = 1,
    within: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="How long each step may take.")] = 600.0,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Export an archive's model as ONNX, an exported program or native code; archive it if it answers as before."""
    # Here, for the time of other commands: numpy.
    from marserve.optimise.compare import describe_outputs, describe_ratios
    from marserve.optimise.comparison import shown
    from marserve.optimise.export import export as export_model

    with Output(as_json) as output, Tidied():
        found = read_inputs(inputs)
        archive = check_archive(archive)
        check_export_path(export_path, archive)
        try:
            with output.progress() as bar:
                task = bar.add_task("")
                made = export_model(
                    archive,
                    found,
                    to.value,
                    export_path,
                    batch_size=batch_size,
                    threads=threads,
                    within_s=within,
                    is_trusted=trust,
                    force=force,
                    on_step=lambda step: bar.update(task, description=step),
                )
        except MarserveError as error:
            raise CommandFailed(error.message) from error
        report = made.report
        errors = [each.mean_error for run in report.runs.values() for each in run.outputs.values()]
        ratios = [f"{ratio.in_words} at {rows}" for rows, ratio in report.ratios.items()]
        document = {
            "archive": str(made.archive),
            "modelVersion": made.version,
            "inputs": report.inputs,
            "outputs": describe_outputs(report.runs, report.mates),
            "ratios": describe_ratios(report.ratios),
            "trustedModels": made.trust or None,
            "notes": list(report.verdict.notes),
        }
        lines = [f"note: {note}" for note in report.verdict.notes]
        if made.trust:
            lines.append(trust_line(to.value, made.trust, "without, its load is refused."))
        said = f"mean error {shown(max(errors))} over {report.inputs} inputs" if errors else "its answers are alike"
        output.result(
            document,
            f"{made.archive}: version {made.version}, {said}" + "".join(f", {ratio}" for ratio in ratios) + ".",
            *lines,
        )
