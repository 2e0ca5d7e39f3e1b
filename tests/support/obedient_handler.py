"""A handler that does what each request's body says: `echo` anything, `raise`, `exit 7`, `sleep 0.5`, `pid`, …

Tests of pools copy it into a model's folder. Every call is noted in the file `calls` there: one line a batch, with the
process id and the bodies, so that a test sees what reached the handler, where, and together with whom.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

CALLS = Path("calls")


class Obedient:
    """Obeys item by item; what an item's order does to the process it does to the whole batch."""

    def initialize(self, context: Any) -> None:
        """Say hello."""
        print(f"initialising {context.model_name}")  # noqa: T201

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[Any]:
        """One answer a row."""
        bodies = [bytes(row["body"]).decode() for row in rows]
        with CALLS.absolute().open("a") as calls:
            calls.write(f"{os.getpid()} {bodies}\n")
        return [self._obey(body, index, context) for index, body in enumerate(bodies)]

    def _obey(self, body: str, index: int, context: Any) -> Any:
        order, _, value = body.partition(" ")
        known = getattr(self, f"do_{order}", None)
        return body if known is None else known(value, index, context)

    def do_raise(self, value: str, index: int, context: Any) -> Any:
        """Raise."""
        raise ValueError(f"told to raise {value}")

    def do_exit(self, value: str, index: int, context: Any) -> Any:
        """End the process."""
        os._exit(int(value or 7))

    def do_segfault(self, value: str, index: int, context: Any) -> Any:
        """Crash as C code does."""
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)

    def do_sleep(self, value: str, index: int, context: Any) -> Any:
        """Take that many seconds."""
        time.sleep(float(value.partition(" ")[0]))
        return f"slept {value}"

    def do_touch(self, value: str, index: int, context: Any) -> Any:
        """Make a file, then wait until another is there: `touch started finish`."""
        made, awaited = value.split(" ")
        Path(made).touch()
        end = time.monotonic() + 30
        while not Path(awaited).exists() and time.monotonic() < end:
            time.sleep(0.002)
        return f"saw {awaited}"

    def do_pid(self, value: str, index: int, context: Any) -> Any:
        """Say who runs this."""
        return str(os.getpid())

    def do_random(self, value: str, index: int, context: Any) -> Any:
        """Draw random numbers, from every source that is loaded."""
        drawn = [random.random()]
        if "numpy" in sys.modules:
            drawn.append(float(sys.modules["numpy"].random.rand()))
        if "torch" in sys.modules:
            drawn.append(float(sys.modules["torch"].rand(1)))
        return drawn

    def do_say(self, value: str, index: int, context: Any) -> Any:
        """Speak by all channels."""
        print(f"printed {value}")  # noqa: T201
        print(f"complained {value}", file=sys.stderr)  # noqa: T201
        logging.getLogger("author").error("logged %s", value)
        warnings.warn(f"warned {value}", stacklevel=1)
        return "said"

    def do_until_cancelled(self, value: str, index: int, context: Any) -> Any:
        """Work until nobody wants it, and note that in a file."""
        Path("working").touch()
        end = time.monotonic() + 30
        while not context.is_cancelled(index) and time.monotonic() < end:
            time.sleep(0.002)
        Path("noticed").touch()
        return "cancelled"

    def do_status(self, value: str, index: int, context: Any) -> Any:
        """Answer with a status, a reason and a header of its own."""
        context.set_response_status(int(value), "As told", idx=index)
        context.set_response_header(index, "X-Told", value)
        return value

    def do_large(self, value: str, index: int, context: Any) -> Any:
        """Answer with that many bytes."""
        return b"x" * int(value)

    def do_unserialisable(self, value: str, index: int, context: Any) -> Any:
        """Answer with what no JSON can say."""
        return object()
