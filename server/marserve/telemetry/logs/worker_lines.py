"""What a worker printed, as logs take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Stream = Literal["stdout", "stderr"]


class WorkerLines(NamedTuple):
    """Records of one level that belong to the same requests; a text of several lines is one record.

    `worker_id` is the worker's number (`9000`), `level` a name of Python's logging, `ids` are those of the requests, as
    `messages.line_ids` writes them.
    """

    model: str
    version: str
    worker_id: str
    stream: Stream
    level: str
    texts: Sequence[str]
    ids: str = ""
