"""What a search needs of an archive that was taken in, as it goes from a server to the process that searches."""

from __future__ import annotations

import msgspec

from marserve.messages import Load
from marserve.optimise.inputs import drawn_of
from marserve.option_values import Optimising, Sample
from marserve.registry.catalogue.plan import Plan


class Taken(msgspec.Struct, frozen=True):
    """What its process loads, what is tried, and its own inputs; `drawn` are drawn from what it declares."""

    load: Load
    optimise: Optimising
    samples: tuple[Sample, ...]
    drawn: tuple[Sample, ...]
    max_workers: int

    @classmethod
    def of(cls, plan: Plan) -> Taken:
        """Of a version's plan."""
        options, configured = plan.facts.options, plan.unpacked.config.document or {}
        drawn = options.drawn_samples or drawn_of(configured.get("signature"))
        return cls(plan.load, options.optimise, options.samples, drawn, options.max_workers)
