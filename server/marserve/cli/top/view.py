"""What `marserve top` shows, and what a key does. Pure: it knows no server, no terminal and no clock.

Texts of the server are escaped, and never markup: a model's name must not command the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from marserve.cli.versions import duration, rounded
from marserve.names import escaped

Row = Mapping[str, Any]
Activity = Mapping[str, Any]

SORTS: Final = {"r": "rate", "p": "p99", "u": "queue", "m": "memory", "n": "name"}
SORTED_BY: Final = {"rate": "answers a second", "p99": "p99", "queue": "queue", "memory": "memory", "name": "name"}
# The first that fits.
_HELPS: Final = (
    "q quit · ↑↓ select · e explain its slowest · + - scale it · sort: r rate, p p99, u queue, m memory, n name",
    "q quit · ↑↓ select · e explain · + - scale · sort: r p u m n",
    "q quit",
)
# Lines that are no version: header, headline, the selected one's title, message, help.
_OTHER_LINES: Final = 7
# Between columns; the first columns are names; a name has so many places at least.
_GAP: Final = 1
_NAMES: Final = 2
LEAST_NAME: Final = 7
# Of the selected version's workers and of the devices so many lines at most.
MOST_WORKERS: Final = 8
MOST_DEVICES: Final = 8


class Quit(NamedTuple):
    """End."""


class Ask(NamedTuple):
    """Ask for the rows anew, as their order has changed."""


class Explain(NamedTuple):
    """Explain the slowest recorded request of a model."""

    model: str


class Scale(NamedTuple):
    """Change how many workers a version has."""

    model: str
    version: str
    minimum: int
    maximum: int


Action = Quit | Ask | Explain | Scale


class _Column(NamedTuple):
    title: str
    cell: Callable[[Row], str]
    is_left: bool = False
    least_width: int = 0


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else duration(value)


def _mib(size: int | None) -> str:
    return "-" if not size else f"{size / (1 << 20):,.0f} MiB"


def _workers(row: Row) -> str:
    low, high = row["minWorkers"], row["maxWorkers"]
    return f"{row['readyWorkers']} of {low}" + (f" to {high}" if high > low else "")


def _batch(row: Row) -> str:
    mean = row.get("meanBatch")
    return str(row["batchSize"]) if mean is None else f"{row['batchSize']} ({rounded(mean)})"


# A column is shown in terminals of its least width.
_COLUMNS: Final = (
    _Column("model", lambda row: str(row["modelName"]), is_left=True),
    _Column("version", lambda row: f"{row['modelVersion']}{' *' if row['isDefault'] else ''}", is_left=True),
    _Column("state", lambda row: str(row["state"]), is_left=True, least_width=60),
    _Column("req/s", lambda row: rounded(row["answersPerSecond"])),
    _Column("p50", lambda row: _milliseconds(row.get("p50")), least_width=80),
    _Column("p99", lambda row: _milliseconds(row.get("p99"))),
    _Column("queue", lambda row: str(row["queued"]), least_width=45),
    _Column("running", lambda row: str(row["running"]), least_width=100),
    _Column("batch", _batch, least_width=80),
    _Column("errors", lambda row: str(row["errors"]), least_width=100),
    _Column("refused", lambda row: str(row["refused"]), least_width=100),
    _Column("workers", _workers, least_width=70),
    _Column("memory", lambda row: _mib(row["memoryBytes"]), least_width=90),
)
_STATE_STYLES: Final = {"ready": "green", "degraded": "yellow", "loading": "cyan", "failed": "red", "idle": "dim"}


def _key_of(row: Row) -> tuple[str, str]:
    return str(row["modelName"]), str(row["modelVersion"])


@dataclass
class View:
    """What is shown. `where` is the server's address. `trouble` says why the figures are old, empty for new ones."""

    where: str
    sort: str = "rate"
    activity: Activity | None = None
    trouble: str = ""
    message: str = ""
    selected: tuple[str, str] | None = None
    question: Scale | None = None
    overlay: Sequence[str] | None = None
    _place: int = field(default=0, repr=False)

    def take(self, activity: Activity) -> None:
        """Show newer figures. A version that is gone leaves its place in the list to its neighbour."""
        self.activity, self.trouble = activity, ""
        keys = [_key_of(row) for row in self._rows]
        if self.selected in keys:
            self._place = keys.index(self.selected)
        elif keys:
            self._place = min(self._place, len(keys) - 1)
            self.selected = keys[self._place]
        else:
            self._place, self.selected = 0, None

    def press(self, key: str) -> Action | None:
        """What is to be done for a key; None for what the view did itself, and for keys without a meaning."""
        if self.overlay is not None:
            self.overlay = None
            return Quit() if key == "q" else None
        if self.question is not None:
            asked, self.question = self.question, None
            if key in ("y", "Y"):
                self.message = f"Scaling {asked.model}/{asked.version} …"
                return asked
            self.message = "Nothing was changed."
            return None
        self.message = ""
        if key in ("q", "Q"):
            return Quit()
        if key in SORTS:
            self.sort = SORTS[key]
            return Ask()
        if key in ("up", "k"):
            self._move(-1)
        elif key in ("down", "j"):
            self._move(1)
        elif key == "e" and self.selected is not None:
            self.message = f"Asking for the slowest request of {self.selected[0]} …"
            return Explain(self.selected[0])
        elif key in ("+", "=", "-"):
            self._ask_to_scale(-1 if key == "-" else 1)
        return None

    @property
    def _rows(self) -> Sequence[Row]:
        return [] if self.activity is None else self.activity["versions"]

    def _move(self, by: int) -> None:
        if rows := self._rows:
            self._place = min(max(self._place + by, 0), len(rows) - 1)
            self.selected = _key_of(rows[self._place])

    def _ask_to_scale(self, by: int) -> None:
        if self.selected is None or self.trouble:
            return
        row = self._rows[self._place]
        minimum, maximum = int(row["minWorkers"]), int(row["maxWorkers"])
        if minimum + by < 0:
            self.message = f"{row['modelName']}/{row['modelVersion']} has no worker that could go."
            return
        is_fixed = minimum == maximum
        wanted = minimum + by
        self.question = Scale(*self.selected, wanted, wanted if is_fixed else max(maximum, wanted))

    # ---------------------------------------------------------------------------------------------- what is shown

    def draw(self, width: int, height: int) -> RenderableType:
        """The whole screen."""
        if self.overlay is not None:
            return Group(Text("any key goes back", style="dim"), *[Text(escaped(line)) for line in self.overlay])
        below = self._below(width)
        room = max(3, height - _OTHER_LINES - len(below))
        first = min(max(0, self._place - room // 2), max(0, len(self._rows) - room))
        parts: list[RenderableType] = [self._header(), self._table(width, first, first + room)]
        help_line = next((words for words in _HELPS if cell_len(words) <= width), "")
        return Group(*parts, Text(), *below, self._last_line(), _line(help_line, "dim"))

    def draw_once(self, width: int) -> RenderableType:
        """All versions that there are, with no marks."""
        self.selected = None
        return Group(self._header(), self._table(width, 0, len(self._rows)), *self._devices())

    def _header(self) -> Text:
        header = Text(f"marserve at {escaped(self.where)}", style="bold", no_wrap=True, overflow="ellipsis")
        if self.activity is not None:
            found = self.activity
            rate, memory = rounded(found["answersPerSecond"]), _mib(found["memoryBytes"])
            shown = f"{len(self._rows)} of {found['versionsInAll']} versions by {SORTED_BY[self.sort]}"
            sums = f": {rate} req/s, {found['queued']} queued, {found['running']} running, {memory}; {shown}"
            header.append(sums, style="not bold")
        return header

    def _table(self, width: int, first: int, end: int) -> RenderableType:
        if not self._rows:
            return Text("No model is registered." if self.activity is not None else "")
        columns = [column for column in _COLUMNS if width >= column.least_width]
        rows = self._rows[first:end]
        cells = [[escaped(column.cell(row)) for column in columns] for row in rows]
        widths = _widths(columns, cells, width)
        drawn = Table(
            box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold", style="dim" if self.trouble else ""
        )
        for column, its in zip(columns, widths, strict=True):
            justify: Literal["left", "right"] = "left" if column.is_left else "right"
            drawn.add_column(column.title, no_wrap=True, overflow="ellipsis", justify=justify, width=its)
        for row, words in zip(rows, cells, strict=True):
            texts = [Text(each) for each in words]
            for text, column in zip(texts, columns, strict=True):
                text.stylize(_STATE_STYLES.get(text.plain, "") if column.title == "state" else "")
            drawn.add_row(*texts, style="reverse" if _key_of(row) == self.selected else "")
        return drawn

    def _below(self, width: int) -> list[Text]:
        """The selected version's workers, and the devices."""
        if not self._rows or self.selected is None:
            return self._devices()
        row = self._rows[self._place]
        lines = [Text(f"{escaped(row['modelName'])}/{escaped(row['modelVersion'])}: workers", style="bold")]
        workers = row["workers"]
        for worker in workers[:MOST_WORKERS]:
            gpu = f" gpu {worker['gpuId']}" if worker.get("gpuId") is not None else ""
            why = f"  {worker['why']}" if worker.get("why") else ""
            text = f"  {worker['id']:<6} {worker['status']:<9} {_mib(worker['memoryBytes']):>10}{gpu}"
            lines.append(_line(f"{text}  restarts {worker['restarts']}{why}"))
        if len(workers) > MOST_WORKERS:
            lines.append(_line(f"  and {len(workers) - MOST_WORKERS} more"))
        elif not workers:
            lines.append(_line("  none"))
        return lines + self._devices()

    def _devices(self) -> list[Text]:
        devices = [] if self.activity is None else self.activity["devices"]
        lines = [_line(_device(each)) for each in devices[:MOST_DEVICES]]
        if len(devices) > MOST_DEVICES:
            lines.append(_line(f"and {len(devices) - MOST_DEVICES} more devices"))
        return lines

    def _last_line(self) -> Text:
        if self.question is not None:
            asked = self.question
            most = f" to {asked.maximum}" if asked.maximum > asked.minimum else ""
            words = f"Scale {asked.model}/{asked.version} to {asked.minimum}{most} workers? [y/n]"
            return _line(words, "bold yellow")
        if self.trouble:
            return _line(self.trouble, "bold red")
        return _line(self.message, "yellow")


def _widths(columns: Sequence[_Column], cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """As wide as the words; the names, which come first, are shortened where the terminal is too narrow."""
    needed = [
        max([cell_len(column.title), *[cell_len(row[place]) for row in cells]]) for place, column in enumerate(columns)
    ]
    left = width - _GAP * (len(columns) - 1) - sum(needed[_NAMES:])
    version = min(needed[1], max(LEAST_NAME, left // 3))
    return [max(LEAST_NAME, min(needed[0], left - version)), version, *needed[_NAMES:]]


def _line(words: str, style: str = "") -> Text:
    return Text(escaped(words), style=style, no_wrap=True, overflow="ellipsis")


def _device(device: Mapping[str, Any]) -> str:
    parts = [f"gpu {device['gpuId']}:"]
    if device.get("busyPercent") is not None:
        parts.append(f"{device['busyPercent']:.0f} % busy")
    if device.get("usedBytes") is not None:
        parts.append(f"{_mib(device['usedBytes'])} of {_mib(device.get('totalBytes'))}")
    if device.get("celsius") is not None:
        parts.append(f"{device['celsius']:.0f} °C")
    if device.get("trouble"):
        parts.append(str(device["trouble"]))
    return " ".join(parts)
