"""The settings of traces and of the log, in the words of Triton's extensions "trace" and "logging". Pure.

Traces are as the server's settings say, for the server and for each model, so these have one value each. Of the log's
settings the level can be changed: it has one level, and each of Triton's switches for a kind of line stands for a part
of the scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from marserve.api.open_inference.shown import bounded, shown
from marserve.errors import BadInput
from marserve.telemetry.logs.records import LEVELS

Document = dict[str, Any]

TRACE: Final[Mapping[str, str | list[str]]] = {
    "trace_file": "",
    "trace_level": ["OFF"],
    "trace_rate": "0",
    "trace_count": "0",
    "log_frequency": "0",
}
"""What is in force without traces."""

# For each switch the most terse level that writes its lines; `log_verbose_level` 1 is `debug`.
_SWITCHES: Final = {"log_verbose_level": "debug", "log_info": "info", "log_warnings": "warning", "log_errors": "error"}
_FIXED: Final = ("log_file", "log_format")


class Levels(Protocol):
    """The levels of the server's log and of workers' logging, as words of `LEVELS`."""

    @property
    def server(self) -> str:
        """The server log's."""

    def set(self, level: str, model: str | None) -> None:
        """Change all levels, or that of one model's workers."""


class TraceSettings:
    """The settings of traces. `share` is that of the traces which begin here and are sent; None: no traces are made."""

    def __init__(self, share: float | None = None) -> None:
        self._is_on = share is not None
        self._values = dict(TRACE)
        if share is not None:
            # Of so many requests one is sent; slow and failed ones are beside that. There is no bound on how many.
            rate = round(1 / share) if share > 0 else 0
            self._values |= {"trace_level": ["TIMESTAMPS"], "trace_rate": str(rate), "trace_count": "-1"}

    def document(self) -> Document:
        """What is in force."""
        return dict(self._values)

    def check(self, wanted: Mapping[str, Any]) -> None:
        """Raise BadInput for a setting that is not in force; None and an empty list ask for what is."""
        for name, value in wanted.items():
            if name not in TRACE:
                raise BadInput(f"{_shown(name)} is no trace setting; there are {', '.join(TRACE)}.")
            given = [value] if isinstance(value, str) else value
            mine = self._values[name]
            if given is not None and given not in ([], [mine] if isinstance(mine, str) else mine):
                why = "stays as it was started" if self._is_on else "makes no traces"
                raise BadInput(
                    f"{name} is {_shown(value)}; this server {why}, so it can only be {_shown(mine)}. The settings "
                    "tracing and trace_sample say another for the next start."
                )


class LogSettings:
    """The settings of the log. `file` is the name of the server log's file, empty for standard output alone."""

    def __init__(self, levels: Levels, file: str, layout: str) -> None:
        """`layout` is what the setting `log_format` says."""
        self._levels = levels
        self._fixed = {"log_file": file, "log_format": layout}

    def document(self) -> Document:
        """What is in force."""
        now = LEVELS.index(self._levels.server)
        switches = {name: now <= LEVELS.index(level) for name, level in _SWITCHES.items()}
        verbose = int(switches.pop("log_verbose_level"))
        return {
            "log_file": self._fixed["log_file"],
            **switches,
            "log_verbose_level": verbose,
            "log_format": self._fixed["log_format"],
        }

    def change(self, wanted: Mapping[str, Any]) -> None:
        """Change the level of the server's log and of workers' logging to the nearest that fits. Raises BadInput.

        A switch that is turned on turns those of graver lines on too, and one that is turned off those of lesser.
        """
        for name, value in wanted.items():
            self._check(name, value)
        least, most = 0, len(LEVELS) - 1
        for name, level in _SWITCHES.items():
            if name not in wanted:
                continue
            at = LEVELS.index(level)
            if wanted[name]:
                most = min(most, at)
            else:
                least = max(least, at + 1)
        if least > most:
            on = next(name for name in _SWITCHES if wanted.get(name))
            off = [name for name in _SWITCHES if wanted.get(name) in (False, 0)][-1]
            raise BadInput(
                f"{on} is on and {off} is off; the log has one level, {' < '.join(LEVELS)}, and writes all above it."
            )
        now = LEVELS.index(self._levels.server)
        level = LEVELS[min(max(now, least), most)]
        if level != self._levels.server:
            self._levels.set(level, None)

    def _check(self, name: str, value: Any) -> None:
        if name in _FIXED:
            mine = self._fixed[name]
            if value != mine:
                where = "log_location" if name == "log_file" else "log_format"
                raise BadInput(
                    f"{name} is {_shown(value)}; while the server runs it stays {_shown(mine)}. The setting {where} "
                    "says another for the next start."
                )
        elif name == "log_verbose_level":
            if type(value) is not int or value not in (0, 1):
                raise BadInput(f"{name} is {_shown(value)}; it must be 0, or 1 for debug lines.")
        elif name not in _SWITCHES:
            raise BadInput(f"{_shown(name)} is no log setting; there are {', '.join(self.document())}.")
        elif not isinstance(value, bool):
            raise BadInput(f"{name} is {_shown(value)}; it must be true or false.")
        elif name == "log_errors" and not value:
            raise BadInput("log_errors is false; errors are always logged.")


def _shown(value: object) -> str:
    """A client's value for a sentence; a list with its first elements."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return bounded(ascii(list(value[:3])))
    return shown(value)
