"""What `GET /` and the pages at `/docs` get of a server and its models, each document typed once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from marserve.answers.management import Document

Expected = Literal["image", "text", "json", "anything"]
"""What a version's handler takes, as far as its name and envelope say."""


class ServerCard(Document, kw_only=True):
    """Which server answers here, and where to go on."""

    name: str
    version: str
    status: Literal["alive"]
    links: Annotated[dict[str, str], Meta(description="paths on this port", examples=[{"docs": "/docs"}])]


class OfferedName(Document):
    """A model that takes requests here."""

    name: str
    version: Annotated[str, Meta(description="the default one")]
    state: Annotated[str, Meta(examples=["ready", "loading", "idle", "degraded", "failed"])]


class OfferedNames(Document, kw_only=True):
    """One page of the models, by name; and the workflows, on the first page."""

    nextPageToken: Annotated[str | None, Meta(description="`next_page_token` of the next page, if one follows")] = None
    models: list[OfferedName]
    workflows: list[str]


class OfferedVersion(Document, kw_only=True):
    """A version, and what it takes."""

    version: str
    isDefault: bool
    state: str
    labels: list[str] | None = None
    expects: Annotated[Expected, Meta(description="what the handler takes, as far as its name and envelope say")]
    declaration: Annotated[dict[str, Any] | None, Meta(description="the inputs and outputs that it declares")] = None


class OfferedModel(Document):
    """A model's versions, oldest first."""

    name: str
    versions: list[OfferedVersion]
