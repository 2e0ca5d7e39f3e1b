"""How far the search for a faster build of a version is, and what it found."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from marserve.answers.management import Document


class BuildRatio(Document):
    """How many times as fast as its parent a build was, by pairs that took turns."""

    rows: Annotated[int, Meta(description="of a batch")]
    threads: int
    ratio: float
    low: Annotated[float, Meta(description="of the interval that holds it with 96 % certainty")]
    high: float


class Optimising(Document):
    """Which build of a version serves, and why; of a version whose configuration has the key `optimise`."""

    state: Annotated[
        Literal["waits", "builds", "serves", "parent"],
        Meta(description="it waits for others' searches, builds are tried, a build serves, or the parent stays"),
    ]
    step: Annotated[str | None, Meta(description="what is done now")] = None
    build: Annotated[str | None, Meta(description="the build that serves")] = None
    ratios: list[BuildRatio] | None = None
    meanError: Annotated[float | None, Meta(description="as a share of the mean output, of the worst output")] = None
    agreement: Annotated[float | None, Meta(description="of the answers, as shown with 95 % certainty")] = None
    why: Annotated[str | None, Meta(description="why the parent serves")] = None
    isCached: Annotated[bool | None, Meta(description="found by an earlier search, with the same archive here")] = None


class OptimisingReport(Optimising):
    """The same, with what the search showed of each build, as `marserve optimise --json` has it."""

    modelName: str = ""
    modelVersion: str = ""
    report: dict[str, Any] | None = None
