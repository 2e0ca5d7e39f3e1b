"""A steady load on one model from threads of its own, for as long as a test needs it; every answer is kept."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: when its request began and ended (monotonic), its status, the version that its header names."""

    began: float
    ended: float
    status: int
    version: str
    body: bytes


@dataclass
class Load:
    """`clients` threads, each of which sends its next request as soon as the last one is answered, or after `pause_s`.

    `body` makes the body of request number n. Use it as a context.
    """

    address: str
    model: str
    clients: int = 4
    pause_s: float = 0.0
    body: Callable[[int], bytes] = lambda number: json.dumps([number % 50, 1.0]).encode()
    replies: list[Reply] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._number = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(self.clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def statuses(self) -> Counter[int]:
        """How many answers had each status; 0 is a broken connection."""
        with self._lock:
            return Counter([reply.status for reply in self.replies] + [0] * len(self.failures))

    def versions(self, since: float = 0.0) -> Counter[str]:
        """Who answered requests that began after this moment."""
        with self._lock:
            return Counter(reply.version for reply in self.replies if reply.began >= since)

    def _run(self) -> None:
        parts = urlsplit(self.address)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        while not self._is_over.is_set():
            with self._lock:
                number = self._number
                self._number += 1
            began = time.monotonic()
            try:
                connection.request("POST", f"/predictions/{self.model}", self.body(number))
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException) as error:
                with self._lock:
                    self.failures.append(repr(error))
                connection.close()
                continue
            version = answer.headers.get("x-marserve-version", "")
            with self._lock:
                self.replies.append(Reply(began, time.monotonic(), answer.status, version, body))
            if self.pause_s:
                self._is_over.wait(self.pause_s)
        connection.close()
