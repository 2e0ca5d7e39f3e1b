"""What the API description says of bodies, parameters and refusals, and the documents that pydantic describes.

`defer_build`: pydantic prepares a shape when it is first used, which most servers never do; preparing all of them
takes a tenth of a second of a start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from fastapi import Path
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from marserve.answers.management import ErrorBody
from marserve.api.parameters import FLAG, Parameter

# A flag in a query, which the route reads itself.
Flag = Annotated[str | None, WithJsonSchema(FLAG)]
# A name in a path: what would be ambiguous there arrives still encoded (`application.split_path`).
Name = Annotated[str, Path(), AfterValidator(lambda word: unquote(word, errors="replace"))]


def error_answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route's description says of refusals with these statuses."""
    return {status: {"model": ErrorBody} for status in statuses}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """What a route's description says of a body that it reads itself; `LateRoute` writes the schema of `model`."""
    return {"requestBody": {"required": True, "model": model}}


def body_like(properties: Mapping[str, Any], *, required: Sequence[str] = ()) -> dict[str, Any]:
    """What a route's description says of a body that is a JSON object with these members, by their schemas.

    Without `required` members it may be left out.
    """
    schema = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {"requestBody": {"required": bool(required), "content": {"application/json": {"schema": schema}}}}


def takes(parameters: Mapping[str, Parameter], *, in_body: bool = False) -> dict[str, Any]:
    """What a route's description says of parameters that it reads itself: in the query, or as JSON in their place.

    `in_body`: they may come as JSON, and then `url` must be there.
    """
    described: dict[str, Any] = {
        "parameters": [
            {"name": name, "in": "query", "required": False, "description": each.help, "schema": each.schema}
            for name, each in parameters.items()
        ]
    }
    if in_body:
        properties = {name: {**each.schema, "description": each.help} for name, each in parameters.items()}
        schema = {"type": "object", "properties": properties, "required": ["url"]}
        content = {"application/json": {"schema": schema}}
        described["requestBody"] = {"description": "the parameters as JSON, in place of the query", "content": content}
    return described


class StickyKey(BaseModel):
    """Where requests have the key by which a client stays with a version: a header or a cookie, one of them."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    header: Annotated[str, Field(examples=["X-User"])] | None = None
    cookie: str | None = None
    salt: Annotated[str, Field(max_length=128, description="makes another draw of the same keys")] | None = None


class TrafficBody(BaseModel):
    """How requests that name no version are shared out."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    weights: Annotated[
        dict[str, Annotated[float, Field(ge=0, le=1_000_000)]],
        Field(description="by version; shares of their sum", examples=[{"1.0": 80, "2.0": 20}]),
    ]
    sticky: StickyKey | None = None


class TrafficStatus(TrafficBody):
    """What is in force."""

    pending: Annotated[
        list[str] | None, Field(description="versions with a weight that cannot answer now: the others get their share")
    ] = None
    isDefault: Annotated[bool | None, Field(description="no weights are set: the default version answers")] = None


class CompareTolerance(BaseModel):
    """How far numbers of two answers may be apart; paths in `ignore` are not looked at."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    relative: Annotated[float, Field(ge=0)] = 1e-3
    absolute: Annotated[float, Field(ge=0)] = 1e-5
    ignore: list[str] = []


class ShadowBody(BaseModel):
    """What is to be mirrored, and how answers are compared."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    version: str
    share: Annotated[float, Field(gt=0, le=1, description="of the requests that other versions answer")] = 0.1
    compare: Literal["exact", "handler", "scores"] | CompareTolerance = "exact"
    in_flight: Annotated[int, Field(ge=1, le=256, description="copies at a time")] = 8


class ShadowStatus(ShadowBody):
    """What a shadow is and has done since it began."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    ready: bool
    yields: Annotated[bool, Field(description="its workers leave the processors to others")]
    mirrored: int
    compared: int
    differing: int
    shownAgreement: Annotated[
        float, Field(description="the least share of answers that agree, by what was compared, at 95 %")
    ]
    meanError: Annotated[float | None, Field(description="of scores, as a share of the mean score")] = None
    dropped: dict[str, int]
    skipped: dict[str, int]
    errors: dict[str, int]
    differences: list[dict[str, Any]]


class RolloutBody(BaseModel):
    """How a version is to take over. Times in seconds, shares from 0 to 1, steps in percent."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    version: str
    url: Annotated[str | None, Field(description="an archive to register first")] = None
    workers: int | None = None
    steps: list[float] = [5, 25, 50, 100]
    hold: float = 60
    max_hold: Annotated[float | None, Field(description="longest hold for want of requests; 10 times hold")] = None
    max_error_increase: float = 0.01
    max_p99_increase: Annotated[float | None, Field(description="relative; null: latency is not judged")] = 0.25
    max_difference: float = 0.001
    min_requests: int = 200
    significance: float = 0.01
    compare: Literal["exact", "handler", "scores"] | CompareTolerance | None = None
    share: Annotated[float, Field(description="of the requests that are mirrored, with compare")] = 0.1


class RolloutStatus(BaseModel):
    """Where a roll-out is, what was found, and what happened."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    id: str
    modelName: str
    modelVersion: str
    baseline: str
    state: Literal["preparing", "running", "paused", "promoted", "rolled back", "aborted"]
    reason: str
    step: int
    share: float
    began: Annotated[float, Field(description="seconds since 1970")]
    ended: Annotated[float | None, Field(description="seconds since 1970")] = None
    events: list[dict[str, Any]]


class LabelBody(BaseModel):
    """What a label is to name."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    version: Annotated[str, Field(examples=["2.0"])]


class LabelStatus(LabelBody):
    """What a label names."""

    isPending: Annotated[bool | None, Field(description="the version cannot answer now")] = None
    answeredBy: Annotated[str | None, Field(description="what the label still names, until then")] = None
