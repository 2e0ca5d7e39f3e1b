"""Plays recordings with `play.py`, one for each order on standard input; servers are forked (`support/prepared.py`).

An order is a line of JSON: `words` of `play.py` and the `environment`. The answer is one, too: `status` and `output`.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Play until the orders end."""
    sys.path += [str(HERE), str(HERE.parent)]
    import play  # type: ignore[import-not-found]

    from support.prepared import Prepared

    subprocess.Popen = Prepared  # type: ignore[misc]
    answers = sys.stdout
    for line in sys.stdin:
        order = json.loads(line)
        os.environ.clear()
        os.environ.update(order["environment"])
        output = io.StringIO()
        with redirect_stdout(output):
            status = play.main(order["words"])
        answers.write(json.dumps({"status": status, "output": output.getvalue()}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
