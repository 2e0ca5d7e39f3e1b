"""What a command says, to a person or to a script, and with which status it ends.

Knows Rich, JSON and exit statuses. Knows nothing of servers: commands hand it finished values. Results go to standard
output, everything else (progress, errors) to standard error, so that a pipe carries results alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

import typer

from marserve.cli import INTERRUPTED_STATUS
from marserve.errors import BadSettings
from marserve.names import escaped, json_escaped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

# Rich is imported where something is printed: a server in front prints nothing by it, and would start 50 ms later.

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, for scripts.")]

FAILED_STATUS = 1
CONFIGURATION_STATUS = 2

_WIDEST = 100_000


class CommandFailed(Exception):
    """A command could not do what it was asked: `message` says what happened, `next_step` what may help.

    `detail` goes into the JSON form (a server's error object, a process id); the text form shows its `reason`.
    """

    status = FAILED_STATUS

    def __init__(self, message: str, next_step: str | None = None, **detail: Any) -> None:
        self.message, self.next_step, self.detail = message, next_step, detail
        super().__init__(message)


class WrongArguments(CommandFailed):
    """What was typed cannot be meant, or names what is not there: nothing was tried."""

    status = CONFIGURATION_STATUS


class Interrupted(CommandFailed):
    """Ctrl-C ended the command, and what it had begun goes on: `message` says where."""

    status = INTERRUPTED_STATUS


class Step(NamedTuple):
    """What a line of progress shows: a text, and how much of how much is done (None: unknown).

    `waits_for` is what the work cannot go on without, such as processors of a cluster; empty for nothing.
    """

    text: str
    done: int = 0
    total: int | None = None
    waits_for: str = ""


class Output:
    """One command's voice. As a context it turns errors into a sentence and an exit status.

    With `as_json` exactly one JSON document is printed, an object `{"error": {…}}` where the command failed; there is
    no progress then.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    @cached_property
    def _results(self) -> Console:
        from rich.console import Console  # late, for a server's start

        return Console(highlight=False)

    @cached_property
    def _notes(self) -> Console:
        from rich.console import Console  # late, for a server's start

        return Console(stderr=True, highlight=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, BadSettings):
            self._fail(error.message, None, {"key": error.key} if error.key else {}, CONFIGURATION_STATUS)
        if isinstance(error, CommandFailed):
            self._fail(error.message, error.next_step, error.detail, error.status)

    @property
    def shows_progress(self) -> bool:
        """Whether progress is shown: on a terminal, without `--json`."""
        return not self.as_json and self._notes.is_terminal

    def progress(self) -> Progress:
        """A line each with a bar, a text and the time passed; invisible if progress is not shown."""
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # late, for a start

        return Progress(
            SpinnerColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._notes,
            transient=True,
            disable=not self.shows_progress,
        )

    def note(self, text: str) -> None:
        """Say something beside the result; silent under `--json`."""
        if not self.as_json:
            self._notes.print(escaped(text, keep="\n\t"), markup=False, soft_wrap=True)

    @property
    def can_ask(self) -> bool:
        """Whether a question reaches a person who can answer it: a terminal at both ends, and no JSON asked for."""
        return self.shows_progress and sys.stdin is not None and sys.stdin.isatty()

    def ask(self, question: str, answers: Sequence[str], default: str, *lines: str | Table) -> str:
        """Show the lines, ask, and return one of the answers. Only where `can_ask`. Raises KeyboardInterrupt.

        The end of the input, which a terminal's Ctrl-D makes, is the default.
        """
        for line in lines:
            self._notes.print(line, markup=False, soft_wrap=True) if isinstance(line, str) else self._notes.print(line)
        while True:
            self._notes.print(f"{question} [{'/'.join(answers)}] ({default}) ", markup=False, soft_wrap=True, end="")
            given = sys.stdin.readline()
            word = given.strip().lower() or default
            found = [answer for answer in answers if answer.startswith(word)]
            if not given.endswith("\n"):
                self._notes.print()
                return found[0] if found and given else default
            if found:
                return found[0]

    def result(self, document: Any, *lines: str | Table) -> None:
        """The command's result: `document` for scripts, or the lines and tables for a person."""
        if self.as_json:
            typer.echo(json_escaped(json.dumps(document, ensure_ascii=False)))
            return
        for line in lines:
            if isinstance(line, str):
                self._results.print(escaped(line, keep="\n\t"), markup=False, soft_wrap=True)
            else:
                self._print_table(line)

    def _print_table(self, drawn: Table) -> None:
        """As wide as its words need: a name broken in two can be neither copied nor found by a script."""
        from rich.measure import Measurement  # late, for a server's start

        console = self._results
        unbounded = console.options.update(max_width=_WIDEST)
        needed = Measurement.get(console, unbounded, drawn)
        console.width = max(console.width, needed.minimum) if console.is_terminal else needed.maximum
        with console.capture() as captured:
            console.print(drawn)
        typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))

    def _fail(self, message: str, next_step: str | None, detail: dict[str, Any], status: int) -> None:
        if self.as_json:
            hint = {"next_step": next_step} if next_step else {}
            document = {"error": {"message": message, **hint, **detail}}
            typer.echo(json_escaped(json.dumps(document, ensure_ascii=False)))
        else:
            self.note(f"marserve: {message}")
            if detail.get("reason"):
                self.note(f"  Reason: {detail['reason']}")
            if next_step:
                self.note(f"  {next_step}")
        raise typer.Exit(status) from None


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without frames: a headline and one line a row; cells are taken literally, controls in them escaped."""
    # Late: a server starts sooner without it.
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    rows = [[escaped(cell) for cell in row] for row in rows]
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        cells = [column, *(row[number] for row in rows)]
        is_last = number == len(columns) - 1
        # In a narrow terminal the last column alone is wrapped, and never inside of a word.
        words = [word for cell in cells for word in cell.split()] if is_last else cells
        drawn.add_column(column, no_wrap=not is_last, min_width=max(map(cell_len, words), default=0))
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn
