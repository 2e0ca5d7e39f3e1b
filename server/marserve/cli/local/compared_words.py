"""What `compare`, `optimise` and `export` check of their words before anything runs, and say alike afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from marserve.cli.output import WrongArguments
from marserve.errors import without_stop

if TYPE_CHECKING:
    from marserve.optimise.compare import UnknownScores
    from marserve.optimise.inputs import Input


def read_inputs(folder: Path) -> list[Input]:
    """The request bodies of `--inputs`. Raises WrongArguments."""
    from marserve.optimise.inputs import BadInputs, find_inputs  # here, for the time of other commands

    try:
        return find_inputs(folder)
    except BadInputs as error:
        raise WrongArguments(error.message, "Name another folder with --inputs.") from error


def wrong_scores(error: UnknownScores) -> WrongArguments:
    """The error of a name of `--scores` that no output with class scores has."""
    message = error.message if error.message.endswith("?") else f"{without_stop(error.message)}."
    return WrongArguments(f"--scores: {message}", "Name one of them with --scores.")


def check_archive(archive: Path) -> Path:
    """Its path, with a name also where it was typed as `.` or `..`. Raises WrongArguments where it is not there."""
    if not archive.exists():
        raise WrongArguments(f"There is no archive {archive}.", "Name a .mar file, or the folder of an archive.")
    return archive.resolve() if archive.name in ("", "..") else archive


def check_export_path(folder: Path, archive: Path) -> None:
    """Raise WrongArguments for an export path that is no folder, or lies in the archive's, which stays as it is."""
    if not folder.is_dir():
        raise WrongArguments(f"The export path {folder} is no folder.", "Name one that is there.")
    if archive.is_dir() and folder.resolve().is_relative_to(archive.resolve()):
        raise WrongArguments(
            f"The export path {folder} lies in the folder of the archive, which stays as it is.",
            "Name another folder with --export-path (-o).",
        )


def check_page(page: Path) -> None:
    """Raise WrongArguments for a page that cannot be written, before minutes are spent."""
    if page.is_dir():
        raise WrongArguments(f"The page {page} is a folder.", "Name a file with --page.")
    if not page.parent.is_dir():
        raise WrongArguments(f"There is no folder {page.parent} for the page.", "Name another with --page.")


def trust_line(what: str, digest: str, without: str) -> str:
    """What to write into a server's settings for an archive of native code, and what happens without it."""
    return (
        f"{what} is native code, which runs as soon as it is loaded. A server loads it with "
        f"`trusted_models={digest}` in its settings; {without}"
    )
