"""Plays recordings with `play.py`, one for each order on standard input; servers are forked (`support/prepared.py`).

An order is a line of JSON: `words` of `play.py` and the `environment`. The answer is one, too: `status` and `output`.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

HERE = Path(__file__).resolve().parent
# At most so many players at a time: each has the ports that leave its number over, divided by this. `play.py` looks for
# unused ports, and a server takes them a second later: by then another player might have found the same.
PLAYERS = 16


def main() -> None:
    """Play until the orders end."""
    sys.path += [str(HERE), str(HERE.parent)]
    import play  # type: ignore[import-not-found]

    from support.prepared import Prepared

    subprocess.Popen = Prepared  # type: ignore[misc]
    found = play.free_ports
    number = int((re.findall(r"\d+", os.environ.get("PYTEST_XDIST_WORKER", "")) or ["0"])[0]) % PLAYERS

    def own_ports(count: int) -> list[int]:
        """Unused ports of this player's own."""
        ports: list[int] = []
        while len(ports) < count:
            ports += [port for port in found(count) if port % PLAYERS == number and port not in ports]
        return ports[:count]

    play.free_ports = own_ports
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
