"""The line of a request in the access log names the id that its client was told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.server import Server, make_archive, poll

ECHO = """
def handle(data, context):
    return [bytes(row["body"]) for row in data] if data else None
"""


@pytest.mark.parametrize(
    ("entry", "settings", "kind"),
    [
        ("torchserve", {}, "without"),
        ("torchserve", {"access_log_request_id": "true"}, "text"),
        ("torchserve", {"log_format": "json"}, "json"),
        ("marserve", {}, "text"),
        ("marserve", {"access_log_request_id": "false"}, "without"),
    ],
)
def test_a_request_is_found_by_its_id(tmp_path: Path, entry: str, settings: dict[str, str], kind: str) -> None:
    """In TorchServe's layout only where it is asked for, in JSON always."""
    folder = tmp_path / "logs"
    with Server(tmp_path, entry=entry, settings={"log_location": str(folder), **settings}) as server:
        make_archive(server.store / "m.mar", ECHO)
        assert server.register("m.mar").status_code == 200

        told = server.predict("m", b"x").headers["x-request-id"]

        for _ in poll(5, "the line"):
            lines = [line for line in (folder / "access_log.log").read_text().splitlines() if "/predictions/m" in line]
            if lines:
                break
    [line] = lines
    if kind == "json":
        assert json.loads(line)["request_id"] == told
    elif kind == "text":
        assert line.endswith(f" {told}")
    else:
        assert told not in line
        assert line.rsplit(" ", 2)[1] == "200"
