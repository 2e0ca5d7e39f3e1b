"""A profile of a version, as the server answers it and as reports show it. Times are milliseconds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from marserve.answers.management import Document

PartName = Literal["operators", "python", "waiting", "blocked", "collections", "decode", "encode", "between"]


class ProfilePart(Document):
    """A part of the time that was profiled."""

    name: PartName
    ms: float
    share: Annotated[float, Meta(description="of the whole, 0 to 1")]


class ProfileShapes(Document):
    """The calls of an operator with inputs of these shapes."""

    shapes: str
    calls: int
    ms: Annotated[float, Meta(description="with what these calls called")]


class ProfileOperator(Document):
    """An operator of torch."""

    name: str
    calls: int
    selfMs: Annotated[float, Meta(description="without the operators that it called")]
    totalMs: Annotated[float, Meta(description="with them")]
    shapes: Annotated[list[ProfileShapes], Meta(description="those that took longest; empty where none were recorded")]


class ProfileRank(Document):
    """A rank of a worker that is a group. Of its window it communicated, computed, did both, or neither."""

    rank: int
    windowMs: float
    communicationMs: float
    computeMs: float
    overlapMs: Annotated[float, Meta(description="of the communication, while it computed")]
    idleMs: Annotated[float, Meta(description="neither")]
    collectives: Annotated[dict[str, int], Meta(description="how often each was called")]


class ProfileWorker(Document):
    """A worker of the version, beside the one that was profiled."""

    name: str
    requests: Annotated[int, Meta(description="that it answered meanwhile")]
    meanMs: Annotated[float, Meta(description="inside the author's code, a batch, of late")]


class ProfileStack(Document):
    """How long a stack was the innermost one: in milliseconds for operators, in samples for Python."""

    names: list[str]
    value: float


class ModelProfile(Document, kw_only=True):
    """How one worker of a version spent its time."""

    modelName: str = ""
    modelVersion: str = ""
    worker: str = ""
    began: Annotated[str, Meta(description="in UTC")] = ""
    ms: Annotated[float, Meta(description="the whole")]
    requests: Annotated[int, Meta(description="that it got")]
    askedRequests: Annotated[int | None, Meta(description="that were asked for, if a number was")] = None
    batches: int
    parts: list[ProfilePart]
    recordedBatches: Annotated[int, Meta(description="whose operators were recorded")]
    operators: Annotated[list[ProfileOperator], Meta(description="those that took longest")]
    noOperators: Annotated[str | None, Meta(description="why none were recorded")] = None
    threads: Annotated[int, Meta(description="that an operator may use")] = 1
    ranks: list[ProfileRank] | None = None
    workers: Annotated[list[ProfileWorker] | None, Meta(description="all that served meanwhile")] = None
    operatorStacks: list[ProfileStack] | None = None
    pythonStacks: list[ProfileStack] | None = None
    noPython: Annotated[str | None, Meta(description="why py-spy saw no Python")] = None
    remarks: list[str] | None = None
    hasTrace: Annotated[bool, Meta(description="whether `profile/trace` has a file")] = False


class ProfileState(Document):
    """Whether a version is being profiled, and what the last profile showed."""

    isRunning: bool
    seconds: Annotated[float | None, Meta(description="for how long one is being made")] = None
    requests: Annotated[int | None, Meta(description="that it has so far")] = None
    readingSeconds: Annotated[
        float | None, Meta(description="for how long a process has been reading what was recorded; none before")
    ] = None
    last: ModelProfile | None = None
