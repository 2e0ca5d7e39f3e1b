"""What clients of a gRPC port may do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Limits for clients of one port. Sizes in bytes, times in seconds; None: no limit.

    A connection that is `age_s` old is asked to close, and its calls have `age_grace_s` to end. So is one that has had
    no call for `idle_s`. After `keepalive_s` of silence a client gets a ping, and is cut if it does not answer within
    `keepalive_timeout_s`. A client may send a ping every `least_ping_interval_s`. A client that takes nothing of an
    answer is cut after `stall_timeout_s`. `rest` is the address of the same API for HTTP/1.1, empty if not known: it is
    named to clients that speak that here.
    """

    message_bytes: int = 6_553_500
    header_bytes: int = 64 * 1024
    connections: int = 8192
    calls_per_connection: int = 1024
    age_s: float | None = None
    age_grace_s: float | None = None
    idle_s: float | None = None
    keepalive_s: float = 60.0
    keepalive_timeout_s: float = 20.0
    least_ping_interval_s: float = 10.0
    stall_timeout_s: float = 60.0
    rest: str = ""

    @property
    def sweep_s(self) -> float:
        """How often a connection looks at its limits of time: once a second, or more often for shorter ones."""
        times = (self.age_s, self.age_grace_s, self.idle_s, self.keepalive_s, self.keepalive_timeout_s)
        return max(0.05, min(1.0, *(limit / 4 for limit in times if limit is not None)))
