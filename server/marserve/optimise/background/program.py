"""The process that searches for a faster build beside the version that serves: `python -m` this module.

It runs no archive's code itself. It and all that it starts keep to a share of a core, except while builds are measured.
It ends when the server does, with all that it started, and deletes what it was making.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from marserve.errors import MarserveError
from marserve.lineage import VARIABLE, end_families, end_family
from marserve.optimise.background.cache import write_found
from marserve.optimise.background.order import WHOLE, Order, Said, read_order
from marserve.optimise.background.throttle import Throttle
from marserve.optimise.optimise import Wish, describe_report, optimise_here


def main() -> None:
    """Carry out the order on standard input."""
    said = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def say(line: Said) -> None:
        with contextlib.suppress(OSError):  # the server has ended, which the watch sees
            said.write(msgspec.json.encode(line) + b"\n")

    orders = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    try:
        order = read_order(orders)
    except EOFError:
        sys.exit("marserve.optimise.background.program is started by a server")
    watch = threading.Thread(target=_end_with_server, args=(orders.fileno(), Path(order.folder)))
    watch.start()
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, max(priority, order.priority))
    try:
        try:
            said_last = _search(order, say, priority)
        finally:
            end_family()  # before the last word: the server kills this process then
        say(said_last)
    except MarserveError as error:
        say(Said(failed=str(error).split("\n", 1)[0]))
    except OSError as error:
        say(Said(failed=f"{error.strerror or error} ({error.filename or order.folder})"))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    watch.join()  # the server ends this process, or has ended itself


def _search(order: Order, say: Callable[[Said], None], priority: int) -> Said:
    """Search, and write what was found. Raises MarserveError, OSError."""
    with Throttle(order.share, priority) as throttle:
        wish = Wish(
            batch_size=order.batch_size,
            threads=order.threads,
            within_s=order.within_s,
            memory_bytes=order.memory_bytes,
            turn=throttle.unthrottled,
        )
        report = optimise_here(
            order.taken,
            wish,
            Path(order.folder, WHOLE),
            patience=max(1.0, 1 / order.share),
            on_step=lambda step: say(Said(step=step)),
        )
    may_change = not report.winner and any(row.may_change for row in report.rows)
    write_found(Path(order.folder, WHOLE), describe_report(report), may_change=may_change)
    return Said(is_done=True)


def _end_with_server(descriptor: int, folder: Path) -> None:
    """Wait for the end of the input, which is the server's; then nothing of this process is left."""
    while os.read(descriptor, 1):
        pass
    lineage = os.environ.get(VARIABLE, "")
    if lineage:
        end_families({lineage: 0})
    end_family()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
