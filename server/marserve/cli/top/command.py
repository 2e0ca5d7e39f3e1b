"""`marserve top`: which models are asked, how fast they answer, what waits, and what their workers do."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer
from rich.console import Console
from rich.live import Live

from marserve.cli.output import AsJson, CommandFailed, Output, WrongArguments
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, model_path
from marserve.cli.requests.explain import ask_recorder, described
from marserve.cli.top.terminal import Terminal
from marserve.cli.top.view import SORTS, Ask, Explain, Quit, Scale, View
from marserve.errors import without_stop

POLL_S: Final = 1.0
# A server that takes long is asked more rarely: it is busy with this for a quarter of the time at most.
REST: Final = 3
AWAY_S: Final = 2.0
LISTED: Final = 100
# Without news the screen is drawn anew this often, for a terminal that has changed its size.
REDRAW_S: Final = 1.0


def top(
    sort: Annotated[
        str, typer.Option("--sort", metavar="WHAT", help="What comes first: rate, p99, queue, memory or name.")
    ] = "rate",
    once: Annotated[bool, typer.Option("--once", help="Show the table once, as is done without a terminal.")] = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Watch models: answers a second, p50 and p99, queues, batches, workers and why one is not up, memory, devices."""
    with Output(as_json) as output:
        if sort not in SORTS.values():
            raise WrongArguments(f"--sort is {sort[:100]!r}; it is one of {', '.join(SORTS.values())}.")
        with Management(find_address("management", management, config)) as server:
            view = View(server.address, sort)
            first = _activity(server, sort)
            view.take(first)
            console = Console(highlight=False)
            if as_json:
                output.result(first)
            elif once or not (console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty()):
                if not console.is_terminal:
                    console.width = 200
                with console.capture() as captured:
                    console.print(view.draw_once(console.width))
                typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
            else:
                _watch(server, view, console)


def _activity(server: Management, sort: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = server.order("GET", "/stats", {"sort": sort, "limit": LISTED})
    except CommandFailed as failure:
        if failure.detail.get("code") in (404, 405):
            raise CommandFailed(
                "This server has no statistics: it was started as torchserve, and keeps TorchServe's routes.",
                "`marserve models` lists its models.",
                **failure.detail,
            ) from failure
        raise
    return found


class Polls:
    """Asks the server on a thread, again and again. What came is taken from `news` by the thread that draws."""

    def __init__(self, server: Management, view: View, wake: Callable[[], None]) -> None:
        self.news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._server, self._view, self._wake = server, view, wake
        self._soon = threading.Event()
        self._has_ended = False
        self._is_busy = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="polls", daemon=True)

    def soon(self) -> None:
        """Ask at once."""
        self._soon.set()

    def end(self) -> None:
        """Ask no more. A request that is under way is not waited for."""
        self._has_ended = True
        self._soon.set()

    def do(self, action: Explain | Scale) -> None:
        """Do what a key asks for, on a thread of its own; one at a time."""
        if not self._is_busy.acquire(blocking=False):
            self._view.message = "The last order is still under way."
            return
        threading.Thread(target=self._do, args=(action,), name="order", daemon=True).start()

    def _tell(self, news: Callable[[], None]) -> None:
        self.news.put(news)
        self._wake()

    def _run(self) -> None:
        pause_s = POLL_S
        while not self._has_ended:
            self._soon.wait(pause_s)
            self._soon.clear()
            if self._has_ended:
                return
            began, sort = time.monotonic(), self._view.sort
            try:
                activity = _activity(self._server, sort)
            except CommandFailed as failure:
                words = f"Old figures, trying again: {without_stop(failure.message)}"
                self._tell(lambda words=words: setattr(self._view, "trouble", words))  # type: ignore[misc]
                pause_s = AWAY_S
                continue
            except RuntimeError:
                if self._has_ended:  # the connections are closed then
                    return
                raise
            pause_s = max(POLL_S, REST * (time.monotonic() - began))
            # Of an order that was changed meanwhile there will be newer ones.
            if sort == self._view.sort:
                self._tell(lambda activity=activity: self._view.take(activity))  # type: ignore[misc]

    def _do(self, action: Explain | Scale) -> None:
        try:
            if isinstance(action, Explain):
                self._explain(action.model)
            else:
                asked = {"min_worker": action.minimum, "max_worker": action.maximum}
                answer = self._server.order("PUT", model_path(action.model, action.version), asked)
                self._say(str(answer["status"]))
        except CommandFailed as failure:
            self._say(failure.message)
        except RuntimeError:
            if not self._has_ended:  # the connections are closed then
                raise
        finally:
            self._is_busy.release()
            self.soon()

    def _explain(self, model: str) -> None:
        found = ask_recorder(self._server, "/requests", {"model": model, "limit": "1"})
        if not found["requests"]:
            self._say(f"No request of {model} is recorded.")
            return
        path = f"/requests/{quote(str(found['requests'][0]['id']), safe='')}"
        lines = described(ask_recorder(self._server, path, {}))

        def show() -> None:
            self._view.message, self._view.overlay = "", lines

        self._tell(show)

    def _say(self, words: str) -> None:
        self._tell(lambda: setattr(self._view, "message", words))


def _watch(server: Management, view: View, console: Console) -> None:
    """The live view, until `q` or the terminal's end. Ctrl-C raises KeyboardInterrupt, as in every command."""
    screens: list[Live] = []

    def show() -> None:
        live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        screens.append(live)
        live.start()

    def hide() -> None:
        screens.pop().stop()

    with contextlib.suppress(EOFError), Terminal(sys.stdin.fileno(), show, hide) as terminal:
        polls = Polls(server, view, terminal.wake)
        polls.thread.start()
        try:
            while True:
                screens[-1].update(view.draw(console.width, console.height), refresh=True)
                if not _go_on(view, polls, terminal.wait(REDRAW_S)):
                    return
        finally:
            polls.end()


def _go_on(view: View, polls: Polls, keys: list[str]) -> bool:
    """Take news and keys; False for the end."""
    with contextlib.suppress(queue.Empty):
        while True:
            polls.news.get_nowait()()
    for key in keys:
        action = view.press(key)
        if isinstance(action, Quit):
            return False
        if isinstance(action, Ask):
            polls.soon()
        elif action is not None:
            polls.do(action)
    return True
