"""What `marserve run` serves: a source, staged as `marserve archive` would pack it, again after each change."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marserve.archive.writing.declaring import Importing
from marserve.archive.writing.sources import (
    TENSOR_HANDLER,
    SourcePlan,
    Wishes,
    is_archive,
    missing_modules,
    plan_source,
)
from marserve.archive.writing.staging import Staging
from marserve.archive.writing.writer import begin_import, with_declaration
from marserve.cli.output import WrongArguments
from marserve.cli.server.sample_request import UNKNOWN_BODY
from marserve.errors import CannotArchive, CannotImport, MarserveError


class LocalModel:
    """The source of one run, staged again whenever it has changed."""

    def __init__(self, source: str, wishes: Wishes, staging: Staging, *, address: str = "") -> None:
        """`address` is where the source was fetched from; the files of one that was fetched do not change."""
        self.source, self.wishes, self.staging = source, wishes, staging
        self.shown = address or source
        self.is_archive = is_archive(source)
        self.can_change = not address and not self.is_archive
        self.name = ""
        self.version = wishes.version
        self.planned: SourcePlan | None = None
        self.warning = ""
        self._seen: object = None
        self._importing: Importing | None = None
        self._staged = f"{staging.root}/"
        # Its entry and the archive's folder are left out, then comes a member: up to a quote, or to a blank.
        self._member = re.compile(re.escape(self._staged) + r"[^/\s]+/[^/\s]+/(?P<name>[^\"'\n]*)")

    def find(self) -> None:
        """Plan the source, and begin to import what marks a model. Raises WrongArguments."""
        if self.is_archive:
            if self.wishes.options or self.wishes.extra_files or self.wishes.task:
                raise WrongArguments(
                    f"{self.shown} is an archive, which says itself how it is served; leave those options out, or "
                    "use `marserve register`."
                )
            return
        try:
            self.planned = plan_source(self.source, self.wishes)
            self._refuse_missing(self.planned)
            self._seen = _state(self.planned)
            self.name = self.planned.plan.spec.model_name
            self._importing = begin_import(self.planned.plan)
        except CannotArchive as error:
            raise WrongArguments(error.message) from error

    def stage_first(self, on_wait: Callable[[str], None]) -> str:
        """Stage what `find` has found; returns the store's entry. `on_wait` is that of `Importing.declared`.

        `warning` then has advice on what the source declares, empty for none.

        Raises WrongArguments.
        """
        try:
            if self.planned is None:
                entry, name, self.version = self.staging.take_archive(Path(self.source))
                self.name = self.wishes.name or name
                return entry
            assert self._importing is not None
            with self._importing as importing:
                declaring = importing.declared(must_import=True, on_wait=on_wait)
            self.warning = declaring.warning or self._advice_on_streams(declaring.text)
            plan = with_declaration(self.planned.plan, declaring)
            return self.staging.stage(plan, links=not self.can_change)
        except CannotImport as error:
            raise WrongArguments(error.message, advice_on(error), traceback=error.traceback) from error
        except CannotArchive as error:
            raise WrongArguments(error.message) from error

    def stage_again(self, say: Callable[[], None] = lambda: None) -> str | None:
        """Stage what is there now; None if nothing has changed. `say` is called before a change is imported.

        Raises CannotArchive.
        """
        try:
            planned = plan_source(self.source, self.wishes)
            seen = _state(planned)
        except CannotArchive as error:
            assert self.planned is not None
            is_gone = not self.planned.path.exists()
            message = f"{self.planned.path} is gone" if is_gone else error.message
            if self._seen == message:
                return None
            self._seen = message
            raise CannotArchive(message) from error
        if seen == self._seen:
            return None
        self.planned, self._seen = planned, seen
        say()
        with begin_import(planned.plan) as self._importing:
            declaring = self._importing.declared(must_import=True)
        return self.staging.stage(with_declaration(planned.plan, declaring))

    def find_fault(self) -> CannotImport | None:
        """Why the source cannot be imported, found by importing it; None if it can be, or is no Python."""
        if self.planned is None:
            return None
        try:
            with begin_import(self.planned.plan, always=True) as self._importing:
                self._importing.declared(must_import=True)
        except CannotImport as error:
            return error
        except MarserveError:
            return None
        return None

    def with_own_paths(self, text: str) -> str:
        """A text with the author's own files in the place of their staged copies. May be called on any thread."""
        return self._member.sub(self._own_path, text) if self._staged in text else text

    def _own_path(self, found: re.Match[str]) -> str:
        said, blank, rest = found["name"], "", ""
        if self.planned is None:
            return f"{self.shown}/{said}"
        members = self.planned.plan.members
        if said not in members:  # a path without quotes
            said, blank, rest = said.partition(" ")
        end = said[len(said.rstrip(".,:;)")) :]
        path = members.get(said.removesuffix(end))
        return found[0] if path is None else f"{path.absolute()}{end}{blank}{rest}"

    @property
    def is_importing(self) -> bool:
        """Whether the source is being imported."""
        return self._importing is not None and self._importing.is_under_way

    def end_import(self) -> None:
        """End an import that is under way, from any thread."""
        if self._importing is not None:
            self._importing.end()

    def close(self) -> None:
        """Leave nothing of an import."""
        if self._importing is not None:
            self._importing.close()

    def folders(self) -> list[Path]:
        """The folders of the source's files."""
        assert self.planned is not None
        return sorted({path.parent for path in self.planned.plan.members.values()})

    @property
    def example(self) -> str | None:
        """A request for a model that does not declare what it takes; None where only a file will do."""
        if self.planned is not None and self.planned.plan.spec.handler == "transformers":
            return _text_for(self.planned.path, self.wishes.task)
        if self.planned is not None and self.planned.plan.spec.handler == TENSOR_HANDLER:
            return UNKNOWN_BODY
        return UNKNOWN_BODY if self.is_litserve else "{}"

    @property
    def body_words(self) -> str:
        """What the body of a request is, where the model does not declare it and no example is known; else empty."""
        if self.example != UNKNOWN_BODY:
            return ""
        if self.is_litserve:
            return "is what decode_request reads"
        return (
            f"is a JSON array: {self.shown} does not declare its inputs; signature in model-config.yaml does "
            "(docs/declared-handlers.md)"
        )

    @property
    def is_litserve(self) -> bool:
        """Whether it is a file of LitServe."""
        found = None if self.planned is None else self.planned.found
        return found is not None and found.shape == "litserve"

    def _advice_on_streams(self, declaration: bytes | None) -> str:
        """That a worker sends one stream after the other, for a plain generator; else empty."""
        assert self.planned is not None
        document = json.loads(declaration) if declaration else {}
        if not (document.get("output") or {}).get("stream") or document.get("async"):
            return ""
        plan = self.planned.plan
        file = plan.spec.config_file
        if file is not None and b"asyncCommunication" in (plan.made.get(file.name) or file.read_bytes()):
            return ""
        return (
            f"{self.shown}: each worker sends one stream after the other; an async def predict serves several at once "
            "(docs/declared-handlers.md)"
        )

    def _refuse_missing(self, planned: SourcePlan) -> None:
        for source, imported in missing_modules(planned):
            top = imported.module.partition(".")[0]
            raise WrongArguments(
                f"{source.label}, line {imported.line}: {top} is imported, and it is neither installed nor beside the "
                "file.",
                f"pip install {top}",
            )


def advice_on(fault: CannotImport) -> str | None:
    """The next step after a source that cannot be imported; None if there is no more to see."""
    return "--verbose prints the traceback." if fault.traceback else None


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
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
