"""What registers a version once more, as a model of its own that is measured. Pure."""

from __future__ import annotations

from typing import Any

from marserve.model_options import DECLARABLE, written
from marserve.registry.catalogue.snapshot import SnapshotVersion
from marserve.registry.catalogue.versions import Version
from marserve.registry.intake.registration import CopyParameters, RegisterParameters


def copy_parameters(wish: CopyParameters, original: Version, now: SnapshotVersion) -> RegisterParameters:
    """The registration of a copy; `now` is what a snapshot says of the original.

    The archive comes from the original's own address, and has to be of the same version. What a document or calls have
    said of the original goes before the archive, as it does there; the copy has workers at once, and never sleeps.
    """
    facts = original.facts
    said = {key: value for key, value in written(now.options).items() if key in DECLARABLE}
    own: dict[str, Any] = {"minWorkers": wish.workers, "maxWorkers": wish.workers, "load": "start"}
    if wish.threads is not None:
        own["threads"] = {**(facts.options.threads or {}), "intra": wish.threads}
    if wish.padding_budget is not None:
        own["paddingBudget"] = wish.padding_budget
    return RegisterParameters(
        url=facts.url,
        model_name=wish.name,
        handler=now.handler,
        runtime=now.runtime,
        synchronous=wish.synchronous,
        declared={**(facts.declared or {}), **said, **own},
        version=original.name,
        freshness="now",
        copy_of=original.model,
    )
