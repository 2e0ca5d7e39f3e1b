"""What the connections of one listening address share: limits, the surface, counts and log of answers.

It knows no sockets. Nothing is global: a server makes one `Listener` for each address.
"""

from __future__ import annotations

from typing import Final

from marserve.api.browsers import BrowserRules
from marserve.api.decoding import Decoding
from marserve.api.errors import ErrorRules
from marserve.api.http.connections import ConnectionTable
from marserve.api.http.inference import InferenceSurface
from marserve.api.http.large_answers import LargeAnswers
from marserve.api.http.request_head import Head, HttpLimits
from marserve.api.http.response_headers import ResponseHeaders
from marserve.api.request_ids import RequestIds
from marserve.api.tokens import Tokens
from marserve.telemetry.logs.access_log import AccessLog
from marserve.telemetry.metrics.server_metrics import Metrics
from marserve.telemetry.trace_context import Trace
from marserve.telemetry.traces.tracing import Takes, Tracing

MAX_KNOWN_HEADS: Final = 1024
MAX_KNOWN_HEAD_BYTES: Final = 2048


class Listener:
    """What the connections of one listening address share."""

    __slots__ = (
        "access_log",
        "browser_rules",
        "connections",
        "decoding",
        "error_rules",
        "has_ids",
        "heads",
        "is_leaving",
        "large_answers",
        "ledger",
        "limits",
        "logs_streams_at_end",
        "match",
        "metrics",
        "next_id",
        "recorder",
        "request_ids",
        "response_headers",
        "sampling",
        "surface",
        "tokens",
        "tracing",
    )

    def __init__(
        self,
        surface: InferenceSurface | None,
        limits: HttpLimits,
        access_log: AccessLog,
        metrics: Metrics,
        connections: ConnectionTable,
        response_headers: ResponseHeaders,
        error_rules: ErrorRules,
        large_answers: LargeAnswers,
        tokens: Tokens | None = None,
        browser_rules: BrowserRules | None = None,
        decoding: Decoding | None = None,
        request_ids: RequestIds | None = None,
        recorder: Takes | None = None,
        tracing: Tracing | None = None,
        *,
        logs_streams_at_end: bool = False,
    ) -> None:
        self.surface = surface
        self.recorder = recorder
        self.tracing = tracing
        self.tokens = tokens
        self.browser_rules = browser_rules
        self.match = surface.match if surface is not None else _match_nothing
        self.limits = limits
        self.access_log: AccessLog | None = access_log if access_log.is_on else None
        self.has_ids = access_log.has_ids
        self.sampling = access_log.sampling
        # TorchServe logs a stream at its first piece.
        self.logs_streams_at_end = logs_streams_at_end
        self.metrics = metrics
        self.connections = connections
        self.ledger = connections.ledger
        self.response_headers = response_headers
        self.error_rules = error_rules
        self.large_answers = large_answers
        self.decoding = decoding or Decoding()
        # The server will stop soon: every answer asks its client to connect anew, elsewhere.
        self.is_leaving = False
        self.heads: dict[bytes, Head] = {} if tokens is None else KnownHeads(tokens)
        self.request_ids = request_ids or RequestIds()
        self.next_id = self.request_ids.next

    def remember(self, head_bytes: bytes, head: Head) -> None:
        """Keep an accepted header, so that the same bytes need not be parsed again."""
        if len(head_bytes) > MAX_KNOWN_HEAD_BYTES:
            return
        if len(self.heads) >= MAX_KNOWN_HEADS:
            self.heads.clear()
        self.heads[head_bytes] = head

    def record(
        self,
        peer: str,
        line: str,
        status: int,
        began: float,
        now: float,
        request_id: str,
        client_id: str,
        trace: Trace | None = None,
    ) -> None:
        """Count an answer that begins now, and log its request. `client_id`: the client's, if it has another one."""
        self.metrics.responses[status // 100] += 1
        if self.access_log is not None:
            milliseconds = int((now - began) * 1000)
            if self.sampling is not None and not self.sampling.keeps(
                request_id, milliseconds, has_failed=status >= 400
            ):
                return
            if not self.has_ids:
                self.access_log.write(f'{peer} "{line}" {status} {milliseconds}')
            elif trace is None and not client_id:  # most of them: as few pieces of text as can be
                self.access_log.write(f'{peer} "{line}" {status} {milliseconds} {request_id}')
            else:
                ids = _ids_of(request_id, client_id, trace)
                self.access_log.write(f'{peer} "{line}" {status} {milliseconds}{ids}')

    def record_stream(
        self,
        peer: str,
        line: str,
        status: int,
        began: float,
        now: float,
        request_id: str,
        client_id: str,
        broken_off: str = "",
        trace: Trace | None = None,
    ) -> None:
        """The same at the end of a stream, which may have been broken off: `broken_off` is why, in a word."""
        if broken_off and self.access_log is not None:
            self.metrics.responses[status // 100] += 1
            ids = _ids_of(request_id, client_id, trace) if self.has_ids else ""
            milliseconds = int((now - began) * 1000)
            self.access_log.write(f'{peer} "{line}" {status} {milliseconds}{ids} broken_off={broken_off}')
        else:
            self.record(peer, line, status, began, now, request_id, client_id, trace)


def _ids_of(request_id: str, client_id: str, trace: Trace | None) -> str:
    """What a line of the access log ends with, where it names its request."""
    both = f" {request_id} {client_id}" if client_id and client_id != request_id else f" {request_id}"
    return both if trace is None else f"{both}{trace.for_lines}"


def _match_nothing(target: bytes) -> None:
    """A listener without inference: every request is ASGI."""


class KnownHeads(dict[bytes, Head]):
    """The accepted headers of a listener with keys. All are forgotten when the key is replaced or has expired.

    Used only where tokens are on, so that other listeners have a plain table and pay nothing.
    """

    def __init__(self, tokens: Tokens) -> None:
        super().__init__()
        self._tokens = tokens
        self._key = tokens.key_of("inference")

    def get(self, head_bytes: bytes, default: Head | None = None) -> Head | None:  # type: ignore[override]
        """The header read from these bytes, if its key is still good."""
        key = self._tokens.key_of("inference")
        if key is not self._key or self._tokens.has_expired("inference"):
            self.clear()
            self._key = key
            return default
        return super().get(head_bytes, default)
