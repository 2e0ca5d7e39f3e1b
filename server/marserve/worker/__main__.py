"""`python -m marserve.worker`: a worker or a template on descriptors that the server passed on. Not for people."""

from __future__ import annotations

import os
import signal
import sys
from socket import socket

from marserve.shared_page import Page
from marserve.worker.connection import Connection
from marserve.worker.loop import WorkerLoop
from marserve.worker.process.parent import die_with_parent
from marserve.worker.process.printed_lines import configure_output
from marserve.worker.template import run_template


def main() -> None:
    """Arguments: `worker PARENT WIRE PAGE [MORE…]` or `template PARENT CONTROL`, the last ones descriptors."""
    if len(sys.argv) < 4:
        sys.exit("marserve.worker is started by the server; to start a server, type: marserve start")
    role, parent, *descriptors = sys.argv[1], *map(int, sys.argv[2:])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if role == "template":
        run_template(descriptors[0])
    configure_output()
    page = Page(descriptors[1])
    os.close(descriptors[1])
    WorkerLoop(Connection(socket(fileno=descriptors[0])), page, more=descriptors[2:]).run()


main()
