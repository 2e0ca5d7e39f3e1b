"""What `marserve run` serves: a source, staged as `marserve archive` would pack it, again after each change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from marserve.archive.writing.sources import SourcePlan, Wishes, is_archive, missing_modules, plan_source
from marserve.archive.writing.staging import Staging
from marserve.cli.output import WrongArguments
from marserve.errors import CannotArchive


class LocalModel:
    """The source of one run, staged again whenever it has changed."""

    def __init__(self, source: str, wishes: Wishes, staging: Staging, *, address: str = "") -> None:
        """`address` is where the source was fetched from; the files of one that was fetched do not change."""
        self.source, self.wishes, self.staging = source, wishes, staging
        self.shown = address or source
        self.can_change = not address and not is_archive(source)
        self.name = ""
        self.version = wishes.version
        self.planned: SourcePlan | None = None
        self._seen: object = None

    def stage_first(self) -> str:
        """Plan and stage the source; returns the store's entry. Raises WrongArguments."""
        try:
            if is_archive(self.source):
                if self.wishes.options or self.wishes.extra_files or self.wishes.task:
                    raise WrongArguments(
                        f"{self.shown} is an archive, which says itself how it is served; leave those options out, or "
                        "use `marserve register`."
                    )
                entry, self.name, self.version = self.staging.take_archive(Path(self.source))
                self.name = self.wishes.name or self.name
                return entry
            self.planned = plan_source(self.source, self.wishes)
            self._refuse_missing(self.planned)
            self._seen = _state(self.planned)
            self.name = self.planned.plan.spec.model_name
            return self.staging.stage(self.planned.plan, links=not self.can_change)
        except CannotArchive as error:
            raise WrongArguments(error.message) from error

    def stage_again(self) -> str | None:
        """Stage what is there now; None if nothing has changed. Raises CannotArchive."""
        try:
            planned = plan_source(self.source, self.wishes)
            seen = _state(planned)
        except CannotArchive as error:
            if self._seen == error.message:
                return None
            self._seen = error.message
            raise
        if seen == self._seen:
            return None
        self.planned, self._seen = planned, seen
        return self.staging.stage(planned.plan)

    def folders(self) -> list[Path]:
        """The folders of the source's files."""
        assert self.planned is not None
        return sorted({path.parent for path in self.planned.plan.members.values()})

    @property
    def example(self) -> str | None:
        """A request for a model that does not declare what it takes; None where only a file will do."""
        if self.planned is not None and self.planned.plan.spec.handler == "transformers":
            return _text_for(self.planned.path, self.wishes.task)
        return '{"input": 1.0}' if self.is_litserve else "{}"

    @property
    def is_litserve(self) -> bool:
        """Whether it is a file of LitServe."""
        found = None if self.planned is None else self.planned.found
        return found is not None and found.shape == "litserve"

    def _refuse_missing(self, planned: SourcePlan) -> None:
        for source, imported in missing_modules(planned):
            top = imported.module.partition(".")[0]
            raise WrongArguments(
                f"{source.label}, line {imported.line}: {top} is imported, and it is neither installed nor beside the "
                "file.",
                f"pip install {top}",
            )


def _state(planned: SourcePlan) -> object:
    """What tells two states of a source apart."""
    plan = planned.plan
    try:
        files = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in plan.members.items()]
    except OSError as error:
        raise CannotArchive(f"{error.filename} cannot be read ({error.strerror}).") from error
    return files, plan.made, plan.spec


def _text_for(folder: Path, task: str | None) -> str | None:
    """A request for a model of transformers; None for one that takes pictures."""
    classes = _read_object(folder / "config.json").get("architectures")
    named = str(classes[0]) if isinstance(classes, list) and classes else ""
    if task == "image-classification" or (task is None and named.endswith("ForImageClassification")):
        return None
    text = "a good film"
    if task == "fill-mask" or (task is None and named.endswith("ForMaskedLM")):
        mask = _read_object(folder / "tokenizer_config.json").get("mask_token")
        mask = mask.get("content") if isinstance(mask, dict) else mask
        text = f"a good {mask if isinstance(mask, str) else '[MASK]'}"
    return json.dumps({"text": text}, ensure_ascii=False)


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON file's object; empty without one."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
