"""What the search for a faster build of a version showed."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from marserve.answers.management import Optimising


class OptimisingReport(Optimising):
    """Which build of a version serves, and why, with what the search showed of each build."""

    modelName: str = ""
    modelVersion: str = ""
    workers: Annotated[
        dict[str, int] | None, Meta(description="how many are ready, by the build that they serve or `parent`")
    ] = None
    report: Annotated[dict[str, Any] | None, Meta(description="as `marserve optimise --json` has it")] = None
