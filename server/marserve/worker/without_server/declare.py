"""Imports a handler, and writes what it declares as JSON. Its arguments are a folder and the handler's word.

For `marserve archive`, whose process runs no code of an archive. No model is loaded.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from marserve.messages import Load
from marserve.worker.load import enter_model_folder, find_definition, import_handler


def declare(folder: str, handler: str) -> dict[str, Any]:
    """What the handler in this folder declares: `declaration`, or `fault` and `is_missing`; empty for nothing."""
    word, _, name = handler.partition(":")
    try:
        enter_model_folder(Load("model", "1.0", folder, handler, None, None, 1))
        module = import_handler(word)
        definition = find_definition(module, name)
        if definition is None:
            return {}
        # here: only now something is declared
        from marserve_handlers.declared.opening import declare

        return {"declaration": declare(definition).encode().decode()}
    except ImportError as error:
        return {"fault": f"{type(error).__name__}: {error}", "is_missing": True}
    except SyntaxError as error:
        return {"fault": f"line {error.lineno}: {error.msg}"}
    except Exception as error:  # what the author's module raises
        is_ours = type(error).__name__ == "DeclarationError"
        return {"fault": str(error) if is_ours else f"{type(error).__name__}: {error}"}


def main() -> None:
    """Write the result to standard output, which the handler's module does not get."""
    if len(sys.argv) != 3:
        sys.exit("marserve.worker.without_server.declare is started by marserve archive")
    out = os.dup(1)
    os.dup2(2, 1)
    result = json.dumps(declare(*sys.argv[1:])).encode()
    with os.fdopen(out, "wb") as file:
        file.write(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the author's module must not keep the process


if __name__ == "__main__":
    main()
