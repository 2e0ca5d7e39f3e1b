"""A command's output, for a person or for a script, and its exit status.

It knows nothing of servers: commands pass it finished values. Results go to standard output, progress and errors to
standard error, so that a pipe carries only results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

# Rich is imported when it prints something. A server in the foreground does not use it, and starts 50 ms sooner.

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, for scripts.")]

FAILED_STATUS = 1
CONFIGURATION_STATUS = 2

_WIDEST = 100_000


class CommandFailed(Exception):
    """A command has failed: `message` says what happened, `next_step` what may help.

    `detail` goes into the JSON form (a server's error object, a process id); the text form shows its `reason`.
    """

    status = FAILED_STATUS

    def __init__(self, message: str, next_step: str | None = None, **detail: Any) -> None:
        self.message, self.next_step, self.detail = message, next_step, detail
        super().__init__(message)


class WrongArguments(CommandFailed):
    """The arguments are wrong, or name something that does not exist. Nothing was tried."""

    status = CONFIGURATION_STATUS


class Interrupted(CommandFailed):
    """A signal ended the command, but not what it had begun: `message` says where that goes on."""

    status = INTERRUPTED_STATUS


@contextmanager
def interrupted_as(message: str) -> Iterator[None]:
    """Make Ctrl-C in the block Interrupted with this message."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(message) from None


class Step(NamedTuple):
    """A line of progress: a text, and how much of `total` is done (None: unknown).

    `waits_for` is what the work waits for, such as processors of a cluster; empty if it does not wait.
    """

    text: str
    done: int = 0
    total: int | None = None
    waits_for: str = ""


class Output:
    """The output of one command. As a context it turns errors into a sentence and an exit status.

    With `as_json` it prints exactly one JSON document, `{"error": {…}}` if the command failed, and no progress.
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
        """Lines with a bar, a text and the time passed; invisible if progress is not shown."""
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

    @contextmanager
    def steps(self) -> Iterator[Callable[[str], None]]:
        """A function that shows the steps of minutes: beside a bar, or, where no terminal is, a line each."""
        with self.progress() as bar:
            task = bar.add_task("")
            yield lambda step: bar.update(task, description=step) if self.shows_progress else self.note(step)

    def note(self, text: str) -> None:
        """Print a text to standard error; nothing under `--json`."""
        if not self.as_json:
            self._notes.print(escaped(text, keep="\n\t"), markup=False, soft_wrap=True)

    def say_wait(self, text: str) -> None:
        """Print to standard error what the command waits for; nothing without a terminal."""
        if self.shows_progress:
            self.note(text)

    @property
    def has_colours(self) -> bool:
        """Whether results go to a terminal that shows colours."""
        return self._results.is_terminal and not self._results.no_color and self._results.color_system is not None

    def lines(self, document: Any, lines: Sequence[str]) -> None:
        """As `result`, for lines that are finished: escaped, and perhaps with colours."""
        if self.as_json:
            self.result(document)
        else:
            typer.echo("\n".join(lines), color=self.has_colours)

    @property
    def can_ask(self) -> bool:
        """Whether a person can be asked: input and output are a terminal, and no JSON is wanted."""
        return self.shows_progress and sys.stdin is not None and sys.stdin.isatty()

    def ask(self, question: str, answers: Sequence[str], default: str, *lines: str | Table) -> str:
        """Show the lines, ask, and return one of the answers. Needs `can_ask`. Raises KeyboardInterrupt.

        The end of the input (Ctrl-D) gives the default.
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
        """Print the command's result: `document` for scripts, or the lines and tables for a person."""
        if self.as_json:
            typer.echo(json_escaped(json.dumps(document, ensure_ascii=False)))
            return
        for line in lines:
            if isinstance(line, str):
                # Without rich, whose import a server's start need not wait for. A patch has its file's line ends.
                pieces = f"{line}\n".split("\r\n")
                typer.echo("\r\n".join(escaped(piece, keep="\n\t") for piece in pieces), nl=False)
            else:
                self._print_table(line)

    def _print_table(self, drawn: Table) -> None:
        """Print a table as wide as its words need: a name that is broken in two can be neither copied nor found."""
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
    """A table without frames: a headline and one line a row. Cells are literal text; control characters are escaped."""
    # Late, for a server's start.
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    rows = [[escaped(cell) for cell in row] for row in rows]
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        cells = [column, *(row[number] for row in rows)]
        is_last = number == len(columns) - 1
        # In a narrow terminal only the last column is wrapped, and never inside a word.
        words = [word for cell in cells for word in cell.split()] if is_last else cells
        drawn.add_column(column, no_wrap=not is_last, min_width=max(map(cell_len, words), default=0))
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn
