"""Which traces are kept. Pure.

The beginning of a trace decides (the caller's flag, or a share of the ids), so that all services keep the same ones.
Requests that failed or were slow are kept in any case, which is known only at their end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from marserve.telemetry.timeline import Timeline
from marserve.telemetry.trace_context import RANDOM, SAMPLED, Parent

SAMPLERS: Final = {
    "always_on": (False, 1.0),
    "always_off": (False, 0.0),
    "traceidratio": (False, None),
    "parentbased_always_on": (True, 1.0),
    "parentbased_always_off": (True, 0.0),
    "parentbased_traceidratio": (True, None),
}
"""OpenTelemetry's names: whether the caller's flag decides, and the share without one, None for the argument's."""

_BITS: Final = 1 << 64


class Sampling(msgspec.Struct, frozen=True):
    """Which traces are kept: a share of those that begin here, and all that were slower than so many seconds or failed.

    `follows_parent`: a caller's flag decides before the share. `slower_than_s` 0: no slow ones are kept beside.
    """

    share: float
    slower_than_s: float = 0.0
    follows_parent: bool = True

    @property
    def below(self) -> bytes:
        """Traces are kept whose id's last 8 bytes are less; of equal length these compare as numbers."""
        return int(self.share * _BITS).to_bytes(8) if self.share < 1.0 else b"\xff" * 9

    def flags(self, parent: Parent | None, trace_id: str) -> int:
        """The flags of a request's trace. The same id is decided alike by every service that samples by a share."""
        if parent is not None and self.follows_parent:
            return parent.flags
        random = RANDOM if parent is None else parent.flags & RANDOM
        return random | (SAMPLED if bytes.fromhex(trace_id[16:32]) < self.below else 0)

    def keeps(self, timeline: Timeline) -> bool:
        """Whether the spans of a request that has ended are sent."""
        trace = timeline.trace
        return trace is not None and (
            trace.is_sampled or timeline.has_failed or 0.0 < self.slower_than_s < timeline.wall_s
        )


def read_sampling(
    share: float | None, slower_than_s: float, environment: Mapping[str, str]
) -> tuple[Sampling, list[str]]:
    """The sampling that the settings and OpenTelemetry's variables ask for, and what was wrong with the variables.

    `share` None: that of `OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG`, without them 1.
    """
    faults = []
    name = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    follows_parent, fixed = SAMPLERS.get(name, (True, None))
    if name and name not in SAMPLERS:
        faults.append(f"OTEL_TRACES_SAMPLER is {name[:100]!r}, and is ignored: it is one of {', '.join(SAMPLERS)}")
    if share is None:
        share = fixed
    if share is None:
        share = 1.0
        argument = environment.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
        if argument:
            try:
                share = float(argument)
            except ValueError:
                share = -1.0
            if not 0.0 <= share <= 1.0:
                faults.append(
                    f"OTEL_TRACES_SAMPLER_ARG is {argument[:100]!r}, and is ignored: it is a share from 0 to 1"
                )
                share = 1.0
    return Sampling(share, slower_than_s, follows_parent), faults
