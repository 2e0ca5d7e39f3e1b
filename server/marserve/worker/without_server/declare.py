"""Imports a handler, and writes what it declares as JSON. Its arguments are a folder, the handler's
word, and the process id of its parent.

For `marserve archive` and `marserve run`, whose process runs no code of an archive. No model is loaded.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from marserve.messages import Load
from marserve.worker.load import enter_model_folder, find_definition, import_handler
from marserve.worker.process.parent import die_with_parent

# Of a traceback, in characters.
_MOST_TRACEBACK = 8_000


def declare(folder: str, handler: str) -> dict[str, Any]:
    """What the handler in this folder declares: `declaration` with `advice`, or `fault` with what belongs to it.

    Empty for a handler that declares nothing.

    The keys are those of `marserve.archive.writing.declaring.Imported`.
    """
    word, _, name = handler.partition(":")
    try:
        enter_model_folder(Load("model", "1.0", folder, handler, None, None, 1))
        module = import_handler(word)
        definition = find_definition(module, name)
        if definition is None:
            return {}
        # here: only now something is declared
        from marserve_handlers.declared.opening import advise, declare

        return {"declaration": declare(definition).encode().decode(), "advice": advise(definition)}
    except BaseException as error:  # what the author's module raises, also to end the process
        return _fault(error, folder)


def _fault(error: BaseException, folder: str) -> dict[str, Any]:
    """What is wrong, in which line of the author's, and the author's part of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [number for number, frame in enumerate(frames) if frame.filename.startswith(folder + os.sep)]
    lines: list[str] = []
    where = ""
    if own:
        last = frames[own[-1]]
        where = f"{os.path.relpath(last.filename, folder)}, line {last.lineno}"
        kept = traceback.StackSummary.from_list(frames[own[0] :])
        lines = ["Traceback (most recent call last):\n", *kept.format()]
    said = ": ".join(word for word in (type(error).__name__, str(error)) if word)
    if type(error).__name__ == "DeclarationError":
        said = str(error)
    elif isinstance(error, SyntaxError):
        said = str(error.msg)
        if error.filename and error.filename.startswith(folder + os.sep):
            where = f"{os.path.relpath(error.filename, folder)}, line {error.lineno}"
    elif isinstance(error, SystemExit):
        said = f"it ends the process while it is imported ({said})"
    lines += traceback.format_exception_only(error) if lines else []
    text = "".join(lines).replace(folder + os.sep, "")[-_MOST_TRACEBACK:]
    return {"fault": said, "where": where, "traceback": text, "is_missing": isinstance(error, ImportError)}


def main() -> None:
    """Write the result to standard output, which the handler's module does not get."""
    if len(sys.argv) != 4:
        sys.exit("marserve.worker.without_server.declare is started by marserve archive")
    die_with_parent(int(sys.argv[3]))
    out = os.dup(1)
    os.dup2(2, 1)
    result = json.dumps(declare(*sys.argv[1:3])).encode()
    with os.fdopen(out, "wb") as file:
        file.write(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the author's module must not keep the process


if __name__ == "__main__":
    main()
