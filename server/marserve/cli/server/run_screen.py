"""What `marserve run` shows in its terminal: where the model answers and how to ask it, and how changes went."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from marserve import __version__
from marserve.cli.output import Output

if TYPE_CHECKING:
    from marserve.app.local_run import Failure, Ready


_WORKER = re.compile(r"^W-\d+-\S+ ")


class Screen:
    """The terminal of one run."""

    def __init__(self, output: Output, source: str, model: str, version: str, staged: Path, *, follows: bool) -> None:
        """`staged` is the folder of the staged models, which are shown as paths of the source."""
        self._output, self._source = output, source
        self._staged = re.compile(re.escape(str(staged)) + r"/[^/\s]+/[^/\s]+/")
        self._model, self._version, self._follows = model, version, follows

    def ready(self, ready: Ready) -> None:
        """The model answers."""
        base, seconds = str(ready.address), f"{ready.seconds:.1f} s"
        lines = [
            "",
            f"  marserve {__version__}: {self._model} {self._version} of {self._source}, ready in {seconds}",
            "",
            f"  POST {base}/predictions/{self._model}",
            f"  curl -d '{{}}' -H 'Content-Type: application/json' {base}/predictions/{self._model}",
            "",
            "  Ctrl-C stops it" + (f"; changes of {self._source} are taken as they are saved" if self._follows else ""),
            "",
        ]
        document = {
            "model": self._model,
            "version": self._version,
            "url": f"{base}/predictions/{self._model}",
            "seconds": round(ready.seconds, 3),
        }
        self._output.result(document, *lines)

    def swapped(self, seconds: float) -> None:
        """A change answers."""
        self._output.note(f"  {_now()}  {self._source} has changed: the new one answers ({seconds:.1f} s)")

    def failed(self, failure: Failure) -> None:
        """A first load or a change failed."""
        self._output.note(f"  {_now()}  {failure.sentence}")
        if failure.reason:
            self._output.note(f"  {failure.reason}")

    def shorten(self, text: str) -> str:
        """A line of the logs as the author knows it: their own file's name, no name of a worker."""
        return self._staged.sub("", _WORKER.sub("", text))


def _now() -> str:
    return time.strftime("%H:%M:%S")
