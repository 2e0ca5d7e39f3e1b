"""The case of docs/slow-requests.md: a model that writes summaries, with mails and now and then a contract."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

from support.server import Server

# A summary takes as long as its text is: most are short, and now and then one is not.
SUMMARISE = """
import json
import time

def handle(data, context):
    if data is None:
        return None
    for row in data:
        text = json.loads(bytes(row["body"]))["text"]
        with context.span("read"):
            time.sleep(0.002)
        with context.span("write"):
            time.sleep(len(text) / 10_000)
    return ["a summary"] * len(data)
"""
LONG, SHORT = "x" * 15_000, "x" * 40


def ask(server: Server, request_id: str, text: str) -> None:
    """Have a text summarised."""
    server.predict("summaries", json.dumps({"text": text}), **{"X-Request-Id": request_id})


def write_round(server: Server, number: int) -> None:
    """A contract, and six mails that come while it is written. Returns when all have their summaries."""
    with ThreadPoolExecutor(8) as clients:
        clients.submit(ask, server, f"contract-{number}", LONG)
        time.sleep(0.2)  # the long one is with the worker by now
        for mail in range(6):
            clients.submit(ask, server, f"mail-{number}{mail}", SHORT)
