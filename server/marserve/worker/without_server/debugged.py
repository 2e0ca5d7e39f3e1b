"""Answers one request to an archive's model on the terminal of `marserve debug`, whose process runs no archive's code.

Its arguments are the order to load, the body, its content type, a folder for the result, and the parent's process id.
The terminal is the author's: standard input, output and errors are those of the command. `result.json` and `answer` are
written into the folder; a traceback goes to standard error whole, at the moment of the failure.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from bdb import BdbQuit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from marserve.messages import Load, Raised, Results, Work
from marserve.shared_page import Page, create_page
from marserve.worker.load import LoadedModel, enter_model_folder, load_model
from marserve.worker.outgoing import why_not_loaded
from marserve.worker.process.own_process import leave, use_threads
from marserve.worker.process.parent import die_with_parent
from marserve.worker.without_server.in_process import InProcess
from marserve_handlers.context import Context
from marserve_handlers.testing import Answer, Request

RESULT, ANSWER = "result.json", "answer"


class Timed(InProcess):
    """A worker in this process that keeps how its time was spent."""

    def __init__(self, model: LoadedModel, page: Page) -> None:
        super().__init__(model, page)
        self.handler_s = 0.0
        self.work: Work | None = None

    def send(self, message: Any, bodies: Sequence[bytes] = ()) -> None:
        """As a worker's; the end of the batch has the times."""
        if isinstance(message, Results | Raised):
            self.handler_s, self.work = message.handler_s, message.work
        super().send(message, bodies)


def telling(model: LoadedModel) -> LoadedModel:
    """The same model, whose tracebacks are printed whole where they happen; the server's log has the first 64 KiB."""

    def call(rows: list[dict[str, Any]], context: Context) -> Any:
        try:
            return model.handle(rows, context)
        except BdbQuit:
            sys.stderr.write("The debugger was left.\n")
            raise
        except BaseException:
            traceback.print_exc()
            raise

    return model.calling(call)


def debug(load: Load, body: Path, content_type: str) -> tuple[dict[str, Any], bytes]:
    """What is written as the result, with the names of `marserve debug --json`, and the answer's body."""
    began = time.perf_counter()
    try:
        use_threads(load.threads)
        enter_model_folder(load)
        model = load_model(load)
    except BaseException as error:  # the author's code, also to end the process
        traceback.print_exc()
        return {"fault": why_not_loaded(error)}, b""
    load_s = time.perf_counter() - began
    descriptor = create_page()
    page = Page(descriptor)
    os.close(descriptor)
    process = Timed(telling(model), page)
    try:
        answer: Answer = process.run([Request(body.read_bytes(), content_type or None)])[0]
    except SystemExit as error:
        return {"fault": f"the handler ended the process with {error.code!r}"}, b""
    work = process.work or Work(0.0, 0.0, 0.0)
    return {
        "status": answer.status,
        "message": str(answer.message),
        "headers": dict(answer.headers),
        "pieces": len(answer.pieces),
        "loadSeconds": load_s,
        "readSeconds": work.decode_s,
        "handlerSeconds": process.handler_s,
        "writeSeconds": work.encode_s,
        "collectedSeconds": work.collected_s,
        "waitedSeconds": work.waited_s,
        "spans": [{"name": span.name, "afterSeconds": span.after_s, "seconds": span.seconds} for span in work.spans],
        "warnings": [str(warning) for warning in model.context.load_warnings],
    }, answer.body


def main() -> None:
    """Answer, and end."""
    if len(sys.argv) != 6:
        sys.exit("marserve.worker.without_server.debugged is started by marserve debug")
    die_with_parent(int(sys.argv[5]))
    load = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=Load)
    folder = Path(sys.argv[4])
    result, answer = debug(load, Path(sys.argv[2]), sys.argv[3])
    (folder / ANSWER).write_bytes(answer)
    (folder / RESULT).write_text(json.dumps(result))
    leave(0)


if __name__ == "__main__":
    main()
