"""What `marserve run` shows in its terminal: where the model answers and how to ask it, and how changes went."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from marserve import __version__
from marserve.cli.output import Output
from marserve.cli.server.foreground import finishing_line
from marserve.cli.server.sample_request import UNKNOWN_BODY, base_of, curl_line, is_socket, request_beside
from marserve.errors import without_stop

if TYPE_CHECKING:
    from marserve.app.local_run import Failure, Ready


_TRACEBACK = "Traceback (most recent call last):"
_WORKER = re.compile(r"^W-\d+-\S+ ")
_FAILED = re.compile(r"Request ([A-Za-z0-9_.:\-]+)(?:, [^:]*)?: ")
_ENDED = re.compile(r"ended \((\w+)\): ")
# Causes of a worker's end that make a load fail, or that are no failure.
_OF_LOADS = (
    "import_error",
    "missing_module",
    "missing_file",
    "load_failed",
    "fork_refused",
    "startup_timeout",
    "stopped",
)


class Screen:
    """The terminal of one run."""

    def __init__(
        self,
        output: Output,
        source: str,
        model: str,
        version: str,
        staged: Path,
        *,
        folder: Path | None,
        follows: bool,
        is_verbose: bool = False,
        is_litserve: bool = False,
        example: str | None = "{}",
        body_words: str = "",
        keys: Path | None = None,
        explains: bool = True,
    ) -> None:
        """`staged` is the folder of the staged models, which are shown as paths of the source.

        `folder` is the source's, None for an archive. `keys` is the file with the keys that clients send, if they must.
        `example` is a request of a model that declares nothing, None where it takes a file. `body_words` say what its
        body is where there is no example. `explains`: the server records requests, for `marserve explain`.
        """
        self._output, self._source = output, source
        self._folder, self._keys, self._is_litserve = folder, keys, is_litserve
        self._example, self._body_words = example, body_words
        self._staged = re.compile(re.escape(str(staged)) + r"/[^/\s]+/[^/\s]+/")
        self._model, self._version, self._follows = model, version, follows
        self._is_ready = False
        self._is_verbose = is_verbose
        self._explains = explains
        self._explain_at = ""  # the address to name with the first failed request, until it is named

    def ready(self, ready: Ready) -> None:
        """The model answers."""
        self._is_ready = True
        address, seconds = str(ready.address), f"{ready.seconds:.1f} s"
        base, route = base_of(address), f"/predictions/{self._model}"
        asked = "/predict" if self._is_litserve else route
        line = curl_line(address, asked, ready.declaration, folder=self._folder, example=self._example)
        says_body = self._body_words and not ready.declaration and request_beside(self._folder) is None
        pages = [f"  Docs     {base}/docs", f"  Logs     marserve logs --management {base}"]
        if self._explains:
            pages.append(f"  Slow?    marserve explain --slowest --management {base}")
            self._explain_at = "" if is_socket(address) else base
        lines = [
            "",
            f"  marserve {__version__}: {self._model} {self._version} of {self._source}, ready in {seconds}",
            "",
            f"  Ask it   {line}",
            *([f"           {UNKNOWN_BODY} {self._body_words}"] if says_body else []),
            *([] if is_socket(address) else pages),
            *([f"  Keys     {self._keys}"] if self._keys else []),
            "",
            "  Ctrl-C stops it" + (f"; changes of {self._source} are taken as they are saved" if self._follows else ""),
            "",
        ]
        document = {
            "model": self._model,
            "version": self._version,
            "url": f"{base}{route}",
            **({"socket": ready.address.path} if is_socket(address) else {}),
            "seconds": round(ready.seconds, 3),
        }
        self._output.result(document, *lines)

    def slow(self) -> None:
        """The first load takes long."""
        self._output.say_wait(f"Loading {self._source} …")

    def changed(self) -> None:
        """A change was found, and is being loaded."""
        self._output.note(f"  {_now()}  {self._source} has changed: loading it …")

    def swapped(self, seconds: float) -> None:
        """A change answers."""
        self._output.note(f"  {_now()}  {self._source} has changed: the new one answers ({seconds:.1f} s)")

    def finishing(self, requests: int, limit_s: float) -> None:
        """A stop was asked for while requests are under way."""
        self._output.note(f"  {finishing_line(requests, limit_s)}")

    def failed(self, failure: Failure) -> None:
        """A first load or a change failed."""
        goes_on = "; what was there goes on answering" if self._is_ready else ""
        what = f"{self._source} was not loaded: {failure.reason}" if failure.reason else failure.sentence
        if failure.traceback and self._is_verbose:
            self._output.note(failure.traceback)
        if not self._is_ready and self._output.as_json:
            hint = {"next_step": failure.next_step} if failure.next_step else {}
            self._output.result({"error": {"message": what, **hint}})
        elif failure.is_of_source and not self._is_ready:
            self._output.note(f"marserve: {without_stop(what)}.")
            if failure.next_step and not self._is_verbose:
                self._output.note(f"  {failure.next_step}")
        else:
            self._output.note(f"  {_now()}  {without_stop(what)}{goes_on}")

    def shorten(self, text: str) -> str:
        """A text of the logs as the author knows it: the names of their own files, and their part of a traceback.

        Empty for what `failed` says.
        """
        text = _WORKER.sub("", text)
        ended = _ENDED.match(text)
        if text.startswith(f"Model {self._model} version") or (ended and (ended[1] in _OF_LOADS or not self._is_ready)):
            return ""
        if ended:
            text = f"A worker of {self._model} {self._version} {text}"
        text = text if self._is_verbose else self._staged.sub("", self._own_part(text))
        failed = _FAILED.match(text) if self._explain_at else None
        if failed:
            text = f"{text}\n  More: marserve explain {failed[1]} --management {self._explain_at}"
            self._explain_at = ""
        return text

    def _own_part(self, text: str) -> str:
        """A traceback without the frames above the first one of the source. Empty for that of the source's import."""
        if _TRACEBACK not in text:
            return text
        lines = text.rstrip().split("\n")
        top = next(number for number, line in enumerate(lines) if _TRACEBACK in line)
        own = [number for number, line in enumerate(lines) if number > top and self._staged.search(line)]
        if own and lines[own[0]].rstrip().endswith("in <module>"):
            return ""  # `failed` says what is wrong in which line
        return "\n".join([*lines[: top + 1], *lines[own[0] if own else top + 1 :]])


def _now() -> str:
    return time.strftime("%H:%M:%S")
